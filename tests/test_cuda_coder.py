"""The coder's kernels on an emulated device: the CPU coder's bytes, and nothing touched that is not theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqkv.cuda_kernels import coder, coder_tables
from seqkv.entropy_coding import CorruptGroup, decode_group, encode_group, reference
from tests.emulator import device_array
from tests.emulator.device import emulated_device

LARGEST = 2**31 - 1
STATE_BYTES = 128
ORDERS = [(0, 0), (1, 3), (7, 2)]  # of lanes, and how often a lane loses its turn


@dataclass
class Batch:
    """Groups side by side, and parts: (symbols, base, offset, segment_starts) of each call."""

    first: list[int]
    tokens: list[int]
    columns: int
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]]

    def group(self, number):
        """A group's live coefficients, and what the CPU coder needs for them."""
        own = slice(self.first[number], self.first[number] + self.tokens[number])
        nothing = np.zeros((0, self.tokens[number]), np.int32)
        symbols = np.concatenate([nothing, *(symbols[:, own] for symbols, *_ in self.parts)])
        live = symbols.any(axis=1)
        base = np.concatenate([nothing.ravel(), *(b[number if len(b) > 1 else 0] for _, b, _, _ in self.parts)])
        offset = np.concatenate([nothing, *(offset[:, own] for _, _, offset, _ in self.parts)])
        starts, before = [0], 0
        for *_, part_starts in self.parts:
            starts += [before + start for start in part_starts[1:]]
            before += part_starts[-1]
        live_starts = np.concatenate([[0], np.cumsum(live)])[starts]
        return live, (symbols[live].T, base[live], offset.T, live_starts)

    def expected(self):
        return [encode_group(*self.group(g)[1]) for g in range(len(self.tokens))]

    def live(self):
        coefs = sum(len(symbols) for symbols, *_ in self.parts)
        live = [self.group(g)[0] for g in range(len(self.tokens))]
        return np.array(live, bool).reshape(len(live), coefs)


def make_batch(tokens, parts, seed=0, gap=2, escapes=0.01, shared_base=False):
    """parts: segment_starts of each call. Some coefficients are zero in some groups, some in all."""
    rng = np.random.default_rng(seed)
    first = [gap + sum(tokens[:g]) + g * gap for g in range(len(tokens))]
    columns = gap + sum(tokens) + len(tokens) * gap
    made = []
    for starts in parts:
        coefs = starts[-1]
        scale = 2.0 ** rng.uniform(-4, 6, (coefs, 1))
        symbols = np.rint(rng.laplace(scale=scale, size=(coefs, columns))).astype(np.int64)
        wild = rng.random(symbols.shape) < escapes
        symbols[wild] = rng.integers(-LARGEST, LARGEST, int(wild.sum()), endpoint=True) >> rng.integers(0, 31)
        symbols[rng.random(coefs) < 0.2] = 0
        for start, size in zip(first, tokens, strict=True):
            symbols[rng.random(coefs) < 0.3, start : start + size] = 0
        base = rng.integers(-200, 4500, (1 if shared_base else len(tokens), coefs)).astype(np.int16)
        offset = rng.integers(-500, 500, (len(starts) - 1, columns)).astype(np.int16)
        made.append((symbols.astype(np.int32), base, offset, list(starts)))
    return Batch(first, list(tokens), columns, made)


def encode(cupy, batch):
    encoder = coder.Encoder(batch.first, batch.tokens, batch.columns)
    for symbols, base, offset, starts in batch.parts:
        on_device = cupy.asarray(symbols)
        statistics = coder.statistics(on_device, batch.first, batch.tokens)
        encoder.add(on_device, statistics, cupy.asarray(base), cupy.asarray(offset), starts)
    return encoder.finish()


def decoder_of(batch, streams):
    return coder.Decoder(streams, batch.live(), batch.first, batch.tokens, batch.columns)


def decode(cupy, batch, decoder, parts=None):
    """The symbols of some first parts."""
    decoded = []
    for symbols, base, offset, starts in batch.parts[:parts]:
        decoded.append(cupy.empty(symbols.shape, np.int32))
        decoder.next(cupy.asarray(base), cupy.asarray(offset), starts, decoded[-1])
    return [symbols.get() for symbols in decoded]


