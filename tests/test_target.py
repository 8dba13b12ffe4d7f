"""decode_into: the caller's arrays, plain and paged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from seqkv import engine
from seqkv.engine import CacheError, KVCache, Profile

TOKENS, LAYERS, HEADS, KEY, VALUE = 300, 3, 2, 8, 6


@pytest.fixture(scope="module")
def coded(profile: Profile, sample: Callable[..., Any]) -> tuple[bytes, KVCache]:
    s = sample(TOKENS, positions=np.arange(TOKENS) + 7)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=0.002, importance=s.importance)
    return stream, engine.decode(stream, profile=profile)


def plain(dtype: Any = np.float32, tokens: int = TOKENS) -> tuple[list[Any], list[Any]]:
    keys = [np.full((HEADS, tokens, KEY), np.nan, dtype) for _ in range(LAYERS)]
    return keys, [np.full((HEADS, tokens, VALUE), np.nan, dtype) for _ in range(LAYERS)]


def test_arrays_of_the_caller_get_what_decode_returns(coded: Any, profile: Profile) -> None:
    stream, whole = coded
    keys, values = plain()
    engine.decode_into(stream, keys, values, profile=profile)
    for ours, theirs in zip(keys + values, whole.keys + whole.values, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_part_goes_into_arrays_of_its_size(coded: Any, profile: Profile) -> None:
    stream, whole = coded
    keys, values = plain(tokens=40)
    part = {"tokens": slice(250, 290), "layers": slice(1, 3)}
    engine.decode_into(stream, keys[:2], values[:2], profile=profile, **part)
    for layer in (1, 2):
        np.testing.assert_array_equal(keys[layer - 1], whole.keys[layer][:, 250:290])
        np.testing.assert_array_equal(values[layer - 1], whole.values[layer][:, 250:290])
    assert np.isnan(keys[2]).all()


def test_pages_take_keys_and_values_side_by_side(coded: Any, profile: Profile) -> None:
    stream, whole = coded
    size, blocks = 16, 25
    pages = [np.full((blocks, HEADS, size, KEY + VALUE), np.nan, np.float32) for _ in range(LAYERS)]
    slots = np.random.default_rng(0).permutation(blocks * size)[:TOKENS]
    halves = [p[..., :KEY] for p in pages], [p[..., KEY:] for p in pages]
    engine.decode_into(stream, *halves, slots=slots, profile=profile)
    for layer, page in enumerate(pages):
        rows = page.transpose(1, 0, 2, 3).reshape(HEADS, blocks * size, KEY + VALUE)
        np.testing.assert_array_equal(rows[:, slots, :KEY], whole.keys[layer])
        np.testing.assert_array_equal(rows[:, slots, KEY:], whole.values[layer])
        assert np.isnan(np.delete(rows, slots, axis=1)).all()  # nothing is written anywhere else


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_get_numbers_rounded_to_their_dtype(dtype: torch.dtype, coded: Any, profile: Profile) -> None:
    stream, whole = coded
    # tokens and heads swapped, as some servers keep them: strides are the array's own business
    keys = [torch.zeros(TOKENS, HEADS, KEY, dtype=dtype).transpose(0, 1) for _ in range(LAYERS)]
    values = [torch.zeros(TOKENS, HEADS, VALUE, dtype=dtype).transpose(0, 1) for _ in range(LAYERS)]
    engine.decode_into(stream, keys, values, profile=profile)
    for ours, theirs in zip(keys + values, whole.keys + whole.values, strict=True):
        assert torch.equal(ours, torch.from_numpy(theirs).to(dtype))


def read_only() -> tuple[list[Any], list[Any]]:
    keys, values = plain()
    keys[1].flags.writeable = False
    return keys, values


@pytest.mark.parametrize(
    ("arrays", "slots", "message"),
    [
        (plain(tokens=TOKENS - 1), None, "do not fit"),
        (plain(), np.arange(TOKENS), "kv_heads, block, width"),
        ((plain()[0][:2], plain()[1]), None, "2 keys and 3 values were given for 3 layers"),
        (plain(np.float64), None, "float64"),
        (plain(np.int32), None, "int32"),
        (read_only(), None, "cannot be written to"),
        ((plain()[1], plain()[0]), None, "2 heads of 6, the stream has 2 of 8"),
        (([x.tolist() for x in plain()[0]], plain()[1]), None, "a NumPy, CuPy or torch array"),
    ],
)
def test_what_does_not_fit_is_refused(arrays: Any, slots: Any, message: str, coded: Any, profile: Profile) -> None:
    with pytest.raises(CacheError, match=message):
        engine.decode_into(coded[0], *arrays, slots=slots, profile=profile)


def expanded() -> tuple[list[Any], list[Any]]:
    keys, values = plain()
    return [torch.zeros(1, TOKENS, KEY).expand(HEADS, TOKENS, KEY), *keys[1:]], values


def windows() -> tuple[list[Any], list[Any]]:
    """Each token begins where the one before it has a number still."""
    keys, values = plain()
    return keys, [*values[:2], torch.zeros(HEADS, TOKENS + VALUE - 1).unfold(1, VALUE, 1)]


def twice() -> tuple[list[Any], list[Any]]:
    keys, values = plain()
    return [keys[0], keys[1], keys[0]], values


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (expanded(), "keys of layer 0: several numbers of the array share memory"),
        (windows(), "values of layer 2: several numbers"),
        (twice(), "one was given twice"),
    ],
    ids=["expanded", "windows", "twice"],
)
def test_arrays_that_share_memory_are_refused(arrays: Any, message: str, coded: Any, profile: Profile) -> None:
    with pytest.raises(CacheError, match=message):
        engine.decode_into(coded[0], *arrays, profile=profile)


def test_parts_of_one_array_are_taken_in_any_order_of_axes(coded: Any, profile: Profile) -> None:
    stream, whole = coded
    memory = np.zeros((TOKENS, LAYERS, HEADS + 1, 2 * KEY), np.float32)
    keys = [memory[:, layer, :HEADS, ::2].transpose(1, 0, 2) for layer in range(LAYERS)]
    values = [memory[:, layer, HEADS:0:-1, 1 : 2 * VALUE : 2].transpose(1, 0, 2) for layer in range(LAYERS)]
    engine.decode_into(stream, keys, values, profile=profile)
    for ours, theirs in zip(keys + values, whole.keys + whole.values, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (np.arange(TOKENS) - 1, "not negative"),
        (np.zeros(TOKENS, np.int64), "different"),
        (np.arange(TOKENS - 1), "expected 300"),
        (np.arange(TOKENS) + 21, "do not fit"),
        (np.arange(TOKENS) + 0.5, "integers"),
    ],
)
def test_slots_that_are_wrong_are_refused(slots: Any, message: str, coded: Any, profile: Profile) -> None:
    keys = [np.zeros((20, HEADS, 16, KEY), np.float32) for _ in range(LAYERS)]
    values = [np.zeros((20, HEADS, 16, VALUE), np.float32) for _ in range(LAYERS)]
    with pytest.raises(CacheError, match=message):
        engine.decode_into(coded[0], keys, values, slots=slots, profile=profile)
    assert not any(x.any() for x in keys + values)
