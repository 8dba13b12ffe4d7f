"""Whether the coder on the device writes the CPU's bytes, and reads them, and refuses what the CPU refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from seqkv import synthetic
from seqkv.cuda_kernels import coder, device
from seqkv.entropy_coding import CorruptGroup, decode_group, encode_group

GROUP_TOKENS = (256, 0, 1, 33, 31)
SEGMENTS = ((0, 30, 30, 70), (0, 33))  # of two calls of the coder
GOLDEN = ("9e780cd5354a4876", "d735caecf860191a", "81445fecbffdb28b", "a87e1ae8315fa2ae", "ce8fe5cd06e0e6b0")
"""xxh3_64 of the bytes of each group: CPU and device shall not come to write others together."""


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Names, and functions that say what is wrong."""
    yield "coder: the CPU writes the bytes on record", _golden
    yield "coder: the device writes the CPU's bytes", _device_encodes
    yield "coder: the CPU decodes the device's bytes", _cpu_decodes
    yield "coder: the device decodes the CPU's bytes", _device_decodes
    yield "coder: the device refuses damaged groups", _damage


@dataclass(frozen=True)
class _Groups:
    """Groups side by side, with columns between them that belong to none. Made of hashes: the same everywhere.

    first, tokens [groups]; symbols [coefs, columns], base [groups, coefs], offset [segments, columns].
    """

    first: NDArray[np.int64]
    tokens: NDArray[np.int64]
    symbols: NDArray[np.int32]
    base: NDArray[np.int16]
    offset: NDArray[np.int16]

    def live(self) -> NDArray[np.bool_]:
        """[groups, coefs]."""
        return np.array([self.symbols[:, part].any(axis=1) for part in self.columns()])

    def columns(self) -> list[slice]:
        return [slice(a, a + n) for a, n in zip(self.first, self.tokens, strict=True)]

    def contexts(self, group: int) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int32]]:
        """As the CPU's coder takes them, of live coefficients."""
        live = np.flatnonzero(self.live()[group])
        lengths = [b - a for starts in SEGMENTS for a, b in itertools.pairwise(starts)]
        starts = np.searchsorted(live, np.cumsum([0, *lengths])).astype(np.int32)
        return self.base[group, live], self.offset[:, self.columns()[group]].T, starts

    def parts(self) -> Iterator[tuple[slice, slice, list[int]]]:
        """Coefficients, segments and starts of each call of the coder."""
        coef = segment = 0
        for starts in SEGMENTS:
            yield slice(coef, coef + starts[-1]), slice(segment, segment + len(starts) - 1), list(starts)
            coef, segment = coef + starts[-1], segment + len(starts) - 1


@cache
def _groups() -> _Groups:
    tokens = np.array(GROUP_TOKENS)
    first = np.cumsum(tokens + 3) - tokens
    columns, coefs = int(first[-1] + tokens[-1] + 2), sum(starts[-1] for starts in SEGMENTS)
    segments = sum(len(starts) - 1 for starts in SEGMENTS)

    def numbers(seed: int, *shape: int) -> NDArray[np.int64]:
        return synthetic.hashed(np, int(np.prod(shape)), seed).astype(np.int64).reshape(shape)

    bits, coef = numbers(1, coefs, columns), np.arange(coefs)[:, None]
    most = np.array([0, 1, 3, 17])[coef % 4]
    plain = (bits >> 8) % (2 * most + 1) - most
    large = ((bits & 0x7FFFFFFF) >> (bits >> 3) % 31) * np.where(bits & 4, -1, 1)  # of 1 to 31 bits
    symbols = np.where((coef % 4 == 3) & (bits % 61 == 0), large, plain).astype(np.int32)
    base = (numbers(2, len(tokens), coefs) % 5000 - 500).astype(np.int16)
    offset = (numbers(3, segments, columns) % 1200 - 600).astype(np.int16)
    return _Groups(first, tokens, symbols, base, offset)


@cache
def _cpu_bytes() -> list[bytes]:
    groups, live = _groups(), _groups().live()
    return [
        encode_group(groups.symbols[live[g]][:, part].T, *groups.contexts(g)) for g, part in enumerate(groups.columns())
    ]


