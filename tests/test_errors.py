"""Errors say what they are about: every section of every kind of stream, damaged in turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import KVCache, Profile, SeqkvError, SessionStore, StreamError, container, errors, exact_chunk, form
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import RecomputeError, StoreDamaged
from tests import golden_streams as golden
from tests.golden_streams import GOLDEN

NAMES = form.NAMES | exact_chunk.NAMES
ONCE = {form.POSITIONS, form.CHANNELS, form.RUNS, form.TOKEN_IDS, form.DIGESTS, exact_chunk.CHANNELS}
PLACES = [(name, place) for name in GOLDEN for place in Container.parse(golden.stream(name)).sections]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return golden.profile()


def changed(stream: bytes, place: tuple[int, int], change: Callable[[bytes], bytes | None]) -> bytes:
    """A section altered, or left out, and all checksums right."""
    parsed, out = Container.parse(stream), []
    for kind, index in parsed.sections:
        data = bytes(parsed.section(kind, index))
        new = change(data) if (kind, index) == place else data
        if new is not None:
            out.append(Section(kind, index, new))
    return container.write(parsed.header, out)


def flipped(stream: bytes, place: tuple[int, int]) -> bytes:
    """The last byte of a section altered, and no checksum."""
    parsed, end = Container.parse(stream), len(stream)
    for kind, index in reversed(parsed.sections):
        if (kind, index) == place:
            return stream[: end - 1] + bytes((stream[end - 1] ^ 1,)) + stream[end:]
        end -= parsed.length(kind, index)
    raise AssertionError(place)


def message(name: str, stream: bytes, profile: Profile) -> str:
    with pytest.raises((StreamError, RecomputeError)) as caught:
        golden.decoded(GOLDEN[name], stream, profile)
    return str(caught.value)


def where(place: tuple[int, int]) -> str:
    return NAMES[place[0]] if place[0] in ONCE else f"chunk {place[1]}: {NAMES[place[0]]}"


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_section_that_is_altered_is_named(name: str, place: tuple[int, int], profile: Profile) -> None:
    text = message(name, flipped(golden.stream(name), place), profile)
    assert text.startswith(f"{where(place)}: altered: section {place[0]}/{place[1]}")


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_section_that_is_cut_off_is_named(name: str, place: tuple[int, int], profile: Profile) -> None:
    """Although every checksum is right."""
    text = message(name, changed(golden.stream(name), place, lambda data: data[: len(data) // 2]), profile)
    if place[0] == form.DIGESTS:
        assert "digests than the header" in text
    elif place[0] == form.TOKEN_IDS:
        assert "token ids" in text and "chunk 0" in text
    elif place[0] == exact_chunk.BITS:
        assert text.startswith(f"chunk {place[1]}: sizes: altered: they are not those of the bits below")
    else:
        assert text.startswith(where(place))


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_section_that_is_not_there_is_named(name: str, place: tuple[int, int], profile: Profile) -> None:
    text = message(name, changed(golden.stream(name), place, lambda data: None), profile)
    if place[0] == form.REPAIR:  # as if there had been nothing to repair
        assert "in chunk 1, layer 1" in text
    elif place[0] == exact_chunk.STRANGE:
        assert text.startswith("chunk 0: layer 1 is not what was encoded")
    else:
        assert f"no section {place[0]}/{place[1]}" in text


@pytest.mark.parametrize("kind", [form.CHUNK, form.SCALES, form.TOKENS, form.CLASSES])
def test_of_several_chunks_in_threads_the_damaged_one_is_named(kind: int, profile: Profile) -> None:
    for chunk in (0, 1):
        text = message("free", flipped(golden.stream("free"), (kind, chunk)), profile)
        assert text.startswith(f"chunk {chunk}: {NAMES[kind]}: altered")


@pytest.mark.parametrize("kind", [form.CHUNK, form.CLASSES, form.TOKENS, form.MEANS])
def test_a_damaged_section_of_a_reference_is_named_with_the_reference(
    kind: int, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a section of the stream itself it would be looked for in the wrong place."""
    damaged, key = flipped(golden.stream("reference"), (kind, 0)), engine.stream_key(golden.stream("reference"))
    with monkeypatch.context() as patch, pytest.raises(StreamError) as caught:
        patch.setattr("seqkv.engine.reference.stream_key", lambda stream: key)  # else it is another reference
        golden.decoded(GOLDEN["delta"], golden.stream("delta"), profile, reference=damaged)
    assert str(caught.value).startswith(f"reference {key}: chunk 0: {NAMES[kind]}: altered")
    with pytest.raises(StreamError, match=f"{key}, the one given is {engine.stream_key(damaged)}"):
        golden.decoded(GOLDEN["delta"], golden.stream("delta"), profile, reference=damaged)
    with pytest.raises(StreamError, match="the reference given: truncated"):
        golden.decoded(GOLDEN["delta"], golden.stream("delta"), profile, reference=b"SQKV")


