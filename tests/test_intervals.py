from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqkv.entropy_coding.intervals import MOST_SYMBOLS, MOST_TOTAL, Adaptive, Decoder, Encoder

BITS, BYTE = (1 << 64) - 1, 8


def reference(intervals: list[tuple[int, int, int]]) -> bytes:
    """The coder in Python's integers, as its definition: Subbotin's."""
    low, width, out = 0, BITS, bytearray()
    for start, size, total in intervals:
        unit = width // total
        low, width = low + start * unit, size * unit
        while True:
            if (low ^ (low + width)) & BITS >= 1 << 56:
                if width >= 1 << 48:
                    break
                width = -low & ((1 << 48) - 1)
            out.append(low >> 56)
            low, width = low << BYTE & BITS, width << BYTE & BITS
    for count in range(9):
        value = -(-low >> (64 - 8 * count))
        if value << (64 - 8 * count) < low + width:
            return bytes(out + value.to_bytes(count, "big"))
    raise AssertionError("low itself has 8 bytes")


@st.composite
def interval(draw: st.DrawFn) -> tuple[int, int, int]:
    total = draw(st.integers(1, 1 << draw(st.integers(0, 48))))
    size = draw(st.integers(1, total) | st.just(1) | st.just(total))
    return draw(st.integers(0, total - size) | st.just(0) | st.just(total - size)), size, total


@settings(max_examples=300, deadline=None)
@given(st.lists(interval(), max_size=60))
def test_agrees_with_the_definition_and_comes_back(intervals: list[tuple[int, int, int]]) -> None:
    encoder = Encoder()
    for one in intervals:
        encoder.put(*one)
    data = encoder.finish()
    assert data == reference(intervals)
    decoder = Decoder(data)
    for start, size, total in intervals:
        assert start <= decoder.target(total) < start + size
        decoder.take(start, size, total)
    assert not decoder.exhausted


def test_costs_what_the_intervals_hold() -> None:
    rng, encoder, bits = np.random.default_rng(0), Encoder(), 0.0
    for _ in range(3000):
        size, total = int(rng.integers(1, 1 << 20)), 1 << 26
        encoder.put(int(rng.integers(0, total - size)), size, total)
        bits += np.log2(total / size)
    assert bits < 8 * len(encoder.finish()) < bits + 20


def test_carries() -> None:
    """Intervals around the middle, which no byte settles, again and again."""
    intervals = [((1 << 47) - 1, 2, 1 << 48)] * 50 + [(1, 1, 3)] * 50
    encoder = Encoder()
    for one in intervals:
        encoder.put(*one)
    assert encoder.finish() == reference(intervals)


@pytest.mark.parametrize(
    "bad", [(-1, 1, 2), (0, 0, 2), (1, 2, 2), (0, 1, MOST_TOTAL + 1), (0, -1, 1)], ids=lambda bad: str(bad)
)
def test_refuses_what_is_no_interval(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no interval"):
        Encoder().put(*bad)
    with pytest.raises(ValueError, match="no interval"):
        Decoder(b"").take(*bad)


class Counts:
    """An Adaptive by its definition."""

    def __init__(self, count: int) -> None:
        self.weights = [(1 << 24) // (i + 256) for i in range(count)]
        self.increment = sum(self.weights) // 256

    def interval(self, symbol: int) -> tuple[int, int, int]:
        found = sum(self.weights[:symbol]), self.weights[symbol], sum(self.weights)
        self.weights[symbol] += self.increment
        return found


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 1000])
def test_adaptive_is_its_definition(count: int) -> None:
    rng = np.random.default_rng(count)
    symbols = np.minimum(rng.integers(0, count, 300), rng.integers(0, count, 300))
    first, learnt, last = np.split(symbols, [100, 150])
    counts, encoder, fast = Counts(count), Encoder(), Adaptive(count)
    intervals = [counts.interval(int(s)) for s in first]
    for s in learnt:
        counts.interval(int(s))
    intervals += [counts.interval(int(s)) for s in last]
    encoder.put_adaptive(first, fast)
    fast.learn(learnt)
    encoder.put_adaptive(last, fast)
    data = encoder.finish()
    assert data == reference(intervals)
    decoder, again = Decoder(data), Adaptive(count)
    np.testing.assert_array_equal(decoder.take_adaptive(len(first), again), first)
    again.learn(learnt)
    np.testing.assert_array_equal(decoder.take_adaptive(len(last), again), last)
    assert not decoder.exhausted


def test_adaptive_takes_a_bounded_number() -> None:
    for count in (0, -1, MOST_SYMBOLS + 1):
        with pytest.raises(ValueError, match="symbols"):
            Adaptive(count)


@pytest.mark.parametrize("symbol", [-1, 10, 1 << 40])
def test_refuses_what_is_no_symbol(symbol: int) -> None:
    known, symbols = Adaptive(10), np.array([3, symbol])
    for call in (known.learn, lambda some: Encoder().put_adaptive(some, known)):
        with pytest.raises(ValueError, match="from 0 to 9"):
            call(symbols)
    np.testing.assert_array_equal(known.tree, Adaptive(10).tree)


def test_a_distribution_that_is_full_stops_to_learn() -> None:
    full = Adaptive(2)
    full.tree[:] = [(1 << 44) + 1, 1 << 43, (1 << 44) + 1]
    before = full.tree.copy()
    full.learn(np.array([0, 1]))
    np.testing.assert_array_equal(full.tree, before)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.integers(1, 5000))
def test_any_bytes_give_symbols_and_an_end(data: bytes, count: int) -> None:
    decoder = Decoder(data)
    symbols = decoder.take_adaptive(100, Adaptive(count))
    assert symbols.min() >= 0 and symbols.max() < count
    assert decoder.exhausted or count < 5000
