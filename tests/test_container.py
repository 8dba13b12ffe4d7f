from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from seqkv.engine.container import MOST_HEADER, Container, Section, pack, unpack, write
from seqkv.engine.errors import CacheError, StreamError
from tests.fuzz_mutations import assembled

SECTIONS = [Section(1, 0, b"a" * 40), Section(2, 0, b""), Section(1, 300, b"c"), Section(255, 2**64 - 1, b"dd")]
SMALL = write({"tokens": 3, "model": "Ä"}, SECTIONS)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def read_all(stream: bytes) -> dict[tuple[int, int], bytes]:
    container = Container.parse(stream)
    return {key: bytes(container.section(*key)) for key in container.sections}


def forge(
    header: bytes = b"{}",
    table: bytes = b"",
    count: int = 0,
    body: bytes = b"",
    length: int | None = None,
    **first: int,
) -> bytes:
    """A stream with a correct table checksum around whatever it is given."""
    length = len(header) if length is None else length
    start = struct.pack("<4sHHI", b"SQKV", first.get("version", 0), first.get("flags", 0), length)
    start += header + struct.pack("<I", count) + table
    return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start)) + body


def entry(kind: int, index: bytes, length: bytes, body: bytes = b"") -> bytes:
    return bytes((kind,)) + index + length + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@given(
    st.dictionaries(st.text(), JSON, max_size=4),
    st.dictionaries(st.tuples(st.integers(0, 255), st.integers(0, 2**64 - 1)), st.binary(max_size=300), max_size=6),
)
def test_round_trip(header: dict[str, Any], parts: dict[tuple[int, int], bytes]) -> None:
    stream = write(header, [Section(*key, data) for key, data in parts.items()])
    container = Container.parse(stream)
    assert container.header == header
    assert container.sections == list(parts)
    assert read_all(stream) == parts
    assert all(container.length(*key) == len(data) for key, data in parts.items())
    assert write(container.header, [Section(*key, container.section(*key)) for key in container.sections]) == stream


def test_the_bytes_are_those_of_format_version_0() -> None:
    stream = write({"b": 1, "a": [2]}, [Section(7, 200, b"xyz")])
    header = b'{"a":[2],"b":1}'
    assert stream == forge(header, entry(7, b"\xc8\x01", b"\x03", b"xyz"), 1, b"xyz")


def test_overhead_is_small() -> None:
    sections = [Section(kind, 0, bytes(100_000)) for kind in range(5)]
    assert len(write({}, sections)) - 500_000 < 100


def test_sections_are_views_of_the_stream() -> None:
    stream = bytearray(SMALL)
    view = Container.parse(stream).section(1)
    assert view.readonly and np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(stream, np.uint8))


def test_every_truncation_is_detected() -> None:
    for cut in range(len(SMALL)):
        with pytest.raises(StreamError):
            Container.parse(SMALL[:cut])


