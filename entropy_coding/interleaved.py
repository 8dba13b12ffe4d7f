"""The fast coder: :mod:`seqkv.entropy_coding.reference` for Numba, byte for byte the same. Called by ``group.py``.

A step is cut into short loops over the lanes: those without table look-ups LLVM vectorises, in the others the lanes'
chains of dependent instructions overlap. What keeps them fast, measured:

- Indices are unsigned (np.uintp). A signed one may count from the end, and the check for it forbids vectorising.
- Steps take whole arrays and an index instead of slices, and are inlined: else each step counts references, atomically.
- A step of all 32 lanes is compiled apart from one of fewer, so that its trip counts are constants.

Tables and rates are arguments, never globals, so that Numba's cache on disk is never stale when one of them changes. It
is after an edit of alphabet.py or contexts.py, as it watches only the file that holds the compiled function: touch it.
No function checks its arguments; ``decode`` reads no word outside its buffer, whatever the words are.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from seqkv.entropy_coding.alphabet import (
    ESCAPE,
    LARGEST_PLAIN,
    LARGEST_VALUE,
    PRECISION,
    RAW_PIECE,
    TOTAL,
    escape_raw,
    escape_token,
    escape_value,
    plain_token,
    plain_value,
    raw_bits,
)
from seqkv.entropy_coding.contexts import decayed, in_subunits, moved, scale_class
from seqkv.entropy_coding.tables import BUCKET_BITS, ROW_BITS

LANES = 32
WORD_BITS = 16
WORD_MASK = (1 << WORD_BITS) - 1
LOWEST_STATE = 1 << WORD_BITS
MOST_WORDS_A_STEP = 3 * LANES  # for each lane's token and its two raw pieces

TOKEN_MASK = (1 << ROW_BITS) - 1
SLOT_MASK = TOTAL - 1
BUCKET_SHIFT = PRECISION - BUCKET_BITS
IDLE = TOKEN_MASK  # entry of a lane beyond the last token: no token, no bits

BLOCK = 16  # coefficients transposed at a time: a cache line of int32
ONE = np.uintp(1)
ALL = np.uintp(LANES)


@njit(cache=True, nogil=True)
def tokenise(symbols, tokens, has_escape):
    """Writes tokens uint8 [tokens, coefs] and marks steps with raw bits in has_escape uint8 [rows, coefs], which is
    zero. Returns the number of escapes, or -1 if a symbol is -2^31."""
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
                    tokens[t, j] = escape_token(value)
                    has_escape[t // LANES, j] = 1
            escapes += large
    return escapes


@njit(cache=True, nogil=True)
def start_segment(segment, token_state, decay_shift):
    if segment > 0:
        for t in range(token_state.size):
            token_state[t] = decayed(np.int32(token_state[t]), decay_shift)


@njit(cache=True, nogil=True)
def load_row(lanes, first, segment, offset, token_state, lane_offset, lane_state):
    """A row of 32 tokens starts a segment: what the lanes' contexts need, in arrays of their own."""
    for lane in range(lanes):
        lane_offset[lane] = in_subunits(np.int32(offset[first + lane, segment]))
        lane_state[lane] = token_state[first + lane]


@njit(cache=True, nogil=True)
def store_row(lanes, first, token_state, lane_state):
    for lane in range(lanes):
        token_state[first + lane] = lane_state[lane]


@njit(cache=True, nogil=True, forceinline=True)
def update_lane(lane, score, lane_state, token_rate):
    lane_state[lane] = moved(np.int32(lane_state[lane]), score, token_rate)


@njit(cache=True, nogil=True, forceinline=True)
def classify_step(lanes, block, at, place, lane_offset, lane_state, entries, k, scores, score_rows, token_rate):
    """A step of the forward pass: entries of the lanes' tokens, new token states. Returns the sum of the scores."""
    for lane in range(lanes):
        row = scale_class(np.int32(lane_offset[lane]) + np.int32(lane_state[lane]) + place)
        entries[k + lane] = row << ROW_BITS | np.int32(block[at + lane])
    for lane in range(lanes):
        scores[lane] = score_rows[np.uintp(entries[k + lane])]
    total = np.int32(0)
    for lane in range(lanes):
        score = np.int32(scores[lane])
        update_lane(lane, score, lane_state, token_rate)
        total = np.int32(total + score)
    return total


