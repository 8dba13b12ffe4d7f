"""The compact form: what is read of it is what was put into it, as near as was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seqkv.engine import CacheError, KVCache, Profile, Rope, compact, compact_kernels
from seqkv.engine.compact import Compact, Format, Reader

IDS = (np.arange(60) ** 2 * 7) % 50
ROPES = {
    "half": Rope.from_theta(1e4, 8),
    "interleaved": Rope(Rope.from_theta(1e4, 8).inv_freq, layout="interleaved"),
    "partial": Rope.from_theta(100, 4),
    "scaled": Rope(Rope.from_theta(1e4, 8).inv_freq, scaling=1.3),
    "none": None,
}


def part(kv: KVCache, start: int, stop: int) -> KVCache:
    sides = ([x[:, start:stop] for x in side] for side in (kv.keys, kv.values))
    return KVCache(*sides, positions=kv.positions[start:stop], rope=kv.rope)


def held(form: Format, kv: KVCache, ids: NDArray[Any], chunk: int = 16) -> Compact:
    out = Compact.empty(form)
    for start in range(0, len(ids), chunk):
        some = part(kv, start, min(start + chunk, len(ids)))
        received = np.ones((kv.layers, some.tokens), np.float32)
        out = out.extended(some, ids[start : start + some.tokens], received)
    return out


def read(one: Compact, kv: KVCache, columns: NDArray[np.int64] | None = None, room: int = 0) -> list[list[Any]]:
    columns = np.arange(kv.tokens) if columns is None else columns
    reader, sides = Reader(one, kv.rope, columns), ("keys", "values")
    out: list[list[Any]] = [[], []]
    for layer, like in enumerate(zip(kv.keys, kv.values, strict=True)):
        for side, name, array in zip(out, sides, like, strict=True):
            heads, tokens, width = array.shape
            side.append(np.full((heads, tokens + room, width), 7, np.float32))
            reader.write(layer, name, side[-1])  # type: ignore[arg-type]
    return out


def error(kv: KVCache, one: Compact) -> float:
    """Of what is not a sink, relative to how values differ from their mean."""
    found = read(one, kv)
    apart = [
        [(x - y)[:, 4:] for x, y in zip(*two, strict=True)] for two in zip(found, (kv.keys, kv.values), strict=True)
    ]
    spread = [[y[:, 4:] - y[:, 4:].mean(1, keepdims=True) for y in side] for side in (kv.keys, kv.values)]
    squares = [sum(float(np.square(x).sum()) for side in what for x in side) for what in (apart, spread)]
    return squares[0] / squares[1]


@pytest.mark.parametrize("rope", ROPES)
def test_the_finer_the_form_the_less_is_lost(rope: str, model: Any, profile: Profile) -> None:
    kv, _ = model.cache(IDS, rope=ROPES[rope])
    ones = [held(Format(profile, kl), kv, IDS) for kl in (1e-1, 1e-3, 1e-6)]
    errors = [error(kv, one) for one in ones]
    assert 0.5 > errors[0] > 4 * errors[1] > 16 * errors[2]
    assert ones[0].nbytes < ones[1].nbytes < ones[2].nbytes < kv.nbytes / 2
    for found, true in zip(read(ones[0], kv), (kv.keys, kv.values), strict=True):
        for x, y in zip(found, true, strict=True):  # sinks are as they were, in half precision
            np.testing.assert_allclose(x[:, :4], y[:, :4], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rope", ROPES)
def test_attention_gets_what_is_written(rope: str, model: Any, profile: Profile) -> None:
    kv, _ = model.cache(IDS, rope=ROPES[rope])
    one, rng = held(Format(profile, 0.01), kv, IDS), np.random.default_rng(0)
    columns = np.sort(rng.permutation(80)[:60])  # some are hidden, some come after
    keys, values = read(one, kv, columns, room=20)
    for side in (keys, values):
        assert all((np.delete(x, columns, axis=1) == 7).all() for x in side)
    reader = Reader(one, kv.rope, columns)
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        query = rng.standard_normal((2, 5, key.shape[2]), np.float32)
        scores = np.full((2, 5, 80), 7, np.float32)
        reader.scores(layer, query, scores)
        np.testing.assert_allclose(scores[..., columns], (query @ key.transpose(0, 2, 1))[..., columns], atol=1e-4)
        assert (np.delete(scores, columns, axis=2) == 7).all()
        weights = rng.random((2, 5, 80), np.float32)
        out = np.ones((2, 5, value.shape[2]), np.float32)
        reader.add_up(layer, weights, out)
        np.testing.assert_allclose(out, 1 + weights[..., columns] @ value[:, columns], atol=1e-4)


def test_the_loops_are_the_plain_arithmetic_bit_for_bit() -> None:
    rng, tokens, groups, size = np.random.default_rng(3), 40, 3, 7
    bits = np.sort(rng.integers(0, 12, (12, groups, size)), axis=2)[..., ::-1].reshape(12, -1).astype(np.uint8)
    distances = rng.random((12, groups * size), np.float32) + np.float32(0.1)
    counts, sizes = (bits > 0).reshape(12, groups, size).sum(2), -(-bits.sum(1, dtype=np.int64) // 8)
    z = (10 * rng.standard_normal((tokens, groups * size))).astype(np.float32)
    levels, heads = rng.integers(0, 12, tokens), np.empty(tokens, np.uint8)
    packed, most = np.zeros(sizes[levels].sum() + compact_kernels.BEYOND, np.uint8), np.full(12, np.inf)
    assert compact_kernels.pack(z, levels, bits, distances, sizes, most, heads, packed) == 0
    found = np.empty((groups, tokens, size), np.float32)
    compact_kernels.unpack(packed, heads, bits, distances, counts, sizes, found)
    assert (heads >> 4 == levels).all()
    start, expected = 0, np.zeros((tokens, groups * size), np.float32)
    for t, level in enumerate(levels):
        stretch = compact_kernels.STRETCHES[heads[t] & 15]
        code = int.from_bytes(packed[start : start + sizes[level]].tobytes(), "little")
        for j, width in enumerate(bits[level].tolist()):
            if width:
                value = np.float32(code % (1 << width) - (1 << width - 1)) + np.float32(0.5)
                expected[t, j] = value * distances[level, j] * stretch
                code >>= width
        assert code == 0
        start += sizes[level]
    np.testing.assert_array_equal(found, expected.reshape(tokens, groups, size).transpose(1, 0, 2))
    # each is the nearest of its values, but where all of them are too small
    where = bits[levels] > 0
    off = np.abs(expected - z) / (distances[levels] * compact_kernels.STRETCHES[heads & 15][:, None])
    largest = np.abs(expected) >= distances[levels] * compact_kernels.STRETCHES[heads & 15][:, None] * (
        2.0 ** (bits[levels].astype(float) - 1) - 0.51
    )
    assert (off[where & ~largest] <= 0.5001).all()


def test_how_it_is_cut_does_not_matter(model: Any, profile: Profile) -> None:
    kv, _ = model.cache(IDS)
    form = Format(profile, 0.01)
    whole, cut = held(form, kv, IDS, chunk=60), held(form, kv, IDS, chunk=7)
    assert whole.nbytes == cut.nbytes and whole.ids.tolist() == IDS.tolist()
    for mine, its in zip(read(whole, kv), read(cut, kv), strict=True):
        for x, y in zip(mine, its, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def test_tokens_that_receive_more_are_held_finer(model: Any, profile: Profile) -> None:
    kv, _ = model.cache(IDS)
    form, received = Format(profile, 0.01), np.ones((kv.layers, 60), np.float32)
    received[:, 30:] = 1 / 64
    one = Compact.empty(form).extended(kv, IDS, received)
    found = read(one, kv)
    lost = [np.square(x - y).sum((0, 2)) for x, y in zip(found[0] + found[1], kv.keys + kv.values, strict=True)]
    assert np.mean([x[30:].mean() / x[4:30].mean() for x in lost]) > 2
    heads = np.stack([block.heads >> 4 for block in one.blocks])
    assert (heads[:, 30:] <= heads[:, 4:30].min(1, keepdims=True)).all() and (heads[:, 30:] < heads[:, 29:30]).any()


def test_tokens_of_another_kind_are_held_as_near_as_others_or_refused(model: Any, profile: Profile) -> None:
    kv, _ = model.cache(IDS)
    form, taken = Format(profile, 0.01), []
    usual = np.abs(read(held(form, kv, IDS), kv)[1][1] - kv.values[1]).max()
    for off in (0, 3, 30, 3e2, 3e4, 1e30):
        values = [x.copy() for x in kv.values]
        values[1][1, 30, 2] += off
        odd = KVCache(kv.keys, values, rope=kv.rope)
        try:
            one = held(form, odd, IDS)
        except CacheError as error:
            assert "values of layer 1 differ from what is expected by too much" in str(error)
            continue
        taken.append(off)
        assert np.abs(read(one, odd)[1][1] - values[1]).max() < 10 * usual
    assert taken[:2] == [0, 3] and 1e30 not in taken


def test_attention_is_estimated_where_it_is_not_known(model: Any, profile: Profile) -> None:
    kv, attention = model.cache(IDS)
    form = Format(profile, 0.01)
    known, estimated = (Compact.empty(form).extended(kv, IDS, what) for what in (attention, None))
    assert known.nbytes < estimated.nbytes < 2 * known.nbytes
    assert error(kv, estimated) < error(kv, known)


@pytest.mark.parametrize("predictor", ["mean", "token", "layers"])
def test_any_predictor(predictor: str, model: Any, profiles: Callable[[str], Profile]) -> None:
    kv, _ = model.cache(IDS)
    assert error(kv, held(Format(profiles(predictor), 1e-4), kv, IDS)) < 0.1


def test_a_profile_is_followed_once(profile: Profile) -> None:
    assert compact.Basis.of(profile) is compact.Basis.of(profile)