def assert_codes_as_on_the_cpu(cupy, batch):
    expected = batch.expected()
    streams, live = encode(cupy, batch)
    assert streams == expected
    np.testing.assert_array_equal(live, batch.live())
    decoder = decoder_of(batch, expected)
    owned = np.zeros(batch.columns, bool)
    for first, tokens in zip(batch.first, batch.tokens, strict=True):
        owned[first : first + tokens] = True
    for decoded, (symbols, *_) in zip(decode(cupy, batch, decoder), batch.parts, strict=True):
        np.testing.assert_array_equal(decoded, np.where(owned, symbols, 0))
    decoder.check()


SIZES = [0, 1, 31, 33, 256, 64, 5]
PARTS = [[0, 5, 5, 41], [0], [0, 0], [0, 33], [0, 7, 40, 72]]


def test_bytes_are_the_cpu_coders():
    with emulated_device() as cupy:
        assert_codes_as_on_the_cpu(cupy, make_batch(SIZES, PARTS))
        assert_codes_as_on_the_cpu(cupy, make_batch(SIZES, PARTS, seed=1, shared_base=True, escapes=0.3))


@pytest.mark.parametrize(("order", "preempt"), ORDERS)
def test_nothing_is_found_in_check_mode(order, preempt, monkeypatch):
    with emulated_device("check", order, preempt) as cupy:
        assert_codes_as_on_the_cpu(cupy, make_batch([33, 0, 2, 70], [[0, 3, 3, 40], [0, 9]], seed=order, gap=0))
        monkeypatch.setattr(coder, "MANY_GROUPS", 4)  # blocks of several warps, the last not full
        assert_codes_as_on_the_cpu(cupy, make_batch([3, 1, 34, 0, 2, 1, 1, 5, 1], [[0, 4], [0, 2]], seed=order))


@pytest.mark.parametrize(
    ("tokens", "parts"), [([], [[0, 3]]), ([], []), ([0, 0], [[0, 3]]), ([3], []), ([3], [[0, 0]])]
)
def test_nothing_to_code(tokens, parts):
    with emulated_device("check") as cupy:
        assert_codes_as_on_the_cpu(cupy, make_batch(tokens, parts))


def test_every_token_at_both_ends_of_its_range():
    ends = {0, LARGEST, *range(1, 14)} | {12 + 2**k + d for k in range(31) for d in (-1, 0)}
    values = np.array([sign * value for value in sorted(ends) for sign in (1, -1)], np.int32)
    symbols = np.stack([values, values[::-1], np.roll(values, 40)])
    for scale_class in (0, 20, 63):
        base = np.full((1, 3), 64 * scale_class, np.int16)
        batch = Batch([0], [values.size], values.size, [(symbols, base, np.zeros((1, values.size), np.int16), [0, 3])])
        with emulated_device() as cupy:
            assert_codes_as_on_the_cpu(cupy, batch)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 70), max_size=4),
    parts=st.lists(st.lists(st.integers(0, 40), max_size=3).map(lambda cuts: [0, *sorted(cuts)]), max_size=3),
    seed=st.integers(0, 2**32 - 1),
    escapes=st.sampled_from([0, 0.02, 0.5]),
    shared_base=st.booleans(),
)
def test_batches_of_any_shape(tokens, parts, seed, escapes, shared_base):
    with emulated_device() as cupy:
        assert_codes_as_on_the_cpu(cupy, make_batch(tokens, parts, seed, seed % 3, escapes, shared_base))


def test_many_groups():
    with emulated_device() as cupy:
        assert_codes_as_on_the_cpu(cupy, make_batch([g % 4 for g in range(70)], [[0, 3]]))


def test_groups_may_lie_in_any_order():
    batch = make_batch([40, 3, 33], [[0, 20]])
    batch.first, batch.tokens = batch.first[::-1], batch.tokens[::-1]
    with emulated_device() as cupy:
        assert_codes_as_on_the_cpu(cupy, batch)


def test_statistics_are_numpys():
    batch = make_batch(SIZES, [[0, 50]], escapes=0.2)
    symbols = batch.parts[0][0]
    with emulated_device("check", 1, 3) as cupy:
        found = coder.statistics(cupy.asarray(symbols), batch.first, batch.tokens)
        magnitude, escapes = found.magnitude.get(), found.escapes.get()
    for g, (first, tokens) in enumerate(zip(batch.first, batch.tokens, strict=True)):
        sizes = np.abs(symbols[:, first : first + tokens].astype(np.int64))
        np.testing.assert_array_equal(magnitude[g], sizes.sum(axis=1))
        assert escapes[g] == (sizes > 12).sum()


