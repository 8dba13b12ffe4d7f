"""What a profile says of keys and values if nothing but their token is known: the basis of engine.compact.

A profile predicts every block from the token and the blocks before it, and knows the scale of what is left: a linear
model with noise. Followed through all layers it gives the keys and values that are expected of a token, and the
covariance of what they differ by, whose principal axes in the Fisher metric are the best to round along. Nothing is
measured for that, and nothing of it is stored: the numbers may differ between machines, and never leave one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import quantiser
from seqkv.engine.profile import Profile

RANK = 32  # of what is expected of tokens, in all layers together


@dataclass(frozen=True, eq=False)
class BlockBasis:
    """Of one block, with C channels: the keys of a layer, un-rotated, or its values.

    token [RANK, C], bias [C]: what is expected of a token's features. forward [C, C]: what differs from that to
    coefficients. These are in groups, each of some channels, and those of the largest variance are first in a group.
    back [groups, C / groups, C / groups]: coefficients of a group to its channels. deviation [C]: standard deviations
    of the coefficients, in units of which an error of 1 costs the same in all, for a token of gain 1.
    """

    token: NDArray[np.float32]
    bias: NDArray[np.float32]
    forward: NDArray[np.float32]
    back: NDArray[np.float32]
    deviation: NDArray[np.float64]


class Basis:
    """Of all blocks of a profile. Making it takes seconds; `of` keeps it as long as there is the profile.

    projection [rank of the profile's token table, RANK, or as many as there are]: its rows to features.
    """

    def __init__(self, profile: Profile) -> None:
        rows = profile.table.astype(np.float32)
        spread = _root((rows.T @ rows).astype(np.float64) / max(len(rows), 1))
        metrics = [forward.astype(np.float64) for forward in profile.forward]
        known = list(_followed(profile))
        directions = sum(
            (m := spread @ token @ metric) @ m.T for (token, *_), metric in zip(known, metrics, strict=True)
        )
        top = np.linalg.eigh(directions)[1][:, ::-1][:, :RANK]
        self.projection = (np.linalg.pinv(spread) @ top).astype(np.float32)
        self.blocks = [
            # keys are wanted head by head, values in sums alone: there all heads' axes cost no more
            one.basis(metric, spread, top, 1 if b % 2 else profile.shape[b // 2][0])
            for b, (one, metric) in enumerate(zip(known, metrics, strict=True))
        ]

    @classmethod
    def of(cls, profile: Profile) -> Basis:
        """The basis of a profile, made once, unless threads ask at the same time."""
        found = _MADE.get(profile)
        return _MADE.setdefault(profile, cls(profile)) if found is None else found


_MADE: weakref.WeakKeyDictionary[Profile, Basis] = weakref.WeakKeyDictionary()


class _Followed(NamedTuple):
    """What the profile's model says of a block: a token table's row to what is expected, [rank, C]; what is expected of
    a row of zeros, [C]; the covariance of what differs from it, [C, C]."""

    token: NDArray[np.float64]
    bias: NDArray[np.float64]
    covariance: NDArray[np.float64]

    def basis(
        self, metric: NDArray[np.float64], spread: NDArray[np.float64], top: NDArray[np.float64], groups: int
    ) -> BlockBasis:
        """metric [C, C]: values to where an error of 1 costs the same in any direction; spread [rank, rank]: root of
        the token table's second moment; top: directions in it that are kept."""
        whole = spread @ self.token
        kept = top.T @ whole
        left = self.covariance + whole.T @ whole - kept.T @ kept
        size, fisher = len(left) // groups, metric @ metric.T
        forward, back, deviation = np.zeros_like(left), [], []
        for start in range(0, len(left), size):
            its = slice(start, start + size)
            # errors of different groups are independent: what they cost together is what each costs
            root = metric if groups == 1 else _root(fisher[its, its])
            variance, axes = np.linalg.eigh(root.T @ left[its, its] @ root)
            variance, axes = variance[::-1], axes[:, ::-1]
            forward[its, its] = root @ axes
            back.append(axes.T @ np.linalg.inv(root))
            deviation.append(np.sqrt(np.maximum(variance, 1e-30)))
        return BlockBasis(
            kept.astype(np.float32),
            self.bias.astype(np.float32),
            forward.astype(np.float32),
            np.stack(back).astype(np.float32),
            np.concatenate(deviation),
        )


def _followed(profile: Profile) -> Iterator[_Followed]:
    """The profile's model, block after block."""
    rank, starts = profile.table.shape[1], profile.starts
    tokens: list[NDArray[np.float64]] = []
    biases: list[NDArray[np.float64]] = []
    first, covariance = 0, np.zeros((0, 0))  # of the blocks from `first` on
    for b in range(len(profile.widths)):
        weights, sources, here = profile.weights[b].astype(np.float64), profile.sources(b), slice(*starts[b : b + 2])
        token, bias = weights[:rank], profile.bias[here].astype(np.float64)
        places = [np.arange(starts[s], starts[s + 1]) - starts[first] for s in sources]
        place = np.concatenate([np.zeros(0, np.intp), *places])
        cross = covariance[:, place] @ weights[rank:]
        noise = quantiser.scale_values(profile.scale[here])[:, None] * profile.maps[b][1]
        own = weights[rank:].T @ cross[place] + noise.T @ noise
        if len(sources):
            token = token + np.concatenate([tokens[s] for s in sources], axis=1) @ weights[rank:]
            bias = bias + np.concatenate([biases[s] for s in sources]) @ weights[rank:]
        tokens.append(token)
        biases.append(bias)
        yield _Followed(token, bias, own)
        covariance = np.block([[covariance, cross], [cross.T, own]])
        kept = max(first, b - 2 * profile.depth)  # what the next blocks are predicted from
        covariance = covariance[starts[kept] - starts[first] :, starts[kept] - starts[first] :]
        first = kept


def _root(square: NDArray[np.float64]) -> NDArray[np.float64]:
    """The symmetric square root of a positive matrix."""
    variance, axes = np.linalg.eigh(square)
    return (axes * np.sqrt(np.maximum(variance, 1e-12 * variance.max(initial=1e-30)))) @ axes.T
