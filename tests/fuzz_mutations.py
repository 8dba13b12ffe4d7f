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
        kind = rng.randrange(13)
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
        elif kind == 11:
            header = blown(rng, header, parts)
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
        return raw(rng, value.encode(errors="replace")).decode(errors="replace")  # lone surrogates are strange already
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


def blown(rng: Random, header: Any, parts: list[Part]) -> Any:
    """The header of a larger cache; and in `parts` arrays and coefficients that go with it, of zeros: few bytes."""
    try:
        before, factor = _sizes(header), rng.choice((2, 3, 16, 256, 1 << 12, 1 << 16))
        out = dict(header)
        what = rng.choice(("layers", "tokens", "heads", "widths"))
        if what == "tokens":
            out["tokens"] *= factor
        elif what == "layers" and len(header["shape"]) == 1:
            out["layers"] = factor * header.get("layers", 1)
        elif what == "layers":
            out["shape"] = header["shape"] * min(factor, 256)
            out |= {"rope": header["rope"] * min(factor, 256)} if "rope" in header else {}
        else:
            scale = (factor, 1, 1) if what == "heads" else (1, factor, factor)
            out["shape"] = [[n * s for n, s in zip(layer, scale, strict=True)] for layer in header["shape"]]
        after = _sizes(out)
        if header["steps"]:
            out["steps"] = header["steps"][:1] * min(after["chunks"], 1 << 12)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError):  # changed before
        return header
    grown = {before[name]: after[name] for name in ("tokens", "layers", "blocks", "coefs") if before[name] > 3}
    for part in parts:
        part.data = _larger(part.data, grown, after["coefs"])
    for part in [p for p in parts if p.index == 0 and (p.kind, 1) in {(q.kind, q.index) for q in parts}]:
        known = {p.index for p in parts if p.kind == part.kind}
        parts += [Part(part.kind, i, part.data) for i in range(min(after["chunks"], 64)) if i not in known]
    return out


def _sizes(header: dict[str, Any]) -> dict[str, int]:
    layers = len(header["shape"]) * (header.get("layers", 1) if len(header["shape"]) == 1 else 1)
    coefs = sum(h * (k + v) for h, k, v in header["shape"]) * layers // len(header["shape"])
    tokens = header["tokens"]
    sizes = {"tokens": tokens, "layers": layers, "blocks": 2 * layers, "coefs": coefs, "chunks": -(-tokens // 256)}
    return {name: max(1, int(min(size, 1 << 31))) for name, size in sizes.items()}


def _larger(data: bytes, grown: dict[int, int], coefs: int) -> bytes:
    """A packed array with those of its dimensions replaced, of zeros; of a chunk's coefficients the same; anything else
    as it is."""
    if data[2:8] == b"\0\0\x28\xb5\x2f\xfd" and coefs <= 1 << 24:
        live = zstandard.ZstdCompressor(level=1).compress(bytes(-(-coefs // 8)))
        return struct.pack("<I", len(live)) + live + struct.pack("<I", 1 << 16) * 32
    if len(data) < 3 or data[0] > 11 or not 1 <= data[1] <= 2:
        return data
    at, dimensions = 2, []
    for _ in range(data[1]):
        size = shift = 0
        while at < len(data):
            size |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                break
        dimensions.append(size)
    if data[at : at + 4] != b"\x28\xb5\x2f\xfd":
        return data
    new = [grown.get(size, size) for size in dimensions]
    items = 1
    for size in new:
        items *= size
    count = items * (1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8)[data[0]]
    if new == dimensions or count > 1 << 24:
        return data
    return data[:2] + b"".join(map(varint, new)) + zstandard.ZstdCompressor(level=1).compress(bytes(count))


def _lie(rng: Random) -> dict[str, int]:
    if rng.randrange(20):
        return {}
    return {rng.choice(("header", "count", "length")): rng.choice(NUMBERS)}


def _parts(parsed: Container) -> list[Part]:
    return [Part(kind, index, bytes(parsed.section(kind, index))) for kind, index in parsed.sections]
