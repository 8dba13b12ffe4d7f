"""A range coder for symbols that are given as intervals, and an adaptive distribution over many symbols.

A symbol is an interval [start, start + size) of [0, total), total at most 2**48: any integers, another total each time.
The coder is Subbotin's carryless one with 64-bit registers. Everything is integer arithmetic, so the same intervals
give the same bytes everywhere. A stream costs the sum of log2(total / size), and about a byte at its end.

Invariant: 2**48 <= width, and low + width <= 2**64, before every symbol. A symbol narrows [low, low + width); bytes
that all of it begins with go out. If it is narrow and still straddles a carry, it is cut to the part before the carry.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

MOST_TOTAL = 1 << 48
MOST_SYMBOLS = 1 << 20  # of an Adaptive, which takes 8 bytes for each, and 32 while it is made

_U = np.uint64
_TOP, _BOTTOM, _ALL = _U(1 << 56), _U(1 << 48), _U((1 << 64) - 1)
_BYTE, _HIGHEST = _U(8), _U(56)
_BEHIND = 8  # bytes that a decoder may read behind the end, as zeros

_PRIOR, _FLATTEN = 1 << 24, 256  # prior weight of symbol i: _PRIOR // (i + _FLATTEN)
_MOST_SEEN = 1 << 44


class Encoder:
    """put() intervals, then finish()."""

    def __init__(self) -> None:
        self._state = np.array([0, _ALL], np.uint64)
        self._out = bytearray()

    def put(self, start: int, size: int, total: int) -> None:
        """Code the interval [start, start + size) of [0, total). ValueError if it is not one."""
        _check(start, size, total)
        room = np.empty(_BEHIND, np.uint8)
        count = _put(self._state, room, 0, _U(start), _U(size), _U(total))
        self._out += room[:count].tobytes()

    def put_adaptive(self, symbols: NDArray[np.int64], distribution: Adaptive) -> None:
        """Code symbols [n] under a distribution, which learns each. ValueError if one is none of its symbols."""
        distribution.check(symbols)
        room = np.empty(_BEHIND * len(symbols), np.uint8)
        count = _put_adaptive(self._state, room, symbols, distribution.tree, distribution.increment)
        self._out += room[:count].tobytes()

    def finish(self) -> bytes:
        """The stream: as few bytes as lie in the interval, whatever follows them; a decoder reads zeros there."""
        low, width = int(self._state[0]), int(self._state[1])
        for count in range(9):
            unit = 1 << (64 - 8 * count)
            value = -(-low // unit) * unit
            if value < min(low + width, 1 << 64):
                self._out += (value >> (64 - 8 * count)).to_bytes(count, "big") if count else b""
                break
        return bytes(self._out)


class Decoder:
    """For each symbol: target(), then take() the interval that holds it."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = np.frombuffer(data, np.uint8)
        first = int.from_bytes(bytes(self._data[:_BEHIND]).ljust(_BEHIND, b"\0"), "big")
        self._state = np.array([0, _ALL, first, _BEHIND], np.uint64)  # low, width, code, bytes read

    @property
    def exhausted(self) -> bool:
        """Whether more was read than was written: the stream was cut, or the intervals are others."""
        return int(self._state[3]) > len(self._data) + _BEHIND

    def target(self, total: int) -> int:
        """A place in [0, total), within the interval of the next symbol."""
        return int(_target(self._state, _U(total)))

    def take(self, start: int, size: int, total: int) -> None:
        """Go on behind the symbol of the interval that holds target(total). ValueError if it is no interval."""
        _check(start, size, total)
        _take(self._state, self._data, _U(start), _U(size), _U(total))

    def take_adaptive(self, count: int, distribution: Adaptive) -> NDArray[np.int64]:
        """The next `count` symbols under a distribution, which learns each."""
        out = np.empty(count, np.int64)
        _take_adaptive(self._state, self._data, out, distribution.tree, distribution.increment)
        return out


