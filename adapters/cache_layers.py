"""Layers of a `CompressedCache`: those whose keys and values become streams, and those that are held as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from seqkv.adapters.compact_past import CompactPast
from seqkv.adapters.compact_tensors import CompactTensor
from seqkv.adapters.past import StreamedPast
from seqkv.engine import CacheError


class _Compressed:
    """A layer of full attention: `keys`, `values` are its last tokens as they are, the `past` has those before.

    before: decoded keys and values of the past, as far as they are kept.
    """

    is_croppable = True
    keys: Any
    values: Any

    def join(self, past: StreamedPast | CompactPast, index: int, keep: bool) -> None:
        """Begin to hold tokens. index: which of the layers that are coded."""
        self.past, self.index, self.keep = past, index, keep
        self.before: tuple[torch.Tensor, torch.Tensor] | None = None
        self.most_decoded = 0  # bytes that an update held beside, most of all

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keys and values of all tokens, [batch, kv_heads, tokens, width], the past decoded."""
        past = self.past
        if past.stop == 0:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        out = self._read(past) if isinstance(past, StreamedPast) else self._read_compact(past, key_states.shape[2])
        if self.index == past.layers - 1:
            past.pass_ended()
        return out

    def _read_compact(self, past: CompactPast, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens. For a single query they are not made, unless something else than attention asks for them."""
        if self.index == 0:
            past.pass_ended()
        readers, stop = past.readers(), past.stop
        keys = CompactTensor(readers, self.index, "keys", stop, self.keys)
        values = CompactTensor(readers, self.index, "values", stop, self.values)
        graph = torch.is_grad_enabled() and (self.keys.requires_grad or self.values.requires_grad)
        if queries == 1 and not graph and not past.whole:
            self.most_decoded = max(self.most_decoded, past.reading_nbytes)
            return keys, values
        both = keys.made(), values.made()
        self.most_decoded = max(self.most_decoded, past.reading_nbytes + sum(x.nbytes for x in both))
        return both

    def _read(self, past: StreamedPast) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens, decoded."""
        before = self._decoded(past)
        if self.keep:
            self.before = before
        keys, values = (
            torch.cat([old.to(new.device), new], dim=2)
            for old, new in zip(before, (self.keys, self.values), strict=True)
        )
        beside = past.reading_nbytes + keys.nbytes + values.nbytes
        self.most_decoded = max(self.most_decoded, beside + (0 if self.keep else sum(x.nbytes for x in before)))
        return keys, values

    def _decoded(self, past: StreamedPast) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the past, on the CPU; hidden columns are 0."""
        kept, stop = 0 if self.before is None else self.before[0].shape[2], past.stop
        if self.before is not None and kept == stop:
            return self.before
        keys, values = (
            torch.zeros((x.shape[0], x.shape[1], stop - kept, x.shape[3]), dtype=x.dtype)
            for x in (self.keys, self.values)
        )
        past.read(self.index, kept, keys, values)
        if self.before is None:
            return keys, values
        return torch.cat([self.before[0], keys], dim=2), torch.cat([self.before[1], values], dim=2)

    @property
    def recent(self) -> int:
        """Columns that are held as they are."""
        return 0 if self.keys is None or self.keys.numel() == 0 else self.keys.shape[2]

    def drop(self, columns: int) -> None:
        """Hold that many columns fewer as they are: the oldest of them."""
        self.keys, self.values = self.keys[:, :, columns:].clone(), self.values[:, :, columns:].clone()

    def get_seq_length(self) -> int:
        return self.past.stop + self.recent

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove columns. CacheError if they are not all held as they are."""
        left = self.recent + tokens_to_remove
        if not 0 <= left <= self.recent:
            raise CacheError(
                f"{-tokens_to_remove} tokens cannot be cropped: {self.recent} are held as they were, those before are "
                "coded; give a larger window"
            )
        if tokens_to_remove:
            self.keys, self.values = self.keys[:, :, :left].clone(), self.values[:, :, :left].clone()

    def reset(self) -> None:
        self.before = None
        super().reset()  # type: ignore[misc]
        self.keys = self.values = None  # older releases keep zeros
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = 0 if self.keys is None else len(self.keys)
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._select(torch.arange(batch).repeat_interleave(repeats))

    def _select(self, rows: torch.Tensor) -> None:
        if self.before is not None:
            self.before = self.before[0][rows.cpu()], self.before[1][rows.cpu()]

    def offload(self) -> None:
        raise CacheError("a CompressedCache is not offloaded: what it holds of old tokens is in host memory already")

    prefetch = offload


class CompressedLayer(_Compressed, DynamicLayer):
    """In place of a DynamicLayer."""


_KINDS: dict[type, Any] = {DynamicLayer: CompressedLayer}

if hasattr(cache_utils, "LinearAttentionAndFullAttentionLayer"):

    class CompressedHybridLayer(_Compressed, cache_utils.LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
        """In place of a layer that has both a linear-attention state, held as it is, and full attention."""

        def crop(self, tokens_to_remove: int) -> None:
            cache_utils.LinearAttentionLayer.crop(self, tokens_to_remove)
            _Compressed.crop(self, tokens_to_remove)

    _KINDS[cache_utils.LinearAttentionAndFullAttentionLayer] = CompressedHybridLayer


def make(decoder: Any, config: Any) -> tuple[list[Any], dict[int, Any]]:
    """The layers of a model's cache, and those of them that are coded, by their place.

    decoder: the stack of layers. config: its configuration. CacheError if this release of transformers has no cache for
    a kind of layer, but a cache of its own for the model.
    """
    for name, kind in vars(sys.modules[type(decoder).__module__]).items():
        own = isinstance(kind, type) and kind.__module__ == type(decoder).__module__ and name.endswith("Cache")
        if own and "Padding" not in name and not issubclass(kind, CacheLayerMixin):
            raise CacheError(f"in this release of transformers the model keeps a cache of its own kind, {name}")
    layers: list[Any] = DynamicCache(config=config).layers
    if not layers:  # older releases make them as they come, where all are alike
        layers = [DynamicLayer() for _ in range(config.num_hidden_layers)]
    kinds = getattr(config, "layer_types", None) or []
    plain = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
    for place, (layer, name) in enumerate(zip(layers, kinds, strict=False)):
        if type(layer) is DynamicLayer and name not in plain:
            raise CacheError(f"layer {place} is of kind {name!r}, for which this release of transformers has no cache")
    coded = {}
    for place, layer in enumerate(layers):
        if type(layer) in _KINDS:
            kind = _KINDS[type(layer)]
            layers[place] = coded[place] = kind.__new__(kind)
            vars(coded[place]).update(vars(layer))  # which differ between releases
    return layers, coded


def hold(layers: list[Any], columns: int) -> bool:
    """Whether all are known to hold that many columns. What a linear-attention state has seen, nobody can tell."""
    kinds = (CompressedLayer, cache_utils.DynamicSlidingWindowLayer)
    return all(type(layer) in kinds and layer.get_seq_length() == columns for layer in layers)


def tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """All tensors that a layer holds, whatever kind it is."""
    stack = list(vars(layer).values())
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
