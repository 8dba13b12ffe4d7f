"""What the lossless tier codes of a chunk, and what a stream says of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from seqkv.engine import container, exact_values
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import StreamError, reading
from seqkv.engine.exact_model import Model, power
from seqkv.engine.exact_values import FORMATS, Format
from seqkv.engine.form import Form, chunk_bounds
from seqkv.engine.quantiser import scale_units
from seqkv.entropy_coding import decode_group, encode_group

CHANNELS, GRIDS, SIZES, SYMBOLS, BITS, STRANGE, DIGESTS = range(32, 39)  # kinds of sections
NAMES = {
    CHANNELS: "channel statistics",
    GRIDS: "grids",
    SIZES: "sizes",
    SYMBOLS: "leading parts",
    BITS: "bits below",
    STRANGE: "numbers without a place",
    DIGESTS: "digests",
}

FINENESS = 2.25  # octaves from the mean error of a channel to its grid, at the most
_BASE = float(np.exp2(FINENESS - 0.5))  # mean magnitude of symbols that contexts start from
_MOST = 127  # of a grid
_PLAIN = 0.9  # a block that seems to take more than this is tried without prediction,
_SAMPLE = 256  # and one that has few different numbers among this many
_MEASURED = 128  # tokens that grids are measured on
_LEVEL = 3  # of zstandard


class Coded:
    """What is coded of a chunk, block after block."""

    def __init__(self, model: Model, form: Format, tokens: int) -> None:
        self.model, self.form = model, form
        self.symbols = np.empty((tokens, int(model.starts[-1])), np.int32)
        self.grids = np.zeros(int(model.starts[-1]), np.int64)
        self.sizes: list[int] = []
        self.bits: list[bytes] = []
        self.strange: list[NDArray[np.int64]] = []
        self.exact: list[NDArray[np.uint32]] = []
        self.digests: list[int] = []
        self.state = xxhash.xxh3_64()

    def add(self, block: int, values: NDArray[Any], predicted: NDArray[np.int32]) -> None:
        """values [tokens, channels], as a KVCache holds them; predicted: in fixed point."""
        form, here = self.form, self.model.columns(block)
        bits, wide, unit = form.stored(values), as_float32(values), self.model.unit[here]
        grid = _grids(wide, predicted, unit, form)
        words = np.empty(bits.size * form.most // 32 + 2, np.uint32)
        strange = np.empty(bits.size, np.int64)
        kind = (form.exponent, form.mantissa, form.bias)
        scales = power(-grid) * unit, power(-grid)
        used, odd = exact_values.split(
            bits, wide, predicted, *scales, grid, kind, self.symbols, here.start, words, strange
        )
        symbols = self.symbols[:, here]
        plain = bits.astype(np.dtype(form.bits).newbyteorder("<"))
        data = words[:used].astype("<u4", copy=False).tobytes()
        size, strange = len(data), strange[:odd]
        some = np.abs(symbols[:: max(1, len(symbols) // 16)].astype(np.float64))
        about = len(data) + 8 * odd + float(np.log2(1.0 + some).mean() + 1) * symbols.size / 8
        few = len(np.unique(bits.reshape(-1)[:: -(-bits.size // _SAMPLE)])) < _SAMPLE // 4
        if few or about > _PLAIN * plain.nbytes:
            packed = _planes(plain)
            if len(packed) < about:
                size, data, strange = -len(packed), packed, strange[:0]
        self.sizes.append(size)
        self.bits.append(data)
        if size < 0:
            symbols[...] = 0
        else:
            self.grids[here] = grid
        self.strange.append(strange)
        self.exact.append(bits.reshape(-1)[strange])
        self.state.update(plain.view(np.uint8).data)
        if block % 2:
            self.digests.append(self.state.intdigest())
            self.state = xxhash.xxh3_64()

    def sections(self, chunk: int) -> list[Section]:
        model = self.model
        sizes = np.array(self.sizes, np.int64)
        live = np.repeat(sizes >= 0, model.widths)
        symbols = self.symbols if live.all() else self.symbols[:, live]
        group = encode_group(symbols, *_contexts(model, sizes, len(symbols)))
        change = np.where(live, self.grids - model.scale, 0).astype(np.int8)  # modulo 256
        out = [
            Section(GRIDS, chunk, container.pack(change, level=_LEVEL)),
            Section(SIZES, chunk, container.pack(sizes, level=_LEVEL)),
            Section(SYMBOLS, chunk, group),
            Section(BITS, chunk, b"".join(self.bits)),
            Section(DIGESTS, chunk, container.pack(np.array(self.digests, np.uint64), level=_LEVEL)),
        ]
        if any(len(s) for s in self.strange):
            places = [
                [b * np.ones(len(s), np.int64), s, e.astype(np.int64)]
                for b, (s, e) in enumerate(zip(self.strange, self.exact, strict=True))
            ]
            out.append(Section(STRANGE, chunk, container.pack(np.concatenate(places, axis=1))))
        return out


def _contexts(
    model: Model, sizes: NDArray[np.int64], tokens: int
) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int32]]:
    """Where the coder's contexts start, of the blocks that are coded."""
    widths = np.where(sizes >= 0, model.widths, 0)
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    base = np.full(int(starts[-1]), scale_units(np.array(_BASE)), np.int16)
    return base, np.zeros((tokens, len(widths)), np.int16), starts


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers as a KVCache holds them in float32."""
    with np.errstate(invalid="ignore"):  # NaN that signals
        return values.astype(np.float32, copy=False)


def _grids(
    values: NDArray[np.float32], predicted: NDArray[np.int32], unit: NDArray[np.float64], form: Format
) -> NDArray[np.int64]:
    """The grid of each channel of a block: a part of the mean error, but not much finer than the numbers are."""
    spread, size = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    step = max(1, len(values) // _MEASURED)
    exact_values.errors(values, predicted, unit, step, spread, size)
    # a Laplace density has the mean (mean root)^2 * 4 / pi; its outliers count less in that
    error, mean = ((x / -(-len(values) // step)) ** 2 * (4 / np.pi) for x in (spread, size))
    finest = np.floor(np.log2(np.maximum(mean, 1e-45))) - form.mantissa
    grid = np.maximum(np.ceil(np.log2(np.maximum(error, 1e-45)) - FINENESS), finest)
    return np.clip(grid, 1 - form.bias, _MOST).astype(np.int64)


def _planes(plain: NDArray[Any]) -> bytes:
    """Bits of a block, first bytes first, through zstandard."""
    planes = plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T
    return zstandard.ZstdCompressor(level=_LEVEL).compress(np.ascontiguousarray(planes).tobytes())


def _from_planes(data: memoryview, shape: tuple[int, int], form: Format) -> NDArray[np.uint32]:
    size = shape[0] * shape[1] * np.dtype(form.bits).itemsize
    try:
        if zstandard.get_frame_parameters(data).content_size != size:
            raise StreamError("altered: a plain block has the wrong size")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StreamError(f"altered: a plain block cannot be decompressed: {error}") from error
    if len(raw) != size:
        raise StreamError("altered: a plain block has the wrong size")
    planes = np.frombuffer(raw, np.uint8).reshape(-1, shape[0] * shape[1]).T
    return np.ascontiguousarray(planes).view(np.dtype(form.bits).newbyteorder("<")).reshape(shape).astype(np.uint32)


class Stored:
    """What a stream says of a chunk; all sizes checked."""

    def __init__(
        self,
        model: Model,
        form: Format,
        tokens: int,
        sizes: NDArray[np.int64],
        grids: NDArray[np.int64],
        symbols: NDArray[np.int32],
        bits: memoryview,
        strange: NDArray[np.int64],
        digests: NDArray[np.uint64],
    ) -> None:
        self.model, self.form, self.tokens, self.sizes, self.grids = model, form, tokens, sizes, grids
        self.symbols, self.bits, self.strange, self.digests = symbols, bits, strange, digests
        self.ends = np.concatenate([[0], np.cumsum(np.abs(sizes))])
        self.starts = np.concatenate([[0], np.cumsum(np.where(sizes >= 0, model.widths, 0))])
        self.state = xxhash.xxh3_64()

    @classmethod
    def read(cls, parsed: Container, model: Model, form: Form, chunk: int, layers: int) -> Stored:
        """layers: how many from the first on will be asked for."""
        start, stop = chunk_bounds(chunk, form.tokens)
        count, total = stop - start, int(model.starts[-1])
        with reading(NAMES[SIZES]):
            sizes = container.unpack(parsed.section(SIZES, chunk), np.int64, shape=(len(model.widths),))
        with reading(NAMES[BITS]):
            bits = parsed.section(BITS, chunk)
        if (np.abs(sizes) > len(bits)).any() or np.abs(sizes).sum() != len(bits) or (sizes[sizes >= 0] % 4).any():
            raise StreamError("sizes: altered: they are not those of the bits below")
        with reading(NAMES[GRIDS]):
            change = container.unpack(parsed.section(GRIDS, chunk), np.int8, shape=(total,))
        grids = (model.scale + change).astype(np.int8).astype(np.int64)
        live = np.repeat(sizes >= 0, model.widths)
        numbers = FORMATS[form.dtype]
        if ((grids < 1 - numbers.bias) | (grids > _MOST))[live].any():
            raise StreamError("grids: altered: one is out of range")
        with reading(NAMES[DIGESTS]):
            digests = container.unpack(parsed.section(DIGESTS, chunk), np.uint64, shape=(len(form.shape),))
        strange = np.zeros((3, 0), np.int64)
        if (STRANGE, chunk) in parsed.sections:
            with reading(NAMES[STRANGE]):
                strange = container.unpack(parsed.section(STRANGE, chunk), np.int64, max_items=3 * count * total)
                if strange.ndim != 2 or len(strange) != 3 or (strange < 0).any() or (strange[0] >= len(sizes)).any():
                    raise StreamError("altered: a block is none of the stream's")
                if (strange[1] >= count * np.array(model.widths)[strange[0]]).any() or (strange[2] >= 1 << 32).any():
                    raise StreamError("altered: a place is outside its block")
        contexts = _contexts(model, sizes, count)
        with reading(NAMES[SYMBOLS]):
            symbols = decode_group(parsed.section(SYMBOLS, chunk), count, *contexts, segments=2 * layers)
        return cls(model, numbers, count, sizes, grids, symbols, bits, strange, digests)

    def block(self, block: int, predicted: NDArray[np.int32]) -> NDArray[np.uint32]:
        """The bits of a block's numbers; blocks in order. StreamError if a layer's are not those of its digest."""
        form, here, shape = self.form, self.model.columns(block), (self.tokens, self.model.widths[block])
        data = self.bits[self.ends[block] : self.ends[block + 1]]
        if self.sizes[block] < 0:
            with reading(f"{NAMES[BITS]}, layer {block // 2}"):
                bits = _from_planes(data, shape, form)
        else:
            bits, grid = np.empty(shape, np.uint32), self.grids[here]
            words = np.frombuffer(data, "<u4").astype(np.uint32, copy=False)
            kind, start = (form.exponent, form.mantissa, form.bias), int(self.starts[block])
            scale = power(-grid) * self.model.unit[here]
            if not exact_values.joined(self.symbols, start, predicted, scale, grid, kind, words, bits):
                raise StreamError(f"bits below, layer {block // 2}: altered: do not end where the last number does")
            odd = self.strange[:, self.strange[0] == block]
            bits.reshape(-1)[odd[1]] = odd[2].astype(np.uint32)
        plain = bits.astype(np.dtype(form.bits).newbyteorder("<"))
        self.state.update(plain.view(np.uint8).data)
        if block % 2:
            if self.state.intdigest() != int(self.digests[block // 2]):
                raise StreamError(
                    f"layer {block // 2} is not what was encoded: the stream is altered, or this machine's cosines "
                    "are other ones than the encoder's"
                )
            self.state = xxhash.xxh3_64()
        return bits
