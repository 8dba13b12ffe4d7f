"""The fast coder: :mod:`seqkv.entropy_coding.reference` compiled by Numba, byte for byte the same.

The compiled functions take every table and every rate as an argument, never as a global, so that Numba's cache on disk
cannot be stale after one of them changed. They release the GIL; several groups are coded by a pool of Python threads,
which, unlike Numba's own threading layers, may be entered from any thread and nested in other pools.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from numba import njit

from seqkv.entropy_coding import contexts, tables
from seqkv.entropy_coding.alphabet import (
    ESCAPE,
    LARGEST_PLAIN,
    LARGEST_VALUE,
    PRECISION,
    RAW_PIECE,
    TOTAL,
    escape_code,
    escape_value,
    plain_token,
    plain_value,
    raw_bits,
)
from seqkv.entropy_coding.contexts import decayed, in_subunits, moved, scale_class
from seqkv.entropy_coding.errors import CorruptGroup

LANES = 32
WORD_BITS = 16
WORD_MASK = (1 << WORD_BITS) - 1
LOWEST_STATE = 1 << WORD_BITS
STATE_BYTES = 4 * LANES
MOST_WORDS_A_STEP = 3 * LANES  # one for the token, one for each of two raw pieces
BLOCK = 16  # coefficients transposed at a time: a cache line of int32
ROW_BITS = 6  # of a table's row
TOKEN_MASK = tables.ROW - 1
# Unsigned indices: a signed one may count from the end in Python, and the check for it keeps loops from being vectorised.
ONE = np.uintp(1)
FULL = np.uintp(LANES)


@njit(cache=True, nogil=True)
def _tokenise(symbols, tokens, has_escape):
    """Tokens uint8 [tokens, coefs]; has_escape uint8 [rows, coefs] marks steps with raw bits. Returns the number of
    escapes, or -1 if a symbol is -2^31."""
    escapes = 0
    for t in range(symbols.shape[0]):
        large = 0
        for j in range(symbols.shape[1]):
            value = np.int64(symbols[t, j])
            large += abs(value) > LARGEST_PLAIN
            tokens[t, j] = np.uint8(plain_token(value))
        if large:
            for j in range(symbols.shape[1]):
                value = np.int64(symbols[t, j])
                if value < -LARGEST_VALUE:
                    return -1
                if abs(value) > LARGEST_PLAIN:
                    tokens[t, j], _ = escape_code(value)
                    has_escape[t // LANES, j] = 1
            escapes += large
    return escapes


@njit(cache=True, nogil=True, forceinline=True)
def _classify_step(lanes, block, at, place, lane_offset, lane_state, entries, k, scores, token_rate, score_rows):
    """One step of the encoder's forward pass: table entries of the lanes' tokens, token states. Returns sum of scores."""
    for lane in range(lanes):
        row = scale_class(np.int32(lane_offset[lane]) + np.int32(lane_state[lane]) + place) << ROW_BITS
        entries[k + lane] = row | np.int32(block[at + lane])
    for lane in range(lanes):
        scores[lane] = score_rows[np.uintp(entries[k + lane])]
    total = np.int32(0)
    for lane in range(lanes):
        score = np.int32(scores[lane])
        lane_state[lane] = moved(np.int32(lane_state[lane]), score, token_rate)
        total = np.int32(total + score)
    return np.int64(total)


@njit(cache=True, nogil=True)
def _classify(tokens, base, offset, segment_starts, rates, score_rows, entries):
    """The encoder's forward pass: entries uint16 [steps * LANES], class << ROW_BITS | token, in coding order."""
    token_rate, coef_rate, decay_shift = rates
    token_count = tokens.shape[0]
    token_state = np.zeros(token_count, np.int32)
    coef_state = np.zeros(base.size, np.int32)
    lane_offset = np.zeros(LANES, np.int32)
    lane_state = np.zeros(LANES, np.int32)
    scores = np.zeros(LANES, np.int32)
    block = np.zeros(BLOCK * LANES, np.uint8)
    k = 0
    for segment in range(segment_starts.size - 1):
        if segment > 0:
            for t in range(token_count):
                token_state[t] = decayed(np.int64(token_state[t]), decay_shift)
        for first in range(0, token_count, LANES):
            lanes = np.uintp(min(LANES, token_count - first))
            for lane in range(lanes):
                lane_offset[lane] = in_subunits(np.int64(offset[np.uintp(first) + lane, segment]))
                lane_state[lane] = token_state[np.uintp(first) + lane]
            for start in range(segment_starts[segment], segment_starts[segment + 1], BLOCK):
                coefs = min(BLOCK, segment_starts[segment + 1] - start)
                for lane in range(lanes):
                    for c in range(coefs):
                        block[np.uintp(c * LANES) + lane] = tokens[np.uintp(first) + lane, np.uintp(start + c)]
                for c in range(coefs):
                    j = start + c
                    place = np.int32(in_subunits(np.int32(base[j])) + np.int32(coef_state[j]))
                    args = (block, np.uintp(c * LANES), place, lane_offset, lane_state, entries, np.uintp(k), scores, token_rate, score_rows)
                    if lanes == FULL:
                        total = _classify_step(FULL, *args)
                    else:
                        total = _classify_step(lanes, *args)
                    coef_state[j] = moved(np.int64(coef_state[j]), total, coef_rate)
                    k += LANES
            for lane in range(lanes):
                token_state[np.uintp(first) + lane] = lane_state[lane]


