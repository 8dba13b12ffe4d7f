"""How streams are made wrong: bytes at random, and parts of a stream changed with every checksum right again.

The first is what disks and networks do: none of it may decode to anything else. The second is what a hostile writer
does: it reaches the parsers and compiled loops that checksums stand before.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from random import Random
from typing import Any

import xxhash
import zstandard

from seqkv.engine.container import MAGIC, Container

NUMBERS = (0, 1, 2, 3, 7, 127, 128, 255, 256, 257, 1024, 65535, 1 << 16, (1 << 20) - 1, 1 << 20, (1 << 20) + 1)
NUMBERS += ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
STRANGE = (None, True, False, "", "near", "lossless", "tokens", "float16", "bfloat16", "half", "interleaved", "arange")
STRANGE += ([], {}, [[]], [None], 0.5, -1, -1e308, 1e308, 1e-320, -0.0, "\ud83d", "0" * 32, 10**30)
LONGEST = 1 << 16  # bytes of what is made


def raw(rng: Random, data: bytes, other: bytes = b"") -> bytes:
    """Some bytes changed, taken away, put in or taken from another stream."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        count = min(rng.choice((1, 1, 2, 4, 8, 64, 1024)), len(out) - at)
        kind = rng.randrange(8)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + count] = rng.randbytes(count)
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            del out[at : at + count]
        elif kind == 4:
            out[at:at] = rng.choice((rng.randbytes(rng.randrange(1, 9)), bytes(out[at : at + count])))
        elif kind == 5:
            number = rng.choice(NUMBERS) + rng.randrange(-1, 2)
            size = rng.choice((1, 2, 4, 8))
            out[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == 6:
            out[at : at + count] = bytes((rng.choice((0, 255)),)) * count
        elif other:
            there = rng.randrange(len(other))
            out[at : at + rng.choice((0, count))] = other[there : there + count]
    return bytes(out[:LONGEST])


@dataclass
class Part:
    """A section: kind, index, and bytes."""

    kind: int
    index: int
    data: bytes


def mended(rng: Random, stream: bytes, other: bytes) -> bytes:
    """The stream with parts changed, or taken from another, and with checksums that are right."""
    parsed = Container.parse(stream)
    header, parts = parsed.header, _parts(parsed)
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.randrange(12)
        part = rng.choice(parts) if parts else Part(0, 0, b"")
        if kind < 3:
            part.data = raw(rng, part.data, rng.choice(parts).data if parts else b"")
        elif kind < 6:
            part.data = _inside(rng, part.data)
        elif kind < 9:
            header = changed(rng, header)
        elif kind == 9 and parts:
            parts.remove(part)
        elif kind == 10:
            there = _parts(Container.parse(other))
            taken = [p for p in there if (p.kind, p.index) == (part.kind, part.index)] or there
            if taken:
                part.data = rng.choice(taken).data
            if rng.randrange(4) == 0:
                header = Container.parse(other).header
        else:
            twin = Part(part.kind, part.index, part.data)
            twin.kind, twin.index = rng.choice(((part.kind, part.index + 1), (rng.randrange(64), part.index)))
            if rng.randrange(2):
                parts.append(twin)
            else:
                part.kind, part.index = twin.kind, twin.index
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    if rng.randrange(16) == 0:
        text = raw(rng, text)
    return assembled(text, parts, _lie(rng))


def assembled(header: bytes, parts: list[Part], lie: dict[str, int] | None = None) -> bytes:
    """A container with right checksums; `lie` replaces lengths: of "header", the "count" of sections, "length"s."""
    lie = lie or {}
    out = bytearray(struct.pack("<4sHHI", MAGIC, 0, 0, lie.get("header", len(header)) & 0xFFFFFFFF)) + header
    out += struct.pack("<I", lie.get("count", len(parts)) & 0xFFFFFFFF)
    for number, part in enumerate(parts):
        length = lie.get("length", len(part.data)) if number == 0 else len(part.data)
        out += bytes((part.kind % 256,)) + varint(part.index) + varint(length)
        out += struct.pack("<Q", xxhash.xxh3_64_intdigest(part.data))
    out += struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(out)))
    for part in parts:
        out += part.data
    return bytes(out)


def varint(value: int) -> bytes:
    value %= 1 << 64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def changed(rng: Random, value: Any, depth: int = 0) -> Any:
    """JSON with one value in it replaced, taken away, or doubled."""
    if isinstance(value, dict) and value and rng.randrange(8):
        key = rng.choice(sorted(value))
        out = dict(value)
        if rng.randrange(10) == 0:
            del out[key]
        else:
            out[key] = changed(rng, value[key], depth + 1)
        return out
    if isinstance(value, list) and value and rng.randrange(8):
        at = rng.randrange(len(value))
        out = list(value)
        out[at : at + 1] = rng.choice(([], [value[at]] * 2, *[[changed(rng, value[at], depth + 1)]] * 6))
        return out
    if isinstance(value, int) and rng.randrange(4):
        return rng.choice((value + 1, value - 1, -value, 2 * value, value + 256, rng.choice(NUMBERS)))
    if isinstance(value, str) and value and rng.randrange(2):
        return raw(rng, value.encode()).decode(errors="replace")
    return rng.choice((*STRANGE, rng.choice(NUMBERS))) if depth else value


def _inside(rng: Random, data: bytes) -> bytes:
    """A section with what a zstandard frame in it holds changed, and compressed again."""
    at = data.find(b"\x28\xb5\x2f\xfd")
    if at < 0:
        return raw(rng, data)
    decoder = zstandard.ZstdDecompressor().decompressobj()
    try:
        held = decoder.decompress(data[at:])
    except zstandard.ZstdError:
        return raw(rng, data)
    behind = decoder.unused_data
    new = raw(rng, held) if rng.randrange(4) else rng.choice((b"\0", b"\xff", b"\x80")) * len(held)
    if rng.randrange(2):  # as many bytes as before
        new = new[: len(held)].ljust(len(held), b"\0")
    frame = zstandard.ZstdCompressor(level=1, write_content_size=rng.randrange(16) > 0).compress(new)
    head = data[:at]
    if at == 4:  # of a chunk: the length of the map
        head = struct.pack("<I", len(frame))
    elif rng.randrange(4) == 0:
        head = raw(rng, head)
    return head + frame + behind


def _lie(rng: Random) -> dict[str, int]:
    if rng.randrange(20):
        return {}
    return {rng.choice(("header", "count", "length")): rng.choice(NUMBERS)}


def _parts(parsed: Container) -> list[Part]:
    return [Part(kind, index, bytes(parsed.section(kind, index))) for kind, index in parsed.sections]