def test_only_bytes_and_flags_go_to_the_host():
    batch = make_batch([256, 100], [[0, 64], [0, 64]])
    with emulated_device() as cupy, device_array.counted() as transfers:
        streams, live = encode(cupy, batch)
        assert transfers.to_host <= sum(map(len, streams)) + live.size + 100
        before = transfers.to_host
        decoder = decoder_of(batch, streams)
        for symbols, base, offset, starts in batch.parts:
            decoder.next(cupy.asarray(base), cupy.asarray(offset), starts, cupy.empty(symbols.shape, np.int32))
        assert transfers.to_host == before


# ---------------------------------------------------------------------------------------------------- damage and misuse


def test_first_parts_decode_alone():
    batch = make_batch([40, 256], [[0, 20], [0, 3, 9], [0, 30]])
    with emulated_device() as cupy:
        decoder = decoder_of(batch, batch.expected())
        for decoded, (symbols, *_) in zip(decode(cupy, batch, decoder, 2), batch.parts, strict=False):
            for first, tokens in zip(batch.first, batch.tokens, strict=True):
                own = slice(first, first + tokens)
                np.testing.assert_array_equal(decoded[:, own], symbols[:, own])
        decoder.check(partial=True)
        with pytest.raises(ValueError, match="30 coefficients are not decoded"):
            decoder.check()


