"""The bytes of a stream: a header and checksummed sections. Format version 0.

    4 bytes   "SQKV"
    u16       version, 0
    u16       flags, 0
    u32       length of the header
    header    a JSON object: UTF-8, keys sorted, no spaces
    u32       number of sections
    for each section, in the order of their bytes:
        u8      kind
        varint  index (LEB128)
        varint  length in bytes (LEB128)
        u64     xxh3_64 of its bytes
    u64       xxh3_64 of everything before
    sections  back to back, to the end of the stream

All numbers are little-endian. A section's place follows from the lengths before it: sections cannot overlap, leave
gaps, or reach past the end. A section is known by (kind, index); what kinds mean is the codec's business.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import DTypeLike, NDArray

from seqkv.engine.errors import CacheError, StreamError

MAGIC = b"SQKV"
VERSION = 0
MOST_HEADER = 1 << 24  # bytes: JSON takes many times its length in memory, before anything of it can be checked

Buffer = bytes | bytearray | memoryview

_FIXED = struct.Struct("<4sHHI")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SMALLEST_ENTRY = 1 + 1 + 1 + 8

_DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")  # order is format
_MAX_DIMENSIONS = 8
_ZSTD_LEVEL = 19


@dataclass(frozen=True)
class Section:
    """A part of a stream: kind 0 to 255, index 0 to 2**64 - 1, bytes."""

    kind: int
    index: int
    data: Buffer


def write(header: dict[str, Any], sections: Iterable[Section]) -> bytes:
    """A stream with this header (JSON-able) and these sections, in this order. The same input gives the same bytes.

    ValueError if two sections share kind and index, or a number is out of range, CacheError for a header of more than
    MOST_HEADER bytes.
    """
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
    if len(text) > MOST_HEADER:
        raise CacheError(f"a header of {len(text)} bytes, at most {MOST_HEADER} can be: encode a part at a time")
    sections = list(sections)
    if len({(s.kind, s.index) for s in sections}) != len(sections):
        raise ValueError("two sections share kind and index")
    out = bytearray(_FIXED.pack(MAGIC, VERSION, 0, len(text)))
    out += text
    out += _U32.pack(len(sections))
    for section in sections:
        data = memoryview(section.data).cast("B")
        out += bytes((section.kind,)) + _varint(section.index) + _varint(data.nbytes)
        out += _U64.pack(xxhash.xxh3_64_intdigest(data))
    out += _U64.pack(xxhash.xxh3_64_intdigest(out))
    for section in sections:
        out += section.data
    return bytes(out)


class Container:
    """A stream of `size` bytes, read in place: `header`, and sections that are checked when they are asked for.

    Nothing is copied: sections are views of the buffer that was parsed, which must not change meanwhile.
    """

    def __init__(self, header: dict[str, Any], table: dict[tuple[int, int], tuple[memoryview, int]], size: int) -> None:
        self.header, self.size = header, size
        self._table = table

    @classmethod
    def parse(cls, stream: Buffer) -> Container:
        """Read header and table; StreamError if they are damaged, or the stream is not as long as they say."""
        reader = _Reader(memoryview(stream).cast("B"))
        magic, version, flags, header_length = _FIXED.unpack(reader.take(_FIXED.size, "start"))
        if magic != MAGIC:
            raise StreamError(f"not a seqkv stream: it starts with {bytes(magic)!r}, not {MAGIC!r}")
        if version != VERSION or flags:
            raise StreamError(f"format version {version}, flags {flags:#x}: this release reads version {VERSION} only")
        text = reader.take(header_length, "header")
        if header_length > MOST_HEADER:
            raise StreamError(f"altered: a header of {header_length} bytes, at most {MOST_HEADER} can be")
        (count,) = _U32.unpack(reader.take(4, "number of sections"))
        if count * _SMALLEST_ENTRY > reader.left:
            raise StreamError(f"truncated: a table of {count} sections does not fit in the {reader.left} bytes left")
        entries = [
            (reader.take(1, "table")[0], reader.varint("table"), reader.varint("table"), reader.u64("table"))
            for _ in range(count)
        ]
        checked = reader.position
        if reader.u64("checksum") != xxhash.xxh3_64_intdigest(reader.buffer[:checked]):
            raise StreamError("altered: header and table do not match their checksum")
        table: dict[tuple[int, int], tuple[memoryview, int]] = {}
        for kind, index, length, checksum in entries:
            if (kind, index) in table:
                raise StreamError(f"altered: section {kind}/{index} is there twice")
            table[kind, index] = reader.take(length, f"section {kind}/{index}"), checksum
        if reader.left:
            raise StreamError(f"altered: {reader.left} bytes follow the last section")
        return cls(_header(text), table, reader.position)

    @property
    def sections(self) -> list[tuple[int, int]]:
        """(kind, index) of all sections, in stream order."""
        return list(self._table)

    def length(self, kind: int, index: int = 0) -> int:
        """Bytes of a section, without checking it. StreamError if there is none."""
        return self._entry(kind, index)[0].nbytes

    def section(self, kind: int, index: int = 0) -> memoryview:
        """A section's bytes, read-only. StreamError if there is none or it does not match its checksum."""
        data, checksum = self._entry(kind, index)
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise StreamError(f"altered: section {kind}/{index} does not match its checksum")
        return data

    def _entry(self, kind: int, index: int) -> tuple[memoryview, int]:
        try:
            return self._table[kind, index]
        except KeyError:
            raise StreamError(f"the stream has no section {kind}/{index}") from None


