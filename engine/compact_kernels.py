"""The loops of engine.compact: coefficients to codes and back, and what attention wants of them.

A token of a block has C coefficients in groups of C / groups, of which the first ones of each group have bits:
`bits` [levels, C], `counts` [levels, groups]. Its codes follow each other from a byte of its own on, `sizes` [levels]
bytes; its head is level << 4 | stretch.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

STRETCHES = np.exp2(np.arange(-2, 14) / 2).astype(np.float32)  # of the distances between values, for each token
BEYOND = 4  # bytes after the last code that unpacking may read

_SUMS = {"contract", "nsz"}  # numbers that never leave the process may be rounded as is fastest


@njit(cache=True, nogil=True)
def pack(
    z: NDArray[np.float32],
    levels: NDArray[np.intp],
    bits: NDArray[np.uint8],
    distances: NDArray[np.float32],
    sizes: NDArray[np.int64],
    most: NDArray[np.float64],
    heads: NDArray[np.uint8],
    packed: NDArray[np.uint8],
) -> float:
    """z [tokens, C] to heads [tokens] and codes, each token with the stretch that fits it best.

    levels: of each token, the least; it gets a higher one, if there is any, until its squared error is at most
        most[level], [levels]. packed: room for the highest of all.
    Returns the largest squared error, in multiples of that.
    """
    start, worst = 0, 0.0
    for t in range(len(z)):
        level = levels[t]
        allowed = most[level]
        while True:
            best, pick = np.inf, 0
            for i in range(len(STRETCHES)):
                error = 0.0
                for j in range(z.shape[1]):
                    off = np.float64(z[t, j])
                    if bits[level, j]:
                        distance = distances[level, j] * STRETCHES[i]
                        off -= (_value(z[t, j], distance, bits[level, j]) + 0.5) * distance
                    error += off * off
                if error < best:
                    best, pick = error, i
            if best <= allowed or level == len(most) - 1:
                break
            level += 1
        worst = max(worst, best / allowed)
        heads[t] = level << 4 | pick
        held, filled, at = np.uint64(0), 0, start
        for j in range(z.shape[1]):
            width = bits[level, j]
            if width:
                code = _value(z[t, j], distances[level, j] * STRETCHES[pick], width) + (1 << (width - 1))
                held |= np.uint64(code) << np.uint64(filled)
                filled += width
                while filled >= 8:
                    packed[at] = held & np.uint64(255)
                    held >>= np.uint64(8)
                    at, filled = at + 1, filled - 8
        if filled:
            packed[at] = held
        start += sizes[level]
    return worst


@njit(cache=True, nogil=True, forceinline=True)
def _value(value: float, distance: float, width: int) -> int:
    """Which of the 2 ** width values around 0 is nearest: from -2 ** (width - 1) on."""
    half = 1 << (width - 1)
    return int(min(max(np.floor(value / distance), -half), half - 1))


@njit(cache=True, nogil=True)
def unpack(
    packed: NDArray[np.uint8],
    heads: NDArray[np.uint8],
    bits: NDArray[np.uint8],
    distances: NDArray[np.float32],
    counts: NDArray[np.intp],
    sizes: NDArray[np.int64],
    z: NDArray[np.float32],
) -> None:
    """All tokens' coefficients: z [groups, tokens, C / groups], 0 where there are no bits."""
    start = 0
    for t in range(len(heads)):
        level = heads[t] >> 4
        _unpack_token(packed, start, bits[level], distances[level], counts[level], STRETCHES[heads[t] & 15], z[:, t])
        start += sizes[level]


@njit(cache=True, nogil=True, forceinline=True)
def _unpack_token(
    packed: NDArray[np.uint8],
    at: int,
    bits: NDArray[np.uint8],
    distances: NDArray[np.float32],
    counts: NDArray[np.intp],
    stretch: np.float32,
    z: NDArray[np.float32],
) -> None:
    """The coefficients of a token whose codes begin at byte `at`: z [groups, C / groups]."""
    held, filled, size = np.uint64(0), 0, z.shape[1]
    for g in range(len(counts)):
        row, its_bits, its_distances = z[g], bits[g * size : (g + 1) * size], distances[g * size : (g + 1) * size]
        for j in range(counts[g]):
            width = its_bits[j]
            if filled < width:  # four more bytes, of which the last may be those of the next token
                low = np.uint64(packed[at]) | np.uint64(packed[at + 1]) << np.uint64(8)
                high = np.uint64(packed[at + 2]) | np.uint64(packed[at + 3]) << np.uint64(8)
                held |= (low | high << np.uint64(16)) << np.uint64(filled)
                at, filled = at + 4, filled + 32
            code = np.int64(held & np.uint64((1 << width) - 1)) - (1 << (width - 1))
            held >>= np.uint64(width)
            filled -= width
            row[j] = (np.float32(code) + np.float32(0.5)) * its_distances[j] * stretch
        row[counts[g] :] = 0


