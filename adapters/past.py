"""What a `CompressedCache` holds of the tokens before its window."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


@dataclass(frozen=True)
class Part:
    """Some tokens of a sequence: their cache, their ids [tokens], and what attention they received, [layers, tokens]
    or None."""

    kv: KVCache
    ids: NDArray[np.int64]
    received: NDArray[np.float32] | None


class Past(ABC):
    """Columns of some sequences, from column 0 on; never changed, only added to.

    profile, kl, tier: as `engine.encode` takes them. layers: how many are coded.

    Attributes: hidden [batch, columns], whether the attention mask hides a column, which then is not held; rope, for
    each layer that is coded; stop, the column after the last one that is held.
    """

    def __init__(self, profile: Profile | None, kl: float, tier: Tier, layers: int) -> None:
        self.profile, self.kl, self.tier, self.layers = profile, kl, tier, layers
        self.rope: list[Rope | None] = []
        self.clear()

    @property
    @abstractmethod
    def stop(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    @abstractmethod
    def reading_nbytes(self) -> int:
        """Bytes that reading holds now, within a forward pass; 0 between them."""

    @property
    @abstractmethod
    def pieces(self) -> list[Piece]:
        """All of it as streams."""

    @abstractmethod
    def take(self, pieces: Sequence[Piece]) -> None:
        """Hold what `pieces` gave, when rope and hidden are known."""

    @abstractmethod
    def _hold(self, stop: int, parts: Sequence[Part | None]) -> None:
        """Add the columns up to `stop`: a part of each sequence, None where all is hidden."""

    def clear(self) -> None:
        """Forget everything, the number of sequences too."""
        self.hidden: torch.Tensor | None = None

    @abstractmethod
    def pass_ended(self) -> None:
        """All layers were read: keep nothing of that."""

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
        parts = [self._part(b, keys, values, ids, None if received is None else received[b]) for b in range(len(ids))]
        self._hold(self.stop + ids.shape[1], parts)

    def _part(
        self,
        b: int,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        ids: torch.Tensor,
        received: NDArray[np.float32] | None,
    ) -> Part | None:
        start = self.stop
        columns = self.columns(b, start, start + ids.shape[1])
        if columns.size == 0:
            return None
        some = torch.from_numpy(columns - start)
        sides = [[x[b].detach().cpu()[:, some] for x in side] for side in (keys, values)]
        # a model counts only the tokens that are not hidden; another count would cost bits, and nothing else
        positions = self.columns(b, 0, start).size + np.arange(columns.size)
        kv = KVCache(sides[0], sides[1], positions=positions, rope=self.rope, exact=self.tier == "lossless")
        return Part(kv, ids[b, some].numpy(), None if received is None else received[:, columns])

    def columns(self, b: int, start: int, stop: int) -> NDArray[np.int64]:
        """Those of a sequence from start to stop that are not hidden."""
        assert self.hidden is not None
        return start + np.flatnonzero(~self.hidden[b, start:stop].numpy())

    def select(self, rows: Sequence[int]) -> None:
        """Of the sequences, take these, in this order, some maybe several times."""
        if self.hidden is not None:
            self.hidden = self.hidden[list(rows)]

    def copy_from(self, other: Past) -> None:
        """Hold what another of this kind holds."""
        self.rope = other.rope
        self.hidden = None if other.hidden is None else other.hidden.clone()


class StreamedPast(Past):
    """As streams, a few whole chunks of tokens in each; every forward pass decodes them."""

    _reader: _StreamReader | None

    def clear(self) -> None:
        super().clear()
        self._pieces: list[Piece] = []
        self.pass_ended()

    @property
    def stop(self) -> int:
        return self._pieces[-1].stop if self._pieces else 0

    @property
    def nbytes(self) -> int:
        return sum(len(stream) for piece in self._pieces for stream in piece.streams if stream is not None)

    @property
    def reading_nbytes(self) -> int:
        return 0 if self._reader is None else self._reader.nbytes

    @property
    def pieces(self) -> list[Piece]:
        return self._pieces

    def take(self, pieces: Sequence[Piece]) -> None:
        self._pieces = list(pieces)

    def _hold(self, stop: int, parts: Sequence[Part | None]) -> None:
        streams = tuple(None if part is None else self._encode(part) for part in parts)
        self._pieces.append(Piece(self.stop, stop, streams))

    def _encode(self, part: Part) -> bytes:
        probs = TokenProbs.from_tokens(part.ids)
        if self.tier == "lossless":
            return engine.encode(part.kv, probs, tier="lossless", profile=self.profile)
        return engine.encode(part.kv, probs, profile=self.profile, kl=self.kl, importance=part.received)

    def read(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the columns from `start` on, where a piece begins, to the first columns of a layer's arrays.

        layer: which of those that are coded. All are read, one after the other, before the first is read again.
        keys, values: [batch, kv_heads, columns, width] on the CPU; what is hidden is left as it is.
        """
        if layer == 0:
            self._reader = _StreamReader(self, start)
        if self._reader is None or self._reader.layer != layer:
            raise CacheError(f"layer {layer} of the cache is read out of order: a forward pass goes through all layers")
        self._reader.next_into(keys, values)

    def pass_ended(self) -> None:
        self._reader = None

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._pieces = [replace(p, streams=tuple(p.streams[row] for row in rows)) for p in self._pieces]

    def copy_from(self, other: Past) -> None:
        super().copy_from(other)
        self.take(other.pieces)


class _StreamReader:
    """Decodes the pieces from a column on, layer after layer."""

    def __init__(self, past: StreamedPast, start: int) -> None:
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
        if layered(past.profile, past.tier) and streams:
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


def layered(profile: Profile | None, tier: Tier) -> bool:
    """Whether what is coded can be read layer after layer."""
    return tier == "near" and profile is not None and profile.predictor != "expectation"


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """As NumPy, sharing memory; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
