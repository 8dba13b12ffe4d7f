"""The codecs that seqkv is compared with do what their authors describe, and count what they keep."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from bench import composed, peers, peers_fitted
from seqkv.engine import KVCache, Rope

WIDTH, HEADS, TOKENS, LAYERS = 16, 2, 100, 3


def cache(seed: int, tokens: int = TOKENS, width: int = WIDTH) -> KVCache:
    """Keys follow from those of the layer before, values from the keys: all from a state of 6 numbers."""
    rng = np.random.default_rng([7, seed])
    maps = np.random.default_rng(0).standard_normal((2 * LAYERS, 6, HEADS * width)) / 6**0.5
    state = rng.standard_normal((tokens, 6))
    parts = [(state @ m + 0.05 * rng.standard_normal((tokens, HEADS * width))).astype(np.float32) for m in maps]
    heads = [part.reshape(tokens, HEADS, width).transpose(1, 0, 2) for part in parts]
    rope = Rope.from_theta(1e4, width)
    keys = [rope.apply(x, np.arange(tokens)) for x in heads[::2]]
    return KVCache(keys, heads[1::2], rope=rope)


def error(kv: KVCache, other: KVCache) -> float:
    """Squared error in part of the energy, of all values."""
    pairs = list(zip(kv.keys + kv.values, other.keys + other.values, strict=True))
    return float(sum(np.square(a - b).sum() for a, b in pairs) / sum(np.square(a).sum() for a, _ in pairs))


@pytest.fixture(scope="module")
def fitted() -> dict[tuple[str, str], peers.Peer]:
    observed = peers_fitted.Observed(cache(seed, 300) for seed in range(4))
    return {(p.name, p.setting): p for p in peers_fitted.fitted(observed)}


@pytest.mark.parametrize("bits, distortion", [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
def test_turboquant_distorts_unit_vectors_as_its_paper_says(bits: int, distortion: float) -> None:
    x = np.random.default_rng(0).standard_normal((4, 500, 128)).astype(np.float32)
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    kv = KVCache([x], [x[::-1]])
    coded = peers.turboquant(kv, bits)
    assert np.square(coded.kv.keys[0] - x).sum(-1).mean() == pytest.approx(distortion, rel=0.15)
    assert coded.bytes == kv.values_count * bits / 8 + 2 * 4 * 500 * 2


@pytest.mark.parametrize("bits", [2, 4])
def test_what_a_prediction_leaves_is_less_to_turboquant(bits: int) -> None:
    caches = [cache(seed, 300) for seed in range(4)]
    ids, table = np.zeros(4 * 296, np.int64), np.zeros((1, 2), np.float32)  # tokens say nothing here, layers do
    kv, composition = cache(9), composed.Composed(peers_fitted.Observed(caches), ids, table)
    coded, plain = composition.code(kv, np.zeros(TOKENS, np.int64), bits), peers.turboquant(kv, bits)
    sinks = 4 * kv.values_count // TOKENS
    norms = 2 * 2 * LAYERS * HEADS * (TOKENS - 4)
    assert coded.bytes == 4 * TOKENS + (kv.values_count - sinks) * bits // 8 + 2 * sinks + norms
    assert error(kv, coded.kv) < 0.6 * error(kv, plain.kv)
    for one, other in zip(kv.keys + kv.values, coded.kv.keys + coded.kv.values, strict=True):
        np.testing.assert_allclose(one[:, :4], other[:, :4], rtol=2e-3, atol=2e-3)


def test_a_composition_predicts_from_tokens() -> None:
    rng = np.random.default_rng(4)
    table, ids = rng.standard_normal((20, 5)).astype(np.float32), rng.integers(0, 20, 4 * 300)
    maps = rng.standard_normal((4, 5, HEADS * WIDTH)).astype(np.float32)

    def made(some: Any) -> KVCache:
        parts = [(table[some] @ m).reshape(len(some), HEADS, WIDTH).transpose(1, 0, 2) for m in maps]
        return KVCache(parts[::2], parts[1::2])

    observed = peers_fitted.Observed(made(part) for part in ids.reshape(4, 300))
    composition = composed.Composed(observed, ids.reshape(4, 300)[:, 4:].reshape(-1), table)
    kv = made(ids[:TOKENS])
    assert error(kv, composition.code(kv, ids[:TOKENS], 1).kv) < 1e-4


def test_kivi_groups_keys_by_channel_and_values_by_token() -> None:
    kv = cache(0, 64, 32)
    for x in kv.keys:
        x[:, :, 3] += 1000  # a channel that is far off, which must not cost the others anything
    for bits in (4, 2):
        coded = peers.kivi(kv, bits)
        assert coded.bytes == kv.values_count * (bits / 8 + 4 / 32)
        for before, after in zip(kv.keys, coded.kv.keys, strict=True):
            groups = before.reshape(HEADS, 2, 32, 32)
            unit = np.ptp(groups, axis=2, keepdims=True) / (2**bits - 1)
            far = np.abs(groups - after.reshape(groups.shape))
            assert (far[..., 4:] <= 0.55 * unit[..., 4:]).all()


def test_cachegen_counts_its_tables() -> None:
    kv = cache(0)
    whole, parts = peers.cachegen(kv, TOKENS), peers.cachegen(kv, TOKENS // 2)
    assert error(whole.kv, parts.kv) == 0
    assert error(kv, whole.kv) < 0.01
    channels = 2 * LAYERS * HEADS * WIDTH
    least = channels * (33 * 2 + 4) + 4 * 2 * LAYERS * TOKENS
    assert least < whole.bytes < least + kv.values_count * 5 / 8  # at most 5 bits a symbol: 31 levels
    assert whole.bytes + 0.8 * channels * 70 < parts.bytes
    symbols = np.zeros((64, 3), np.int64)
    assert peers.static_size(symbols, 16) == 3 * (70 + 1)  # one symbol alone costs next to nothing


def test_static_size_is_about_the_entropy() -> None:
    rng = np.random.default_rng(0)
    symbols = rng.integers(0, 8, (4096, 5))
    assert peers.static_size(symbols, 16) == pytest.approx(5 * (4096 * 3 / 8 + 70), rel=0.01)


def test_kvtc_allots_bits_and_restores(fitted: dict[tuple[str, str], peers.Peer]) -> None:
    kv = cache(9, 300)
    errors, sizes = [], []
    for rate in (2.0, 1.0, 0.5):
        coded = fitted["KVTC", f"{rate:g} bits"].code(kv)
        errors.append(error(kv, coded.kv))
        sizes.append(8 * coded.bytes / kv.values_count)
        sinks = 16 * peers_fitted.SINKS / 300
        assert sizes[-1] < rate + sinks + 0.01  # deflate saves something, or costs next to nothing
    assert errors[0] < errors[1] < errors[2] < 0.5 and sizes[0] > sizes[1] > sizes[2]
    first = fitted["KVTC", "1 bits"].code(kv).kv
    for before, after in zip(kv.values, first.values, strict=True):
        np.testing.assert_allclose(after[:, :4], before[:, :4], rtol=1e-3, atol=1e-3)


def test_a_plan_is_within_its_rate_and_better_than_one_of_equal_groups() -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((2000, 128)) * 0.95 ** np.arange(128)).astype(np.float16)
    transform = peers_fitted.Transform.fit([rows])
    plan = transform.plan(1.0)
    spent = sum(16 if g.size == 1 else g.size * g.bits + 16 for g in plan)
    assert spent <= 128 and plan == sorted(plan, key=lambda g: g.start)
    assert all(a.start + a.size <= b.start for a, b in itertools.pairwise(plan))
    total = float(np.square(transform.sample).sum())

    def lost(groups: Any) -> float:
        kept = sum(
            float(np.square(transform.sample[:, g.start : g.start + g.size]).sum()) - transform.errors[g]
            for g in groups
        )
        return total - kept

    assert lost(plan) < min(
        lost([peers_fitted.Group(0, 16, 4)]), lost([peers_fitted.Group(i, 1, 16) for i in range(8)])
    )


def test_levels_are_packed_without_gaps() -> None:
    x = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    for bits in (2, 4, 8):
        back, data = peers_fitted.levels(x, bits)
        assert len(data) == 40 * (2 + 16 * bits // 8)
        assert np.abs(back - x).max() <= 0.51 * np.abs(x).max() * 2.0 ** (1 - bits) + 1e-3
    assert zlib.crc32(peers_fitted.levels(x, 4)[1]) == zlib.crc32(peers_fitted.levels(x.copy(), 4)[1])


def test_aqua_predicts_layer_from_layer(fitted: dict[tuple[str, str], peers.Peer]) -> None:
    kv = cache(9, 300)
    errors = [error(kv, fitted["AQUA-KV", f"{bits} bits"].code(kv).kv) for bits in (3, 2, 1)]
    assert errors[0] < errors[1] < errors[2] < 0.05  # 1 bit without prediction would leave 0.36
    size = 8 * fitted["AQUA-KV", "2 bits"].code(kv).bytes / kv.values_count
    first, others, scales, sinks = 4 / 3, 2 * 2 / 3, 16 / (HEADS * WIDTH), 16 * 4 / 300
    assert size == pytest.approx((first + others + scales) * 296 / 300 + sinks, rel=0.01)


@pytest.mark.parametrize("points, distortion", [(4, 0.363), (16, 0.107), (64, 0.031)])
def test_gaussian_grid_is_about_as_good_as_can_be(points: int, distortion: float) -> None:
    grid = peers_fitted.gaussian_grid(points)
    x = np.random.default_rng(1).standard_normal((20_000, 2)).astype(np.float32)
    assert np.square(x - grid[peers_fitted.nearest_of(x, grid)]).mean() == pytest.approx(distortion, rel=0.05)


def test_blocks_and_cache_are_inverses() -> None:
    kv = cache(3)
    assert error(kv, peers_fitted.cache(peers_fitted.blocks(kv), kv)) < 1e-10


def test_the_order_of_texts_changes_nothing(fitted: dict[tuple[str, str], peers.Peer]) -> None:
    one, other = cache(10), cache(11)
    everything = [*peers.lossy(), *fitted.values()]
    everything = [peer for peer in everything if "quanto" not in peer.name]  # it compiles itself for minutes
    before = [(p.code(one).bytes, error(one, p.code(one).kv)) for p in everything]
    for peer in everything:
        peer.code(other)
    assert [(p.code(one).bytes, error(one, p.code(one).kv)) for p in everything] == before


def test_lossless_peers_are_of_the_cache_in_bfloat16() -> None:
    kv = cache(0)
    assert peers.plain(kv).bytes == 2 * kv.values_count
    assert 0 < error(kv, peers.plain(kv).kv) < 1e-4
    for peer in peers.lossless():
        coded = peer.code(kv)
        assert coded.bytes < 2 * kv.values_count * 1.01
        assert coded.kv.digest() == peers.plain(kv).kv.digest()
