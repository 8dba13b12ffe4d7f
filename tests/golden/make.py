"""Make the golden files again: a tiny profile, a cache, the stream and what it decodes to, for each tier.

    python tests/golden/make.py

Format version 0 may still change: then the files are made again. From version 1 on, older files stay and new ones come
beside them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # a plain checkout

from seqkv import engine  # noqa: E402

STEP = 2.0**-9


def main() -> None:
    spec = importlib.util.spec_from_file_location("conftest", HERE.parent / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest: Any = importlib.util.module_from_spec(spec)
    sys.modules["conftest"] = conftest
    spec.loader.exec_module(conftest)
    model = conftest.LinearModel(layers=2, heads=1)
    profile = conftest.calibrated(model)
    profile.save(HERE / "profile.safetensors")
    ids = model.tokenize(model.text(3, 24))
    kv, importance = model.cache(ids, positions=2 * np.arange(24), dtype="float16")
    stream = engine.encode(kv, model.probs(ids), profile=profile, step=STEP, importance=importance)
    decoded = engine.decode(stream, profile=profile)
    (HERE / "near.skv").write_bytes(stream)
    arrays = {"ids": ids, "positions": kv.positions, "importance": importance, "inv_freq": kv.rope[0].inv_freq}
    arrays |= {"keys": np.stack(kv.keys), "values": np.stack(kv.values)}
    arrays |= {"near.keys": np.stack(decoded.keys), "near.values": np.stack(decoded.values)}
    np.savez(HERE / "cache.npz", **arrays)
    about = {"step": STEP, "zstd": list(zstandard.ZSTD_VERSION), "fingerprint": profile.fingerprint}
    (HERE / "about.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