def test_every_flipped_bit_is_detected() -> None:
    for position in range(len(SMALL) * 8):
        altered = bytearray(SMALL)
        altered[position // 8] ^= 1 << position % 8
        with pytest.raises(StreamError):
            read_all(bytes(altered))


def test_a_damaged_section_leaves_the_others_readable() -> None:
    altered = bytearray(SMALL)
    altered[-4] ^= 1  # sections end with ... "a", "c", "dd"
    container = Container.parse(altered)
    assert container.section(255, 2**64 - 1) == b"dd" and container.section(1, 300) == b"c"
    with pytest.raises(StreamError, match="section 1/0 "):
        container.section(1)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"", "truncated"),
        (b"PK\x03\x04" + bytes(40), "not a seqkv stream"),
        (forge(version=1), "format version 1"),
        (forge(flags=2), "flags 0x2"),
        (forge(length=2**32 - 1), "truncated in header"),
        (forge(count=2**32 - 1), "table of 4294967295 sections"),
        (forge(count=1, table=entry(0, b"\xff" * 10, b"")), "does not end"),
        (forge(count=1, table=entry(0, b"\0", b"\xff" * 9 + b"\x01")), "truncated in section 0/0"),
        (forge(count=1, table=entry(3, b"\x05", b"\x04"), body=b"abc"), "truncated in section 3/5: 4 bytes"),
        (forge(count=2, table=entry(3, b"\x05", b"\0") * 2), "section 3/5 is there twice"),
        (forge(body=b"abc"), "3 bytes follow"),
        (forge(header=b"[]"), "not a JSON object"),
        (forge(header=b"{"), "header cannot be read"),
        (forge(header=b'{"a":NaN}'), "NaN is not JSON"),
        (forge(header=b'{"a":"\xff"}'), "header cannot be read"),
        (forge(header=b"[" * 200_000), "header cannot be read"),
    ],
)
def test_hostile_streams(stream: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        Container.parse(stream)


def test_an_absent_section_is_named() -> None:
    with pytest.raises(StreamError, match="no section 9/1"):
        Container.parse(SMALL).section(9, 1)


def test_writing_checks_its_input() -> None:
    with pytest.raises(ValueError, match="share kind"):
        write({}, [Section(1, 1, b""), Section(1, 1, b"x")])
    for kind, index in ((256, 0), (-1, 0), (0, -1), (0, 2**64)):
        with pytest.raises(ValueError):
            write({}, [Section(kind, index, b"")])
    with pytest.raises(ValueError):
        write({"loss": float("nan")}, [])


ARRAYS = hnp.arrays(
    st.sampled_from(["?", "i1", "u1", "<i2", ">i2", "<u2", "<i4", ">u4", "<i8", "<u8", "<f2", "<f4", ">f4", "<f8"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


@given(ARRAYS)
def test_pack_round_trip(array: Any) -> None:
    native = array.dtype.newbyteorder("=")
    for out in (
        unpack(pack(array), native, shape=array.shape),
        unpack(memoryview(pack(array)), native, max_items=array.size),
    ):
        assert out.dtype == native and out.shape == array.shape and out.flags.writeable
        assert out.tobytes() == array.astype(native).tobytes()


def test_unpack_refuses_what_is_not_expected() -> None:
    packed = pack(np.arange(12, dtype=np.int32).reshape(3, 4))
    for dtype, limits, message in (
        (np.int64, {"shape": (3, 4)}, "int64 is expected"),
        (np.uint32, {"shape": (3, 4)}, "uint32 is expected"),
        (np.int32, {"shape": (4, 3)}, r"shape \(3, 4\) where shape \(4, 3\)"),
        (np.int32, {"shape": (12,)}, "is expected"),
        (np.int32, {"max_items": 11}, "at most 11 items"),
    ):
        with pytest.raises(StreamError, match=message):
            unpack(packed, dtype, **limits)
    with pytest.raises(TypeError):
        unpack(packed, np.int32)
    with pytest.raises(ValueError, match="cannot pack"):
        pack(np.array(["text"]))


def test_unpack_trusts_no_length() -> None:
    def frame(data: bytes, **kw: Any) -> bytes:
        return zstandard.ZstdCompressor(**kw).compress(data)

    head = bytes((2, 1, 4))  # u1, one dimension, 4 items
    assert unpack(head + frame(b"abcd"), np.uint8, shape=(4,)).tobytes() == b"abcd"
    for tail in (
        frame(b"abcde"),
        frame(b"abc"),
        frame(bytes(10_000_000)),
        frame(b"abcd", write_content_size=False),
        frame(b"abcd") + b"x",
        frame(b"abcd") + frame(b"efgh"),
        b"",
        b"abcd",
    ):
        with pytest.raises(StreamError):
            unpack(head + tail, np.uint8, shape=(4,))
    huge = bytes((2, 1)) + b"\xff" * 9 + b"\x01"  # 2**64 - 1 items
    with pytest.raises(StreamError):
        unpack(huge + frame(b"abcd"), np.uint8, max_items=2**70)
    with pytest.raises(StreamError, match="200 dimensions"):
        unpack(bytes((2, 200)) + bytes(200) + frame(b""), np.uint8, max_items=4)


def test_a_damaged_array_never_gives_another_error() -> None:
    packed = pack(np.arange(40, dtype=np.int16))
    for cut in range(len(packed)):
        with pytest.raises(StreamError):
            unpack(packed[:cut], np.int16, shape=(40,))
    for position in range(len(packed) * 8):
        altered = bytearray(packed)
        altered[position // 8] ^= 1 << position % 8
        with contextlib.suppress(StreamError):
            assert unpack(altered, np.int16, shape=(40,)).shape == (40,)


def test_headers_that_are_too_long_are_neither_written_nor_read() -> None:
    with pytest.raises(CacheError, match="encode a part at a time"):
        write({"x": "y" * MOST_HEADER}, [])
    stream = bytearray(write({"x": "y" * (MOST_HEADER - 8)}, []))
    assert Container.parse(stream).header["x"][:2] == "yy"
    stream[8:12] = (MOST_HEADER + 1).to_bytes(4, "little")
    with pytest.raises(StreamError, match=f"a header of {MOST_HEADER + 1} bytes"):
        Container.parse(stream + bytes(16))


@pytest.mark.parametrize("text", [r'{"x": "\ud83d"}', r'{"\uDe00": 1}', r'{"x": [{"y": "\ud83d."}]}'])
def test_headers_with_half_a_character_are_refused(text: str) -> None:
    with pytest.raises(StreamError, match="surrogates"):
        Container.parse(assembled(text.encode(), []))
    assert Container.parse(assembled(rb'{"x": "\ud83d\ude00"}', [])).header == {"x": "\U0001f600"}