@njit(cache=True, nogil=True)
def classify(tokens, base, offset, segment_starts, score_rows, rates, entries):
    """The encoder's forward pass. Writes entries uint16 [steps * LANES] in coding order: where in a table each token
    is looked up, class << ROW_BITS | token; leaves those of idle lanes."""
    token_rate, coef_rate, decay_shift = rates
    token_count = tokens.shape[0]
    token_state = np.zeros(token_count, np.int32)
    coef_state = np.zeros(base.size, np.int32)
    lane_offset = np.zeros(LANES, np.int32)
    lane_state = np.zeros(LANES, np.int32)
    scores = np.zeros(LANES, np.int32)
    block = np.zeros(BLOCK * LANES, np.uint8)
    k = np.uintp(0)
    for segment in range(segment_starts.size - 1):
        start_segment(segment, token_state, decay_shift)
        for row in range(0, token_count, LANES):
            first = np.uintp(row)
            lanes = np.uintp(min(LANES, token_count - row))
            load_row(lanes, first, segment, offset, token_state, lane_offset, lane_state)
            for block_start in range(segment_starts[segment], segment_starts[segment + 1], BLOCK):
                coefs = min(BLOCK, segment_starts[segment + 1] - block_start)
                for lane in range(lanes):
                    for c in range(coefs):
                        block[np.uintp(c * LANES) + lane] = tokens[first + lane, np.uintp(block_start + c)]
                for c in range(coefs):
                    j = block_start + c
                    at = np.uintp(c * LANES)
                    place = np.int32(in_subunits(np.int32(base[j])) + np.int32(coef_state[j]))
                    arrays = (lane_offset, lane_state, entries, k, scores, score_rows, token_rate)
                    if lanes == ALL:
                        total = classify_step(ALL, block, at, place, *arrays)
                    else:
                        total = classify_step(lanes, block, at, place, *arrays)
                    coef_state[j] = moved(np.int32(coef_state[j]), total, coef_rate)
                    k += ALL
            store_row(lanes, first, token_state, lane_state)


@njit(cache=True, nogil=True)
def sum_bits(entries, bits):
    """Ideal code length of all entries."""
    total = 0.0
    for k in range(entries.size):
        total += bits[np.uintp(entries[k])]
    return total


