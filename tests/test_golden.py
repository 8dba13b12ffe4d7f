"""Files that an earlier version wrote. Format version 0 may change until it is pinned: tests/golden/make.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from seqkv import engine
from seqkv.engine import KVCache, Profile, Rope, TokenProbs, form
from seqkv.engine.container import Container, unpack

HERE = Path(__file__).parent / "golden"
ABOUT = json.loads((HERE / "about.json").read_text())


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    with np.load(HERE / "cache.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def golden_profile() -> Profile:
    return Profile.load(HERE / "profile.safetensors")


def kv_of(stored: dict[str, Any]) -> KVCache:
    return KVCache(stored["keys"], stored["values"], positions=stored["positions"], rope=Rope(stored["inv_freq"]))


def encoded(stored: dict[str, Any], profile: Profile) -> bytes:
    probs = TokenProbs.from_tokens(stored["ids"])
    return engine.encode(kv_of(stored), probs, profile=profile, step=ABOUT["step"], importance=stored["importance"])


def test_the_profile_loads(golden_profile: Profile) -> None:
    assert golden_profile.fingerprint == ABOUT["fingerprint"]


def test_the_stream_decodes_to_what_it_did(stored: dict[str, Any], golden_profile: Profile) -> None:
    kv = engine.decode((HERE / "near.skv").read_bytes(), profile=golden_profile)
    assert kv.dtype == "float16" and kv.rope == [Rope(stored["inv_freq"])] * 2
    np.testing.assert_array_equal(kv.positions, stored["positions"])
    # matrix products are not rounded alike on every machine; a float16 at an edge falls to one side or the other
    np.testing.assert_allclose(np.stack(kv.keys), stored["near.keys"], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(np.stack(kv.values), stored["near.values"], rtol=1e-3, atol=1e-5)


def test_the_cache_encodes_to_the_same_content(stored: dict[str, Any], golden_profile: Profile) -> None:
    """Coded symbols byte for byte; what zstandard wrote may differ between its versions, what it holds may not."""
    ours = Container.parse(encoded(stored, golden_profile))
    theirs = Container.parse((HERE / "near.skv").read_bytes())
    assert ours.sections == theirs.sections
    for name in ("dtype", "tokens", "shape", "profile", "steps", "ropes", "tier"):
        assert ours.header[name] == theirs.header[name]
    assert ours.section(form.CLASSES) == theirs.section(form.CLASSES)
    for kind, dtype in ((form.TOKENS, np.uint32), (form.POSITIONS, np.int64)):
        one, other = (unpack(stream.section(kind), dtype, shape=(24,)) for stream in (ours, theirs))
        np.testing.assert_array_equal(one, other)
    for kind in (form.CHUNK, form.MEANS):
        assert symbols_of(ours.section(kind)) == symbols_of(theirs.section(kind))


def symbols_of(chunk: memoryview) -> tuple[bytes, bytes]:
    """The map of coefficients that are not zero throughout, and the coded group."""
    end = 4 + int.from_bytes(chunk[:4], "little")
    return zstandard.decompress(chunk[4:end]), bytes(chunk[end:])


@pytest.mark.skipif(list(zstandard.ZSTD_VERSION) != ABOUT["zstd"], reason="made with another version of zstandard")
def test_the_cache_encodes_to_the_same_bytes(stored: dict[str, Any], golden_profile: Profile) -> None:
    assert encoded(stored, golden_profile) == (HERE / "near.skv").read_bytes()


def test_the_files_are_small() -> None:
    assert all(path.stat().st_size < 20_000 for path in HERE.iterdir() if path.is_file())