class Adaptive:
    """A distribution over symbols 0 to count - 1 that starts out falling as 1 / (symbol + 256), as the ids of
    vocabularies made by merging do, and gives each symbol that it learns a 256th of that more."""

    def __init__(self, count: int) -> None:
        if not 1 <= count <= MOST_SYMBOLS:
            raise ValueError(f"{count} symbols, where 1 to {MOST_SYMBOLS} are possible")
        self.count = count
        weights = _PRIOR // (np.arange(count, dtype=np.int64) + _FLATTEN)
        self.tree = np.concatenate([[0], weights])  # a Fenwick tree; the total is kept in its unused first place
        _build(self.tree)
        self.tree[0] = weights.sum()
        self.increment = int(weights.sum()) // 256

    def check(self, symbols: NDArray[np.int64]) -> None:
        """ValueError if one is none of the distribution's: the tree's indices follow from them, unchecked."""
        if symbols.size and (symbols.min() < 0 or symbols.max() >= self.count):
            raise ValueError(f"symbols must be from 0 to {self.count - 1}")

    def learn(self, symbols: NDArray[np.int64]) -> None:
        """Symbols [n] that were coded in another way. ValueError if one is none of the distribution's."""
        self.check(symbols)
        _learn(self.tree, symbols, self.increment)


def _check(start: int, size: int, total: int) -> None:
    """A coder of an empty interval would never end."""
    if start < 0 or size < 1 or not start + size <= total <= MOST_TOTAL:
        raise ValueError(f"[{start}, {start} + {size}) is no interval of [0, {total})")


@njit(cache=True, nogil=True)
def _narrow(state, start, size, total):
    unit = state[1] // total
    state[0] += start * unit
    state[1] = size * unit


@njit(cache=True, nogil=True)
def _settled(state):
    """Whether a byte can go; cuts the interval where it straddles."""
    if (state[0] ^ (state[0] + state[1])) < _TOP:
        return True
    if state[1] < _BOTTOM:
        state[1] = (_U(0) - state[0]) & (_BOTTOM - _U(1))
        return True
    return False


@njit(cache=True, nogil=True)
def _put(state, out, position, start, size, total):
    _narrow(state, start, size, total)
    while _settled(state):
        out[position] = state[0] >> _HIGHEST
        position += 1
        state[0] <<= _BYTE
        state[1] <<= _BYTE
    return position


@njit(cache=True, nogil=True)
def _target(state, total):
    return min((state[2] - state[0]) // (state[1] // total), total - _U(1))


@njit(cache=True, nogil=True)
def _take(state, data, start, size, total):
    _narrow(state, start, size, total)
    while _settled(state):
        at = state[3]
        byte = _U(data[at]) if at < _U(data.size) else _U(0)
        state[2] = (state[2] << _BYTE) | byte
        state[3] += _U(1)
        state[0] <<= _BYTE
        state[1] <<= _BYTE


@njit(cache=True, nogil=True)
def _build(tree):
    for i in range(1, tree.size):
        above = i + (i & -i)
        if above < tree.size:
            tree[above] += tree[i]


@njit(cache=True, nogil=True)
def _add(tree, symbol, amount):
    if tree[0] > _MOST_SEEN:
        return
    tree[0] += amount
    i = symbol + 1
    while i < tree.size:
        tree[i] += amount
        i += i & -i


@njit(cache=True, nogil=True)
def _below(tree, symbol):
    """The weight of all symbols below one."""
    total, i = 0, symbol
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@njit(cache=True, nogil=True)
def _find(tree, place):
    """The symbol whose interval holds a place."""
    bit = 1
    while 2 * bit < tree.size:
        bit *= 2
    i = 0
    while bit > 0:
        if i + bit < tree.size and tree[i + bit] <= place:
            i += bit
            place -= tree[i]
        bit //= 2
    return i


@njit(cache=True, nogil=True)
def _put_adaptive(state, out, symbols, tree, increment):
    position = 0
    for symbol in symbols:
        start = _below(tree, symbol)
        size = _below(tree, symbol + 1) - start
        position = _put(state, out, position, _U(start), _U(size), _U(tree[0]))
        _add(tree, symbol, increment)
    return position


@njit(cache=True, nogil=True)
def _take_adaptive(state, data, out, tree, increment):
    for i in range(out.size):
        symbol = _find(tree, np.int64(_target(state, _U(tree[0]))))
        start = _below(tree, symbol)
        size = _below(tree, symbol + 1) - start
        _take(state, data, _U(start), _U(size), _U(tree[0]))
        _add(tree, symbol, increment)
        out[i] = symbol


@njit(cache=True, nogil=True)
def _learn(tree, symbols, increment):
    for symbol in symbols:
        _add(tree, symbol, increment)
