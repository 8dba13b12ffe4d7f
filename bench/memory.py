"""Peak memory of encode and decode, beside the cache and the profile.

    python bench/memory.py PROFILE.safetensors [--tokens 1024 4096 8192] [--dtype bfloat16] [--out memory.json]

The caches are noise of the profile's shape, with tokens drawn from its vocabulary: worse to compress than a
model's, so that streams and coder buffers are larger than they will be. Each measurement is a process of its own, in
these steps; freed memory is given back to Linux before each number is taken:

profile  what is resident (VmRSS) after the profile is loaded, less before.
ready    what is resident after 300 tokens were encoded and decoded, less after loading: compiled code, and what the
         profile computes once and keeps. Paid once a process.
growth   the peak while one cache is coded (VmHWM, which Linux starts counting anew), less what was resident before.
         Of decode's growth the cache that it returns is taken off.

Exits with 1 if a growth is above --limit MB (10^6 bytes).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from seqkv import engine  # noqa: E402

MB = 1e6
WARM_UP = 300  # tokens: two chunks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--limit", type=float, default=200, help="MB that encode and decode may take")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "TOKENS", "STREAM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, tokens, stream = options.one
        print(json.dumps(measure(options.profile, options.dtype, what, int(tokens), Path(stream))))
        return 0
    print("          tokens  cache MB  profile MB  ready MB  stream MB  growth MB  seconds")
    results = []
    with tempfile.TemporaryDirectory(prefix="seqkv-") as folder:
        for tokens in options.tokens:
            for what in ("encode", "decode"):  # encode leaves the stream for decode
                one = (options.profile, options.dtype, what, tokens, Path(folder) / f"{tokens}.skv")
                results.append(in_a_process(*one))
                in_mb = {name: value / MB for name, value in results[-1].items() if isinstance(value, int)}
                print(
                    "{what:8}{tokens:8}".format(**results[-1])
                    + "{cache:10.0f}{profile:12.0f}{ready:10.0f}{stream:11.1f}{growth:11.0f}".format(**in_mb)
                    + "{seconds:9.1f}".format(**results[-1]),
                    flush=True,
                )
    worst = max(result["growth"] for result in results) / MB
    print(f"at most {worst:.0f} MB; the limit is {options.limit:.0f}")
    if options.out:
        report = {"results": results, "limit": options.limit * MB, "python": platform.python_version()}
        report |= {
            "numpy": np.__version__,
            "dtype": options.dtype,
            "machine": platform.machine(),
            "profile": options.profile.name,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(worst > options.limit)


def in_a_process(profile: Path, dtype: str, what: str, tokens: int, stream: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, str(profile), "--dtype", dtype, "--one", what, str(tokens), str(stream)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(path: Path, dtype: str, what: str, tokens: int, stream: Path) -> dict[str, Any]:
    """One of encode and decode, in bytes and seconds."""
    before = settled()
    profile = engine.Profile.load(path)
    loaded = settled()
    warm = engine.encode(*noise(profile, dtype, WARM_UP), profile=profile)
    engine.decode(warm, profile=profile)
    ready = settled()
    if what == "encode":
        kv, probs = noise(profile, dtype, tokens)
        started, base = time.perf_counter(), settled()
        data = engine.encode(kv, probs, profile=profile)
        growth = resident("VmHWM") - base
        stream.write_bytes(data)
    else:
        data = stream.read_bytes()
        started, base = time.perf_counter(), settled()
        kv = engine.decode(data, profile=profile)
        growth = resident("VmHWM") - base - nbytes(kv)
    return {
        "what": what,
        "tokens": tokens,
        "cache": nbytes(kv),
        "profile": loaded - before,
        "ready": ready - loaded,
        "stream": len(data),
        "growth": growth,
        "seconds": round(time.perf_counter() - started, 2),
    }


def noise(profile: engine.Profile, dtype: str, tokens: int) -> tuple[engine.KVCache, engine.TokenProbs]:
    """A cache of the profile's shape."""
    rng = np.random.default_rng(tokens)

    def layer(heads: int, width: int) -> NDArray[np.float32]:
        return rng.standard_normal((heads, tokens, width), np.float32)

    keys = [layer(heads, key) for heads, key, _ in profile.shape]
    values = [layer(heads, value) for heads, _, value in profile.shape]
    ids = rng.integers(0, max(len(profile.table), 1), tokens)
    dim = profile.shape[0][1] // 2 * 2
    rope = engine.Rope.from_theta(1e5, dim) if dim else None
    return engine.KVCache(keys, values, rope=rope, dtype=dtype), engine.TokenProbs.from_tokens(ids)


def nbytes(kv: engine.KVCache) -> int:
    """Of the arrays as they are in memory: NumPy has no bfloat16, so that such a cache takes 4 bytes a number."""
    return sum(x.nbytes for x in kv.keys + kv.values)


def settled() -> int:
    """What is resident, in bytes, without what is freed; the peak is set to it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status does not say {name}: this measures on Linux only")


if __name__ == "__main__":
    sys.exit(main())
