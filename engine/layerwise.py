"""Several streams of the near tier decoded together, layer after layer, for a reader that needs one layer at a time.

`decode` gives all layers of one stream. Attention reads the layers in order, over all that a growing session was coded
as: here the tokens of all its streams go through each matrix product together, and no more is in memory than the
symbols, and the layers that predict the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import importance, near, prediction, quantiser
from seqkv.engine.container import Buffer, Container
from seqkv.engine.errors import CacheError, reading
from seqkv.engine.form import NAMES, TOKENS, Form, chunks
from seqkv.engine.host import WORKERS, Coding, Unpacked
from seqkv.engine.known import Known
from seqkv.engine.layout import Turns
from seqkv.engine.modes import stored_mode
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile


class LayerDecoder:
    """The layers of some streams, one after the other.

    streams: of the near tier and of `profile`, not coded against a reference, all of one dtype and rotation. Their
        tokens are taken one stream after the other.
    profile: of a predictor other than the expectation.

    Attributes: tokens, of all streams; layer, the next one.

    Raises StreamError, ProfileError as `engine.decode`, and CacheError for streams that it does not take.
    """

    def __init__(self, streams: Sequence[Buffer], profile: Profile) -> None:
        if profile.predictor == "expectation":
            raise CacheError(
                "streams of a profile that predicts by the expectation are decoded whole: use engine.decode"
            )
        opened = [_open(stream, profile) for stream in streams]
        forms = [coding.form for coding in opened]
        if len({(form.dtype, *form.rope) for form in forms}) != 1:
            raise CacheError("the streams are not of one sequence, their dtype or rotation differs: decode each alone")
        self._profile, self._rope, self.layer = profile, forms[0].rope, 0
        layers = len(profile.shape)
        work = [(coding, chunk) for coding in opened for chunk in range(chunks(coding.form.tokens))]
        with ThreadPoolExecutor(WORKERS) as pool:
            unpacked = list(pool.map(lambda pair: pair[0].unpack(pair[1], layers), work))
        self._chunks: list[_Chunk] = []
        for (coding, chunk), one in zip(work, unpacked, strict=True):
            self._chunks.append(_Chunk.of(one, coding.form.steps[chunk], self.tokens, profile))
        self._positions = np.concatenate([form.positions for form in forms])
        self._turns = Turns(self._positions)
        self._gains = np.concatenate([one.side.gain for one in unpacked], axis=1)
        ids = np.concatenate([coding.probs.token_ids for coding in opened])
        with reading(f"{NAMES[TOKENS]}: altered"):
            given = TokenProbs.from_tokens(ids)
            self._rows, self._index = prediction.token_rows(profile.table, given, profile.predictor)
        self._decoded: dict[int, NDArray[np.float32]] = {}

    @property
    def tokens(self) -> int:
        """Of all streams."""
        return self._chunks[-1].stop if self._chunks else 0

    @property
    def nbytes(self) -> int:
        """What is in memory now, but for the token table's rows: symbols, and decoded layers."""
        symbols = sum(chunk.symbols.nbytes + chunk.live.nbytes + chunk.means[0].nbytes for chunk in self._chunks)
        return symbols + self._gains.nbytes + sum(block.nbytes for block in self._decoded.values())

    def into(self, keys: NDArray[Any], values: NDArray[Any], slots: NDArray[np.int64] | None = None) -> None:
        """Write the next layer, keys turned to their positions, into arrays of the caller, rounded to their dtype.

        keys, values: [blocks, kv_heads, block, width] float32, float16, or uint16 with the bits of bfloat16.
        slots: [tokens] different integers: token t goes to place slots[t] % block of block slots[t] // block; t itself
            if not given.

        ValueError, before anything is written, if arrays or slots do not fit, or after the last layer.
        """
        self._check(keys, values, slots)
        block = 2 * self.layer
        self._turns.to_heads(self._block(block), self._rope[self.layer], keys, slots)
        self._turns.to_heads(self._block(block + 1), None, values, slots)
        self.layer += 1
        kept = self._profile.sources(block + 2) if self.layer < len(self._profile.shape) else range(0)
        self._decoded = {b: decoded for b, decoded in self._decoded.items() if b in kept}

    def _check(self, keys: NDArray[Any], values: NDArray[Any], slots: NDArray[np.int64] | None) -> None:
        if self.layer == len(self._profile.shape):
            raise ValueError(f"all {self.layer} layers have been read: make another LayerDecoder to read them again")
        places = np.arange(self.tokens) if slots is None else slots
        if places.shape != (self.tokens,) or places.dtype.kind not in "iu":
            raise ValueError(f"slots: expected {self.tokens} integers, got {places.dtype} of shape {places.shape}")
        heads, *widths = self._profile.shape[self.layer]
        for name, array, width in zip(("keys", "values"), (keys, values), widths, strict=True):
            if array.ndim != 4 or (array.shape[1], array.shape[3]) != (heads, width):
                raise ValueError(
                    f"{name} of layer {self.layer}: expected [blocks, {heads}, block, {width}], got shape {array.shape}"
                )
            room = array.shape[0] * array.shape[2]
            if not 0 <= int(places.min()) <= int(places.max()) < room:
                raise ValueError(f"{name} of layer {self.layer}: a slot from 0 to {room - 1} is needed for each token")
        if slots is not None and len(np.unique(slots)) != self.tokens:
            raise ValueError(f"slots: expected {self.tokens} different integers, some are there twice")

    def _block(self, block: int) -> NDArray[np.float32]:
        """A decoded block, [tokens, channels], keys un-rotated; those that predict it have been decoded."""
        profile = self._profile
        start, end = profile.starts[block : block + 2]
        out = (self._rows @ profile.token_map[:, start:end] + profile.bias[start:end])[self._index]
        sources = profile.sources(block)
        if len(sources):
            before = [self._decoded[source] for source in sources]
            out += np.concatenate(before, axis=1) @ profile.maps[block][0]
        residual = np.zeros(out.shape, np.float32)
        gains = quantiser.gain_value(self._gains[block])
        for chunk in self._chunks:
            here = slice(chunk.start, chunk.stop)
            if chunk.first:
                sinks = out[here][: importance.SINKS]
                sinks += profile.sink_bias[: len(sinks), start:end]
            some = slice(*chunk.bounds[block : block + 2])
            if some.start < some.stop:
                steps = (quantiser.step_size(chunk.step) / gains[here]).astype(np.float32)
                symbols = chunk.symbols[:, some].astype(np.int32)
                residual[here, chunk.live[some] - start] = quantiser.dequantise(symbols, steps)
            means, live = chunk.means
            some = slice(*np.searchsorted(live, (start, end)))
            shared = quantiser.dequantise(means[:, some], near.mean_steps(chunk.step, len(means)))
            residual[here, live[some] - start] += shared[np.arange(chunk.stop - chunk.start) // near.WINDOW]
        used = np.flatnonzero(residual.any(axis=0))
        out += residual[:, used] @ profile.maps[block][1][used]
        self._decoded[block] = out
        return out


class _Chunk:
    """The symbols of a chunk: [tokens, live] of the coefficients `live`; which of them are each block's; and means."""

    def __init__(
        self,
        start: int,
        symbols: NDArray[np.integer],
        live: NDArray[np.intp],
        means: near.Symbols,
        bounds: Any,
        step: int,
        first: bool,
    ) -> None:
        self.start, self.stop, self.symbols, self.live = start, start + len(symbols), symbols, live
        self.means, self.bounds, self.step, self.first = means, bounds, step, first

    @classmethod
    def of(cls, unpacked: Unpacked, step: int, start: int, profile: Profile) -> _Chunk:
        symbols, live = unpacked.own
        largest = int(np.abs(symbols).max(initial=0))
        kind = next(k for k in (np.int8, np.int16, np.int32) if largest <= np.iinfo(k).max)
        bounds = np.searchsorted(live, profile.starts)
        assert unpacked.means is not None  # of every stream with a profile
        return cls(start, symbols.astype(kind), live, unpacked.means, bounds, step, unpacked.side.first)


def _open(stream: Buffer, profile: Profile) -> Coding:
    parsed = Container.parse(stream)
    form = Form(parsed)
    if form.tier != "near" or form.reference is not None or form.profile is None:
        raise CacheError(
            "only streams of the near tier, with a profile and without a reference, decode layer by layer: use "
            "engine.decode"
        )
    mode = stored_mode(parsed, form, profile)
    known = Known.read(parsed, form, range(chunks(form.tokens)))
    return Coding(parsed, form, mode, TokenProbs.from_tokens(known.ids), known.classes, None)
