"""The token alphabet: how a quantised value becomes one token of 56 and, for large values, raw bits.

====== ======================= ==========================================================
token  value q                 raw bits
====== ======================= ==========================================================
0      0                       none
1..24  +1, -1, ..., +12, -12   none
25+k   abs(q) = 12 + 2^k + r   k + 1: r in [0, 2^k), then the sign (1: negative) above it
====== ======================= ==========================================================

for k = 0..30. Every int32 but -2^31 has exactly one code. Raw bits are coded as uniform symbols, lowest first, in
pieces of at most RAW_PIECE bits.

The functions are plain Python on integers; Numba compiles the same text into the fast coder.
"""

from __future__ import annotations

from numba.extending import register_jitable

TOKENS = 56
PRECISION = 15  # probabilities of tokens are integers that sum to 2^PRECISION
TOTAL = 1 << PRECISION
LARGEST_PLAIN = 12  # magnitudes up to here are tokens of their own
ESCAPE = 2 * LARGEST_PLAIN + 1  # first token with raw bits
RAW_PIECE = 16  # a renormalisation word: one piece never needs more than one word
LARGEST_VALUE = 2**31 - 1


@register_jitable
def plain_token(value: int) -> int:
    """Token of a value with abs(value) <= LARGEST_PLAIN."""
    return 2 * value - 1 if value > 0 else -2 * value


@register_jitable
def plain_value(token: int) -> int:
    """Value of a token below ESCAPE."""
    half = (token + 1) >> 1
    return half if token & 1 else -half


@register_jitable
def raw_bits(token: int) -> int:
    """Number of raw bits of an escape token."""
    return token - ESCAPE + 1


@register_jitable
def escape_token(value: int) -> int:
    """Token of a value with abs(value) > LARGEST_PLAIN."""
    excess = abs(value) - LARGEST_PLAIN
    exponent = 0
    while excess >> (exponent + 1):
        exponent += 1
    return ESCAPE + exponent


@register_jitable
def escape_raw(token: int, value: int) -> int:
    """Raw bits of a value whose token is an escape."""
    exponent = token - ESCAPE
    sign = 1 if value < 0 else 0
    return (sign << exponent) | (abs(value) - LARGEST_PLAIN - (1 << exponent))


@register_jitable
def escape_value(token: int, raw: int) -> int:
    """Value of an escape token and its raw bits; beyond LARGEST_VALUE in magnitude only if the stream is damaged."""
    exponent = token - ESCAPE
    magnitude = LARGEST_PLAIN + (1 << exponent) + (raw & ((1 << exponent) - 1))
    return -magnitude if raw >> exponent else magnitude
