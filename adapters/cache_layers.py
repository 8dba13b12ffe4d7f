"""Layers of a `CompressedCache`: those whose keys and values become streams, and those that are held as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from seqkv.adapters.past import Past
from seqkv.engine import CacheError


class _Compressed:
    """A layer of full attention: `keys`, `values` are its last tokens as they are, the `past` has those before.

    before: decoded keys and values of the past, as far as they are kept.
    """

    is_croppable = True
    keys: Any
    values: Any

    def join(self, past: Past, index: int, keep: bool) -> None:
        """Begin to hold tokens. index: which of the layers that are coded."""
        self.past, self.index, self.keep = past, index, keep
        self.before: tuple[torch.Tensor, torch.Tensor] | None = None
        self.most_decoded = 0  # bytes that an update held beside, most of all

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keys and values of all tokens, [batch, kv_heads, tokens, width], the past decoded."""
        if self.past.stop == 0:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        out = []
        for recent, new in ((self.keys, key_states), (self.values, value_states)):
            batch, heads, columns, width = new.shape
            columns += self.past.stop + recent.shape[2]
            out.append(torch.zeros((batch, heads, columns, width), dtype=new.dtype))
        kept = self._kept
        for side, array in enumerate(out):
            if self.before is not None:
                array[:, :, :kept] = self.before[side]
        if kept < self.past.stop:
            self.past.read(self.index, kept, out[0][:, :, kept:], out[1][:, :, kept:])
            if self.keep:
                self.before = out[0][:, :, : self.past.stop].clone(), out[1][:, :, : self.past.stop].clone()
        self.most_decoded = max(self.most_decoded, self.past.reading_nbytes + sum(x.nbytes for x in out))
        keys, values = (x.to(key_states.device) for x in out)
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        keys[:, :, self.past.stop :], values[:, :, self.past.stop :] = self.keys, self.values
        return keys, values

    @property
    def _kept(self) -> int:
        """Columns that are held decoded."""
        return 0 if self.before is None else self.before[0].shape[2]

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
        remove = -tokens_to_remove
        if not 0 <= remove <= self.recent:
            raise CacheError(
                f"{remove} tokens cannot be cropped: {self.recent} are held as they were, those before are coded; "
                "give a larger window"
            )
        super().crop(tokens_to_remove)  # type: ignore[misc]

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


_KINDS: dict[type, type] = {DynamicLayer: CompressedLayer}

if hasattr(cache_utils, "LinearAttentionAndFullAttentionLayer"):

    class CompressedHybridLayer(_Compressed, cache_utils.LinearAttentionAndFullAttentionLayer):
        """In place of a layer that has both a linear-attention state, held as it is, and full attention."""

    _KINDS[cache_utils.LinearAttentionAndFullAttentionLayer] = CompressedHybridLayer


def make(config: Any) -> tuple[list[Any], dict[int, Any]]:
    """The layers of a model's cache, and those of them that are coded, by their place.

    config: of the text decoder. CacheError if this release of transformers has no cache for a kind of layer.
    """
    layers = DynamicCache(config=config).layers
    if not layers:  # older releases make them as they come, where all are alike
        layers = [DynamicLayer() for _ in range(config.num_hidden_layers)]
    kinds = getattr(config, "layer_types", None) or []
    plain = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
    for place, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        if type(layer) is DynamicLayer and kind not in plain:
            raise CacheError(f"layer {place} is of kind {kind!r}, for which this release of transformers has no cache")
    coded = {}
    for place, layer in enumerate(layers):
        if type(layer) in _KINDS:
            layers[place] = coded[place] = _KINDS[type(layer)].__new__(_KINDS[type(layer)])
            vars(coded[place]).update(vars(layer))  # which differ between releases
    return layers, coded


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
