"""The coder against its definition, on arbitrary symbols, and against damage."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seqkv.entropy_coding import (
    CorruptGroup,
    alphabet,
    contexts,
    cost,
    decode_group,
    decode_groups,
    encode_group,
    encode_groups,
    reference,
    tables,
)
from seqkv.entropy_coding.make_tables import class_scale, make_tables

STATE_BYTES = 128
LARGEST = 2**31 - 1


@st.composite
def groups(draw, most_tokens=70, most_coefs=24):
    """(symbols, base, offset, segment_starts) of any shape, at any scale."""
    tokens = draw(st.integers(0, most_tokens))
    coefs = draw(st.integers(0, most_coefs))
    inner = draw(st.lists(st.integers(0, coefs), max_size=4))
    segments = len(inner) + 1 if coefs or inner else draw(st.integers(0, 1))
    segment_starts = [0, *sorted(inner), coefs][: segments + 1] if segments else [0]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = rng.integers(-200, 4500, coefs)
    scale = 2.0 ** draw(st.floats(-8, 31))
    symbols = np.clip(np.rint(rng.laplace(scale=scale, size=(tokens, coefs))), -LARGEST, LARGEST)
    wild = rng.random((tokens, coefs)) < draw(st.sampled_from([0, 0.01, 0.3]))
    symbols = np.where(wild, rng.integers(-LARGEST, LARGEST, (tokens, coefs), endpoint=True), symbols)
    offset = rng.integers(-500, 500, (tokens, segments))
    return symbols.astype(np.int32), base.astype(np.int16), offset.astype(np.int16), np.array(segment_starts, np.int32)


def realistic_group(tokens=256, coefs=1000, segments=20, mean_class=18.0, seed=0):
    """Symbols whose scale drifts about what base and offset say, as residuals of a predictor do."""
    rng = np.random.default_rng(seed)
    base = np.rint(contexts.UNITS * rng.normal(mean_class, 4, coefs)).astype(np.int16)
    offset = rng.integers(-64, 64, (tokens, segments)).astype(np.int16)
    segment_starts = np.linspace(0, coefs, segments + 1).astype(np.int32)
    segment = np.searchsorted(segment_starts, np.arange(coefs), side="right") - 1
    place = (base + offset[:, segment]) / contexts.UNITS + rng.normal(0, 2, (tokens, 1)) + rng.normal(0, 2, coefs)
    symbols = np.rint(rng.laplace(scale=class_scale(place))).astype(np.int32)
    return symbols, base, offset, segment_starts


@settings(max_examples=60, deadline=None)
@given(groups())
def test_bytes_are_the_references_and_decode_to_the_symbols(group):
    symbols, *context = group
    encoded = encode_group(symbols, *context)
    assert encoded == reference.encode_group(symbols, *context)
    decoded = decode_group(encoded, symbols.shape[0], *context)
    assert decoded.dtype == np.int32
    np.testing.assert_array_equal(decoded, symbols)
    expected = np.array(reference.decode_group(encoded, symbols.shape[0], *context)).reshape(symbols.shape)
    np.testing.assert_array_equal(expected, symbols)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_smallest_groups(shape):
    context = (np.zeros(shape[1], np.int16), np.zeros((shape[0], 1), np.int16), [0, shape[1]])
    encoded = encode_group(np.zeros(shape, np.int32), *context)
    assert len(encoded) == STATE_BYTES  # zeros in class 0 cost next to nothing
    np.testing.assert_array_equal(decode_group(encoded, shape[0], *context), np.zeros(shape))


def test_every_token_at_both_ends_of_its_range():
    ends = {0, LARGEST, *range(1, 14)} | {12 + 2**k + d for k in range(31) for d in (-1, 0)}
    values = [sign * value for value in sorted(ends) for sign in (1, -1)]
    for scale_class in (0, 20, 40, 63):
        symbols = np.array([values, values[::-1]], np.int32)
        context = (np.full(len(values), 64 * scale_class), np.zeros((2, 1), int), [0, len(values)])
        encoded = encode_group(symbols, *context)
        assert encoded == reference.encode_group(symbols.tolist(), *context)
        np.testing.assert_array_equal(decode_group(encoded, 2, *context), symbols)


def test_tokens_partition_the_integers():
    for magnitude in [*range(5000), *(2**k + d for k in range(13, 31) for d in (-1, 0, 11, 12, 13)), LARGEST]:
        for value in {magnitude, -magnitude}:
            if magnitude <= alphabet.LARGEST_PLAIN:
                token = alphabet.plain_token(value)
                assert token < alphabet.ESCAPE
                assert alphabet.plain_value(token) == value
            else:
                token = alphabet.escape_token(value)
                raw = alphabet.escape_raw(token, value)
                assert alphabet.ESCAPE <= token < alphabet.TOKENS
                assert 0 <= raw < 1 << alphabet.raw_bits(token)
                assert alphabet.escape_value(token, raw) == value


@pytest.mark.parametrize("mean_class", [14, 20, 28])
def test_cost_is_the_length_of_large_groups(mean_class):
    group = realistic_group(mean_class=mean_class)
    bits = 8 * len(encode_group(*group))
    ideal = cost(*group)
    assert ideal <= bits - 8 * STATE_BYTES + 32 * 16  # the states themselves hold some of the code
    assert bits <= 1.01 * ideal + 8 * STATE_BYTES


def test_contexts_learn_scales_that_base_does_not_know():
    symbols, base, offset, segment_starts = realistic_group()
    right = cost(symbols, base, offset, segment_starts)
    static = static_cost(symbols, base, offset, segment_starts)
    assert right < 0.98 * static
    assert cost(symbols, np.full_like(base, np.mean(base)), offset, segment_starts) < 1.1 * right


def static_cost(symbols, base, offset, segment_starts):
    """Bits under the classes that base and offset alone give; plain tokens only."""
    segment = np.searchsorted(segment_starts, np.arange(base.size), side="right") - 1
    classes = np.clip((base + offset[:, segment]) >> contexts.UNIT_BITS, 0, contexts.CLASSES - 1)
    plain = np.clip(symbols, -alphabet.LARGEST_PLAIN, alphabet.LARGEST_PLAIN)
    tokens = np.where(plain > 0, 2 * plain - 1, -2 * plain)
    return float(tables.BITS[classes * tables.ROW + tokens].sum())


def test_an_outlier_costs_bits_and_nothing_else():
    symbols, *context = realistic_group(coefs=100)
    usual = cost(symbols, *context)
    symbols[100, 50] = -2_000_000_000
    assert cost(symbols, *context) < usual + 200
    np.testing.assert_array_equal(decode_group(encode_group(symbols, *context), 256, *context), symbols)


@settings(max_examples=40, deadline=None)
@given(groups(), st.data())
def test_first_segments_decode_alone(group, data):
    symbols, base, offset, segment_starts = group
    segments = data.draw(st.integers(0, segment_starts.size - 1))
    encoded = encode_group(*group)
    decoded = decode_group(encoded, symbols.shape[0], base, offset, segment_starts, segments=segments)
    np.testing.assert_array_equal(decoded, symbols[:, : segment_starts[segments]])


@settings(max_examples=100, deadline=None)
@given(groups(), st.data())
def test_truncated_groups_are_corrupt(group, data):
    symbols, *context = group
    encoded = encode_group(symbols, *context)
    length = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(CorruptGroup):
        decode_group(encoded[:length], symbols.shape[0], *context)


def test_first_segments_of_a_truncated_group_are_whole_or_corrupt():
    symbols, *context = realistic_group(tokens=64, coefs=40, segments=2, mean_class=26)
    encoded = encode_group(symbols, *context)
    whole = 0
    for length in range(STATE_BYTES, len(encoded), 2):
        try:
            decoded = decode_group(encoded[:length], 64, *context, segments=1)
        except CorruptGroup:
            assert not whole
        else:
            np.testing.assert_array_equal(decoded, symbols[:, :20])
            whole += 1
    assert 0 < whole < (len(encoded) - STATE_BYTES) // 2


@pytest.mark.parametrize("value", [2**31, -(2**31), 2**31 + 11])
def test_symbols_beyond_32_bits_are_corrupt(value):
    context = ([64 * 40], [[0]], [0, 1])
    with pytest.raises(CorruptGroup):
        decode_group(reference.encode_group([[value]], *context), 1, *context)


@settings(max_examples=100, deadline=None)
@given(groups(), st.binary(min_size=1, max_size=40))
def test_groups_with_more_bytes_are_corrupt(group, more):
    symbols, *context = group
    with pytest.raises(CorruptGroup):
        decode_group(encode_group(symbols, *context) + more, symbols.shape[0], *context)


@settings(max_examples=200, deadline=None)
@given(groups(), st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 50]))
def test_altered_groups_decode_as_the_reference_says(group, seed, changes):
    symbols, *context = group
    altered = np.frombuffer(encode_group(symbols, *context), np.uint8).copy()
    rng = np.random.default_rng(seed)
    altered[rng.integers(0, altered.size, changes)] ^= rng.integers(1, 256, changes, dtype=np.uint8)
    assert_decodes_as_the_reference(altered.tobytes(), symbols.shape[0], *context)


@settings(max_examples=100, deadline=None)
@given(groups(), st.binary(min_size=0, max_size=600))
@example((np.zeros((40, 9), np.int32), np.zeros(9, int), np.zeros((40, 1), int), np.array([0, 9])), bytes(128))
@example((np.zeros((40, 9), np.int32), np.zeros(9, int), np.zeros((40, 1), int), np.array([0, 9])), b"\xff" * 600)
def test_arbitrary_bytes_decode_as_the_reference_says(group, buffer):
    symbols, *context = group
    assert_decodes_as_the_reference(buffer, symbols.shape[0], *context)


def assert_decodes_as_the_reference(buffer, tokens, base, offset, segment_starts):
    try:
        expected = reference.decode_group(buffer, tokens, base, offset, segment_starts)
    except CorruptGroup:
        with pytest.raises(CorruptGroup):
            decode_group(buffer, tokens, base, offset, segment_starts)
    else:
        decoded = decode_group(buffer, tokens, base, offset, segment_starts)
        np.testing.assert_array_equal(decoded, np.array(expected).reshape(decoded.shape))


def test_many_groups_in_threads_inside_threads():
    many = [realistic_group(tokens=40 + i, coefs=60, segments=3, seed=i) for i in range(6)]
    expected = [encode_group(*group) for group in many]
    with ThreadPoolExecutor(3) as pool:
        for encoded in pool.map(lambda threads: encode_groups(many, threads=threads), [None, 1, 4]):
            assert encoded == expected
    buffers = [(data, group[0].shape[0], *group[1:]) for data, group in zip(expected, many, strict=True)]
    for decoded, group in zip(decode_groups(buffers, threads=3), many, strict=True):
        np.testing.assert_array_equal(decoded, group[0])
    for decoded, group in zip(decode_groups(buffers, segments=1), many, strict=True):
        np.testing.assert_array_equal(decoded, group[0][:, :20])
    assert encode_groups([]) == []


def test_other_array_types_are_taken_if_they_fit():
    symbols, base, offset, segment_starts = realistic_group(tokens=33, coefs=50, segments=5)
    expected = encode_group(symbols, base, offset, segment_starts)
    transposed = np.asfortranarray(symbols.astype(np.int64))
    assert encode_group(transposed, base.tolist(), offset.astype(np.int32), segment_starts.tolist()) == expected
    decoded = decode_group(memoryview(bytearray(expected)), 33, base, offset, segment_starts)
    np.testing.assert_array_equal(decoded, symbols)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"symbols": [[0.5, 0, 0]]}, "integers"),
        ({"symbols": [[2**40, 0, 0]]}, "do not fit"),
        ({"symbols": [[-(2**31), 0, 0]]}, "at least"),
        ({"symbols": [0, 0, 0]}, "shape"),
        ({"symbols": [[0, 0]]}, "coefficients"),
        ({"base": [2**15, 0, 0]}, "do not fit"),
        ({"offset": [[0]]}, "shape"),
        ({"segment_starts": [0, 2, 2]}, "end with"),
        ({"segment_starts": [1, 2, 3]}, "begin with"),
        ({"segment_starts": [0, 4, 3]}, "decrease"),
        ({"segment_starts": np.zeros(0, int)}, "begin with"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"symbols": [[0, 0, 0]], "base": [0, 0, 0], "offset": [[0, 0]], "segment_starts": [0, 1, 3]}
    encoded = encode_group(**arguments)
    with pytest.raises(ValueError, match=message):
        encode_group(**(arguments | change))
    with pytest.raises(ValueError, match="segments"):
        decode_group(encoded, 1, *list(arguments.values())[1:], segments=3)


def laplace_tail(x, scale):
    return math.exp(-x / scale)


def student_like_tail(x, scale):
    return (1 + x / (2 * scale)) ** -3


@pytest.mark.parametrize("made", [(tables.FREQUENCIES, tables.SCORES), laplace_tail, student_like_tail])
def test_tables_are_distributions_of_growing_scale(made):
    frequencies, scores = (table.astype(np.int64) for table in (make_tables(made) if callable(made) else made))
    assert frequencies.shape == scores.shape == (contexts.CLASSES, alphabet.TOKENS)
    assert (frequencies >= 1).all()
    assert (frequencies.sum(axis=1) == alphabet.TOTAL).all()
    positive, negative = frequencies[:, 1 : alphabet.ESCAPE : 2], frequencies[:, 2 : alphabet.ESCAPE : 2]
    np.testing.assert_array_equal(positive, negative)
    assert (frequencies[:, 0] >= positive[:, 0]).all()
    assert (np.diff(positive, axis=1) <= 0).all()  # unimodal
    assert (np.diff(frequencies[:, 0]) <= 0).all()  # zero is ever less probable, so classes are in order
    assert (scores[:, 0] <= 0).all()  # zero never asks for a larger scale, the largest never for a smaller one
    assert (scores[:, -1] > 0).all()
    assert (np.diff(scores[:, [0, *range(1, alphabet.ESCAPE, 2)]], axis=1) >= 0).all()


def test_shipped_tables_are_the_generators():
    frequencies, scores = make_tables()  # its floats may round otherwise on other machines: hence shipped
    assert np.abs(frequencies.astype(int) - tables.FREQUENCIES).max() <= 1
    assert np.abs(scores.astype(int) - tables.SCORES).max() <= 1


def test_buckets_begin_the_search_at_or_before_the_token():
    ends = np.cumsum(tables.FREQUENCIES, axis=1, dtype=np.int64)
    part = alphabet.TOTAL >> tables.BUCKET_BITS
    for scale_class in range(contexts.CLASSES):
        token = np.searchsorted(ends[scale_class], np.arange(0, alphabet.TOTAL, part), side="right")
        first = scale_class << tables.BUCKET_BITS
        np.testing.assert_array_equal(tables.BUCKET_TOKENS[first : first + token.size], token)


def test_reference_contexts_stay_in_range():
    assert contexts.scale_class(-(2**30)) == 0
    assert contexts.scale_class(2**30) == contexts.CLASSES - 1
    assert contexts.moved(contexts.STATE_LIMIT, 512, 32) == contexts.STATE_LIMIT
    assert contexts.moved(-contexts.STATE_LIMIT, -512, 32) == -contexts.STATE_LIMIT
    assert [contexts.decayed(state, 3) for state in (8, -8, 7, -1)] == [7, -7, 7, 0]
