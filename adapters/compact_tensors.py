"""Keys and values of a layer, of which those in the compact form are not made if attention can do without them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from seqkv.engine.compact import Reader, Side


class CompactTensor(torch.Tensor):
    """Keys or values of all tokens, [batch, kv_heads, tokens, width]: a tensor as any other, made when something is
    done with it. But PyTorch's scaled dot product of one query token takes keys and values as they are held.

    readers: of each sequence, None where it has no tokens; layer; stop: how many columns are theirs. recent: those
    after them, [batch, kv_heads, tokens - stop, width].
    """

    readers: Sequence[Reader | None]
    layer: int
    side: Side
    stop: int
    recent: torch.Tensor
    _made: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, readers: Sequence[Reader | None], layer: int, side: Side, stop: int, recent: torch.Tensor
    ) -> CompactTensor:
        batch, heads, tokens, width = recent.shape
        shape = (batch, heads, stop + tokens, width)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=recent.dtype, device=recent.device)
        self.readers, self.layer, self.side, self.stop, self.recent = readers, layer, side, stop, recent
        self._made = None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            out = _attended(*args, **kwargs)
            if out is not None:
                return out
        if func not in _ASKED:
            args, kwargs = tree_map_only(cls, cls.made, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, cls.made, (args, kwargs or {}))  # what did not come through Python's front
        return func(*args, **kwargs)

    def made(self) -> torch.Tensor:
        """A tensor of them; what is hidden is 0."""
        if self._made is None:
            recent = self.recent.cpu()
            batch, heads, tokens, width = recent.shape
            made = torch.zeros((batch, heads, self.stop + tokens, width), dtype=torch.float32, device="cpu")
            for reader, row in zip(self.readers, made, strict=True):
                if reader is not None:
                    reader.write(self.layer, self.side, row.numpy())
            if recent.dtype != made.dtype:
                most = torch.finfo(recent.dtype).max
                made = made.clamp_(-most, most).to(recent.dtype)
            made[:, :, self.stop :] = recent
            self._made = made.to(self.recent.device)
        return self._made


_ASKED = {  # of which nothing needs to be made
    torch.Tensor.__len__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")),
}


def _attended(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """scaled_dot_product_attention with keys and values as they are held; None if they must be made for that."""
    if not _fit(query, key, value, attn_mask) or dropout_p or is_causal:
        return None
    (batch, heads, queries, width), (_, kv_heads, tokens, _), stop = query.shape, key.shape, key.stop
    rows = heads // kv_heads * queries
    if heads % kv_heads or not 1 <= rows <= _MOST_ROWS or (heads != kv_heads and not enable_gqa):
        return None
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext():
        grouped = query.reshape(batch, kv_heads, rows, width).float().cpu().contiguous()
        scores = torch.zeros((batch, kv_heads, rows, tokens), dtype=torch.float32, device="cpu")
        scores[..., stop:] = grouped @ key.recent.float().cpu().transpose(2, 3)
        for reader, one, its in zip(key.readers, grouped, scores, strict=True):
            if reader is not None:
                reader.scores(key.layer, one.numpy(), its.numpy())
        scores *= width**-0.5 if scale is None else scale
        if attn_mask is not None:
            by_head, mask = scores.view(batch, heads, queries, tokens), attn_mask.cpu()
            if mask.dtype == torch.bool:
                by_head.masked_fill_(~mask, float("-inf"))
            else:
                by_head += mask
        weights = scores.softmax(-1)
        if attn_mask is not None:
            weights.nan_to_num_(0.0)  # a query that sees nothing
        out = weights[..., stop:] @ value.recent.float().cpu()
        for reader, its, row in zip(value.readers, weights, out, strict=True):
            if reader is not None:
                reader.add_up(value.layer, its.numpy(), row.numpy())
        return out.view(batch, heads, queries, -1).to(query)


_MOST_ROWS = 64  # of a query that share keys; for more, keys and values are made


def _fit(query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Whether these are the keys and values of one layer as they were handed out, and a query and a mask of theirs."""
    if not (isinstance(key, CompactTensor) and isinstance(value, CompactTensor)) or isinstance(query, CompactTensor):
        return False
    ours = (key.side, value.side) == ("keys", "values") and key.readers is value.readers and key.layer == value.layer
    if not ours or key.stop != value.stop or key._made is not None or value._made is not None:
        return False  # what was made may have been changed
    if mask is not None and (mask.dtype not in (torch.bool, query.dtype) or mask.dim() < 2):
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, mask)):
        return False
    return bool(
        query.dim() == 4
        and query.dtype == key.dtype
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
    )
