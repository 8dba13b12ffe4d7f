"""Files that an earlier version wrote. Format version 0 may change until it is pinned: tests/golden/make.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zstandard

from seqkv import engine
from seqkv.engine import KVCache, Profile, exact_chunk, form
from seqkv.engine.container import Container
from tests import golden_streams as golden
from tests.golden_streams import GOLDEN

ABOUT = golden.about()
NEAR = [name for name, one in GOLDEN.items() if not one.exact]
GROUPS = {form.CLASSES, exact_chunk.SYMBOLS, exact_chunk.BITS, form.TOKEN_IDS, form.DIGESTS, form.REPAIR}
MAPPED = {form.CHUNK, form.DELTA, form.MEANS, form.DELTA_MEANS}
SAME = ("tier", "dtype", "tokens", "shape", "layers", "ropes", "positions", "profile", "steps", "depth", "vocab")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return golden.profile()


@pytest.fixture(scope="module")
def caches() -> dict[str, dict[str, Any]]:
    return golden.caches()


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    return golden.expected()


def close(kv: KVCache, known: dict[str, Any], spread: float = 0.0) -> None:
    """Matrix products are not rounded alike on every machine; a float16 at an edge falls to one side or the other."""
    for one, other in ((kv.keys, known["keys"]), (kv.values, known["values"])):
        atol = 1e-5 + spread * float(other.astype(np.float64).std())
        np.testing.assert_allclose(np.stack(one), other, rtol=1e-3, atol=atol)


def test_the_profile_loads(profile: Profile) -> None:
    assert profile.fingerprint == ABOUT["fingerprint"]


@pytest.mark.parametrize("name", NEAR)
def test_near_streams_decode_to_what_they_did(
    name: str, profile: Profile, caches: dict[str, Any], expected: dict[str, Any]
) -> None:
    kv = golden.decoded(GOLDEN[name], golden.stream(name), profile)
    true = golden.kv_of(caches[GOLDEN[name].cache])
    assert kv.dtype == "float16" and kv.rope == true.rope
    np.testing.assert_array_equal(kv.positions, true.positions)
    close(kv, expected[name])


@pytest.mark.parametrize("name", [name for name in NEAR if GOLDEN[name].reference is None])
def test_near_streams_decode_on_a_device_too(name: str, profile: Profile, expected: dict[str, Any]) -> None:
    pytest.importorskip("numba.cuda.dispatcher")
    from tests.emulator.device import emulated_device

    with emulated_device():
        kv = golden.decoded(GOLDEN[name], golden.stream(name), profile, backend="cuda")
    close(kv, expected[name], spread=0.02)  # features are rounded to TF32 there: test_device.py


@pytest.mark.parametrize("name", [name for name, one in GOLDEN.items() if one.exact])
def test_exact_streams_decode_to_the_same_bits(name: str, profile: Profile, caches: dict[str, Any]) -> None:
    kv = golden.decoded(GOLDEN[name], golden.stream(name), profile)
    assert kv.digest() == ABOUT["digests"][name] == golden.kv_of(caches[GOLDEN[name].cache], exact=True).digest()


@pytest.mark.parametrize("name", GOLDEN)
def test_token_ids_are_what_they_were(name: str, profile: Profile, caches: dict[str, Any]) -> None:
    one = GOLDEN[name]
    reference = None if one.reference is None else golden.stream(one.reference)
    options: dict[str, Any] = {"profile": profile, "reference": reference, "model": golden.Counting()}
    np.testing.assert_array_equal(engine.token_ids(golden.stream(name), **options), caches[one.cache]["ids"])


@pytest.mark.parametrize("name", [name for name, one in GOLDEN.items() if one.backend == "cpu"])
def test_caches_encode_to_the_same_content(name: str, profile: Profile, caches: dict[str, Any]) -> None:
    """Coded symbols byte for byte; what zstandard wrote may differ between its versions, what it holds may not."""
    one = GOLDEN[name]
    again, stored = golden.encoded(one, caches[one.cache], profile), golden.stream(name)
    if list(zstandard.ZSTD_VERSION) == ABOUT["zstd"]:
        assert again == stored
    ours, theirs = Container.parse(again), Container.parse(stored)
    assert ours.sections == theirs.sections
    for entry in SAME:
        assert ours.header.get(entry) == theirs.header.get(entry)
    for kind, index in ours.sections:
        content = contents(kind, ours.section(kind, index)), contents(kind, theirs.section(kind, index))
        assert content[0] == content[1], (kind, index)


def contents(kind: int, data: memoryview) -> tuple[bytes, ...]:
    """What a section holds, however zstandard wrote it."""
    if kind in GROUPS:
        return (bytes(data),)
    start = 4 if kind in MAPPED else 2 + data[1]  # behind a length, or dtype and dimensions of a packed array
    end = start + int.from_bytes(data[:4], "little") if kind in MAPPED else None
    if kind not in MAPPED:
        start = bytes(data).index(zstandard.FRAME_HEADER)
    head = b"" if kind in MAPPED else bytes(data[:start])
    return head, zstandard.decompress(data[start:end]), b"" if end is None else bytes(data[end:])


def test_every_kind_of_section_is_in_a_golden_stream() -> None:
    there = {kind for name in GOLDEN for kind, _ in Container.parse(golden.stream(name)).sections}
    # the expectation of tokens: test_codec.py; padding: test_memory_limit.py
    assert there == {*form.NAMES, *exact_chunk.NAMES} - {form.TOPK_IDS, form.TOPK_PROBS, form.PADDING}
    assert len(Container.parse(golden.stream("free")).header["steps"]) == 2  # chunks


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in golden.HERE.iterdir() if path.is_file()) < 150_000