@njit(cache=True, nogil=True)
def _encode_raw(lanes, symbols, first, j, states, words, position):
    """Raw bits of a step, backwards; ``position`` is where the last word written lies. Returns the new position."""
    for shift in (RAW_PIECE, 0):
        for lane in range(np.int64(lanes) - 1, -1, -1):
            value = np.int64(symbols[first + lane, j])
            if abs(value) > LARGEST_PLAIN:
                token, raw = escape_code(value)
                bits = min(raw_bits(token) - shift, RAW_PIECE)
                if bits > 0:
                    x = np.int64(states[lane])
                    if x >> (32 - bits):
                        position -= 1
                        words[position] = x & WORD_MASK
                        x >>= WORD_BITS
                    states[lane] = x << bits | raw >> shift & (1 << bits) - 1
    return position


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def _encode_step(lanes, entries, k, states, words, position, starts):
    """Tokens of a step, backwards. Returns the new position."""
    for last in range(lanes):
        lane = lanes - ONE - last
        entry = np.uintp(entries[k + lane])
        start = np.uint32(starts[entry])
        frequency = np.uint32(starts[entry + ONE]) - start
        x = np.uint64(states[lane])
        full = x >= np.uint64(frequency) << np.uint64(32 - PRECISION)
        words[np.uintp(position - 1)] = np.uint16(x)
        position -= full
        x = np.uint32(x >> np.uint64(WORD_BITS)) if full else np.uint32(x)
        quotient = np.uint32(x // np.uint32(frequency))
        states[lane] = np.uint32(x + start + quotient * (np.uint32(TOTAL) - np.uint32(frequency)))
    return position


@njit(cache=True, nogil=True)
def _encode(symbols, entries, has_escape, segment_starts, starts, states, words):
    """The encoder's backward pass: fills ``words`` from its end. Returns the position of the first word."""
    token_count = symbols.shape[0]
    position = words.size
    k = entries.size
    for segment in range(segment_starts.size - 2, -1, -1):
        for row in range((token_count + LANES - 1) // LANES - 1, -1, -1):
            first = row * LANES
            lanes = np.uintp(min(LANES, token_count - first))
            for j in range(segment_starts[segment + 1] - 1, segment_starts[segment] - 1, -1):
                k -= LANES
                if has_escape[row, j]:
                    position = _encode_raw(lanes, symbols, first, j, states, words, position)
                if lanes == FULL:
                    position = _encode_step(FULL, entries, np.uintp(k), states, words, position, starts)
                else:
                    position = _encode_step(lanes, entries, np.uintp(k), states, words, position, starts)
    return position


@njit(cache=True, nogil=True, forceinline=True)
def _decode_step(
    lanes, place, lane_offset, lane_state, states, words, position, token_rate, starts, buckets, score_rows, scratch, block, at
):
    """One step of the decoder but for raw bits. Returns (new position, sum of scores, whether a lane has raw bits)."""
    for lane in range(lanes):
        scratch[lane] = scale_class(np.int32(lane_offset[lane]) + np.int32(lane_state[lane]) + place)
    for lane in range(lanes):
        x = np.int64(states[lane])
        slot = x & (TOTAL - 1)
        row = np.int64(scratch[lane])
        entry = np.uintp(row << ROW_BITS | np.int64(buckets[np.uintp(row << 7 | slot >> 8)]))
        while np.int64(starts[entry + ONE]) <= slot:
            entry += ONE
        start = np.int64(starts[entry])
        frequency = np.int64(starts[entry + ONE]) - start
        states[lane] = frequency * (x >> PRECISION) + slot - start
        scratch[lane] = np.int64(entry) & TOKEN_MASK
        scratch[FULL + lane] = score_rows[entry]
    for lane in range(lanes):
        x = np.int64(states[lane])
        low = x < LOWEST_STATE
        word = np.int64(words[np.uintp(position)])
        position += low
        states[lane] = x << WORD_BITS | word if low else x
    total = np.int32(0)
    largest = np.int32(0)
    for lane in range(lanes):
        token = np.int32(scratch[lane])
        score = np.int32(scratch[FULL + lane])
        largest = max(largest, token)
        lane_state[lane] = moved(np.int32(lane_state[lane]), score, token_rate)
        total = np.int32(total + score)
        block[at + lane] = plain_value(token)
    return position, np.int64(total), largest >= ESCAPE


@njit(cache=True, nogil=True)
def _decode_raw(lanes, states, words, position, block, at):
    """Raw bits of a step. Returns the new position, or -1 if a value is beyond 32 bits."""
    raws = np.zeros(LANES, np.int64)
    for shift in (0, RAW_PIECE):
        for lane in range(lanes):
            token = plain_token(np.int64(block[at + lane]))  # the step decoder wrote escapes as if they were plain
            bits = min(raw_bits(token) - shift, RAW_PIECE) if token >= ESCAPE else 0
            if bits > 0:
                x = np.int64(states[lane])
                raws[lane] |= (x & ((1 << bits) - 1)) << shift
                x >>= bits
                if x < LOWEST_STATE:
                    x = x << WORD_BITS | np.int64(words[position])
                    position += 1
                states[lane] = x
    for lane in range(lanes):
        token = plain_token(np.int64(block[at + lane]))
        if token >= ESCAPE:
            value = escape_value(token, raws[lane])
            if abs(value) > LARGEST_VALUE:
                return -1
            block[at + lane] = value
    return position


@njit(cache=True, nogil=True)
def _decode(states, words, word_count, base, offset, segment_starts, rates, starts, buckets, score_rows, symbols):
    """Fills symbols [tokens, coefs] from words, which has MOST_WORDS_A_STEP spare ones behind word_count. Returns
    the number of words read, or -1 if the group is damaged."""
    token_rate, coef_rate, decay_shift = rates
    token_count = symbols.shape[0]
    token_state = np.zeros(token_count, np.int32)
    coef_state = np.zeros(base.size, np.int32)
    lane_offset = np.zeros(LANES, np.int32)
    lane_state = np.zeros(LANES, np.int32)
    scratch = np.zeros(2 * LANES, np.int32)
    block = np.zeros(BLOCK * LANES, np.int32)
    position = 0
    for segment in range(segment_starts.size - 1):
        if segment > 0:
            for t in range(token_count):
                token_state[t] = decayed(np.int64(token_state[t]), decay_shift)
        for first in range(0, token_count, LANES):
            lanes = np.uintp(min(LANES, token_count - first))
            for lane in range(lanes):
                lane_offset[lane] = in_subunits(np.int64(offset[np.uintp(first) + lane, segment]))
                lane_state[lane] = token_state[np.uintp(first) + lane]
            for start in range(segment_starts[segment], segment_starts[segment + 1], BLOCK):
                coefs = min(BLOCK, segment_starts[segment + 1] - start)
                for c in range(coefs):
                    j = start + c
                    place = np.int32(in_subunits(np.int32(base[j])) + np.int32(coef_state[j]))
                    args = (
                        place, lane_offset, lane_state, states, words, position, token_rate, starts, buckets,
                        score_rows, scratch, block, np.uintp(c * LANES),
                    )
                    if lanes == FULL:
                        position, total, has_escape = _decode_step(FULL, *args)
                    else:
                        position, total, has_escape = _decode_step(lanes, *args)
                    if has_escape:
                        position = _decode_raw(lanes, states, words, position, block, c * LANES)
                    if position < 0 or position > word_count:
                        return -1
                    coef_state[j] = moved(np.int64(coef_state[j]), total, coef_rate)
                for lane in range(lanes):
                    for c in range(coefs):
                        symbols[np.uintp(first) + lane, np.uintp(start + c)] = block[np.uintp(c * LANES) + lane]
            for lane in range(lanes):
                token_state[np.uintp(first) + lane] = lane_state[lane]
    return position


def _input(array: npt.ArrayLike, dtype: type, shape: tuple[int | None, ...], name: str) -> npt.NDArray:
    """``array`` as a read-only contiguous view or copy, so that each function is compiled for one type only."""
    given = np.asarray(array)
    if given.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, given.shape, strict=True)):
        raise ValueError(f"{name} has shape {given.shape}, expected {tuple('any' if n is None else n for n in shape)}")
    converted = np.ascontiguousarray(given, dtype)
    if converted is not given and given.dtype != dtype and not np.array_equal(converted, given):
        raise ValueError(f"{name} does not fit {np.dtype(dtype).name}")
    view = converted.view()
    view.flags.writeable = False
    return view


