"""Make the golden files again: a tiny profile, caches, a stream of each kind and what it decodes to.

    python tests/golden/make.py

Format version 0 may still change: then the files are made again. From version 1 on, older files stay and new ones come
beside them. See tests/golden_streams.py for what there is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # a plain checkout

from seqkv.engine import KVCache  # noqa: E402
from tests import golden_streams as golden  # noqa: E402
from tests.conftest import LinearModel, calibrated  # noqa: E402
from tests.emulator.device import emulated_device  # noqa: E402
from tests.sessions import CausalModel  # noqa: E402


def main() -> None:
    profile = calibrated(LinearModel(layers=2, heads=1))
    profile.save(HERE / "profile.safetensors")
    _save("caches", _caches())
    caches, outcome = golden.caches(), {}
    digests: dict[str, str] = {}
    for name, one in golden.GOLDEN.items():
        with emulated_device():
            stream = golden.encoded(one, caches[one.cache], profile)
        (HERE / f"{name}.skv").write_bytes(stream)
        kv = golden.decoded(one, stream, profile)
        digests[name] = kv.digest()
        if not one.exact:
            outcome[name] = {"keys": np.stack(kv.keys), "values": np.stack(kv.values)}
    _save("decoded", outcome)
    exact = {name: digest for name, digest in digests.items() if golden.GOLDEN[name].exact}
    made = {"zstd": list(zstandard.ZSTD_VERSION), "fingerprint": profile.fingerprint, "digests": exact}
    (HERE / "about.json").write_text(json.dumps(made, indent=1) + "\n")


def _caches() -> dict[str, dict[str, Any]]:
    linear, causal = LinearModel(layers=2, heads=1), CausalModel(layers=2, heads=1)
    texts = {"text": linear.tokenize(linear.text(3, 24)), "long": linear.tokenize(linear.text(4, 270))}
    known = causal.tokens(0, 64)
    texts |= {"known": known, "session": np.concatenate([causal.tokens(1, 8), known[8:]])}
    out = {}
    for name, ids in texts.items():
        model, positions = (linear, 2 * np.arange(24)) if name == "text" else (causal, None)
        kv, importance = model.cache(ids, positions=positions, dtype="float16")
        assert kv.rope[0] is not None
        out[name] = _arrays(kv, ids) | {"importance": importance, "inv_freq": kv.rope[0].inv_freq}
    ids = linear.tokenize(linear.text(5, 7))
    kv = linear.cache(ids, rope=None)[0]
    keys = np.stack(kv.keys)
    keys[1, 0, 3, :6] = np.nan, np.inf, -np.inf, -0.0, 1e-40, -1e-40
    out["strange"] = _arrays(KVCache(keys, kv.values, dtype="bfloat16", exact=True), ids)
    ids = _as_predicted(270)
    kv = golden.Counting().recompute(ids)
    out["counted"] = _arrays(kv, ids)
    keys = np.stack(kv.keys)
    keys[1, 0, 260:] += 1 / 64
    out["nudged"] = _arrays(KVCache(keys, kv.values, dtype=kv.dtype), ids)
    return out


def _as_predicted(count: int) -> Any:
    """Ids of which each is among those that the model expects most: an archive codes them under its predictions."""
    step, ids = golden.Counting().stepper(), [5]
    while len(ids) < count:
        logits = step(ids[-1])
        best = np.flatnonzero(logits == logits.max())
        ids.append(int(best[len(ids) % len(best)]))
    return np.array(ids)


def _arrays(kv: KVCache, ids: Any) -> dict[str, Any]:
    keys, values = np.stack(kv.keys), np.stack(kv.values)
    return {"ids": ids, "positions": kv.positions, "keys": keys, "values": values, "dtype": np.array(kv.dtype)}


def _save(name: str, arrays: dict[str, dict[str, Any]]) -> None:
    named = {f"{owner}.{what}": array for owner, some in arrays.items() for what, array in some.items()}
    np.savez_compressed(HERE / f"{name}.npz", **named)


if __name__ == "__main__":
    main()