def _device_bytes() -> tuple[list[memoryview], NDArray[np.uint8]]:
    groups, xp = _groups(), device.cupy()
    encoder = coder.Encoder(groups.first, groups.tokens, groups.symbols.shape[1])
    for coefs, segments, starts in groups.parts():
        symbols = xp.asarray(groups.symbols[coefs])
        statistics = coder.statistics(symbols, groups.first, groups.tokens)
        base, offset = (xp.asarray(np.ascontiguousarray(x)) for x in (groups.base[:, coefs], groups.offset[segments]))
        encoder.add(symbols, statistics, base, offset, starts)
    return encoder.finish()


def _decoded(streams: Sequence[bytes | memoryview]) -> NDArray[np.int32]:
    """Symbols [coefs, columns], decoded on the device. CorruptGroup."""
    groups, xp = _groups(), device.cupy()
    decoder = coder.Decoder(streams, groups.live(), groups.first, groups.tokens, groups.symbols.shape[1])
    out: list[Any] = []
    for coefs, segments, starts in groups.parts():
        base, offset = (xp.asarray(np.ascontiguousarray(x)) for x in (groups.base[:, coefs], groups.offset[segments]))
        symbols = xp.empty((starts[-1], groups.symbols.shape[1]), np.int32)
        decoder.next(base, offset, starts, symbols)
        out.append(symbols)
    decoder.check()
    return np.concatenate([symbols.get() for symbols in out])


def _golden() -> str:
    digests = tuple(xxhash.xxh3_64_hexdigest(data) for data in _cpu_bytes())
    return "" if digests == GOLDEN else f"digests {digests} instead of {GOLDEN}"


def _device_encodes() -> str:
    streams, live = _device_bytes()
    if not np.array_equal(live, _groups().live()):
        return "other coefficients are live"
    wrong = [
        f"{tokens} tokens: {len(ours)} bytes instead of {len(theirs)}, equal as far as {_common(ours, theirs)}"
        for tokens, ours, theirs in zip(GROUP_TOKENS, streams, _cpu_bytes(), strict=True)
        if ours != theirs
    ]
    return "; ".join(wrong)


def _common(a: bytes | memoryview, b: bytes | memoryview) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _cpu_decodes() -> str:
    groups = _groups()
    for g, (data, part) in enumerate(zip(_device_bytes()[0], groups.columns(), strict=True)):
        symbols = decode_group(data, GROUP_TOKENS[g], *groups.contexts(g))
        if not np.array_equal(symbols, groups.symbols[groups.live()[g]][:, part].T):
            return f"other symbols in the group of {GROUP_TOKENS[g]} tokens"
    return ""


def _device_decodes() -> str:
    groups = _groups()
    owned = np.zeros(groups.symbols.shape[1], bool)
    for part in groups.columns():
        owned[part] = True
    expected, got = np.where(owned, groups.symbols, 0), _decoded(_cpu_bytes())
    wrong = np.argwhere(got != expected)
    return f"{len(wrong)} symbols differ, the first at {wrong[0].tolist()}" if len(wrong) else ""


def _damage() -> str:
    """What the CPU refuses is refused, and the group named."""
    groups, sound = _groups(), _cpu_bytes()

    def on_cpu(group: int, data: bytes) -> Any:
        return decode_group(data, GROUP_TOKENS[group], *groups.contexts(group))

    def on_device(group: int, data: bytes) -> Any:
        return _decoded([*sound[:group], data, *sound[group + 1 :]])

    for group in (0, 2, 3):
        whole = sound[group]
        damaged = {"a word short": whole[:-2], "a word more": whole + b"\1\0", "nothing": b"", "odd": whole + b"\0"}
        damaged |= {f"byte {at} changed": _changed(whole, at) for at in (0, 77, len(whole) // 2, len(whole) - 1)}
        damaged["another group"] = sound[group - 1]
        for what, data in damaged.items():
            for decode in (on_cpu, on_device):
                said = _refusal(decode, group, data)
                if not said or (decode is on_device and f"group {group}" not in said):
                    return f"{what}, group {group}: {decode.__name__} {said or 'it is decoded'}"
    return ""


def _refusal(decode: Callable[[int, bytes], Any], group: int, data: bytes) -> str:
    """What is said of a damaged group; nothing if it is decoded."""
    try:
        decode(group, data)
    except CorruptGroup as error:
        return str(error)
    return ""


def _changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