ENTRIES: dict[str, tuple[Any, str]] = {
    "tokens": (0, "tokens"),
    "dtype": ("float8", "float8"),
    "shape": ([[1, 0, 6], [1, 8, 6]], "widths"),
    "ropes": ([], "rotations"),
    "steps": ([1 << 20], "chunk 0"),
    "tier": ("best", "best"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_of_the_header_that_cannot_be_is_named(entry: str, profile: Profile) -> None:
    parsed = Container.parse(golden.stream("near"))
    sections = [Section(kind, index, parsed.section(kind, index)) for kind, index in parsed.sections]
    value, named = ENTRIES[entry]
    for header in (parsed.header | {entry: value}, {k: v for k, v in parsed.header.items() if k != entry}):
        with pytest.raises(StreamError) as caught:
            engine.decode(container.write(header, sections), profile=profile)
        assert (named if entry in header else entry) in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, profile: Profile) -> Iterator[Path]:
    caches = golden.caches()
    with SessionStore(tmp_path, profile=profile) as store:
        for name in ("known", "session"):
            kv = golden.kv_of(caches[name])
            store.put(name, kv, engine.TokenProbs.from_tokens(caches[name]["ids"]), step=2.0**-14)
    yield tmp_path


def test_a_store_names_the_session_and_the_object(folder: Path, profile: Profile) -> None:
    blob = next(path for path in sorted(folder.glob("blobs/*/*")))
    name, data = blob.relative_to(folder).as_posix(), blob.read_bytes()
    for damage, said in ((lambda: blob.write_bytes(data[:-1]), "damaged"), (blob.unlink, "missing")):
        damage()
        texts = []
        with SessionStore(folder, profile=profile) as store:
            for session in ("known", "session"):
                try:
                    store.get(session)
                except StoreDamaged as error:
                    texts.append(str(error))
                    assert texts[-1].startswith(f"session {session!r}: {name} is {said}")
        assert texts


def test_a_store_names_the_session_whatever_is_wrong(folder: Path, profile: Profile) -> None:
    kv = golden.kv_of(golden.caches()["known"])
    with SessionStore(folder, profile=profile) as store:
        with pytest.raises(engine.CacheError, match="session 'known': nothing is left of 64 tokens"):
            store.get("known", tokens=slice(3, 3))
        with pytest.raises(engine.ProbsError, match="session 'new': the cache holds 64 tokens"):
            store.put("new", kv, engine.TokenProbs.from_tokens(np.arange(3)))
        with pytest.raises(engine.SessionError, match="session 'other': is not in the store"):
            store.delete("other")


def test_every_kind_of_error_says_what_to_do() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SeqkvError)]
    assert len(kinds) == 12
    todo = (
        "catch",
        "check",
        "pass",
        "give",
        "fetch",
        "decode with",
        "remove",
        "put",
        "try again",
        "delete",
        "cannot be",
    )
    for kind in kinds:
        assert any(word in (inspect.getdoc(kind) or "").lower() for word in todo), kind


def test_the_right_stream_still_decodes(profile: Profile) -> None:
    kv = golden.decoded(GOLDEN["near"], changed(golden.stream("near"), (0, 0), bytes), profile)
    assert isinstance(kv, KVCache)