@njit(cache=True, nogil=True, fastmath=_SUMS, forceinline=True)
def _turned(
    t: int,
    h: int,
    made: NDArray[np.float32],
    expected: NDArray[np.float32],
    index: NDArray[np.intp],
    sinks: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    interleaved: bool,
    row: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """A head of a token, out [width], of what `place` takes; row is room for it before it is turned."""
    its, pairs, c, s = slice(h * len(row), (h + 1) * len(row)), cos.shape[1], cos[t], sin[t]
    if t < len(sinks):
        row[:] = sinks[t, its]
    else:
        found, usual = made[t, h], expected[index[t], its]
        for i in range(len(row)):
            row[i] = found[i] + usual[i]
    if interleaved:
        for p in range(pairs):
            out[2 * p] = row[2 * p] * c[p] - row[2 * p + 1] * s[p]
            out[2 * p + 1] = row[2 * p + 1] * c[p] + row[2 * p] * s[p]
    else:  # loops over slices that begin at 0 compile to vector instructions
        a, b, first, second = row[:pairs], row[pairs : 2 * pairs], out[:pairs], out[pairs : 2 * pairs]
        for p in range(pairs):
            first[p] = a[p] * c[p] - b[p] * s[p]
        for p in range(pairs):
            second[p] = b[p] * c[p] + a[p] * s[p]
    left, rest = row[2 * pairs :], out[2 * pairs :]
    for i in range(len(rest)):
        rest[i] = left[i]


@njit(cache=True, nogil=True, fastmath=_SUMS)
def place(
    made: NDArray[np.float32],
    expected: NDArray[np.float32],
    index: NDArray[np.intp],
    sinks: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    interleaved: bool,
    columns: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    """Tokens to their columns of out [kv_heads, columns, width], turned but for the channels beyond the pairs.

    made: [tokens, kv_heads, width], to which is added what is expected of the token, expected[index[t]]. sinks: what
    the first tokens are instead. cos, sin: [tokens, pairs].
    """
    heads, _, width = out.shape
    row = np.empty(width, np.float32)
    for t in range(len(index)):
        for h in range(heads):
            _turned(t, h, made, expected, index, sinks, cos, sin, interleaved, row, out[h, columns[t]])


@njit(cache=True, nogil=True, fastmath=_SUMS | {"reassoc"})
def score(
    made: NDArray[np.float32],
    expected: NDArray[np.float32],
    index: NDArray[np.intp],
    sinks: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    interleaved: bool,
    columns: NDArray[np.int64],
    query: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Products of the rows of `query` [kv_heads, rows, width] with the keys that `place` would write, to their columns
    of out [kv_heads, rows, columns]."""
    heads, rows, width = query.shape
    row, key = np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(len(index)):
        for h in range(heads):
            _turned(t, h, made, expected, index, sinks, cos, sin, interleaved, row, key)
            for r in range(rows):
                one, total = query[h, r], np.float32(0)
                for i in range(width):
                    total += one[i] * key[i]
                out[h, r, columns[t]] = total


@njit(cache=True, nogil=True, fastmath=_SUMS)
def add_up(
    packed: NDArray[np.uint8],
    tokens: NDArray[np.uint8],
    bits: NDArray[np.uint8],
    distances: NDArray[np.float32],
    counts: NDArray[np.intp],
    sizes: NDArray[np.int64],
    back: NDArray[np.float32],
    features: NDArray[np.float32],
    index: NDArray[np.intp],
    token: NDArray[np.float32],
    bias: NDArray[np.float32],
    sinks: NDArray[np.float32],
    columns: NDArray[np.int64],
    weights: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Add all tokens, each times its weight, weights [kv_heads, rows, columns], to out [kv_heads, rows, width].

    Coefficients are in one group, and become channels once they are added up: back [C, C]; so does what is expected of
    tokens: features [distinct, rank], index [tokens], token [rank, C], bias [C].
    """
    heads, rows, width = out.shape
    coefs = np.zeros((heads, rows, len(back)), np.float32)
    of_id, totals = np.zeros((heads, rows, len(features)), np.float32), np.zeros((heads, rows), np.float32)
    z, start = np.empty((1, len(back)), np.float32), 0
    for t in range(len(tokens)):
        level = tokens[t] >> 4
        if t >= len(sinks):
            stretch, count = STRETCHES[tokens[t] & 15], counts[level, 0]
            _unpack_token(packed, start, bits[level], distances[level], counts[level], stretch, z)
            for h in range(heads):
                for r in range(rows):
                    weight = weights[h, r, columns[t]]
                    _add(weight, z[0, :count], coefs[h, r, :count])
                    of_id[h, r, index[t]] += weight
                    totals[h, r] += weight
        start += sizes[level]
    for h in range(heads):
        its = slice(h * width, (h + 1) * width)
        for r in range(rows):
            target = out[h, r]
            for t in range(len(sinks)):
                _add(weights[h, r, columns[t]], sinks[t, its], target)
            for j in range(len(back)):
                _add(coefs[h, r, j], back[j, its], target)
            mixed = np.zeros(features.shape[1], np.float32)
            for i in range(len(features)):
                _add(of_id[h, r, i], features[i], mixed)
            for i in range(len(mixed)):
                _add(mixed[i], token[i, its], target)
            _add(totals[h, r], bias[its], target)


@njit(cache=True, nogil=True, fastmath=_SUMS, forceinline=True)
def _add(weight: np.float32, row: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(len(out)):
        out[i] += weight * row[i]