def mutations(stream, rng):
    """Damaged versions of a group, of even length."""
    data = np.frombuffer(stream, np.uint8)
    flipped = data.copy()
    flipped[rng.integers(data.size, size=3)] ^= 1 << rng.integers(0, 8, 3).astype(np.uint8)
    states = data.copy()
    states[:STATE_BYTES] = rng.integers(0, 256, STATE_BYTES)
    low_states = data.copy()
    low_states[:STATE_BYTES] = 0
    cut = data[: STATE_BYTES + 2 * int(rng.integers(0, (data.size - STATE_BYTES) // 2))]
    longer = np.concatenate([data, rng.integers(0, 256, 2 * int(rng.integers(1, 50)), np.uint8)])
    noise = rng.integers(0, 256, data.size, np.uint8)
    ones = np.full(data.size, 255, np.uint8)
    return [mutated.tobytes() for mutated in (flipped, states, low_states, cut, longer, noise, ones)]


def verdict(call):
    """What CorruptGroup names, and nothing if it is not raised."""
    try:
        call()
    except CorruptGroup as error:
        return [int(number) for number in re.findall(r"\d+", str(error).split(":")[0])]
    return []


@pytest.mark.parametrize("order", [0, 7])
def test_damaged_streams_touch_nothing_else_and_are_found(order):
    rng = np.random.default_rng(order)
    batch = make_batch([40] * 8, [[0, 10, 30], [0, 8]], seed=order, escapes=0.05)
    whole = batch.expected()
    with emulated_device("check", order, 3 * order) as cupy:
        for g in range(3):
            streams = list(whole)
            streams[1:] = mutations(whole[g], rng)  # in the contexts of other groups
            streams[g] = whole[g]
            decoder = decoder_of(batch, streams)
            decoded = np.concatenate(decode(cupy, batch, decoder))
            named = verdict(decoder.check)
            for number, stream in enumerate(streams):
                live, (symbols, *contexts) = batch.group(number)
                try:
                    expected = decode_group(stream, len(symbols), *contexts)
                except CorruptGroup:
                    assert number in named
                else:
                    assert number not in named
                    own = slice(batch.first[number], batch.first[number] + batch.tokens[number])
                    np.testing.assert_array_equal(decoded[live, own].T, expected)
            assert len(named) >= 6


def test_values_beyond_32_bits_are_found():
    batch = make_batch([3], [[0, 1]], gap=0)
    symbols, base, offset, starts = batch.parts[0]
    symbols[:] = 1
    with emulated_device("check") as cupy:
        for value in (LARGEST, LARGEST + 1, LARGEST + 12, -LARGEST - 1):
            stream = reference.encode_group([[1], [value], [1]], base[0], offset.T, starts)
            decoder = decoder_of(batch, [stream])
            decode(cupy, batch, decoder)
            assert verdict(decoder.check) == ([] if value == LARGEST else [0])


def test_damage_shows_in_first_parts_when_words_run_out():
    batch = make_batch([256, 256], [[0, 60], [0, 60]])
    streams = batch.expected()
    streams[1] = streams[1][: STATE_BYTES + 40]
    with emulated_device() as cupy:
        decoder = decoder_of(batch, streams)
        decode(cupy, batch, decoder, 1)
        assert verdict(lambda: decoder.check(partial=True)) == [1]


def test_streams_of_an_impossible_length():
    batch = make_batch([3, 3, 3], [[0, 5]])
    streams = batch.expected()
    streams[0] += b"x"
    streams[2] = streams[2][: STATE_BYTES - 2]
    with emulated_device(), pytest.raises(CorruptGroup, match="group 0, 2"):
        decoder_of(batch, streams)


def test_smallest_integer_is_refused():
    batch = make_batch([40, 3], [[0, 5]])
    batch.parts[0][0][2, batch.first[1] + 1] = -(2**31)
    with emulated_device("check") as cupy, pytest.raises(ValueError, match=r"at least -2147483647: group 1$"):
        encode(cupy, batch)


def test_statistics_of_other_symbols_are_refused():
    batch = make_batch([40, 30], [[0, 20]], escapes=0.1)
    symbols, base, offset, starts = batch.parts[0]
    with emulated_device("check") as cupy:
        on_device = cupy.asarray(symbols)
        true = coder.statistics(on_device, batch.first, batch.tokens)
        wrong = coder.Statistics(true.magnitude, cupy.asarray(true.escapes.get() - [1, 0]))
        encoder = coder.Encoder(batch.first, batch.tokens, batch.columns)
        encoder.add(on_device, wrong, cupy.asarray(base), cupy.asarray(offset), starts)
        with pytest.raises(ValueError, match="statistics are of other symbols: group 0"):
            encoder.finish()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"symbols": np.zeros((5, 9), np.int64)}, "symbols must be int32"),
        ({"symbols": np.zeros((4, 9), np.int32)}, "symbols must be"),
        ({"base": np.zeros((3, 5), np.int16)}, "base must be"),
        ({"offset": np.zeros((2, 9), np.int16)}, "offset must be"),
        ({"segment_starts": [1, 5]}, "segment_starts"),
        ({"segment_starts": [0, 6, 5]}, "segment_starts"),
        ({"segment_starts": []}, "segment_starts"),
    ],
)
def test_arguments_of_other_shapes_are_refused(change, message):
    arrays = {
        "base": np.zeros((2, 5), np.int16),
        "offset": np.zeros((1, 9), np.int16),
        "segment_starts": [0, 5],
        "symbols": np.zeros((5, 9), np.int32),
    }
    arrays |= change
    with emulated_device() as cupy:
        decoder = coder.Decoder([bytes(STATE_BYTES)] * 2, np.ones((2, 5)), [0, 4], [4, 5], 9)
        given_ = {name: x if isinstance(x, list) else cupy.asarray(x) for name, x in arrays.items()}
        with pytest.raises(ValueError, match=message):
            decoder.next(**given_)


@pytest.mark.parametrize(
    ("first", "tokens", "columns"),
    [([0, 3], [4, 4], 9), ([0], [10], 9), ([-1], [2], 9), ([0], [-1], 9), ([0, 1], [1], 9), ([], [], 1 << 30)],
)
def test_groups_must_lie_apart_within_the_columns(first, tokens, columns):
    with emulated_device(), pytest.raises(ValueError, match=r"groups must|must be as long"):
        coder.Encoder(first, tokens, columns)


def test_division_by_reciprocals_is_exact():
    rng = np.random.default_rng(0)
    frequency = np.arange(1, 2**15 + 1, dtype=np.uint64)[:, None]
    last = (2**32 - 1) // frequency
    quotients = np.concatenate([np.zeros_like(last), np.ones_like(last), last - 1, last], axis=1)
    quotients = np.concatenate([quotients, rng.integers(0, last, (len(last), 40), np.uint64, endpoint=True)], axis=1)
    for rest in (0, 1, frequency // 2, frequency - 1):
        states = np.minimum(quotients * frequency + np.minimum(rest, frequency - 1), 2**32 - 1)
        quotient = states * coder_tables.reciprocal(frequency) >> 32
        quotient += states - quotient * frequency >= frequency  # the kernel's only correction
        np.testing.assert_array_equal(quotient, states // frequency)
