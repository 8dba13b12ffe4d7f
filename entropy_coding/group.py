"""Stream groups: matrices of symbols to bytes and back, and how long they will be.

What is coded, in which order, and the bytes are defined by :mod:`seqkv.entropy_coding.reference`. Arguments throughout:

``symbols`` int32 [tokens, coefs]
    any values but -2^31; any number of tokens and coefficients, 0 included.
``base`` int16 [coefs], ``offset`` int16 [tokens, segments]
    where on the scale axis the contexts start, in units of 1/64 class (:mod:`seqkv.entropy_coding.contexts`).
``segment_starts`` int32 [segments + 1]
    first coefficient of each segment, beginning with 0 and ending with ``coefs``; segments may be empty.

Arrays of other integer types are taken if their values fit. The decoder needs the encoder's ``base``, ``offset`` and
``segment_starts``; with others it raises CorruptGroup or returns other symbols, so keep a checksum where that matters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from seqkv.entropy_coding import contexts, interleaved, tables
from seqkv.entropy_coding.alphabet import LARGEST_VALUE
from seqkv.entropy_coding.errors import CorruptGroup
from seqkv.entropy_coding.interleaved import IDLE, LANES, LOWEST_STATE, MOST_WORDS_A_STEP

STATE_BYTES = 4 * LANES

Buffer = bytes | bytearray | memoryview
SymbolArgs = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
BufferArgs = tuple[Buffer, int, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
Args = TypeVar("Args")
Result = TypeVar("Result")


def encode_group(
    symbols: npt.ArrayLike, base: npt.ArrayLike, offset: npt.ArrayLike, segment_starts: npt.ArrayLike
) -> bytes:
    """Bytes of a group: 128 of states, then two a word. Equal on every machine."""
    symbols, base, offset, segment_starts = _checked_symbols(symbols, base, offset, segment_starts)
    entries, has_escape, escapes = _classified(symbols, base, offset, segment_starts)
    states = np.full(LANES, LOWEST_STATE, np.uint32)
    words = np.empty(symbols.size + 2 * escapes + 1, np.uint16)
    first = interleaved.encode(symbols, entries, has_escape, segment_starts, tables.STARTS, states, words)
    return states.astype("<u4", copy=False).tobytes() + words[first:].astype("<u2", copy=False).tobytes()


def decode_group(
    buffer: Buffer,
    tokens: int,
    base: npt.ArrayLike,
    offset: npt.ArrayLike,
    segment_starts: npt.ArrayLike,
    *,
    segments: int | None = None,
) -> npt.NDArray[np.int32]:
    """Symbols int32 [tokens, coefs] of a group, or those of its first ``segments`` segments.

    Raises CorruptGroup if the bytes cannot be a group of this shape. Damage may also show only as wrong symbols, if
    ``segments`` leaves out the end, where the coder checks itself. Time and memory depend on the shape, not the bytes.
    """
    base, offset, segment_starts = _checked_contexts(tokens, base, offset, segment_starts)
    last = segment_starts.size - 1
    wanted = last if segments is None else segments
    if not 0 <= wanted <= last:
        raise ValueError(f"segments must be from 0 to {last}, not {segments}")
    size = memoryview(buffer).nbytes
    if size < STATE_BYTES or size % 2:
        raise CorruptGroup(f"a group is {STATE_BYTES} bytes of states and 2 bytes a word, not {size} bytes")
    word_count = (size - STATE_BYTES) // 2
    states = np.frombuffer(buffer, "<u4", LANES).astype(np.uint32)
    words = np.zeros(word_count + MOST_WORDS_A_STEP, np.uint16)
    words[:word_count] = np.frombuffer(buffer, "<u2", word_count, STATE_BYTES)
    symbols = np.empty((tokens, segment_starts[wanted]), np.int32)
    read = interleaved.decode(
        words,
        word_count,
        base,
        offset,
        segment_starts[: wanted + 1],
        tables.STARTS,
        tables.BUCKET_TOKENS,
        tables.SCORE_ROWS,
        _rates(),
        states,
        symbols,
    )
    if read < 0:
        raise CorruptGroup("the group ends before its last symbol, or holds a symbol beyond 32 bits")
    if wanted == last and (read != word_count or (states != LOWEST_STATE).any()):
        raise CorruptGroup("the group does not end where its last symbol does")
    return symbols


def cost(symbols: npt.ArrayLike, base: npt.ArrayLike, offset: npt.ArrayLike, segment_starts: npt.ArrayLike) -> float:
    """Ideal code length of a group in bits, without its 1,024 bits of states; an estimate, not the same everywhere."""
    symbols, base, offset, segment_starts = _checked_symbols(symbols, base, offset, segment_starts)
    entries, _, _ = _classified(symbols, base, offset, segment_starts)
    return interleaved.sum_bits(entries, tables.BITS)


def encode_groups(groups: Iterable[SymbolArgs], *, threads: int | None = None) -> list[bytes]:
    """:func:`encode_group` of each (symbols, base, offset, segment_starts), in ``threads`` threads (default: CPUs)."""
    return _in_threads(lambda group: encode_group(*group), groups, threads)


def decode_groups(
    groups: Iterable[BufferArgs], *, segments: int | None = None, threads: int | None = None
) -> list[npt.NDArray[np.int32]]:
    """:func:`decode_group` of each (buffer, tokens, base, offset, segment_starts), in ``threads`` threads."""
    return _in_threads(lambda group: decode_group(*group, segments=segments), groups, threads)


def _in_threads(code: Callable[[Args], Result], groups: Iterable[Args], threads: int | None) -> list[Result]:
    """Python threads, as the compiled functions release the GIL: unlike Numba's own threading layers, of which some may
    not be entered twice, they work from any thread and inside other pools."""
    todo = list(groups)
    workers = min(threads or os.cpu_count() or 1, len(todo))
    if workers <= 1:
        return [code(group) for group in todo]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(code, todo))


def _rates() -> tuple[int, int, int]:
    return contexts.TOKEN_RATE, contexts.COEF_RATE, contexts.DECAY_SHIFT


def _classified(
    symbols: npt.NDArray[np.int32],
    base: npt.NDArray[np.int16],
    offset: npt.NDArray[np.int16],
    segment_starts: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8], int]:
    """Table entries in coding order, which steps have raw bits, and the number of escapes."""
    token_count, coefs = symbols.shape
    rows = -(-token_count // LANES)
    tokens = np.empty(symbols.shape, np.uint8)
    has_escape = np.zeros((rows, coefs), np.uint8)
    escapes = interleaved.tokenise(symbols, tokens, has_escape)
    if escapes < 0:
        raise ValueError(f"symbols must be at least {-LARGEST_VALUE}")
    entries = np.full(rows * LANES * coefs, IDLE, np.uint16)
    interleaved.classify(tokens, base, offset, segment_starts, tables.SCORE_ROWS, _rates(), entries)
    return entries, has_escape, escapes


def _checked_symbols(
    symbols: npt.ArrayLike, base: npt.ArrayLike, offset: npt.ArrayLike, segment_starts: npt.ArrayLike
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16], npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    symbols = _input(symbols, np.int32, (None, None), "symbols")
    contexts_ = _checked_contexts(symbols.shape[0], base, offset, segment_starts)
    if contexts_[0].size != symbols.shape[1]:
        raise ValueError(f"base has {contexts_[0].size} coefficients, symbols {symbols.shape[1]}")
    return symbols, *contexts_


def _checked_contexts(
    tokens: int, base: npt.ArrayLike, offset: npt.ArrayLike, segment_starts: npt.ArrayLike
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    base = _input(base, np.int16, (None,), "base")
    segment_starts = _input(segment_starts, np.int32, (None,), "segment_starts")
    if segment_starts.size == 0 or segment_starts[0] != 0 or segment_starts[-1] != base.size:
        raise ValueError(f"segment_starts must begin with 0 and end with the number of coefficients, {base.size}")
    if (segment_starts[1:] < segment_starts[:-1]).any():
        raise ValueError("segment_starts must not decrease")
    return base, _input(offset, np.int16, (tokens, segment_starts.size - 1), "offset"), segment_starts


def _input(array: npt.ArrayLike, dtype: Any, shape: tuple[int | None, ...], name: str) -> npt.NDArray[Any]:
    """``array`` as a read-only contiguous view or copy, so that each function is compiled for one type only."""
    given = np.asarray(array)
    if given.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, given.shape, strict=True)):
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} must have shape ({wanted}), not {given.shape}")
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, not {given.dtype}")
    converted = np.ascontiguousarray(given, dtype)
    if not np.can_cast(given.dtype, dtype) and not np.array_equal(converted, given):
        raise ValueError(f"{name} has values that do not fit {np.dtype(dtype)}")
    view = converted.view()
    view.flags.writeable = False
    return view
