"""What a `CompressedCache` holds of the tokens before its window: streams, a few whole chunks of tokens in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from seqkv import engine
from seqkv.engine import CacheError, KVCache, Profile, Rope, TokenProbs
from seqkv.engine.layerwise import LayerDecoder

Tier = Literal["near", "lossless"]


@dataclass(frozen=True)
class Piece:
    """Columns start to stop of the cache: a stream for each sequence of the batch, None where all of it is hidden."""

    start: int
    stop: int
    streams: tuple[bytes | None, ...]


class Past:
    """Pieces that follow each other, from column 0 on; never changed, only added to.

    profile, kl, tier: as `engine.encode` takes them. layers: how many are coded.

    Attributes: hidden [batch, columns], whether the attention mask hides a column, which then is not held; rope, for
    each layer that is coded.
    """

    def __init__(self, profile: Profile | None, kl: float, tier: Tier, layers: int) -> None:
        self.profile, self.kl, self.tier, self.layers = profile, kl, tier, layers
        self.rope: list[Rope | None] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything, the number of sequences too."""
        self.pieces: list[Piece] = []
        self.hidden: torch.Tensor | None = None
        self._reader: _Reader | None = None

    @property
    def stop(self) -> int:
        """The column after the last one that is coded."""
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the streams."""
        return sum(len(stream) for piece in self.pieces for stream in piece.streams if stream is not None)

    def add(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        ids: torch.Tensor,
        received: Sequence[NDArray[np.float32]] | None,
    ) -> None:
        """Code the columns that follow.

        keys, values: of each layer, [batch, kv_heads, columns, width]; ids [batch, columns].
        received: of each sequence, attention that its columns received from the first on, [layers, columns]; None where
            that is not known.
        """
        start = self.stop
        streams = tuple(self._encode(b, start, keys, values, ids, received) for b in range(len(ids)))
        self.pieces.append(Piece(start, start + ids.shape[1], streams))

    def _encode(
        self,
        b: int,
        start: int,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        ids: torch.Tensor,
        received: Sequence[NDArray[np.float32]] | None,
    ) -> bytes | None:
        columns = self.columns(b, start, start + ids.shape[1])
        if columns.size == 0:
            return None
        some = torch.from_numpy(columns - start)
        sides = [[x[b].detach().cpu()[:, some] for x in side] for side in (keys, values)]
        # a model counts only the tokens that are not hidden; another count would cost bits, and nothing else
        positions = self.columns(b, 0, start).size + np.arange(columns.size)
        exact = self.tier == "lossless"
        kv = KVCache(sides[0], sides[1], positions=positions, rope=self.rope, exact=exact)
        probs = TokenProbs.from_tokens(ids[b, some])
        if exact:
            return engine.encode(kv, probs, tier="lossless", profile=self.profile)
        importance = None if received is None else received[b][:, columns]
        return engine.encode(kv, probs, profile=self.profile, kl=self.kl, importance=importance)

    def columns(self, b: int, start: int, stop: int) -> NDArray[np.int64]:
        """Those of a sequence from start to stop that are not hidden."""
        assert self.hidden is not None
        return start + np.flatnonzero(~self.hidden[b, start:stop].numpy())

    def read(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the coded columns from `start` on, where a piece begins, to the first columns of a layer's arrays.

        layer: which of those that are coded. All are read, one after the other, before the first is read again.
        keys, values: [batch, kv_heads, columns, width] on the CPU; what is hidden is left as it is.
        """
        if layer == 0:
            self._reader = _Reader(self, start)
        if self._reader is None or self._reader.layer != layer:
            raise CacheError(f"layer {layer} of the cache is read out of order: a forward pass goes through all layers")
        self._reader.next_into(keys, values)
        if self._reader.layer == self.layers:
            self._reader = None

    @property
    def reading_nbytes(self) -> int:
        """Bytes that decoding holds now, within a forward pass; 0 between them."""
        return 0 if self._reader is None else self._reader.nbytes

    def select(self, rows: Sequence[int]) -> None:
        """Of the sequences, take these, in this order, some maybe several times."""
        self.pieces = [replace(p, streams=tuple(p.streams[row] for row in rows)) for p in self.pieces]
        if self.hidden is not None:
            self.hidden = self.hidden[list(rows)]


class _Reader:
    """Decodes the pieces from a column on, layer after layer."""

    def __init__(self, past: Past, start: int) -> None:
        self.layer = 0
        assert past.hidden is not None
        found = [
            (b, past.columns(b, piece.start, piece.stop) - start, stream)
            for b in range(len(past.hidden))
            for piece in past.pieces
            if piece.start >= start and (stream := piece.streams[b]) is not None
        ]
        self._rows, self._columns = [b for b, _, _ in found], [columns for _, columns, _ in found]
        self._plain = len(past.hidden) == 1 and not past.hidden.any()
        self._decoder: LayerDecoder | None = None
        self._whole: list[KVCache] = []
        streams = [stream for *_, stream in found]
        layered = past.tier == "near" and past.profile is not None and past.profile.predictor != "expectation"
        if layered and streams:
            assert past.profile is not None
            self._decoder = LayerDecoder(streams, past.profile)
        else:
            self._whole = [engine.decode(stream, profile=past.profile) for stream in streams]

    @property
    def nbytes(self) -> int:
        """Of what is decoded."""
        whole = sum(kv.nbytes for kv in self._whole)
        return whole if self._decoder is None else self._decoder.nbytes

    def next_into(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._decoder is not None:
            self._decoder.into(_array(keys), _array(values), self._slots(keys.shape[2]))
        for b, columns, kv in zip(self._rows, self._columns, self._whole, strict=False):
            for target, array in ((keys, kv.keys[self.layer]), (values, kv.values[self.layer])):
                target[b, :, torch.from_numpy(columns)] = torch.from_numpy(array).to(target.dtype)
        self.layer += 1

    def _slots(self, columns: int) -> NDArray[np.int64] | None:
        if self._plain:
            return None  # one after the other
        return np.concatenate([b * columns + some for b, some in zip(self._rows, self._columns, strict=True)])


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """As NumPy, sharing memory; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
