"""How much attention tokens receive while a transformers model runs.

sdpa does not tell: it is computed once more, for the last queries of a call, as the next ones will look at about the
same tokens.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqkv.adapters.parts import decoder_of
from seqkv.engine import CacheError

OBSERVED_SDPA = "seqkv_observed_sdpa"  # the attention implementation that is registered


@contextlib.contextmanager
def observe_attention(model: PreTrainedModel, last: int = 256) -> Iterator[AttentionObserver]:
    """Within this context, forward passes of `model` also record how much attention each token receives.

        with observe_attention(model) as attention:
            out = model(input_ids, use_cache=True)
        importance = attention.importance()

    last: how many of the latest queries count. The prefill may come in one call or in chunks; a call without a past
        starts anew.

    The model attends with PyTorch's scaled dot product meanwhile, and gets its own implementation back afterwards. The
    record takes memory for [heads, last / 4, tokens] numbers while a layer runs, and keeps about [10, tokens] a layer.
    """
    if last < 1:
        raise ValueError(f"last must be at least 1, not {last}")
    decoder = decoder_of(model)
    attentions = [m for m in decoder.modules() if hasattr(m, "layer_idx") and not getattr(m, "is_cross_attention", 0)]
    if any(hasattr(m, "_seqkv_observer") for m in attentions):
        raise RuntimeError("the model is being observed already")
    AttentionInterface.register(OBSERVED_SDPA, _telling())
    AttentionMaskInterface.register(OBSERVED_SDPA, sdpa_mask)
    before, observer = decoder.config._attn_implementation, AttentionObserver(last)
    decoder.set_attn_implementation(OBSERVED_SDPA)
    try:
        for module in attentions:
            module._seqkv_observer = observer
        yield observer
    finally:
        for module in attentions:
            del module._seqkv_observer
        decoder.set_attn_implementation(before)


class AttentionObserver:
    """What `observe_attention` recorded."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._block = max(1, last // 4)  # queries that are added up before they are stored
        self._layers: dict[int, list[_Received]] = {}

    @property
    def layers(self) -> set[int]:
        """Those of which something was recorded."""
        return set(self._layers)

    def importance(self, batch_index: int = 0) -> NDArray[np.float32]:
        """Attention received: [layers, tokens] float32, between 0 and 1.

        The mean over all heads and over those of the last queries that can see the token. If the prefill came in
        chunks, up to a quarter of `last` more queries than that may count, never fewer unless the text is shorter.

        CacheError if nothing was recorded, or the layers saw different numbers of tokens.
        """
        if not self._layers:
            raise CacheError(
                "no attention was observed: run the model within observe_attention (and check its support)"
            )
        rows = [self._row(self._layers[layer], batch_index) for layer in sorted(self._layers)]
        if len({row.size for row in rows}) != 1:
            raise CacheError("layers saw different numbers of tokens: start from an empty DynamicCache()")
        return np.stack(rows)

    def record(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> None:
        """Add a layer's call: query [batch, heads, queries, dim], key [batch, kv_heads, tokens, dim].

        mask: what may be seen, as sdpa takes it: [batch, 1 or heads, queries, tokens] booleans or summands, or None
            for a causal one.
        scaling: factor on the products, 1 / sqrt(dim) if None.
        """
        queries, tokens = query.shape[2], key.shape[2]
        received = self._layers.setdefault(layer, [])
        if queries == tokens:
            received.clear()
        for start in range(max(0, queries - self._last), queries, self._block):
            rows = slice(start, min(start + self._block, queries))
            bias = _bias(mask, rows, queries, tokens, query.device)
            new = _receive(query[:, :, rows], key, bias, query.shape[-1] ** -0.5 if scaling is None else scaling)
            if received and received[-1].queries + new.queries <= self._block:
                new = received.pop().plus(new)
            received.append(new)
        while sum(r.queries for r in received) - received[0].queries >= self._last:
            received.pop(0)

    @staticmethod
    def _row(received: list[_Received], batch_index: int) -> NDArray[np.float32]:
        total = received[0]
        for other in received[1:]:
            total = total.plus(other)
        return (total.attention[batch_index] / total.seen[batch_index].clamp(min=1)).cpu().numpy()


class Listener(Protocol):
    """Who wants to know what attends to keys of its."""

    def attended(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> None:
        """What a layer attended with, after it did; arguments as of AttentionObserver.record."""


def listen(listener: Listener, layer: int, key: torch.Tensor) -> None:
    """Tell a listener when this thread attends, with PyTorch's scaled dot product, to this very tensor; once, and not
    after another was listened for.

    Models and their configurations stay as they are: what transformers calls "sdpa" is wrapped once, for the process.
    """
    _telling()
    _HERE.awaited = weakref.ref(key), weakref.ref(listener), layer


_HERE, _WRAPPING = threading.local(), threading.Lock()


def _telling() -> Any:
    """What transformers calls "sdpa", wrapped so that it tells who observes a model or listens for a key."""
    with _WRAPPING:
        known = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if not hasattr(known, "_seqkv"):
            known = _wrapped(known)
            AttentionInterface.register("sdpa", known)
        return known


def _wrapped(plain: Any) -> Any:
    @functools.wraps(plain)
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        out = plain(module, query, key, value, attention_mask, *args, **kwargs)
        call = query, key, attention_mask, kwargs.get("scaling")
        observer = getattr(module, "_seqkv_observer", None)
        if observer is not None:
            observer.record(module.layer_idx, *call)
        if not torch.compiler.is_compiling():
            _tell(*call)
        return out

    attend._seqkv = True  # type: ignore[attr-defined]
    return attend


def _tell(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None) -> None:
    awaited = getattr(_HERE, "awaited", None)
    if awaited is None or awaited[0]() is not key:
        return
    _HERE.awaited = None
    listener = awaited[1]()
    if listener is not None:
        listener.attended(awaited[2], query, key, mask, scaling)


@dataclass
class _Received:
    """Some queries' attention, mean over heads and sum over queries, and how many saw each token: [batch, tokens]."""

    queries: int
    attention: torch.Tensor
    seen: torch.Tensor

    def plus(self, later: _Received) -> _Received:
        more = (0, later.seen.shape[1] - self.seen.shape[1])  # tokens that came after these queries
        return _Received(
            self.queries + later.queries,
            torch.nn.functional.pad(self.attention, more) + later.attention,
            torch.nn.functional.pad(self.seen, more) + later.seen,
        )


def _bias(mask: torch.Tensor | None, rows: slice, queries: int, tokens: int, device: torch.device) -> torch.Tensor:
    """What is added to the scores of some queries: [1 or batch, 1 or heads, rows, tokens] float32."""
    if mask is None:  # causal, the last query sees all tokens
        at = torch.arange(tokens - queries + rows.start, tokens - queries + rows.stop, device=device)
        mask = (torch.arange(tokens, device=device) <= at[:, None])[None, None]
    else:
        mask = mask[:, :, rows, :tokens]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=device).masked_fill_(~mask, float("-inf"))
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.float().masked_fill_(hidden, float("-inf"))


def _receive(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, scaling: float) -> _Received:
    """The attention of these queries, recomputed: sdpa does not tell."""
    with torch.no_grad():
        batch, heads, queries, dim = query.shape
        kv_heads, tokens = key.shape[1:3]
        # the heads that share keys side by side, so that keys need no copy
        grouped = query.reshape(batch, kv_heads, heads // kv_heads * queries, dim)
        scores = (grouped @ key.transpose(2, 3)).float().mul_(scaling).view(batch, heads, queries, tokens)
        attention = scores.add_(bias).softmax(-1).nan_to_num_(0.0)  # a padding query sees nothing: 0 / 0
        seen = torch.isfinite(bias).any(1).sum(1, dtype=torch.float32).expand(batch, tokens)
        return _Received(queries, attention.mean(1).sum(1), seen)
