"""A stream of a thousand bytes makes no more than 64 MB be allocated, whatever it says, and encoders keep to the bound
that this rests on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import CacheError, KVCache, TokenProbs, form
from seqkv.engine.container import Container
from tests.hostile_streams import LARGEST, PROFILES, STREAMS, packed_ids

ROOT = Path(__file__).parents[1]
WAYS = ("decode", "part", "token_ids", "inspect")

CHILD = """
import ctypes, json, mmap, resource, sys, tempfile, warnings
from pathlib import Path
import numpy as np
from seqkv import engine
from seqkv.engine import Profile
from tests import fuzz_targets
from tests.test_tokens_tier import Toy

warnings.simplefilter("ignore")
fuzz_targets.without_threads()  # a thread's stack is address space too
model = Toy()
ways = {
    "decode": lambda data: engine.decode(data, model=model),
    "part": lambda data: engine.decode(data, model=model, tokens=slice(0, 1), layers=slice(0, 1)),
    "token_ids": engine.token_ids,
    "inspect": engine.inspect,
}
for target in fuzz_targets.targets({"near-free", "lossless-float32"}).values():  # compiles, and warms up
    for data in target.seeds:
        target.read(data)
        for way in ways.values():
            way(data)
given = json.load(sys.stdin)
engine.token_ids(bytes.fromhex(given["right"]))
np.linalg.solve(np.eye(300), np.eye(300))

def limited(act):
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is no room
    held = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), resource.RLIM_INFINITY))
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "read"

said = {"too much": limited(lambda: np.zeros(80 << 20, np.uint8))}
for name, text in given["streams"].items():
    data = bytes.fromhex(text)
    for way, read in ways.items():
        said[f"{way}: {name}"] = limited(lambda: read(data))
file = Path(tempfile.mkdtemp()) / "profile"
for name, text in given["profiles"].items():
    file.write_bytes(bytes.fromhex(text))
    said[name] = limited(lambda: Profile.load(file))
file.unlink()
file.parent.rmdir()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What reading each of tests/hostile_streams.py in each way came to, in a process with 64 MB of room."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    command = [sys.executable, "-c", CHILD]
    streams = {name: data for name, (data, _) in STREAMS.items()} | LARGEST
    texts = {name: data.hex() for name, data in streams.items()}
    given = {"streams": texts, "profiles": {name: data.hex() for name, data in PROFILES.items()}}
    given |= {"right": packed_ids().hex()}
    options: dict[str, Any] = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    run = subprocess.run(command, input=json.dumps(given), check=False, **options)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_the_limit_is_one(said: dict[str, str]) -> None:
    assert "MemoryError" in said["too much"]


@pytest.mark.parametrize("name", STREAMS)
def test_what_asks_for_much_is_refused_within_the_limit(name: str, said: dict[str, str]) -> None:
    message = STREAMS[name][1]
    for way in WAYS:
        if way == "inspect" and message in ("token ids: altered", "vocab"):  # it does not look at them
            assert said[f"{way}: {name}"] == "read"
            continue
        if name == "tokens, 2^20 ids" and way in ("decode", "part"):  # the model has fewer
            assert said[f"{way}: {name}"].startswith("RecomputeError: ")
            continue
        assert said[f"{way}: {name}"].startswith("StreamError: ") and message in said[f"{way}: {name}"]


@pytest.mark.parametrize("name", LARGEST)
def test_the_most_that_a_stream_may_say_is_within_the_limit(name: str, said: dict[str, str]) -> None:
    for way in WAYS:
        outcome = said[f"{way}: {name}"]
        if name.startswith("near") or way in ("token_ids", "inspect"):
            assert outcome == "read"
        else:
            assert "is not what was encoded" in outcome


def test_profiles_that_say_much_are_refused_within_the_limit(said: dict[str, str]) -> None:
    for name in PROFILES:
        assert said[name].startswith("ProfileError: ")


CONSTANT: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "near": ((24, 4, 32), {"step": 2.0**-6}),
    "lossless": ((12, 8, 128), {"tier": "lossless"}),
}
"""Layers, heads and width of caches; and how they are encoded."""


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("value", [0.0, 1.5])
@pytest.mark.parametrize("tier", CONSTANT)
def test_caches_of_one_number_are_padded_and_come_back(tier: str, value: float, tokens: int) -> None:
    (layers, heads, width), options = CONSTANT[tier]
    keys = np.full((layers, heads, tokens, width), value, np.float16)
    probs = TokenProbs.from_tokens(np.zeros(tokens, np.int64))
    stream = engine.encode(KVCache(keys, keys), probs, **options)
    parsed = Container.parse(stream)
    least = form.least_bytes(((heads, width, width),) * layers, tokens, tier, None)
    assert len(stream) >= least
    padded = tokens > 1 and (tier == "lossless" or value == 0)
    if padded:
        assert parsed.length(form.PADDING) > 0 and len(stream) < least + 16
    decoded = engine.decode(stream)
    assert np.abs(np.stack(decoded.keys) - keys).max() <= (0 if tier == "lossless" else 2.0**-6 * max(value, 1e-9))
    assert engine.inspect(stream)["bytes_by_part"].get("padding", 0) == (parsed.length(form.PADDING) if padded else 0)


def test_a_stream_is_refused_without_its_padding() -> None:
    keys = np.zeros((4, 8, 300, 64), np.float16)
    stream = engine.encode(KVCache(keys, keys), TokenProbs.from_tokens(np.zeros(300, np.int64)), tier="lossless")
    parsed = Container.parse(stream)
    rest = [engine.container.Section(k, i, parsed.section(k, i)) for k, i in parsed.sections if k != form.PADDING]
    with pytest.raises(engine.StreamError, match="cannot hold 300 tokens of 4 layers, which take at least 1200"):
        engine.decode(engine.container.write(parsed.header, rest))


def test_more_layers_than_a_stream_has_are_refused() -> None:
    keys = np.zeros((form.MOST_LAYERS + 1, 1, 1, 1), np.float16)
    with pytest.raises(CacheError, match="4097 layers"):
        engine.encode(KVCache(keys, keys), TokenProbs.from_tokens([0]))
