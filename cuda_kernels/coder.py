"""The interleaved coder on the device: many groups at once, a few segments at a time. Same bytes as entropy_coding.

The groups of a batch lie side by side: group g has the columns first[g], ..., first[g] + tokens[g] - 1 of every matrix,
a column a token. Groups may have any size, 0 included, and do not overlap. A group's stream is that of
:func:`entropy_coding.encode_group` for its live coefficients, which are those with a symbol other than 0 in it.
Arguments throughout:

``first``, ``tokens``
    integers on the host, one a group.
``symbols`` int32 [coefs, columns]
    any values but -2^31.
``base`` int16 [groups or 1, coefs], ``offset`` int16 [segments, columns]
    where the contexts start; one row of base is that of all groups.
``segment_starts``
    integers on the host: first coefficient of each segment of this call, from 0, and at the end coefs.

All other arrays are CuPy's, contiguous, and everything runs on the current stream. Functions raise ValueError for
arguments of other shapes or types. A column count must be below 2^30.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from seqkv.cuda_kernels import coder_tables, device
from seqkv.entropy_coding import CorruptGroup, alphabet, contexts, tables
from seqkv.entropy_coding.group import STATE_BYTES, Buffer
from seqkv.entropy_coding.interleaved import LANES, LOWEST_STATE

MOST_WARPS = 8  # of a block
BLOCKS_A_MULTIPROCESSOR = 4  # that registers and shared memory leave room for
MANY_GROUPS = 512  # about as many as there are places for blocks: with fewer each group has a block of its own
MOST_COLUMNS = 1 << 30

CODER = "coder.cu"
COMPACTION = "compaction.cu"
DEFINES: dict[str, tuple[tuple[str, int], ...]] = {
    CODER: (
        *((name, getattr(alphabet, name)) for name in ("PRECISION", "ESCAPE", "LARGEST_PLAIN", "LARGEST_VALUE")),
        ("RAW_PIECE", alphabet.RAW_PIECE),
        *((name, getattr(contexts, name)) for name in ("CLASSES", "UNIT_BITS", "SUBUNIT_BITS", "STATE_LIMIT")),
        *((name, getattr(contexts, name)) for name in ("TOKEN_RATE", "COEF_RATE", "DECAY_SHIFT")),
        ("ROW_BITS", tables.ROW_BITS),
        ("BUCKET_BITS", tables.BUCKET_BITS),
        ("DECODE_ENTRIES", coder_tables.ENTRIES),
        ("SCORE_STRIDE", coder_tables.SCORE_STRIDE),
        ("MOST_THREADS", MOST_WARPS * LANES),
        ("BLOCKS_A_MULTIPROCESSOR", BLOCKS_A_MULTIPROCESSOR),
    ),
    COMPACTION: (("LARGEST_PLAIN", alphabet.LARGEST_PLAIN), ("MOST_THREADS", MOST_WARPS * LANES)),
}
"""What the kernels of each file are compiled with, for device.raw_module and build.compile_file."""

TOO_LARGE = 1  # flag of a group, set by kernels; the other says that statistics are not those of the symbols


@dataclass(frozen=True)
class Statistics:
    """Of symbols, on the device: sums of absolute values int64 [groups, coefs], numbers of escapes int64 [groups]."""

    magnitude: Any
    escapes: Any


def statistics(symbols: Any, first: npt.ArrayLike, tokens: npt.ArrayLike) -> Statistics:
    """Statistics of symbols, for :meth:`Encoder.add`."""
    coefs, columns = _two(symbols)
    _check("symbols", symbols, (coefs, columns), np.int32)
    groups = _Groups(first, tokens, columns)
    cupy = device.cupy()
    found = Statistics(cupy.empty((groups.count, coefs), np.int64), cupy.zeros(groups.count, np.int64))
    sizes = (np.int32(groups.count), np.int32(coefs), np.int32(columns))
    arrays = (symbols, groups.first, groups.tokens, found.magnitude, found.escapes)
    _launch(COMPACTION, "measure", groups.count * coefs, (*arrays, *sizes), MOST_WARPS)
    return found


class Encoder:
    """Codes groups together.

    Device memory between calls: 2 bytes for each live coefficient and token (rounded up to 32 a group), 4 an escape and
    4 a column; finish takes as much again and the bytes of the streams. add needs 9 bytes a group and coefficient.
    """

    def __init__(self, first: npt.ArrayLike, tokens: npt.ArrayLike, columns: int) -> None:
        self._groups = _Groups(first, tokens, columns)
        cupy = device.cupy()
        self._scores, self._codes = cupy.asarray(coder_tables.scores()), cupy.asarray(coder_tables.codes())
        self._token_state = cupy.zeros(columns, np.int32)
        self._flags = cupy.zeros(self._groups.count, np.uint32)
        self._most_words = np.zeros(self._groups.count, np.int64)
        self._segments = 0
        self._live: list[npt.NDArray[np.uint8]] = []
        self._passes: list[tuple[Any, ...]] = []

    def add(self, symbols: Any, statistics: Statistics, base: Any, offset: Any, segment_starts: Sequence[int]) -> None:
        """The next segments: classes of their symbols. Copies a byte a group and coefficient to the host.

        statistics: those of these symbols. With others, coefficients may be left out, or finish raises ValueError.
        """
        groups, cupy = self._groups, device.cupy()
        coefs, segments = _check_contexts(groups, base, offset, segment_starts)
        _check("symbols", symbols, (coefs, groups.columns), np.int32)
        _check("magnitude", statistics.magnitude, (groups.count, coefs), np.int64)
        _check("escapes", statistics.escapes, (groups.count,), np.int64)
        flags = cupy.empty((groups.count, coefs), np.uint8)
        marked = (statistics.magnitude, flags, np.int64(flags.size))
        _launch(COMPACTION, "mark_live", -(-flags.size // LANES), marked, MOST_WARPS)
        live = _list_live(groups, flags, 0, segment_starts)
        self._live.append(flags.get())
        counts = self._live[-1].sum(axis=1, dtype=np.int64)
        escapes = statistics.escapes.get()
        rows = -(-groups.host_tokens // LANES)
        entry_starts, raw_starts = _starts(counts * rows * LANES), _starts(escapes)
        self._most_words += counts * groups.host_tokens + 2 * escapes  # a word a token, one a piece of raw bits

        entries, raw = cupy.empty(int(entry_starts[-1]), np.uint16), cupy.empty(int(raw_starts[-1]), np.uint32)
        raw_counts = cupy.zeros(groups.count, np.int64)
        coded = (entries, cupy.asarray(entry_starts), raw, cupy.asarray(raw_starts), raw_counts)
        contexts_ = (base, _stride(base), offset, np.int32(self._segments), self._token_state, cupy.empty_like(live[0]))
        sizes = (np.int32(groups.count), np.int32(coefs), np.int32(segments), np.int32(groups.columns))
        arrays = (symbols, self._scores, groups.first, groups.tokens, *live, *contexts_, *coded, self._flags)
        groups.launch("classify", (*arrays, *sizes))
        self._segments += segments
        self._passes.append(coded)

    def finish(self) -> tuple[list[memoryview], npt.NDArray[np.uint8]]:
        """The bytes of each group, and which coefficients are live, uint8 [groups, coefs of all that was added].

        To be called once. Raises ValueError if a symbol was -2^31, or statistics were not those of the symbols.
        """
        groups, cupy = self._groups, device.cupy()
        states = cupy.asarray(np.full((groups.count, LANES), LOWEST_STATE, np.uint32))
        written = cupy.zeros(groups.count, np.int64)
        word_ends = _starts(self._most_words)[1:]
        words = cupy.empty(int(self._most_words.sum()), np.uint16)
        word_ends = cupy.asarray(word_ends)
        while self._passes:
            arrays = (*self._passes.pop(), self._flags, self._codes, states, words, word_ends, written)
            groups.launch("encode", (*arrays, np.int32(groups.count)))
        starts = cupy.zeros(groups.count + 1, np.int64)
        _launch(COMPACTION, "scan_sizes", 1, (written, starts, np.int32(groups.count)), 1)
        flags, ends = self._flags.get(), starts.get()
        if flags.any():
            bad = _named(np.flatnonzero(flags))
            least = f"symbols must be at least {-alphabet.LARGEST_VALUE}"
            raise ValueError(f"{least if flags.max() & TOO_LARGE else 'statistics are of other symbols'}: {bad}")
        streams = cupy.empty(int(ends[-1]), np.uint16)
        gathered = (states, words, word_ends, starts, streams)
        _launch(COMPACTION, "gather", groups.count * MOST_WARPS, gathered, MOST_WARPS)
        data = memoryview(streams.get().view(np.uint8))
        live = np.concatenate([np.zeros((groups.count, 0), np.uint8), *self._live], axis=1)
        return [data[2 * start : 2 * end] for start, end in itertools.pairwise(ends)], live


class Decoder:
    """Decodes groups together.

    groups: the bytes of each. live: whether each coefficient is live, host array [groups, coefs of all segments].
    Raises CorruptGroup for bytes that cannot be a group. Device memory: the bytes, and 4 a column; next needs 8 bytes a
    group and coefficient.
    """

    def __init__(
        self,
        groups: Sequence[Buffer],
        live: npt.ArrayLike,
        first: npt.ArrayLike,
        tokens: npt.ArrayLike,
        columns: int,
    ) -> None:
        self._groups = _Groups(first, tokens, columns)
        flags = np.asarray(live)
        if len(groups) != self._groups.count or flags.ndim != 2 or len(flags) != len(groups):
            raise ValueError(f"{self._groups.count} groups need as many buffers and rows of live flags")
        sizes = np.array([memoryview(group).nbytes for group in groups], np.int64)
        bad = np.flatnonzero((sizes < STATE_BYTES) | (sizes % 2 != 0))
        if bad.size:
            raise CorruptGroup(f"{_named(bad)}: a group is {STATE_BYTES} bytes of states and 2 bytes a word")
        cupy = device.cupy()
        states = b"".join(memoryview(group).cast("B")[:STATE_BYTES] for group in groups)
        self._word_counts = (sizes - STATE_BYTES) // 2
        self._states = cupy.asarray(np.frombuffer(states, "<u4").astype(np.uint32).reshape(-1, LANES))
        word_starts = _starts(self._word_counts)
        self._word_starts = cupy.asarray(word_starts)
        self._words = cupy.empty(int(word_starts[-1]), np.uint16)
        as_bytes = self._words.view(np.uint8)  # both sides are little-endian, and a group may lie at an odd address
        for group, start, count in zip(groups, word_starts, self._word_counts, strict=False):
            if count:
                words = np.frombuffer(group, np.uint8, 2 * int(count), STATE_BYTES)
                as_bytes[2 * int(start) : 2 * int(start + count)].set(words)
        self._flags = cupy.asarray(np.ascontiguousarray(flags != 0).view(np.uint8))
        self._tables = tuple(cupy.asarray(table) for table in (coder_tables.entries(), coder_tables.buckets()))
        self._positions = cupy.zeros(len(groups), np.int64)
        self._damage = cupy.zeros(len(groups), np.uint32)
        self._token_state = cupy.zeros(columns, np.int32)
        self._segments = self._coefs = 0

    def next(self, base: Any, offset: Any, segment_starts: Sequence[int], symbols: Any) -> None:
        """Writes the symbols of the next segments; 0 where not live, and in columns that no group has.

        What it writes of damaged groups means nothing: see check.
        """
        groups, cupy = self._groups, device.cupy()
        coefs, segments = _check_contexts(groups, base, offset, segment_starts)
        _check("symbols", symbols, (coefs, groups.columns), np.int32)
        if self._coefs + coefs > self._flags.shape[1]:
            raise ValueError(f"only {self._flags.shape[1] - self._coefs} coefficients are left")
        live = _list_live(groups, self._flags, self._coefs, segment_starts)
        symbols.fill(0)
        stream = (self._words, self._word_starts, *self._tables)
        contexts_ = (base, _stride(base), offset, np.int32(self._segments))
        kept = (self._states, self._positions, self._damage, self._token_state)
        sizes = (np.int32(groups.count), np.int32(coefs), np.int32(segments), np.int32(groups.columns))
        arrays = (*stream, groups.first, groups.tokens, *live, *contexts_, *kept, cupy.empty_like(live[0]), symbols)
        groups.launch("decode", (*arrays, *sizes))
        self._segments += segments
        self._coefs += coefs

    def check(self, *, partial: bool = False) -> None:
        """Raises CorruptGroup, naming the groups, if what was decoded shows that they are damaged.

        partial: not all coefficients were decoded. Damage may then show only as wrong symbols.
        """
        if not partial and self._coefs != self._flags.shape[1]:
            raise ValueError(f"{self._flags.shape[1] - self._coefs} coefficients are not decoded yet: partial=True?")
        read = self._positions.get()
        bad = (self._damage.get() != 0) | (read > self._word_counts)
        if not partial:
            bad |= (read != self._word_counts) | (self._states.get() != LOWEST_STATE).any(axis=1)
        if bad.any():
            named = _named(np.flatnonzero(bad))
            raise CorruptGroup(f"{named}: does not end where its last symbol does, or holds one beyond 32 bits")


class _Groups:
    """Where the groups lie, checked: on the device int32 [groups], and how many tokens they have on the host."""

    def __init__(self, first: npt.ArrayLike, tokens: npt.ArrayLike, columns: int) -> None:
        starts, sizes = np.asarray(first, np.int64), np.asarray(tokens, np.int64)
        if starts.ndim != 1 or starts.shape != sizes.shape or not 0 <= columns < MOST_COLUMNS:
            raise ValueError(f"first {starts.shape} and tokens {sizes.shape} must be as long, columns below 2^30")
        if sizes.size and (starts.min() < 0 or sizes.min() < 0 or (starts + sizes).max() > columns):
            raise ValueError(f"groups must lie within the {columns} columns")
        order = np.lexsort((sizes, starts))
        if ((starts + sizes)[order][:-1] > starts[order][1:]).any():
            raise ValueError("groups must not overlap")
        self.count, self.columns, self.host_tokens = starts.size, columns, sizes
        cupy = device.cupy()
        self.first, self.tokens = (cupy.asarray(numbers.astype(np.int32)) for numbers in (starts, sizes))

    def launch(self, kernel: str, args: tuple[Any, ...], file: str = CODER) -> None:
        """A warp a group; few groups are spread over all multiprocessors."""
        _launch(file, kernel, self.count, args, min(max(self.count // MANY_GROUPS, 1), MOST_WARPS))


def _launch(file: str, kernel: str, warps: int, args: tuple[Any, ...], warps_a_block: int) -> None:
    if warps:
        function = device.raw_module(file, DEFINES[file]).get_function(kernel)
        function((-(-warps // warps_a_block),), (warps_a_block * LANES,), args)


def _list_live(groups: _Groups, flags: Any, start: int, segment_starts: Sequence[int]) -> tuple[Any, Any]:
    """Numbers of live coefficients int32 [groups, coefs], how many before each segment int32 [groups, segments + 1]."""
    cupy = device.cupy()
    coefs, segments = segment_starts[-1], len(segment_starts) - 1
    live = cupy.empty((groups.count, coefs), np.int32), cupy.empty((groups.count, segments + 1), np.int32)
    starts = cupy.asarray(np.array(segment_starts, np.int32))
    sizes = (np.int32(groups.count), np.int32(coefs), np.int32(segments))
    args = (flags, np.int64(start), np.int64(flags.shape[1]), starts, *live, *sizes)
    groups.launch("list_live", args, COMPACTION)
    return live


def _starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each of some parts starts, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _stride(base: Any) -> np.int64:
    return np.int64(base.shape[1] if base.shape[0] > 1 else 0)


def _named(groups: npt.NDArray[np.intp]) -> str:
    shown = ", ".join(map(str, groups[:8]))
    return f"group {shown}" + (f" and {groups.size - 8} more" if groups.size > 8 else "")


def _two(array: Any) -> tuple[int, int]:
    if array.ndim != 2:
        raise ValueError(f"symbols must have shape [coefs, columns], not {array.shape}")
    return array.shape


def _check(name: str, array: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, contiguous, not {array.dtype} {array.shape}")


def _check_contexts(groups: _Groups, base: Any, offset: Any, segment_starts: Sequence[int]) -> tuple[int, int]:
    """Numbers of coefficients and segments."""
    starts = list(segment_starts)
    if not starts or starts[0] != 0 or sorted(starts) != starts:
        raise ValueError(f"segment_starts must begin with 0 and not decrease: {starts}")
    coefs, segments = starts[-1], len(starts) - 1
    _check("base", base, (1 if base.shape[:1] == (1,) else groups.count, coefs), np.int16)
    _check("offset", offset, (segments, groups.columns), np.int16)
    return coefs, segments