def _checked_contexts(
    tokens: int, base: npt.ArrayLike, offset: npt.ArrayLike, segment_starts: npt.ArrayLike
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    base = _input(base, np.int16, (None,), "base")
    segment_starts = _input(segment_starts, np.int32, (None,), "segment_starts")
    if segment_starts.size == 0 or segment_starts[0] != 0 or segment_starts[-1] != base.size:
        raise ValueError(f"segment_starts must begin with 0 and end with the number of coefficients, {base.size}")
    if (np.diff(segment_starts) < 0).any():
        raise ValueError("segment_starts must not decrease")
    return base, _input(offset, np.int16, (tokens, segment_starts.size - 1), "offset"), segment_starts


def _rates() -> tuple[int, int, int]:
    return contexts.TOKEN_RATE, contexts.COEF_RATE, contexts.DECAY_SHIFT


def encode_group(
    symbols: npt.ArrayLike, base: npt.ArrayLike, offset: npt.ArrayLike, segment_starts: npt.ArrayLike
) -> bytes:
    symbols = _input(symbols, np.int32, (None, None), "symbols")
    token_count, coefs = symbols.shape
    base, offset, segment_starts = _checked_contexts(token_count, base, offset, segment_starts)
    if base.size != coefs:
        raise ValueError(f"base has {base.size} coefficients, symbols {coefs}")
    rows = -(-token_count // LANES)
    tokens = np.empty(symbols.shape, np.uint8)
    has_escape = np.zeros((rows, coefs), np.uint8)
    escapes = _tokenise(symbols, tokens, has_escape)
    if escapes < 0:
        raise ValueError(f"symbols must be at least {-LARGEST_VALUE}")
    entries = np.empty(rows * LANES * coefs, np.uint16)
    _classify(tokens, base, offset, segment_starts, _rates(), tables.SCORE_ROWS, entries)
    states = np.full(LANES, LOWEST_STATE, np.uint32)
    words = np.empty(symbols.size + 2 * escapes + 1, np.uint16)
    first = _encode(symbols, entries, has_escape, segment_starts, tables.STARTS, states, words)
    return states.astype("<u4", copy=False).tobytes() + words[first:].astype("<u2", copy=False).tobytes()


def decode_group(
    buffer: bytes | bytearray | memoryview,
    tokens: int,
    base: npt.ArrayLike,
    offset: npt.ArrayLike,
    segment_starts: npt.ArrayLike,
    *,
    segments: int | None = None,
) -> npt.NDArray[np.int32]:
    base, offset, segment_starts = _checked_contexts(tokens, base, offset, segment_starts)
    size = memoryview(buffer).nbytes
    if size < STATE_BYTES or size % 2:
        raise CorruptGroup(f"a group is {STATE_BYTES} bytes of states and 2 bytes a word, not {size} bytes")
    states = np.frombuffer(buffer, "<u4", LANES).astype(np.uint32)
    word_count = (size - STATE_BYTES) // 2
    words = np.zeros(word_count + MOST_WORDS_A_STEP, np.uint16)
    words[:word_count] = np.frombuffer(buffer, "<u2", word_count, STATE_BYTES)
    last = segment_starts.size - 1
    wanted = last if segments is None else segments
    if not 0 <= wanted <= last:
        raise ValueError(f"segments must be from 0 to {last}, not {segments}")
    symbols = np.empty((tokens, segment_starts[wanted]), np.int32)
    used = _decode(
        states, words, word_count, base, offset, segment_starts[: wanted + 1], _rates(), tables.STARTS,
        tables.BUCKET_TOKENS, tables.SCORE_ROWS, symbols,
    )
    if used < 0:
        raise CorruptGroup("the group ends before its last symbol, or holds a symbol beyond 32 bits")
    if wanted == last and (used != word_count or (states != LOWEST_STATE).any()):
        raise CorruptGroup("the group does not end where its last symbol does")
    return symbols
