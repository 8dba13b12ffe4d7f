"""Adaptive contexts: which scale class a symbol is coded with, from what is already decoded.

A class stands for a scale of the residual, CLASSES_PER_OCTAVE classes an octave. The place of a symbol on that axis is

    base[coefficient] + offset[token, segment] + token state + coefficient state

``base`` and ``offset`` are sent (or known from calibration), UNITS = 64 of them a class. The two states start at 0 and
follow the decoded symbols: after each symbol both move along the score, the derivative of its log likelihood by
log2(scale), as in stochastic gradient ascent. States are kept in subunits, 2^SUBUNIT_BITS = 256 of a unit, so that
steps much smaller than a unit are not lost to rounding, which would be a drift. Everything is an integer of at most 32
bits: two machines always agree.

The functions are plain Python on integers; Numba compiles the same text into the fast coder. int32 says where a result
is cut to the width that the fast coders compute in; nothing ever exceeds it.
"""

from __future__ import annotations

from numba.extending import register_jitable
from numpy import int32

CLASSES = 64
CLASSES_PER_OCTAVE = 4
LOWEST_OCTAVE = -6  # class 0 is a mean magnitude of 2^-6 quantiser steps

UNIT_BITS = 6
UNITS = 1 << UNIT_BITS  # a class
SUBUNIT_BITS = 8  # of a unit
STATE_LIMIT = 24 * UNITS << SUBUNIT_BITS  # a state moves a symbol by at most 24 classes: six octaves

SCORE_UNIT = 64  # a score of 1 nat an octave
TOKEN_RATE = 32  # subunits per score
COEF_RATE = 16  # subunits per score, of each lane
DECAY_SHIFT = 3  # a token's state loses 1/8 where a segment begins


@register_jitable
def scale_class(place: int) -> int:
    """Class of a place on the scale axis, given in subunits."""
    return min(max(int32(place) >> (UNIT_BITS + SUBUNIT_BITS), 0), CLASSES - 1)


@register_jitable
def in_subunits(units: int) -> int:
    return int32(units << SUBUNIT_BITS)


@register_jitable
def moved(state: int, score: int, rate: int) -> int:
    """A state after a score: one symbol's for a token, the sum over the lanes for a coefficient."""
    return min(max(int32(state + score * rate), -STATE_LIMIT), STATE_LIMIT)


@register_jitable
def decayed(state: int, decay_shift: int) -> int:
    """A token's state at the start of each segment after the first."""
    return int32(state - (state >> decay_shift))