def pack(array: NDArray[Any], level: int = _ZSTD_LEVEL) -> bytes:
    """An array of booleans, integers or floats as bytes: dtype, shape, and its values through zstandard.

    u8 dtype (its place in a fixed list), u8 number of dimensions, the dimensions as varints, a zstandard frame. level:
    zstandard's; large arrays take a while at the highest ones.
    """
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if little.dtype.str not in _DTYPES or array.ndim > _MAX_DIMENSIONS:
        raise ValueError(f"cannot pack {array.dtype} of shape {array.shape}")
    head = bytes((_DTYPES.index(little.dtype.str), array.ndim)) + b"".join(_varint(n) for n in array.shape)
    return head + zstandard.ZstdCompressor(level=level).compress(little.tobytes())


def unpack(
    buffer: Buffer, dtype: DTypeLike, *, shape: tuple[int, ...] | None = None, max_items: int | None = None
) -> NDArray[Any]:
    """The array that `pack` wrote, as a new array.

    dtype: what it must be. shape: what it must be; or max_items: how many items it may have at most. Both are checked
    against what the buffer declares before anything is allocated. StreamError if it declares, or holds, anything else.
    """
    if (shape is None) == (max_items is None):
        raise TypeError("unpack needs either shape or max_items")
    reader = _Reader(memoryview(buffer).cast("B"))
    code, dimensions = reader.take(2, "array")
    expected = np.dtype(dtype)
    if code >= len(_DTYPES) or np.dtype(_DTYPES[code]) != expected:
        raise StreamError(f"array of dtype code {code} where {expected} is expected")
    if dimensions > _MAX_DIMENSIONS:
        raise StreamError(f"array with {dimensions} dimensions")
    declared = tuple(reader.varint("array") for _ in range(dimensions))
    items = 1
    for n in declared:
        items *= n
    if (shape is not None and declared != tuple(shape)) or (max_items is not None and items > max_items):
        limit = f"shape {tuple(shape)}" if shape is not None else f"at most {max_items} items"
        raise StreamError(f"array of shape {declared} where {limit} is expected")
    frame, size = reader.take(reader.left, "array"), items * expected.itemsize
    try:
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise StreamError(f"array of shape {declared}: its compressed size does not agree")
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StreamError(f"array of shape {declared} cannot be decompressed: {error}") from error
    if len(raw) != size:
        raise StreamError(f"array of shape {declared}: {len(raw)} bytes where {size} are expected")
    return np.frombuffer(raw, _DTYPES[code]).reshape(declared).astype(expected)


class _Reader:
    """Takes bytes from a buffer, and never more than there are."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.position = buffer.toreadonly(), 0

    @property
    def left(self) -> int:
        return self.buffer.nbytes - self.position

    def take(self, count: int, what: str) -> memoryview:
        if count > self.left:
            raise StreamError(f"truncated in {what}: {count} bytes are needed, the stream ends after {self.left}")
        self.position += count
        return self.buffer[self.position - count : self.position]

    def u64(self, what: str) -> int:
        return _U64.unpack(self.take(8, what))[0]

    def varint(self, what: str) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self.take(1, what)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise StreamError(f"altered: a number in {what} does not end")


def _varint(value: int) -> bytes:
    if not 0 <= value < 2**64:
        raise ValueError(f"{value} does not fit in 64 bits")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _header(text: memoryview) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        written = bytes(text).decode()
        header = json.loads(written, parse_constant=refuse)
        if "\\ud" in written.lower():  # may be half a character, which could not be written again
            json.dumps(header, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise StreamError(f"the header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise StreamError("the header is not a JSON object")
    return header
