"""Generates ``tables.npz``, the integer tables that encoder and decoder share.

    python -m seqkv.entropy_coding.make_tables

Floating point is used here and nowhere else: what is shipped is integers, because two machines may round a logarithm
differently but must agree on every table entry. Run it only to change the family of distributions, which changes the
format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from seqkv.entropy_coding.alphabet import ESCAPE, LARGEST_PLAIN, TOKENS, TOTAL
from seqkv.entropy_coding.contexts import CLASSES, CLASSES_PER_OCTAVE, LOWEST_OCTAVE, SCORE_UNIT

Tail = Callable[[float, float], float]
"""``tail(x, scale)``: probability that ``|X| > x``, x >= 0, for a symmetric density whose mean ``|X|`` is ``scale``."""

GAUSSIAN_SHARE = 0.25
LARGEST_SCORE = 8 * SCORE_UNIT


def laplace_gaussian_tail(x: float, scale: float) -> float:
    """Mixture of a Laplace and a Gaussian density, both with mean magnitude ``scale``."""
    laplace = math.exp(-x / scale)
    gaussian = math.erfc(x / (scale * math.sqrt(math.pi)))
    return (1 - GAUSSIAN_SHARE) * laplace + GAUSSIAN_SHARE * gaussian


def class_scale(scale_class: float) -> float:
    """Mean magnitude of the residual, in quantiser steps before rounding, that a class stands for."""
    return 2.0 ** (scale_class / CLASSES_PER_OCTAVE + LOWEST_OCTAVE)


def magnitude_range(token: int) -> tuple[int, int]:
    """Magnitudes ``first <= |q| < end`` of a token."""
    if token < ESCAPE:
        magnitude = (token + 1) // 2
        return magnitude, magnitude + 1
    width = 1 << (token - ESCAPE)
    return LARGEST_PLAIN + width, LARGEST_PLAIN + 2 * width


def range_probability(tail: Tail, scale: float, first: int, end: int) -> float:
    """Probability that ``|X|`` rounds to a magnitude in ``first <= |q| < end``, both signs together."""
    above = 1.0 if first == 0 else tail(first - 0.5, scale)
    return above - tail(end - 0.5, scale)


def class_frequencies(tail: Tail, scale: float) -> npt.NDArray[np.uint16]:
    """Frequencies uint16 [TOKENS] of one class: each at least 1, their sum TOTAL, both signs of a magnitude equal."""
    probability = np.array([range_probability(tail, scale, *magnitude_range(token)) for token in range(TOKENS)])
    probability[1:ESCAPE] /= 2  # the sign is part of the token
    frequency = 1 + np.floor(probability * (TOTAL - TOKENS)).astype(np.int64)
    frequency[int(np.argmax(np.where(signed_tokens(), 0, frequency)))] += TOTAL - int(frequency.sum())
    return frequency.astype(np.uint16)


def signed_tokens() -> npt.NDArray[np.bool_]:
    """Which tokens are one of a pair +m, -m, bool [TOKENS]."""
    token = np.arange(TOKENS)
    return (token > 0) & (token < ESCAPE)


def class_scores(tail: Tail, scale_class: int) -> npt.NDArray[np.int16]:
    """Score int16 [TOKENS]: d ln P(token) / d log2(scale) at the class's scale, in 1/SCORE_UNIT, limited."""
    scores = []
    for token in range(TOKENS):
        low, high = (
            range_probability(tail, class_scale(scale_class + half), *magnitude_range(token)) for half in (-0.5, 0.5)
        )
        # what is too far out to have a probability asks for a larger scale as strongly as anything may
        slope = math.log(high / low) * CLASSES_PER_OCTAVE if low > 0 else math.inf
        scores.append(round(min(max(slope * SCORE_UNIT, -LARGEST_SCORE), LARGEST_SCORE)))
    return np.array(scores, np.int16)


def make_tables(tail: Tail = laplace_gaussian_tail) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int16]]:
    """Frequencies uint16 [CLASSES, TOKENS] and scores int16 [CLASSES, TOKENS] of a family of densities."""
    frequencies = np.stack([class_frequencies(tail, class_scale(c)) for c in range(CLASSES)])
    scores = np.stack([class_scores(tail, c) for c in range(CLASSES)])
    return frequencies, scores


def main() -> None:
    frequencies, scores = make_tables()
    np.savez(Path(__file__).with_name("tables.npz"), frequencies=frequencies, scores=scores)


if __name__ == "__main__":
    main()
