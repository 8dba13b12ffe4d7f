"""Sessions coded against others: what is copied, what is sent, what comes back, and what is refused."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from seqkv import engine
from seqkv.engine import (
    CacheError,
    DeviceError,
    KVCache,
    Profile,
    ProfileError,
    Reference,
    Rope,
    StreamError,
    TokenProbs,
    container,
    form,
    importance,
    reference,
)
from seqkv.engine import known as known_module
from seqkv.engine.container import Container, Section
from seqkv.engine.known import Known
from seqkv.engine.reference import Aligned
from tests.sessions import CausalModel

STEP = 2.0**-7  # what a kl of 0.01 gives, about
EXCESS = 1.4
"""How much more a session may lose than it does alone, in plain squares. In the Fisher metric it is 1.25 at most."""
MOST_EXCESS = 2.0  # of short sessions, of which a good part comes so soon after an edit that it is hardly alike

PARTIAL = Rope(np.array([1.0, 0.1], np.float32), scaling=1.5, layout="interleaved")


@dataclass(frozen=True)
class Session:
    """A cache, what encode takes beside it, and its stream coded alone."""

    ids: NDArray[np.int64]
    kv: KVCache
    importance: NDArray[np.float32]
    profile: Profile

    def encode(self, reference: Any = None, **how: Any) -> bytes:
        known: dict[str, Any] = {"profile": self.profile, "step": STEP, "importance": self.importance} | how
        return engine.encode(self.kv, TokenProbs.from_tokens(self.ids), reference=reference, **known)

    @functools.cached_property
    def alone(self) -> bytes:
        return self.encode()


Make = Callable[..., Session]


@pytest.fixture(scope="module")
def causal() -> CausalModel:
    return CausalModel()


@pytest.fixture(scope="module")
def make(causal: CausalModel, profile: Profile) -> Make:
    """(ids, guise of the cache...) -> Session."""

    @functools.cache
    def made(ids: tuple[int, ...], **guise: Any) -> Session:
        kv, received = causal.cache(np.array(ids), **guise)
        return Session(np.array(ids), kv, received, profile)

    def session(ids: Any, **guise: Any) -> Session:
        if guise:
            kv, received = causal.cache(ids, **guise)
            return Session(np.asarray(ids), kv, received, profile)
        return made(tuple(np.asarray(ids).tolist()))

    return session


@pytest.fixture(scope="module")
def texts(causal: CausalModel) -> list[NDArray[np.int64]]:
    """Tokens of texts that have nothing in common, 900 of each."""
    return [causal.tokens(seed, 900) for seed in range(4)]


@pytest.fixture(scope="module")
def base(make: Make, texts: list[NDArray[np.int64]]) -> Session:
    """600 tokens: three chunks, the last one short."""
    return make(texts[0][:600])


@pytest.fixture(scope="module")
def edited(make: Make, texts: list[NDArray[np.int64]]) -> Session:
    """`base` with other tokens in its second chunk, and some more."""
    return make(np.concatenate([texts[0][:300], texts[1][:12], texts[0][308:600]]))


@pytest.fixture(scope="module")
def delta(base: Session, edited: Session) -> bytes:
    return edited.encode(base.alone)


def loss(session: Session, kv: KVCache) -> float:
    """Mean of squared errors, beside the variance of each side of each layer."""
    pairs = zip(session.kv.keys + session.kv.values, kv.keys + kv.values, strict=True)
    return float(np.mean([np.square(x.astype(np.float64) - y).mean() / x.astype(np.float64).var() for x, y in pairs]))


def worst(session: Session, kv: KVCache) -> float:
    """The largest error of a number, beside the spread of its side of its layer."""
    pairs = zip(session.kv.keys + session.kv.values, kv.keys + kv.values, strict=True)
    return max(float(np.abs(x.astype(np.float64) - y).max() / x.astype(np.float64).std()) for x, y in pairs)


def comes_back(
    session: Session, stream: bytes, behind: Any, alone: bytes | None = None, excess: float = EXCESS
) -> KVCache:
    """A stream decodes to what the session is, no worse than it would alone but for the dead zone of deltas."""
    kv = engine.decode(stream, profile=session.profile, reference=behind)
    alone = session.alone if alone is None else alone
    assert (kv.dtype, kv.rope) == (session.kv.dtype, session.kv.rope)
    np.testing.assert_array_equal(kv.positions, session.kv.positions)
    ids = engine.token_ids(stream, reference=behind, profile=session.profile)
    np.testing.assert_array_equal(ids, session.ids)
    without = engine.decode(alone, profile=session.profile)
    assert loss(session, kv) < excess * loss(session, without)
    assert worst(session, kv) < 2 * excess * worst(session, without)
    said, said_alone = (engine.inspect(s)["loss"]["fisher"] for s in (stream, alone))
    assert said < excess * said_alone
    return kv


def sections(stream: bytes) -> dict[tuple[int, int], bytes]:
    parsed = Container.parse(stream)
    return {key: bytes(parsed.section(*key)) for key in parsed.sections}


def runs_of(stream: bytes, behind: bytes, profile: Profile) -> list[tuple[int, int, int]]:
    parsed = Container.parse(stream)
    aligned = Aligned.read(parsed, form.Form(parsed), profile, behind)
    assert aligned is not None
    return [tuple(run) for run in container.unpack(aligned.section().data, np.int64, max_items=10**6).tolist()]


def aligned_tokens(stream: bytes) -> int:
    parsed = Container.parse(stream)
    if (form.RUNS, 0) not in parsed.sections:
        return 0
    return int(container.unpack(parsed.section(form.RUNS), np.int64, max_items=10**6)[:, 2].sum())


# what both begin with


def test_the_same_session_again_is_the_same_sections(base: Session) -> None:
    again = base.encode(base.alone)
    assert sections(again) == sections(base.alone)
    assert engine.inspect(again)["reference"] is None and "depth" not in Container.parse(again).header
    assert engine.inspect(again)["loss"] == pytest.approx(engine.inspect(base.alone)["loss"], rel=1e-3)
    whole = engine.decode(base.alone, profile=base.profile)
    assert engine.decode(again, profile=base.profile).digest() == whole.digest()


def test_a_session_that_grew_copies_what_it_had(make: Make, texts: list[NDArray[np.int64]]) -> None:
    before, after = make(texts[0][:512]), make(np.concatenate([texts[0][:512], texts[1][:200]]))
    stream = after.encode(before.alone)
    assert engine.inspect(stream)["reference"] is None
    had, has = sections(before.alone), sections(stream)
    assert had.items() <= has.items() and len(had) == 8 and len(has) == 12
    comes_back(after, stream, None)


def test_a_last_chunk_that_grew_is_predicted(make: Make, texts: list[NDArray[np.int64]]) -> None:
    before, after = make(texts[0][:600]), make(texts[0][:700])
    stream = after.encode(before.alone)
    assert engine.inspect(stream)["reference"] == engine.stream_key(before.alone)
    assert runs_of(stream, before.alone, after.profile) == [(512, 512, 88)]
    comes_back(after, stream, before.alone)
    # the other way there is no chunk to copy but the whole ones
    shorter = before.encode(after.alone)
    assert {key for key in sections(shorter) if sections(shorter)[key] == sections(after.alone).get(key)} >= {
        (form.CHUNK, 0),
        (form.CHUNK, 1),
    }
    assert runs_of(shorter, after.alone, before.profile) == [(512, 512, 88)]
    comes_back(before, shorter, after.alone)


@pytest.mark.parametrize("tokens", [1, 2, 5, 255, 256, 257])
def test_whole_sessions_of_any_length_are_copied(tokens: int, make: Make, texts: list[NDArray[np.int64]]) -> None:
    session = make(texts[2][:tokens])
    assert sections(session.encode(session.alone)) == sections(session.alone)


@pytest.mark.parametrize("tokens", [1, 31])
def test_sessions_too_short_for_a_run(tokens: int, base: Session, make: Make, texts: list[NDArray[np.int64]]) -> None:
    for short in (make(texts[0][:tokens]), make(texts[0][100 : 100 + tokens]), make(texts[1][:tokens])):
        assert sections(short.encode(base.alone)) == sections(short.alone)
        assert sections(base.encode(short.alone)) == sections(base.alone)


def test_finer_chunks_are_copied_and_coarser_ones_are_not(base: Session) -> None:
    finer, coarser = base.encode(step=STEP / 4), base.encode(step=STEP * 1.2)
    stream = base.encode(finer)
    assert sections(stream) == sections(finer)
    assert engine.inspect(stream)["steps"] == engine.inspect(finer)["steps"]
    stream = base.encode(coarser)
    assert engine.inspect(stream)["reference"] == engine.stream_key(coarser)
    assert engine.inspect(stream)["steps"] == engine.inspect(base.alone)["steps"]
    comes_back(base, stream, coarser)
    # copied chunks of one step, coded ones of another; and that as a reference, in turn
    mixed = Session(base.ids, base.kv, base.importance, base.profile)
    assert loss(mixed, engine.decode(stream, profile=base.profile, reference=coarser)) < loss(
        mixed, engine.decode(coarser, profile=base.profile)
    )


def test_steps_are_those_of_each_chunk(make: Make, texts: list[NDArray[np.int64]]) -> None:
    before, after = make(texts[0][:256]), make(texts[0][:700])
    finer = before.encode(step=STEP / 4)
    stream = after.encode(finer)
    steps = engine.inspect(stream)["steps"]
    assert len(steps) == 3 and steps[0] * 4 == pytest.approx(steps[1]) and steps[1] == steps[2]
    comes_back(after, stream, None)
    # the fine chunk is copied once more, the others only if they are fine enough
    assert sections(after.encode(stream)) == sections(stream)
    again = sections(after.encode(stream, step=STEP / 2))
    assert again[form.CHUNK, 0] == sections(stream)[form.CHUNK, 0]
    assert again[form.CHUNK, 1] != sections(stream)[form.CHUNK, 1]


# what is the same later


def edits(texts: list[NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    a, b = texts[0][:600], texts[1]
    return {
        "a changed token": np.concatenate([a[:300], (a[300:301] + 1) % 50, a[301:]]),
        "a changed token in the first chunk": np.concatenate([a[:90], (a[90:91] + 1) % 50, a[91:]]),
        "the first token changed": np.concatenate([(a[:1] + 1) % 50, a[1:]]),
        "the last token changed": np.concatenate([a[:-1], (a[-1:] + 1) % 50]),
        "inserted": np.concatenate([a[:300], b[:17], a[300:]]),
        "inserted at the start": np.concatenate([b[:1], a]),
        "removed": np.concatenate([a[:280], a[320:]]),
        "removed at the start": a[37:],
        "under a longer prefix": np.concatenate([b[:333], a]),
        "under a shorter prefix": np.concatenate([b[:40], a[300:]]),
        "several runs": np.concatenate([b[:50], a[400:500], b[50:120], a[100:300], b[:30], a[300:400]]),
        "the same run twice": np.concatenate([b[:70], a[100:200], b[70:90], a[100:200]]),
        "the reference's sinks in the middle": np.concatenate([b[:120], a[:120], b[120:200]]),
        "one token repeated": np.full(400, a[5]),
    }


@pytest.mark.parametrize("edit", edits([np.zeros(900, np.int64)] * 3))
def test_tokens_that_a_reference_holds_elsewhere(
    edit: str, base: Session, make: Make, texts: list[NDArray[np.int64]]
) -> None:
    session = make(edits(texts)[edit])
    stream = session.encode(base.alone)
    if edit == "one token repeated":
        assert engine.inspect(stream)["reference"] is None and sections(stream) == sections(session.alone)
        return
    comes_back(session, stream, base.alone)
    if edit == "the last token changed":  # all but the last chunk is copied; that one is near
        assert runs_of(stream, base.alone, session.profile) == [(512, 512, 87)]
    assert engine.inspect(stream)["reference"] == engine.stream_key(base.alone)
    for start, there, length in runs_of(stream, base.alone, session.profile):
        np.testing.assert_array_equal(session.ids[start : start + length], base.ids[there : there + length])
    assert len(stream) < len(session.alone)


def test_runs_that_are_hardly_worth_it(base: Session, make: Make, texts: list[NDArray[np.int64]]) -> None:
    """Coded either way, and never for more than it costs to name the reference."""
    b = texts[1]
    for ids in (
        np.concatenate([b[:300], texts[0][50:130], b[300:400]]),  # inside a chunk
        np.concatenate([b[:230], texts[0][230:290], b[300:400]]),  # over a border
        np.concatenate([b[:200], texts[0][144:200], b[200:300]]),  # up to a border
        np.concatenate([b[:256], texts[2][:3], texts[0][:40]]),  # at the end of a short chunk
    ):
        session = make(ids)
        stream = session.encode(base.alone)
        comes_back(session, stream, base.alone)
        assert len(stream) < len(session.alone) + 120


def test_what_is_nearly_the_same_costs_little(base: Session, edited: Session, delta: bytes) -> None:
    def bytes_of(stream: bytes, *kinds: int) -> int:
        return sum(len(data) for (kind, chunk), data in sections(stream).items() if kind in kinds and chunk == 2)

    # of the last chunk: all of it is aligned
    assert bytes_of(delta, form.CHUNK, form.MEANS, form.DELTA, form.DELTA_MEANS) < 0.6 * bytes_of(
        edited.alone, form.CHUNK
    )
    assert bytes_of(delta, form.TOKENS, form.CLASSES) < 0.6 * bytes_of(edited.alone, form.TOKENS, form.CLASSES)
    assert sections(delta)[form.CHUNK, 0] == sections(base.alone)[form.CHUNK, 0]


def test_unrelated_sessions_cost_what_they_did(base: Session, make: Make, texts: list[NDArray[np.int64]]) -> None:
    other = make(texts[3][:700])
    stream = other.encode(base.alone)
    assert engine.inspect(stream)["reference"] is None
    assert sections(stream) == sections(other.alone) and abs(len(stream) - len(other.alone)) < 8
    comes_back(other, stream, None)


GUISES: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "offset": {"positions": np.arange(604) + 100_000},
    "gaps": {"positions": np.arange(604) * 3 + 5},
    "not rotated": {"rope": None},
    "rotated otherwise": {"rope": PARTIAL},
    "a rotation a layer": {"rope": [Rope.from_theta(1e4, 8), None, PARTIAL]},
}


@pytest.mark.parametrize("guise", GUISES)
def test_guises_of_the_session_and_of_its_reference(guise: str, base: Session, edited: Session, make: Make) -> None:
    other = make(edited.ids, **GUISES[guise])
    stream = other.encode(base.alone)
    assert aligned_tokens(stream) >= 280 and len(stream) < 0.8 * len(other.alone)
    comes_back(other, stream, base.alone)
    # and the other way round
    stream = base.encode(other.alone)
    assert aligned_tokens(stream) >= 280 and len(stream) < 0.8 * len(base.alone)
    comes_back(base, stream, other.alone)


@pytest.mark.parametrize("how", [{"step": STEP / 8}, {"step": STEP * 8}, {"step": None, "kl": 0.001}])
def test_other_steps_than_the_reference(how: dict[str, Any], base: Session, edited: Session) -> None:
    alone, stream = edited.encode(**how), edited.encode(base.alone, **how)
    assert engine.inspect(stream)["reference"] == engine.stream_key(base.alone)
    comes_back(edited, stream, base.alone, alone)


def test_steps_finer_than_means_reach(base: Session, edited: Session) -> None:
    """Means are coded finer than tokens are: what is beyond them is coded alone."""
    alone = edited.encode(step=2.0**-24)
    behind = base.encode(step=2.0**-24)
    for stream in (edited.encode(base.alone, step=2.0**-24), edited.encode(behind, step=2.0**-24)):
        needed = base.alone if engine.inspect(stream)["reference"] == engine.stream_key(base.alone) else behind
        kv = engine.decode(stream, profile=base.profile, reference=needed)
        assert worst(edited, kv) < 1.5 * worst(edited, engine.decode(alone, profile=base.profile)) < 3e-3


# parts


@pytest.mark.parametrize("tokens", [(0, 256), (0, 1), (250, 330), (300, 312), (312, 313), (512, None), (-1, None)])
def test_a_range_of_tokens_is_that_part_of_the_whole(tokens: Any, delta: bytes, base: Session, edited: Session) -> None:
    whole = engine.decode(delta, profile=base.profile, reference=base.alone)
    part = engine.decode(delta, profile=base.profile, reference=base.alone, tokens=slice(*tokens))
    for one, other in zip(part.keys + part.values, whole.keys + whole.values, strict=True):
        np.testing.assert_allclose(one, other[:, slice(*tokens)], atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(part.positions, whole.positions[slice(*tokens)])


@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (-1, None)])
def test_a_range_of_layers_is_that_part_of_the_whole(layers: Any, delta: bytes, base: Session) -> None:
    whole = engine.decode(delta, profile=base.profile, reference=base.alone)
    part = engine.decode(delta, profile=base.profile, reference=base.alone, layers=slice(*layers))
    sides = zip(part.keys + part.values, whole.keys[slice(*layers)] + whole.values[slice(*layers)], strict=True)
    for one, other in sides:
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


def test_into_pages(delta: bytes, base: Session, edited: Session) -> None:
    whole = engine.decode(delta, profile=base.profile, reference=base.alone)
    count, slots = edited.kv.tokens, np.random.default_rng(0).permutation(38 * 16)[: edited.kv.tokens]
    pages = [[np.zeros((38, 2, 16, width), np.float32) for _ in range(3)] for width in (8, 6)]
    engine.decode_into(delta, *pages, slots=slots, profile=base.profile, reference=base.alone)
    for side, right in zip(pages, (whole.keys, whole.values), strict=True):
        for page, one in zip(side, right, strict=True):
            np.testing.assert_array_equal(page[slots // 16, :, slots % 16].transpose(1, 0, 2), one[:, :count])


def test_for_a_device(delta: bytes, base: Session, edited: Session) -> None:
    """Coded on the host, wherever the cache is; the same streams, the same caches."""
    pytest.importorskip("numba.cuda.dispatcher")
    from tests.emulator.device import emulated_device

    right = engine.decode(delta, profile=base.profile, reference=base.alone)
    with emulated_device() as cupy:
        there = Session(edited.ids, edited.kv.to("cuda"), edited.importance, edited.profile)
        assert there.encode(base.alone) == there.encode(base.alone, backend="cuda") == delta
        kv = engine.decode(delta, profile=base.profile, reference=base.alone, backend="cuda")
        assert kv.backend == "cuda" and kv.to("cpu").digest() == right.digest()
        arrays = [[cupy.zeros((2, edited.kv.tokens, w), np.float32) for _ in range(3)] for w in (8, 6)]
        with pytest.raises(DeviceError, match="on the CPU"):
            engine.decode_into(delta, *arrays, profile=base.profile, reference=base.alone)


# chains


@pytest.fixture(scope="module")
def chain(make: Make, texts: list[NDArray[np.int64]]) -> list[tuple[Session, bytes]]:
    """Sessions of which each was edited a little and coded against the one before; the first was coded alone."""
    ids = texts[0][:560]
    out = [(make(ids), make(ids).alone)]
    for i in range(5):
        place = 40 + 90 * i  # the first change is in the first chunk: nothing is copied
        ids = np.concatenate([ids[:place], texts[1][10 * i : 10 * i + 7], ids[place + 5 :]])
        streams = {engine.stream_key(stream): stream for _, stream in out}
        behind = Reference(out[-1][1], make(ids).profile, streams.__getitem__)
        out.append((make(ids), make(ids).encode(behind)))
    return out


def test_chains_are_no_longer_than_they_may_be(chain: list[tuple[Session, bytes]]) -> None:
    streams = {engine.stream_key(stream): stream for _, stream in chain}
    profile = chain[0][0].profile
    depths = [Reference(stream, profile, streams.__getitem__).depth for _, stream in chain]
    assert depths == [0, 1, 2, 3, 0, 1]
    keys = list(streams)
    assert [engine.inspect(stream)["reference"] for _, stream in chain] == [None, *keys[:3], None, keys[4]]
    assert sections(chain[4][1]) == sections(chain[4][0].alone)


def test_loss_does_not_grow_along_a_chain(chain: list[tuple[Session, bytes]]) -> None:
    streams = {engine.stream_key(stream): stream for _, stream in chain}
    for session, stream in chain:
        comes_back(session, stream, streams.__getitem__)
    assert all(len(stream) < 0.75 * len(session.alone) for session, stream in chain[1:4])


def test_a_chain_of_references_as_they_are(chain: list[tuple[Session, bytes]]) -> None:
    profile = chain[0][0].profile
    streams = {engine.stream_key(stream): stream for _, stream in chain}
    first = chain[1][1]
    whole = engine.decode(first, profile=profile, reference=streams.__getitem__)
    for behind in (chain[0][1], memoryview(chain[0][1]), Reference(chain[0][1], profile)):
        assert engine.decode(first, profile=profile, reference=behind).digest() == whole.digest()
    # one that needs another in turn is not enough
    with pytest.raises(StreamError, match=engine.stream_key(chain[0][1])):
        engine.decode(chain[2][1], profile=profile, reference=chain[1][1])
    with pytest.raises(StreamError, match=engine.stream_key(chain[0][1])):
        chain[2][0].encode(chain[1][1])
    held = Reference(chain[1][1], profile, streams.__getitem__)
    assert engine.decode(chain[2][1], profile=profile, reference=held).tokens == chain[2][0].kv.tokens


def test_the_end_of_a_chain_still_gives_what_stands_alone(
    chain: list[tuple[Session, bytes]], make: Make, texts: list[NDArray[np.int64]]
) -> None:
    """At most depth only chunks that depend on nothing are copied, and nothing is predicted."""
    profile = chain[0][0].profile
    streams = [make(texts[2][:600]).alone]  # of which all copy the first chunk
    ids = texts[2][:600].copy()
    for i in range(4):
        ids[280 + 3 * i] = (ids[280 + 3 * i] + 1) % 50
        find = {engine.stream_key(stream): stream for stream in streams}
        session = make(ids)  # which keeps ids as they are now
        streams.append(session.encode(Reference(streams[-1], profile, find.__getitem__)))
    said = [engine.inspect(stream)["reference"] for stream in streams]
    assert said == [None, *map(engine.stream_key, streams[:3]), None]
    assert len({sections(stream)[form.CHUNK, 0] for stream in streams}) == 1
    comes_back(session, streams[-1], None)


# the same tokens, other keys and values


def swapped(session: Session, other: Session, tokens: slice) -> Session:
    """With some tokens' keys and values of another session: not what the tokens say, as of the placeholders of
    images."""

    def mixed(ones: list[Any], others: list[Any]) -> list[Any]:
        out = [one.copy() for one in ones]
        for one, from_there in zip(out, others, strict=True):
            one[:, tokens] = from_there[:, tokens]
        return out

    kv = KVCache(mixed(session.kv.keys, other.kv.keys), mixed(session.kv.values, other.kv.values), rope=session.kv.rope)
    return Session(session.ids, kv, session.importance, session.profile)


@pytest.mark.parametrize(
    "tokens", [slice(300, 301), slice(255, 256), slice(3, 4), slice(300, 340), slice(256, 512), slice(0, 600)]
)
@pytest.mark.parametrize("step", [STEP * 2, STEP, STEP / 16])
def test_the_same_tokens_with_other_keys_and_values_are_not_copied(
    tokens: slice, step: float, base: Session, make: Make, texts: list[NDArray[np.int64]]
) -> None:
    other = swapped(base, make(texts[1][:600]), tokens)
    behind, alone = base.encode(step=step), other.encode(step=step)
    stream = other.encode(behind, step=step)
    chunk = tokens.start // 256
    assert all((sections(stream)[form.CHUNK, c] == sections(behind)[form.CHUNK, c]) == (c < chunk) for c in range(3))
    kv, without = (engine.decode(s, profile=base.profile, reference=behind) for s in (stream, alone))
    assert worst(other, kv) < 2.5 * worst(other, without)
    part = [
        (x[:, tokens], y[:, tokens], z[:, tokens])
        for x, y, z in zip(
            other.kv.keys + other.kv.values, kv.keys + kv.values, without.keys + without.values, strict=True
        )
    ]
    wrong = sum(float(np.square(x - y).sum() / x.var()) for x, y, _ in part)
    assert wrong < 5 * sum(float(np.square(x - z).sum() / x.var()) for x, _, z in part)
    assert loss(other, kv) < EXCESS * 1.25 * loss(other, without)


def test_deltas_that_cost_more_than_they_save_are_not_sent(
    base: Session, make: Make, texts: list[NDArray[np.int64]]
) -> None:
    other = swapped(base, make(texts[1][:600]), slice(0, 600))
    stream = other.encode(base.alone)
    assert engine.inspect(stream)["reference"] is None
    assert sections(stream) == sections(other.alone)


def test_copies_of_a_stream_that_does_not_say_its_loss(base: Session) -> None:
    for said in (None, {}, {"fisher": None}, {"fisher": True}, {"fisher": "much"}, [], 3, {"fisher": -1.0}):
        stream = base.encode(rewritten(base.alone, {"loss": said}))
        comes_back(base, stream, rewritten(base.alone, {"loss": said}))


# references that do not fit


def test_a_missing_reference_is_named(delta: bytes, base: Session, edited: Session) -> None:
    key = engine.stream_key(base.alone)
    for read in (engine.decode, engine.token_ids):
        with pytest.raises(StreamError, match=f"{key}.*not given"):
            read(delta, profile=base.profile)
        with pytest.raises(StreamError, match=f"{key}.*{engine.stream_key(edited.alone)}"):
            read(delta, profile=base.profile, reference=edited.alone)
        with pytest.raises(StreamError, match=f"{key}.*{engine.stream_key(edited.alone)}"):
            read(delta, profile=base.profile, reference=Reference(edited.alone, base.profile))
        with pytest.raises(KeyError, match=key):
            read(delta, profile=base.profile, reference={}.__getitem__)
    with pytest.raises(ProfileError, match=base.profile.fingerprint):
        engine.token_ids(delta, reference=base.alone)
    arrays = [[np.zeros((2, edited.kv.tokens, w), np.float32) for _ in range(3)] for w in (8, 6)]
    with pytest.raises(StreamError, match=key):
        engine.decode_into(delta, *arrays, profile=base.profile)


def test_a_damaged_reference_is_another(delta: bytes, base: Session) -> None:
    for place in (20, len(base.alone) // 2, len(base.alone) - 1):
        damaged = bytearray(base.alone)
        damaged[place] ^= 4
        with pytest.raises(StreamError):
            engine.decode(delta, profile=base.profile, reference=bytes(damaged))
    with pytest.raises(StreamError):
        engine.decode(delta, profile=base.profile, reference=b"")


def test_a_damaged_reference_to_code_against_is_refused_or_not_needed(base: Session, edited: Session) -> None:
    for place in range(30, len(base.alone), 97):
        damaged = bytearray(base.alone)
        damaged[place] ^= 4
        with pytest.raises(StreamError):
            stream = edited.encode(bytes(damaged))
            needed = engine.decode(stream, profile=base.profile, reference=bytes(damaged))  # not what is damaged
            assert loss(edited, needed) < EXCESS * loss(edited, engine.decode(edited.alone, profile=base.profile))
            raise StreamError("none of it was needed")


def test_a_reference_of_another_profile(
    delta: bytes, base: Session, edited: Session, profiles: Callable[[str], Profile]
) -> None:
    other = profiles("layers")
    foreign = base.encode(profile=other)
    with pytest.raises(ProfileError, match=other.fingerprint):
        edited.encode(foreign)
    with pytest.raises(ProfileError, match=other.fingerprint):
        edited.encode(Reference(foreign, other))
    with pytest.raises(ProfileError, match=other.fingerprint):
        engine.decode(delta, profile=other, reference=base.alone)
    with pytest.raises(ProfileError, match=other.fingerprint):
        Reference(base.alone, other)
    with pytest.raises(ProfileError, match=other.fingerprint):
        engine.token_ids(delta, profile=other, reference=Reference(base.alone, base.profile))


def test_what_cannot_be_a_reference(base: Session, profiles: Callable[[str], Profile]) -> None:
    free = base.encode(profile=None)
    exact = base.encode(tier="lossless", step=None, importance=None)
    with pytest.raises(StreamError, match="a reference must be of the near tier, not of the lossless tier"):
        base.encode(exact)
    with pytest.raises(StreamError, match="without a profile"):
        base.encode(free)
    for profile in (None, profiles("expectation")):
        with pytest.raises(ValueError, match="needs a profile"):
            base.encode(base.alone, profile=profile)
    with pytest.raises(StreamError):
        base.encode(b"no stream")


# streams that lie, with checksums that are right


def rewritten(stream: bytes, header: dict[str, Any] | None = None, **parts: Any) -> bytes:
    """A stream with other header entries and other sections: of chunk 1 (or the only one), by kind, e.g. DELTA."""
    parsed, data = Container.parse(stream), sections(stream)
    for name, other in parts.items():
        kind = getattr(form, name)
        key = (kind, 1 if (kind, 1) in data else 0)
        data.pop(key, None)
        if other is not None:
            data[key] = other
    return container.write(parsed.header | (header or {}), [Section(*key, some) for key, some in data.items()])


HEADERS: dict[str, dict[str, Any]] = {
    "no depth": {"depth": None},
    "depth 0": {"depth": 0},
    "deeper": {"depth": 2},
    "deepest": {"depth": 3},
    "too deep": {"depth": 4},
    "depth as text": {"depth": "1"},
    "a reference that is a number": {"reference": 7},
    "a reference that is a list": {"reference": [1]},
    "an empty reference": {"reference": ""},
    "no reference": {"reference": None},
    "more tokens": {"tokens": 605},
    "fewer tokens": {"tokens": 603},
    "other layers": {"shape": [[2, 8, 6]] * 2},
    "other heads": {"shape": [[2, 6, 8]] * 3},
    "no profile": {"profile": None},
    "another profile": {"profile": "0" * 32},
}


@pytest.mark.parametrize("lie", HEADERS)
def test_a_header_that_lies_is_refused(lie: str, delta: bytes, base: Session) -> None:
    stream = rewritten(delta, HEADERS[lie])
    for read in (engine.decode, engine.token_ids):
        if read is engine.token_ids and lie in ("no reference", "no profile"):
            continue
        for behind in (
            base.alone,
            Reference(base.alone, base.profile),
            {engine.stream_key(base.alone): base.alone}.get,
        ):
            with pytest.raises((StreamError, ProfileError)):
                read(stream, profile=base.profile, reference=behind)


def packed(*runs: tuple[int, int, int]) -> bytes:
    return container.pack(np.array(runs, np.int64).reshape(-1, 3))


RUNS: dict[str, Any] = {
    "none": None,
    "nothing": b"",
    "no runs": packed(),
    "other numbers": container.pack(np.array([[312, 308, 292]], np.int32)),
    "of two": container.pack(np.array([[312, 308]], np.int64)),
    "flat": container.pack(np.array([312, 308, 292], np.int64)),
    "a negative start": packed((-1, 308, 292)),
    "a negative place": packed((312, -1, 292)),
    "a negative length": packed((312, 308, -292)),
    "empty": packed((312, 308, 0)),
    "beyond the session": packed((312, 308, 293)),
    "beyond the reference": packed((312, 309, 292)),
    "far beyond": packed((312, 2**62, 292)),
    "so far that sums overflow": packed((312, 2**63 - 1, 292)),
    "a length that overflows": packed((2**63 - 1, 0, 2**63 - 1)),
    "overlapping": packed((256, 256, 60), (315, 311, 289)),
    "backwards": packed((312, 308, 292), (256, 256, 44)),
    "elsewhere": packed((312, 0, 292)),
    "too many": packed((300, 300, 12), (312, 308, 292)),
    "too few": packed((320, 316, 284)),
    "in a chunk without deltas": packed((0, 0, 256), (312, 308, 292)),
    "a run for each token": packed(*[(i, 0, 1) for i in range(604)]),
    "more than there are tokens": packed(*[(i % 604, 0, 1) for i in range(700)]),
}


@pytest.mark.parametrize("lie", RUNS)
def test_runs_that_lie(lie: str, delta: bytes, base: Session, edited: Session) -> None:
    """Refused; or a cache, if nothing in the stream contradicts them."""
    stream = rewritten(delta, RUNS=RUNS[lie])
    try:
        kv = engine.decode(stream, profile=base.profile, reference=base.alone)
    except StreamError:
        return
    assert lie in ("elsewhere",)
    assert kv.tokens == edited.kv.tokens and kv.shape == edited.kv.shape


@pytest.mark.parametrize("lie", [None, b"", b"\0" * 40])
@pytest.mark.parametrize("name", ["TOKENS", "CLASSES", "CHUNK", "DELTA", "MEANS", "DELTA_MEANS"])
def test_a_section_that_is_missing_or_nonsense(name: str, lie: Any, delta: bytes, base: Session) -> None:
    with pytest.raises(StreamError):
        engine.decode(rewritten(delta, **{name: lie}), profile=base.profile, reference=base.alone)


def test_sections_of_deltas_that_are_not_needed(delta: bytes, base: Session) -> None:
    parsed, more = Container.parse(base.alone), [Section(form.DELTA, 0, b"x"), Section(form.DELTA_MEANS, 0, b"x")]
    stream = container.write(parsed.header, [Section(*key, d) for key, d in sections(base.alone).items()] + more)
    assert (
        engine.decode(stream, profile=base.profile).digest() == engine.decode(base.alone, profile=base.profile).digest()
    )
    # such a chunk is not copied: it looks as if it needed another stream
    assert (form.CHUNK, 0) in sections(base.encode(stream))
    comes_back(base, base.encode(stream), stream)


@pytest.mark.parametrize("name", ["TOKENS", "CLASSES", "CHUNK", "DELTA", "MEANS", "DELTA_MEANS", "RUNS"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # nonsense may be too large for a float
def test_hostile_bytes_make_no_more_than_a_cache(name: str, delta: bytes, base: Session, edited: Session) -> None:
    behind = Reference(base.alone, base.profile)
    kind = getattr(form, name)
    good = np.frombuffer(sections(delta)[kind, 1 if kind != form.RUNS else 0], np.uint8)
    refused = 0
    for seed in range(24):
        rng = np.random.default_rng(seed)
        data = good.copy()
        if seed % 4 == 0:
            data = rng.integers(0, 256, rng.integers(0, 400), np.uint8)
        elif seed % 4 == 1:
            data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
        elif seed % 4 == 2:
            data = np.concatenate([data[: rng.integers(len(data))], rng.integers(0, 256, 40, np.uint8)])
        else:
            data = np.concatenate([data[: len(data) // 2], rng.integers(0, 256, 2 * rng.integers(70, 200), np.uint8)])
        stream = rewritten(
            delta, {"steps": [[112, 112, 112], [-640] * 3, [640] * 3][seed % 3]}, **{name: data.tobytes()}
        )
        try:
            kv = engine.decode(stream, profile=base.profile, reference=behind)
        except StreamError:
            refused += 1
        else:
            assert kv.shape == edited.kv.shape and all(np.isfinite(x).all() for x in kv.keys + kv.values)
    assert refused


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_coding_against_hostile_bytes(base: Session, edited: Session) -> None:
    """A reference that means something else than it did, with checksums that are right: refused, or of no use."""
    for seed, name in enumerate(["TOKENS", "CLASSES", "CHUNK"] * 6):
        rng = np.random.default_rng(seed)
        data = bytearray(sections(base.alone)[getattr(form, name), 1])
        for _ in range(3):
            data[rng.integers(len(data))] = rng.integers(256)
        behind = rewritten(base.alone, {"steps": [[112] * 3, [-640] * 3][seed % 2]}, **{name: bytes(data)})
        try:
            stream = edited.encode(behind)
        except StreamError:
            continue
        comes_back(edited, stream, behind)


def test_ids_that_no_session_has(base: Session, edited: Session) -> None:
    for value in (50, 2**31, 2**32 - 1):
        behind = rewritten(base.alone, TOKENS=container.pack(np.full(256, value, np.uint32)))
        try:
            stream = edited.encode(behind)
        except StreamError:
            continue
        comes_back(edited, stream, behind)


def test_chains_that_have_no_end(delta: bytes, base: Session) -> None:
    """A store that gives the same stream for every key."""
    asked: list[str] = []

    def find(key: str) -> bytes:
        asked.append(key)
        return delta

    with pytest.raises(StreamError):
        engine.decode(delta, profile=base.profile, reference=find)
    assert len(asked) == 1
    # streams that each name the next, all of them of depth 3
    streams = {engine.stream_key(base.alone): base.alone}
    last = base.alone
    for _ in range(6):
        last = rewritten(delta, {"reference": engine.stream_key(last), "depth": 3})
        streams[engine.stream_key(last)] = last
    asked.clear()
    with pytest.raises(StreamError):
        engine.decode(last, profile=base.profile, reference=lambda key: asked.append(key) or streams[key])
    assert len(asked) == 1


# sameness


def test_the_same_bytes_each_time(delta: bytes, base: Session, edited: Session) -> None:
    held = Reference(base.alone, base.profile)
    assert {
        edited.encode(base.alone),
        edited.encode(held),
        edited.encode(held),
        edited.encode(memoryview(base.alone)),
    } == {delta}
    assert edited.encode(base.alone, backend="cpu") == delta


def test_nothing_of_the_arguments_is_changed(base: Session, edited: Session) -> None:
    received, digest = edited.importance.copy(), edited.kv.digest()
    edited.encode(base.alone)
    np.testing.assert_array_equal(edited.importance, received)
    assert edited.kv.digest() == digest


@settings(max_examples=15)
@given(data=st.data())
def test_any_edits_come_back(data: st.DataObject, base: Session, make: Make, texts: list[NDArray[np.int64]]) -> None:
    ids = base.ids
    for _ in range(data.draw(st.integers(0, 4), "edits")):
        start = data.draw(st.integers(0, len(ids) - 1), "start")
        stop = data.draw(st.integers(start, min(len(ids), start + 300)), "stop")
        new = data.draw(st.sampled_from([0, 1, 5, 40, 256]), "inserted")
        from_there = data.draw(st.integers(0, 600), "from")
        ids = np.concatenate([ids[:start], texts[data.draw(st.integers(0, 1), "text")][from_there:][:new], ids[stop:]])
        ids = ids if len(ids) else texts[1][:1]
    session = make(ids)
    stream = session.encode(base.alone)
    comes_back(session, stream, base.alone, excess=MOST_EXCESS)
    assert len(stream) <= 1.01 * len(session.alone) + 120  # the header names the reference


# what a reference keeps


def test_a_reference_keeps_few_chunks(make: Make, texts: list[NDArray[np.int64]]) -> None:
    long = make(np.concatenate([texts[0], texts[1]]))
    held = Reference(long.alone, long.profile)
    assert (held.key, held.depth) == (engine.stream_key(long.alone), 0)
    np.testing.assert_array_equal(held.token_ids, long.ids)
    for chunk in [*range(8), 0, 3]:
        held.blocks(chunk)
        assert len(held._decoded) <= reference.KEPT
    assert list(held._decoded) == [6, 7, 0, 3]
    tokens = np.array([1799, 0, 256, 255, 1799])
    np.testing.assert_array_equal(held.rows(tokens)[[0, 4]], held.blocks(7)[[7, 7]])
    np.testing.assert_array_equal(
        held.rows(tokens)[1:4], np.stack([held.blocks(0)[0], held.blocks(1)[0], held.blocks(0)[255]])
    )
    assert held.rows(np.zeros(0, np.int64)).shape == (0, 84)


def test_another_thread_may_take_out_what_a_reference_keeps(base: Session) -> None:
    class Emptied(OrderedDict[int, NDArray[np.float32]]):
        """By another thread, as soon as anything is in it."""

        def __setitem__(self, chunk: int, decoded: NDArray[np.float32]) -> None:
            super().__setitem__(chunk, decoded)
            self.clear()

    held = Reference(base.alone, base.profile)
    expected = held.blocks(1)
    held._decoded = Emptied()
    np.testing.assert_array_equal(held.blocks(1), expected)
    assert not held._decoded


def test_a_reference_is_decoded_a_chunk_at_a_time(
    delta: bytes, base: Session, edited: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Reference(base.alone, base.profile)
    engine.decode(delta, profile=base.profile, reference=held, tokens=slice(0, 256))
    assert not held._decoded
    engine.decode(delta, profile=base.profile, reference=held, tokens=slice(560, None))
    assert set(held._decoded) == {1, 2}


def test_classes_that_will_do_are_the_references(base: Session, edited: Session, delta: bytes) -> None:
    parsed = Container.parse(delta)
    aligned = Aligned.read(parsed, form.Form(parsed), base.profile, base.alone)
    known = Known.read(parsed, form.Form(parsed), range(3), aligned)
    own = importance.classes(edited.importance)
    there = aligned.known(slice(0, None)).classes
    held = aligned.held(slice(0, None))
    np.testing.assert_array_equal(known.classes[:, :256], Reference(base.alone, base.profile).known.classes[:, :256])
    known.classes[:, :256] = own[:, :256]
    assert (known.classes[:, ~held] == own[:, ~held]).all()
    assert ((known.classes == own) | (known.classes == there))[:, held].all()
    change = own.astype(int) - known.classes
    assert change.min() >= -known_module.LESS and change.max() <= known_module.MORE


def test_hand_made_caches(base: Session) -> None:
    """The very same keys and values at other positions: nothing but the means and the dead zone is left to send."""
    positions = 3 * base.kv.positions
    keys = [r.apply(r.undo(k, base.kv.positions), positions) for r, k in zip(base.kv.rope, base.kv.keys, strict=True)]
    rng = np.random.default_rng(0)
    values = [v + 0.01 * v.std() * rng.standard_normal(v.shape).astype(np.float32) for v in base.kv.values]
    other = Session(
        base.ids, KVCache(keys, values, positions=positions, rope=base.kv.rope), base.importance, base.profile
    )
    stream = other.encode(base.alone)
    assert sections(stream).items() >= sections(base.alone).items()  # all is copied, and positions do not count
    moved = np.roll(np.arange(600), 200)  # in another order, which is not copied; sinks are not aligned
    keys = [
        r.apply(r.undo(k, base.kv.positions)[:, moved], base.kv.positions)
        for r, k in zip(base.kv.rope, base.kv.keys, strict=True)
    ]
    other = Session(
        base.ids[moved],
        KVCache(keys, [v[:, moved] for v in values], rope=base.kv.rope),
        base.importance[:, moved],
        base.profile,
    )
    stream = other.encode(base.alone)
    assert runs_of(stream, base.alone, base.profile) == [(4, 404, 196), (204, 4, 396)]
    kv = engine.decode(stream, profile=base.profile, reference=base.alone)
    assert loss(other, kv) < EXCESS * loss(other, engine.decode(other.alone, profile=base.profile))
    by_part = engine.inspect(stream)["bytes_by_part"]
    assert (
        by_part["deltas"] + by_part["means of deltas"]
        < 0.3 * engine.inspect(other.alone)["bytes_by_part"]["coefficients"]
    )


def test_nothing_is_copied_of_a_session_that_begins_elsewhere(base: Session) -> None:
    """The same tokens are sinks in one, and not in the other."""
    positions = base.kv.positions + 1000
    keys = [r.apply(r.undo(k, base.kv.positions), positions) for r, k in zip(base.kv.rope, base.kv.keys, strict=True)]
    later = Session(
        base.ids, KVCache(keys, base.kv.values, positions=positions, rope=base.kv.rope), base.importance, base.profile
    )
    stream = later.encode(base.alone)
    assert not sections(stream).items() & sections(base.alone).items()
    assert runs_of(stream, base.alone, base.profile)[0][:2] == (4, 4)  # the tokens after the sinks are as they were
    kv = engine.decode(stream, profile=base.profile, reference=base.alone)
    assert loss(later, kv) < EXCESS * loss(later, engine.decode(later.alone, profile=base.profile))


def test_a_cache_too_far_for_symbols_is_refused_as_ever(base: Session) -> None:
    values = [v.copy() for v in base.kv.values]
    values[1][0, 300, 2] = 1e30
    other = Session(base.ids, KVCache(base.kv.keys, values, rope=base.kv.rope), base.importance, base.profile)
    with pytest.raises(CacheError, match="values of layer 1"):
        other.encode(base.alone)
