"""Codecs of KV caches that are calibrated, for comparison: on the same texts as a profile of seqkv, and no others.

Like bench/peers.py: implementations of our own, side information counted but for what all caches of a model share.
Both keep the first 4 tokens, which soak up attention, in 16 bits, and work on keys before rotation.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.peers import HALF, Array, Coded, Peer, fixed_width, half, rotation
from seqkv.engine import KVCache
from seqkv.engine.layout import Turns, blocks_of

SINKS = 4
RATES = (2.0, 1.0, 0.5, 0.25)  # bits a value that KVTC allots, before deflate
AQUA_BITS = (3, 2, 1)
_FIT_BITS, _FIRST_LAYER_BITS = 2, 4
_RIDGE = 1e-3
_SAMPLE = 256  # tokens that allotting bits looks at


def blocks(kv: KVCache) -> list[Array]:
    """Keys before rotation and values of each layer in turn, [tokens, channels]."""
    block = blocks_of(kv, slice(None), Turns(kv.positions))
    return [block(b) for b in range(2 * kv.layers)]


def cache(parts: list[Array], kv: KVCache) -> KVCache:
    """The cache that such blocks are of. kv: whose shape and positions it has."""
    sides: tuple[list[Array], list[Array]] = ([], [])
    for b, part in enumerate(parts):
        rope = None if b % 2 else kv.rope[b // 2]
        heads = part.reshape(kv.tokens, kv.shape[b // 2][0], -1).transpose(1, 0, 2)
        sides[b % 2].append(heads if rope is None else rope.apply(heads, kv.positions))
    return KVCache(*sides, positions=kv.positions, rope=kv.rope)


class Observed:
    """The blocks of all calibration caches but their first tokens, [tokens, channels] float16 each, and how many heads
    each layer has."""

    def __init__(self, caches: Iterable[KVCache]) -> None:
        rows = []
        for kv in caches:
            rows.append([half(x[SINKS:]).astype(np.float16) for x in blocks(kv)])
            self.heads = [heads for heads, _, _ in kv.shape]
        self.blocks = [np.concatenate(same) for same in zip(*rows, strict=True)]


# KVTC, arXiv 2511.01815: principal components of all layers together, for keys and for values; bits for groups of
# components by dynamic programming; deflate.


@dataclass(frozen=True)
class Group:
    """Components [start, start + size) of a token, in `bits` bits each, with a scale of 16 bits; one alone in 16."""

    start: int
    size: int
    bits: int


@dataclass
class Transform:
    """Principal components of one side, all layers side by side."""

    mean: Array
    basis: Array
    sample: Array  # components of some tokens of calibration

    @classmethod
    def fit(cls, parts: list[NDArray[np.float16]]) -> Transform:
        width = sum(part.shape[1] for part in parts)
        mean, gram = np.zeros(width, np.float32), np.zeros((width, width), np.float32)
        pieces = range(0, len(parts[0]), 4096)
        for start in pieces:
            mean += np.concatenate([x[start : start + 4096] for x in parts], axis=1).sum(0, dtype=np.float32)
        mean /= len(parts[0])
        for start in pieces:
            x = np.concatenate([x[start : start + 4096] for x in parts], axis=1).astype(np.float32) - mean
            gram += x.T @ x
        basis = np.ascontiguousarray(np.linalg.eigh(gram / len(parts[0]))[1][:, ::-1])
        some = np.linspace(0, len(parts[0]) - 1, _SAMPLE).astype(int)
        sample = np.concatenate([x[some] for x in parts], axis=1).astype(np.float32) - mean
        return cls(mean, basis, sample @ basis)

    @functools.cached_property
    def errors(self) -> dict[Group, float]:
        """The squared error of every group that may be chosen."""
        found = {}
        width = len(self.mean)
        for start in places(width):
            for size in (1, 16, 64, 256, 1024):
                if start + size > width or (size == 1 and start >= 64):
                    continue
                part = self.sample[:, start : start + size]
                for bits in (16,) if size == 1 else (2, 4, 8):
                    found[Group(start, size, bits)] = float(np.square(part - levels(part, bits)[0]).sum())
        return found

    def plan(self, rate: float) -> list[Group]:
        """The groups of least error at `rate` bits a value or less; components that are in none are left out."""
        at = {place: i for i, place in enumerate(places(len(self.mean)))}
        budget = int(rate * len(self.mean) / 16)  # all costs are multiples of 16 bits
        kept = np.full((len(at), budget + 1), -np.inf)  # energy that is not lost, by place and bits spent
        kept[0, 0] = 0.0
        came: dict[tuple[int, int], tuple[int, int, Group | None]] = {}
        power = np.concatenate([[0.0], np.cumsum(np.square(self.sample).sum(0, dtype=np.float64))])
        by_start: dict[int, list[tuple[Group, float]]] = {}
        for group, error in self.errors.items():
            by_start.setdefault(group.start, []).append((group, error))
        order = list(at)
        for place, i in at.items():
            steps: list[tuple[int, int, float, Group | None]] = []
            if i + 1 < len(order):
                steps.append((i + 1, 0, 0.0, None))
            for group, error in by_start.get(place, []):
                end = at.get(place + group.size)
                cost = 1 if group.size == 1 else group.size * group.bits // 16 + 1
                if end is not None and cost <= budget:
                    steps.append((end, cost, power[place + group.size] - power[place] - error, group))
            for end, cost, gain, chosen in steps:
                reached = kept[i, : budget + 1 - cost] + gain
                better = np.flatnonzero(reached > kept[end, cost:])
                kept[end, cost + better] = reached[better]
                for spent in better.tolist():
                    came[end, cost + spent] = (i, spent, chosen)
        state = (len(order) - 1, int(np.argmax(kept[-1])))
        plan = []
        while state in came:
            before, left, used = came[state]
            plan += [used] if used else []
            state = (before, left)
        return plan[::-1]


def places(width: int) -> list[int]:
    """Where a group may start or end."""
    return [*range(min(64, width)), *range(64, width, 16), width]


def levels(x: Array, bits: int) -> tuple[Array, bytes]:
    """Each row as even levels up to its largest magnitude, and its bytes."""
    if bits == 16:
        return half(x), x.astype(np.float16).tobytes()
    largest = half(np.abs(x).max(1, keepdims=True))
    unit = np.maximum(largest, 1e-30) * (2.0 ** (1 - bits))
    level = np.clip(np.floor(x / unit), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    packed = np.packbits(np.unpackbits((level.T + 2 ** (bits - 1)).astype(np.uint8)[..., None], axis=-1)[..., -bits:])
    return ((level + 0.5) * unit).astype(np.float32), largest.astype(np.float16).tobytes() + packed.tobytes()


class Kvtc:
    def __init__(self, observed: Observed) -> None:
        self.sides = [Transform.fit(observed.blocks[side::2]) for side in (0, 1)]
        self.plans = {rate: [transform.plan(rate) for transform in self.sides] for rate in RATES}

    def code(self, kv: KVCache, rate: float) -> Coded:
        parts, out = blocks(kv), []
        data = []
        for side, transform in enumerate(self.sides):
            plan = self.plans[rate][side]
            some = parts[side::2]
            x = np.concatenate(some, axis=1)
            data.append(x[:SINKS].astype(np.float16).tobytes())
            basis = transform.basis[:, : max((group.start + group.size for group in plan), default=0)]
            z = (x[SINKS:] - transform.mean) @ basis
            back = np.zeros_like(z)
            for group in plan:
                span = slice(group.start, group.start + group.size)
                back[:, span], packed = levels(np.asarray(z[:, span], np.float32), group.bits)
                data.append(packed)
            rows = np.concatenate([half(x[:SINKS]), back @ basis.T + transform.mean])
            out.append(np.split(rows, np.cumsum([part.shape[1] for part in some])[:-1], axis=1))
        merged = [block for pair in zip(*out, strict=True) for block in pair]
        return Coded(cache(merged, kv), len(zlib.compress(b"".join(data), 9)))


# AQUA-KV, arXiv 2501.19392: keys are predicted from the keys of the layer before, values from those keys of their own
# layer and the values before, all as decoded; what is left is quantised as in HIGGS, arXiv 2411.17525: rotated, scaled,
# then pairs of numbers to the nearest of a grid that is best for a Gaussian. The first layer takes 4 bits.


class Aqua:
    def __init__(self, observed: Observed) -> None:
        self.maps: list[tuple[Array, Array]] = []
        decoded: list[Array] = []
        for b, stored in enumerate(observed.blocks):
            true = stored[::2].astype(np.float32)  # half of the tokens are plenty for these maps
            x = np.concatenate([decoded[i] for i in self.features(b)], axis=1) if b > 1 else np.zeros((len(true), 0))
            self.maps.append(regression(x.astype(np.float32), true))
            decoded.append(self._decoded(b, true, decoded, _FIT_BITS)[0])
            if b >= 4:
                decoded[b - 4] = np.zeros((0, 0), np.float32)  # never read again

    @staticmethod
    def features(block: int) -> list[int]:
        """The blocks that predict a block of the second layer or later."""
        return [block - 1, block - 2] if block % 2 else [block - 2]

    def code(self, kv: KVCache, bits: int) -> Coded:
        decoded: list[Array] = []
        total = 0
        for b, x in enumerate(blocks(kv)):
            out, size = self._decoded(b, x, decoded, bits)
            out[:SINKS] = half(x[:SINKS])
            decoded.append(out)
            total += size + HALF * x[:SINKS].size - size * SINKS // len(x)
        return Coded(cache(decoded, kv), total)

    def _decoded(self, b: int, x: Array, decoded: list[Array], bits: int) -> tuple[Array, int]:
        weights, bias = self.maps[b]
        out = np.tile(bias, (len(x), 1))
        if b > 1:
            out += np.concatenate([decoded[i] for i in self.features(b)], axis=1) @ weights
        left, size = by_vectors(x - out, bits if b > 1 else _FIRST_LAYER_BITS)
        return out + left, size


def regression(x: Array, y: Array) -> tuple[Array, Array]:
    """Weights and constant of a linear map from rows of x to rows of y."""
    centre, mean = x.mean(0), y.mean(0)
    gram = (x - centre).T @ (x - centre)
    ridge = np.diag(_RIDGE * np.diag(gram) + 1e-9)
    weights = np.linalg.solve((gram + ridge).astype(np.float64), (x - centre).T @ (y - mean)).astype(np.float32)
    return weights, (mean - centre @ weights).astype(np.float32)


def by_vectors(x: Array, bits: int) -> tuple[Array, int]:
    """Rows of x rotated and scaled to variance 1, pairs of numbers to a grid: what comes back, and its bytes."""
    width = x.shape[1]
    turn, grid = rotation(width + width % 2), gaussian_grid(4**bits)
    turned = np.pad(x, ((0, 0), (0, width % 2))) @ turn
    scale = half(np.sqrt(np.square(turned).mean(1, keepdims=True)))
    pairs = np.asarray(turned / np.maximum(scale, 1e-30), np.float32).reshape(-1, 2)
    nearest = np.concatenate([nearest_of(pairs[i : i + 65536], grid) for i in range(0, len(pairs), 65536)])
    back = (grid[nearest].reshape(turned.shape) * scale) @ turn.T
    return back[:, :width], fixed_width(turned.size, bits) + HALF * len(x)


def nearest_of(x: Array, grid: Array) -> NDArray[np.intp]:
    return np.argmin(np.square(grid).sum(1) / 2 - x @ grid.T, axis=1)


@functools.cache
def gaussian_grid(points: int) -> Array:
    """Points in the plane of least squared error for a Gaussian of variance 1 (k-means on samples of it)."""
    sample = np.random.default_rng(points).standard_normal((40_000, 2)).astype(np.float32)
    grid = sample[:points].copy()
    for _ in range(60):
        nearest = nearest_of(sample, grid)
        count = np.maximum(np.bincount(nearest, minlength=points), 1)
        sums = [np.bincount(nearest, sample[:, axis], points) for axis in (0, 1)]
        grid = (np.stack(sums, axis=1) / count[:, None]).astype(np.float32)
    return grid


def fitted(observed: Observed) -> list[Peer]:
    """KVTC and AQUA-KV, calibrated on these caches."""
    kvtc, aqua = Kvtc(observed), Aqua(observed)
    found = [Peer("KVTC", f"{rate:g} bits", functools.partial(kvtc.code, rate=rate)) for rate in RATES]
    return found + [Peer("AQUA-KV", f"{bits} bits", functools.partial(aqua.code, bits=bits)) for bits in AQUA_BITS]


NAMES = [("KVTC", f"{rate:g} bits") for rate in RATES] + [("AQUA-KV", f"{bits} bits") for bits in AQUA_BITS]
"""The settings of `fitted`, known before anything is calibrated."""