@njit(cache=True, nogil=True)
def encode_raw(lanes, symbols, first, j, entries, k, states, words, position, escaped):
    """Raw bits of a step, last piece first. Returns the new position."""
    count = 0
    for lane in range(lanes):
        if entries[k + lane] & TOKEN_MASK >= ESCAPE:
            escaped[count] = lane
            count += 1
    for shift in (RAW_PIECE, 0):
        for i in range(count - 1, -1, -1):
            lane = np.uintp(escaped[i])
            token = np.int64(entries[k + lane] & TOKEN_MASK)
            bits = min(raw_bits(token) - shift, RAW_PIECE)
            if bits > 0:
                raw = escape_raw(token, np.int64(symbols[first + lane, np.uintp(j)]))
                x = np.int64(states[lane])
                if x >> (32 - bits):
                    position -= 1
                    words[np.uintp(position)] = x & WORD_MASK
                    x >>= WORD_BITS
                states[lane] = x << bits | (raw >> shift & ((1 << bits) - 1))
    return position


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def encode_step(lanes, entries, k, states, words, position, starts):
    """Tokens of a step, last lane first. Returns the new position."""
    for i in range(lanes):
        lane = lanes - ONE - i
        entry = np.uintp(entries[k + lane])
        start = np.uint32(starts[entry])
        frequency = np.uint32(np.uint32(starts[entry + ONE]) - start)
        x = np.uint64(states[lane])
        full = x >= np.uint64(frequency) << np.uint64(32 - PRECISION)
        words[np.uintp(position - 1)] = np.uint16(x)  # stays if full, else the next one overwrites it
        position -= full
        x = np.uint32(x >> np.uint64(WORD_BITS)) if full else np.uint32(x)
        quotient = np.uint32(x // frequency)
        states[lane] = np.uint32(x + start + quotient * np.uint32(np.uint32(TOTAL) - frequency))
    return position


@njit(cache=True, nogil=True)
def encode(symbols, entries, has_escape, segment_starts, starts, states, words):
    """The encoder's backward pass. Takes the states from LOWEST_STATE to what the decoder starts from and fills words
    from its end; its first element is only scratch. Returns the position of the last word written, the decoder's first.
    """
    token_count = symbols.shape[0]
    escaped = np.zeros(LANES, np.int32)
    position = words.size
    k = np.uintp(entries.size)
    for segment in range(segment_starts.size - 2, -1, -1):
        for row in range((token_count + LANES - 1) // LANES - 1, -1, -1):
            first = np.uintp(row * LANES)
            lanes = np.uintp(min(LANES, token_count - row * LANES))
            for j in range(segment_starts[segment + 1] - 1, segment_starts[segment] - 1, -1):
                k -= ALL
                if has_escape[row, j]:
                    position = encode_raw(lanes, symbols, first, j, entries, k, states, words, position, escaped)
                if lanes == ALL:
                    position = encode_step(ALL, entries, k, states, words, position, starts)
                else:
                    position = encode_step(lanes, entries, k, states, words, position, starts)
    return position


@njit(cache=True, nogil=True, forceinline=True)
def decode_step(
    lanes,
    block,
    at,
    place,
    position,
    lane_offset,
    lane_state,
    states,
    words,
    lane_tokens,
    scores,
    starts,
    bucket_tokens,
    score_rows,
    token_rate,
):
    """A step but for raw bits. Returns (new position, sum of the scores, largest token)."""
    for lane in range(lanes):
        lane_tokens[lane] = scale_class(np.int32(lane_offset[lane]) + np.int32(lane_state[lane]) + place)
    for lane in range(lanes):
        x = np.int64(states[lane])
        slot = x & SLOT_MASK
        row = np.int64(lane_tokens[lane])
        bucket = np.uintp(row << BUCKET_BITS | slot >> BUCKET_SHIFT)
        entry = np.uintp(row << ROW_BITS | np.int64(bucket_tokens[bucket]))
        while np.int64(starts[entry + ONE]) <= slot:
            entry += ONE
        start = np.int64(starts[entry])
        frequency = np.int64(starts[entry + ONE]) - start
        states[lane] = frequency * (x >> PRECISION) + slot - start
        lane_tokens[lane] = np.int64(entry) & TOKEN_MASK
        scores[lane] = score_rows[entry]
    for lane in range(lanes):
        x = np.int64(states[lane])
        low = x < LOWEST_STATE
        word = np.int64(words[np.uintp(position)])
        position += low
        states[lane] = x << WORD_BITS | word if low else x
    total = np.int32(0)
    largest = np.int32(0)
    for lane in range(lanes):
        token = np.int32(lane_tokens[lane])
        score = np.int32(scores[lane])
        update_lane(lane, score, lane_state, token_rate)
        total = np.int32(total + score)
        largest = max(largest, token)
        block[at + lane] = plain_value(token)
    return position, total, largest


@njit(cache=True, nogil=True)
def decode_raw(lanes, block, at, position, states, words, lane_tokens, escaped):
    """Raw bits of a step. Returns the new position, or -1 if a value is beyond 32 bits."""
    count = 0
    for lane in range(lanes):
        if lane_tokens[lane] >= ESCAPE:
            escaped[count] = lane
            block[at + lane] = 0  # gathers the raw bits, at most 31
            count += 1
    for shift in (0, RAW_PIECE):
        for i in range(count):
            lane = np.uintp(escaped[i])
            bits = min(raw_bits(np.int64(lane_tokens[lane])) - shift, RAW_PIECE)
            if bits > 0:
                x = np.int64(states[lane])
                block[at + lane] |= (x & ((1 << bits) - 1)) << shift
                x >>= bits
                if x < LOWEST_STATE:
                    x = x << WORD_BITS | np.int64(words[np.uintp(position)])
                    position += 1
                states[lane] = x
    for i in range(count):
        lane = np.uintp(escaped[i])
        value = escape_value(np.int64(lane_tokens[lane]), np.int64(block[at + lane]))
        if abs(value) > LARGEST_VALUE:
            return -1
        block[at + lane] = value
    return position


@njit(cache=True, nogil=True)
def decode(words, word_count, base, offset, segment_starts, starts, bucket_tokens, score_rows, rates, states, symbols):
    """Writes symbols [tokens, coefs]. Behind its word_count words, ``words`` has MOST_WORDS_A_STEP spare ones: a step
    may read there, the next does not begin. Returns the number of words read, or -1 if the group is damaged."""
    token_rate, coef_rate, decay_shift = rates
    token_count = symbols.shape[0]
    token_state = np.zeros(token_count, np.int32)
    coef_state = np.zeros(base.size, np.int32)
    lane_offset = np.zeros(LANES, np.int32)
    lane_state = np.zeros(LANES, np.int32)
    lane_tokens = np.zeros(LANES, np.int32)
    scores = np.zeros(LANES, np.int32)
    escaped = np.zeros(LANES, np.int32)
    block = np.zeros(BLOCK * LANES, np.int32)
    position = 0
    for segment in range(segment_starts.size - 1):
        start_segment(segment, token_state, decay_shift)
        for row in range(0, token_count, LANES):
            first = np.uintp(row)
            lanes = np.uintp(min(LANES, token_count - row))
            load_row(lanes, first, segment, offset, token_state, lane_offset, lane_state)
            for block_start in range(segment_starts[segment], segment_starts[segment + 1], BLOCK):
                coefs = min(BLOCK, segment_starts[segment + 1] - block_start)
                for c in range(coefs):
                    j = block_start + c
                    at = np.uintp(c * LANES)
                    place = np.int32(in_subunits(np.int32(base[j])) + np.int32(coef_state[j]))
                    arrays = (lane_offset, lane_state, states, words, lane_tokens, scores)
                    tables = (starts, bucket_tokens, score_rows, token_rate)
                    if lanes == ALL:
                        position, total, largest = decode_step(ALL, block, at, place, position, *arrays, *tables)
                    else:
                        position, total, largest = decode_step(lanes, block, at, place, position, *arrays, *tables)
                    if largest >= ESCAPE:
                        position = decode_raw(lanes, block, at, position, states, words, lane_tokens, escaped)
                    if position < 0 or position > word_count:
                        return -1
                    coef_state[j] = moved(np.int32(coef_state[j]), total, coef_rate)
                for lane in range(lanes):
                    for c in range(coefs):
                        symbols[first + lane, np.uintp(block_start + c)] = block[np.uintp(c * LANES) + lane]
            store_row(lanes, first, token_state, lane_state)
    return position
