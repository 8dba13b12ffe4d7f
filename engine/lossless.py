"""The lossless tier: every bit of a cache, without a forward pass of the model.

Blocks are predicted as in the near tier (engine.prediction), from numbers that are exact, so that the encoder knows
them all from the start. What is coded of a number is how far its leading part is from the one expected, in steps about
as large as the prediction's error, with the coder's adaptive contexts; the bits below are noise and stored as they are
(engine.exact_values). What both sides compute is exact (engine.exact_model), and a digest for each layer of each chunk
proves it: a decoder returns the cache, bit for bit, or refuses.

With a profile, blocks are predicted from tokens and from the layers before; without one from the mean of each channel
before rotation. A block of a chunk that this does not make smaller is stored through zstandard.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from seqkv.cuda_kernels.errors import DeviceError
from seqkv.engine import container, exact_values
from seqkv.engine.cache import KVCache
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import ProfileError, StreamError
from seqkv.engine.exact_model import LARGEST_EXPONENT, Angles, Model, Window, measured, power
from seqkv.engine.exact_values import FORMATS, Format
from seqkv.engine.form import TOKENS, Form, chunk_bounds, chunks
from seqkv.engine.host import WORKERS
from seqkv.engine.known import plain_ids
from seqkv.engine.near import CHUNK
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile
from seqkv.engine.quantiser import scale_units
from seqkv.entropy_coding import CorruptGroup, decode_group, encode_group

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
_BATCH = 4  # chunks predicted together


def encode(kv: KVCache, probs: TokenProbs, profile: Profile | None) -> tuple[dict[str, Any], list[Section]]:
    """Header entries and sections of a cache in host memory.

    ProfileError if a token is not of the profile's model, DeviceError for a cache on a device.
    """
    if kv.backend != "cpu":
        raise DeviceError('the lossless tier codes on the CPU: use backend="cpu", or kv.to("cpu")')
    channels = measured(kv)
    model = Model(kv.shape, channels, profile)
    sections = [Section(CHANNELS, 0, container.pack(channels))]
    with ThreadPoolExecutor(WORKERS) as pool:
        for first in range(0, chunks(kv.tokens), _BATCH):
            batch = _Batch.of(model, kv.shape, kv.rope, kv.positions, probs.token_ids, kv.dtype, first, kv.tokens)
            coded = [_Coded(model, part, batch.form) for part in batch.parts]

            def code(task: tuple[_Part, _Coded], block: int) -> None:
                part, coded = task
                values = _block_of(kv, block, part.tokens)
                predicted = part.expected(block)
                coded.add(block, values, predicted)
                part.learn(block, values)

            for block in range(len(model.widths)):
                batch.predict(block)
                list(pool.map(code, zip(batch.parts, coded, strict=True), [block] * len(coded)))
            for some in pool.map(lambda one: one.sections(), coded):
                sections += some
    for chunk in range(chunks(kv.tokens)):
        ids = probs.token_ids[slice(*chunk_bounds(chunk, kv.tokens))].astype(np.uint32)
        sections.append(Section(TOKENS, chunk, container.pack(ids)))
    about: dict[str, Any] = {
        "tier": "lossless",
        "profile": None if profile is None else profile.fingerprint,
        "steps": [],
    }
    return about, sections


def decode(parsed: Container, form: Form, profile: Profile | None, wanted: range, depth: range) -> KVCache:
    """The tokens `wanted` of the layers `depth`. ProfileError for another profile, StreamError on damage."""
    _check_profile(form, profile)
    total = sum(heads * (k + v) for heads, k, v in form.shape)
    channels = container.unpack(parsed.section(CHANNELS), np.int16, shape=(2, total))
    if np.abs(channels[0].astype(np.int64)).max() > LARGEST_EXPONENT:
        raise StreamError("altered: the scale of a channel is out of range")
    model = Model(form.shape, channels, profile)
    some = range(wanted.start // CHUNK, chunks(wanted.stop))
    for chunk in some:
        parsed.length(SYMBOLS, chunk)  # before anything of their size is made
    ids = plain_ids(parsed, form, some)
    numbers = FORMATS[form.dtype]
    kind = np.float16 if form.dtype == "float16" else np.float32
    sides = [
        [np.empty((heads, len(wanted), widths[side]), kind) for heads, *widths in form.shape[depth.start : depth.stop]]
        for side in (0, 1)
    ]
    with ThreadPoolExecutor(WORKERS) as pool:
        for first in range(some.start, some.stop, _BATCH):
            stop = min(some.stop * CHUNK, form.tokens)
            try:
                batch = _Batch.of(model, form.shape, form.rope, form.positions, ids, form.dtype, first, stop)
            except ProfileError as error:
                raise StreamError(f"altered: {error}") from error
            stored = list(pool.map(lambda part: _Stored.read(parsed, model, form, part, depth.stop), batch.parts))

            def code(task: tuple[_Part, _Stored], block: int) -> None:
                part, stored = task
                values = numbers.values(stored.block(block, part.expected(block)))
                part.learn(block, values)
                layer, side = divmod(block, 2)
                begin, end = max(part.tokens.start, wanted.start), min(part.tokens.stop, wanted.stop)
                if layer in depth and begin < end:
                    out = sides[side][layer - depth.start]
                    heads = values.reshape(len(values), len(out), -1).transpose(1, 0, 2)
                    inside = heads[:, begin - part.tokens.start : end - part.tokens.start]
                    out[:, begin - wanted.start : end - wanted.start] = inside

            for block in range(2 * depth.stop):
                batch.predict(block)
                list(pool.map(code, zip(batch.parts, stored, strict=True), [block] * len(stored)))
    positions, ropes = form.positions[wanted.start : wanted.stop], form.rope[depth.start : depth.stop]
    return KVCache.of_parts(sides[0], sides[1], form.dtype, positions, ropes, exact=True)


def _check_profile(form: Form, profile: Profile | None) -> None:
    if form.profile is None:
        return
    if profile is None or profile.fingerprint != form.profile:
        given = "no profile was given" if profile is None else f"the profile given is {profile.fingerprint}"
        raise ProfileError(f"the stream was encoded with profile {form.profile}, {given}")
    if profile.shape != form.shape:
        raise StreamError("altered: its shape is not its profile's")


def _block_of(kv: KVCache, block: int, tokens: slice) -> NDArray[Any]:
    """Numbers of a block as they are in the cache, [tokens, channels]."""
    layer, side = divmod(block, 2)
    heads = (kv.values if side else kv.keys)[layer][:, tokens]
    return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)


def _wide(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):  # NaN that signals
        return values.astype(np.float32, copy=False)


Rows = tuple[NDArray[np.float32], NDArray[np.int64]]


class _Batch:
    """Chunks that are predicted together: one matrix product for all their tokens."""

    def __init__(
        self, model: Model, rows: tuple[NDArray[np.float32], NDArray[np.int64]], parts: list[_Part], form: Format
    ) -> None:
        self.model, self.parts, self.form = model, parts, form
        self.all_blocks, self.index = model.of_tokens(rows[0]), rows[1]
        self.start, self.stop = parts[0].tokens.start, parts[-1].tokens.stop
        self.window = Window(model, self.stop - self.start)
        for part in parts:
            part.batch = self

    @classmethod
    def of(
        cls, model: Model, shape: Any, ropes: Any, positions: Any, ids: Any, dtype: str, first: int, tokens: int
    ) -> _Batch:
        """The chunks from `first` on, of a sequence of so many tokens."""
        bounds = [chunk_bounds(c, tokens) for c in range(first, min(first + _BATCH, chunks(tokens)))]
        heads = [h for h, _, _ in shape]
        parts = [
            _Part(first + i, slice(*two), Angles(positions[slice(*two)]), heads, ropes) for i, two in enumerate(bounds)
        ]
        return cls(model, model.rows(ids[bounds[0][0] : bounds[-1][1]]), parts, FORMATS[dtype])

    def predict(self, block: int) -> None:
        """Prepare what the chunks expect of a block."""
        self.of_tokens = np.ascontiguousarray(self.all_blocks[:, self.model.columns(block)])
        self.of_blocks = self.window.expected(block)
        if self.model.profile is not None:
            self.features = self.window.room(block)


@dataclass
class _Part:
    """A chunk of a batch."""

    chunk: int
    tokens: slice
    angles: Angles
    heads: list[int]
    ropes: list[Any]
    batch: Any = None

    def expected(self, block: int) -> NDArray[np.int64]:
        """What a block is expected to hold, in fixed point, [tokens, channels]."""
        batch, model = self.batch, self.batch.model
        here, rows = model.columns(block), slice(self.tokens.start - batch.start, self.tokens.stop - batch.start)
        out = np.empty((self.tokens.stop - self.tokens.start, model.widths[block]), np.int64)
        of_tokens = batch.of_tokens, batch.index[rows], model.token_scale[here]
        exact_values.expected(*of_tokens, batch.of_blocks[rows], model.maps[block][1], model.bias[here], out)
        self._turn(out, block, back=False)
        return out

    def learn(self, block: int, values: NDArray[Any]) -> None:
        """What a block holds, which predicts others."""
        batch, model = self.batch, self.batch.model
        if model.profile is None:
            return
        here = model.columns(block)
        numbers = np.empty(values.shape, np.int64)
        exact_values.fixed(_wide(values), 1 / model.unit[here], numbers)
        self._turn(numbers, block, back=True)
        rows = slice(self.tokens.start - batch.start, self.tokens.stop - batch.start)
        exact_values.features(numbers, model.mean[here], model.to_steps[here], batch.features[rows])

    def _turn(self, numbers: NDArray[np.int64], block: int, back: bool) -> None:
        layer, side = divmod(block, 2)
        if not side and self.ropes[layer] is not None:
            self.angles.turn(numbers, self.heads[layer], self.ropes[layer], back)


class _Coded:
    """What is coded of a chunk, block after block."""

    def __init__(self, model: Model, part: _Part, form: Format) -> None:
        self.model, self.chunk, self.form = model, part.chunk, form
        count = part.tokens.stop - part.tokens.start
        self.symbols = np.empty((count, int(model.starts[-1])), np.int32)
        self.grids = np.zeros(int(model.starts[-1]), np.int64)
        self.sizes: list[int] = []
        self.bits: list[bytes] = []
        self.strange: list[NDArray[np.int64]] = []
        self.exact: list[NDArray[np.uint32]] = []
        self.digests: list[int] = []
        self.state = xxhash.xxh3_64()

    def add(self, block: int, values: NDArray[Any], predicted: NDArray[np.int64]) -> None:
        form, here = self.form, self.model.columns(block)
        bits, wide = form.stored(values), _wide(values)
        unit = self.model.unit[here]
        grid = _grids(wide, predicted, unit, form)
        words = np.empty(bits.size * form.most // 32 + 2, np.uint32)
        strange = np.empty(bits.size, np.int64)
        symbols = self.symbols[:, here]
        kind = (form.exponent, form.mantissa, form.bias)
        used, odd = exact_values.split(
            bits, wide, predicted, power(-grid) * unit, power(-grid), grid, kind, symbols, words, strange
        )
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

    def sections(self) -> list[Section]:
        model, chunk = self.model, self.chunk
        sizes = np.array(self.sizes, np.int64)
        live = np.repeat(sizes >= 0, model.widths)
        symbols = self.symbols if live.all() else self.symbols[:, live]
        group = encode_group(symbols, *_contexts(model, sizes, len(symbols)))
        change = np.where(live, self.grids - model.scale, 0).astype(np.int8)  # modulo 256
        out = [
            Section(GRIDS, chunk, container.pack(change)),
            Section(SIZES, chunk, container.pack(sizes)),
            Section(SYMBOLS, chunk, group),
            Section(BITS, chunk, b"".join(self.bits)),
            Section(DIGESTS, chunk, container.pack(np.array(self.digests, np.uint64))),
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


def _grids(
    values: NDArray[np.float32], predicted: NDArray[np.int64], unit: NDArray[np.float64], form: Format
) -> NDArray[np.int64]:
    """The grid of each channel of a block: a part of the mean error, but not much finer than the numbers are."""
    spread, size = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    exact_values.errors(values, predicted, unit, spread, size)
    # a Laplace density has the mean (mean root)^2 * 4 / pi; its outliers count less in that
    error, mean = ((x / len(values)) ** 2 * (4 / np.pi) for x in (spread, size))
    finest = np.floor(np.log2(np.maximum(mean, 1e-45))) - form.mantissa
    grid = np.maximum(np.ceil(np.log2(np.maximum(error, 1e-45)) - FINENESS), finest)
    return np.clip(grid, 1 - form.bias, _MOST).astype(np.int64)


def _planes(plain: NDArray[Any]) -> bytes:
    """Bits of a block, first bytes first, through zstandard."""
    planes = plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T
    return zstandard.ZstdCompressor(level=3).compress(np.ascontiguousarray(planes).tobytes())


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


class _Stored:
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
    def read(cls, parsed: Container, model: Model, form: Form, part: _Part, layers: int) -> _Stored:
        chunk, count, total = part.chunk, part.tokens.stop - part.tokens.start, int(model.starts[-1])
        sizes = container.unpack(parsed.section(SIZES, chunk), np.int64, shape=(len(model.widths),))
        bits = parsed.section(BITS, chunk)
        if (np.abs(sizes) > len(bits)).any() or np.abs(sizes).sum() != len(bits) or (sizes[sizes >= 0] % 4).any():
            raise StreamError("altered: the sizes of a chunk's blocks are not those of its bits")
        grids = model.scale + container.unpack(parsed.section(GRIDS, chunk), np.int8, shape=(total,))
        grids = grids.astype(np.int8).astype(np.int64)
        live = np.repeat(sizes >= 0, model.widths)
        numbers = FORMATS[form.dtype]
        if ((grids < 1 - numbers.bias) | (grids > _MOST))[live].any():
            raise StreamError("altered: a grid is out of range")
        digests = container.unpack(parsed.section(DIGESTS, chunk), np.uint64, shape=(len(form.shape),))
        strange = np.zeros((3, 0), np.int64)
        if (STRANGE, chunk) in parsed.sections:
            strange = container.unpack(parsed.section(STRANGE, chunk), np.int64, max_items=3 * count * total)
            if strange.ndim != 2 or len(strange) != 3 or (strange < 0).any() or (strange[0] >= len(sizes)).any():
                raise StreamError("altered: numbers without a place")
            if (strange[1] >= count * np.array(model.widths)[strange[0]]).any() or (strange[2] >= 1 << 32).any():
                raise StreamError("altered: numbers without a place")
        contexts = _contexts(model, sizes, count)
        try:
            symbols = decode_group(parsed.section(SYMBOLS, chunk), count, *contexts, segments=2 * layers)
        except CorruptGroup as error:
            raise StreamError(f"altered chunk: {error}") from error
        return cls(model, numbers, count, sizes, grids, symbols, bits, strange, digests)

    def block(self, block: int, predicted: NDArray[np.int64]) -> NDArray[np.uint32]:
        """The bits of a block's numbers; blocks in order. StreamError if a layer's are not those of its digest."""
        form, here, shape = self.form, self.model.columns(block), (self.tokens, self.model.widths[block])
        data = self.bits[self.ends[block] : self.ends[block + 1]]
        if self.sizes[block] < 0:
            bits = _from_planes(data, shape, form)
        else:
            bits, grid = np.empty(shape, np.uint32), self.grids[here]
            words = np.frombuffer(data, "<u4").astype(np.uint32, copy=False)
            symbols = self.symbols[:, self.starts[block] : self.starts[block + 1]]
            kind = (form.exponent, form.mantissa, form.bias)
            scale = power(-grid) * self.model.unit[here]
            if not exact_values.joined(symbols, predicted, scale, grid, kind, words, bits):
                raise StreamError("altered: a block does not end where its last number does")
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
