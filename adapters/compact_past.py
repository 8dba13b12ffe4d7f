"""What a `CompressedCache` holds of the tokens before its window, in the compact form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seqkv import engine
from seqkv.adapters.past import Part, Past, Piece
from seqkv.engine import KVCache, StreamError, TokenProbs
from seqkv.engine.cached import cached_property
from seqkv.engine.compact import Compact, Format, Reader

SAVED = 8  # times less than what is asked for is lost where the compact form becomes streams


class CompactPast(Past):
    """In the compact form; tier "near", with a profile.

    Attributes: whole, whether layers must hand out tensors that are made, as the model does not attend by "sdpa".
    """

    whole = False
    _readers: list[Reader | None] | None

    def clear(self) -> None:
        super().clear()
        self._held: list[Compact] = []
        self._stop, self._dtype = 0, "float32"
        self.pass_ended()

    @cached_property
    def _form(self) -> Format:
        assert self.profile is not None
        return Format(self.profile, self.kl, _product)

    @property
    def stop(self) -> int:
        return self._stop

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in {id(held): held for held in self._held}.values())

    @property
    def reading_nbytes(self) -> int:
        return 0 if self._readers is None else sum(reader.nbytes for reader in self._readers if reader is not None)

    @property
    def pieces(self) -> list[Piece]:
        """A new stream of each sequence, finer than asked for, as something is lost already."""
        if self._stop == 0:
            return []
        return [Piece(0, self._stop, tuple(self._stream(held) if held.ids.size else None for held in self._held))]

    def _stream(self, held: Compact) -> bytes:
        assert self.profile is not None
        reader, shape, tokens = Reader(held, self.rope, np.arange(held.ids.size)), self.profile.shape, held.ids.size
        keys = [np.empty((heads, tokens, width), np.float32) for heads, width, _ in shape]
        values = [np.empty((heads, tokens, width), np.float32) for heads, _, width in shape]
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            reader.write(layer, "keys", key)
            reader.write(layer, "values", value)
        kv = KVCache(keys, values, positions=held.positions.astype(np.int64), rope=self.rope, dtype=self._dtype)
        return engine.encode(kv, TokenProbs.from_tokens(held.ids), profile=self.profile, kl=self.kl / SAVED)

    def take(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            parts = [None if stream is None else self._decoded(stream) for stream in piece.streams]
            for b, part in enumerate(parts):
                expected, found = self.columns(b, self._stop, piece.stop).size, 0 if part is None else len(part.ids)
                if expected != found:
                    raise StreamError(f"altered: a stream of {found} tokens, where {expected} are expected")
            self._hold(piece.stop, parts)

    def _decoded(self, stream: bytes) -> Part:
        return Part(engine.decode(stream, profile=self.profile), engine.token_ids(stream), None)

    def _hold(self, stop: int, parts: Sequence[Part | None]) -> None:
        self._dtype = next((part.kv.dtype for part in parts if part is not None), self._dtype)
        before = self._held or [Compact.empty(self._form)] * len(parts)
        self._held = [
            held if part is None else held.extended(part.kv, part.ids, part.received)
            for held, part in zip(before, parts, strict=True)
        ]
        self._stop = stop

    def readers(self) -> Sequence[Reader | None]:
        """Of each sequence, None where it has no tokens. They are kept until `pass_ended`."""
        if self._readers is None:
            self._readers = [
                Reader(held, self.rope, self.columns(b, 0, self._stop)) if held.ids.size else None
                for b, held in enumerate(self._held)
            ]
        return self._readers

    def pass_ended(self) -> None:
        self._readers = None

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.pass_ended()
        self._held = [self._held[row] for row in rows] if self._held else []

    def copy_from(self, other: Past) -> None:
        assert isinstance(other, CompactPast)
        super().copy_from(other)
        self._held, self._stop, self._dtype = list(other._held), other._stop, other._dtype


def _product(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """By PyTorch, whose threads are warm: NumPy's would wait for them, and they for NumPy's."""
    torch.bmm(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(out))
