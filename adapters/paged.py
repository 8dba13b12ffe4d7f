"""What a server with paged attention needs, whichever server it is: where in its pages tokens are, and which prompts
to load from a store and to save to it.

A server keeps keys and values in blocks of a fixed number of tokens; a request has a list of blocks. A slot is the
place of a token: block * block_size + offset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from seqkv.engine import CacheError
from seqkv.engine.arrays import host_integers, on_device
from seqkv.engine.trie import Prefix


def slots(blocks: Sequence[int], block_size: int) -> torch.Tensor:
    """The slots of all tokens in some blocks, in order: [len(blocks) * block_size] int64."""
    first = torch.as_tensor(blocks, dtype=torch.int64)[:, None] * block_size
    return (first + torch.arange(block_size)).flatten()


class Pages:
    """The keys and values of one layer.

    pages: [blocks, kv_heads, block_size, 2 * width], in whatever order in memory.
    order: where in a head's page the numbers are: [2, block_size, width] int64, for keys and values offsets into its
        block_size * 2 * width numbers, which are then without gaps in memory. If not given, keys are the first half of
        the last axis, values the second.

    CacheError if shapes do not fit.
    """

    def __init__(self, pages: torch.Tensor, order: torch.Tensor | None = None) -> None:
        if pages.ndim != 4 or pages.shape[-1] % 2:
            raise CacheError(f"pages: expected [blocks, kv_heads, block_size, 2 * width], got {tuple(pages.shape)}")
        self.pages, self.order = pages, order
        self.blocks, self.heads, self.block_size, self.width = *pages.shape[:3], pages.shape[3] // 2
        if order is None:
            return
        places = torch.arange(self.block_size * 2 * self.width)
        if order.shape != (2, self.block_size, self.width) or not torch.equal(order.flatten().sort().values, places):
            raise CacheError(f"order: not the places of all numbers of a page of shape {tuple(pages.shape[2:])}")
        try:
            self._flat = pages.view(self.blocks, self.heads, -1)
        except RuntimeError as error:
            raise CacheError(
                f"pages with an order need a head's page in one piece of memory, not with strides {pages.stride()}"
            ) from error

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens in some slots, in new memory: [kv_heads, tokens, width] each.

        slots: [tokens] integers. CacheError if one is outside the pages.
        """
        block, inside = self._split(slots)
        if self.order is None:
            keys, values = self.pages[block, :, inside].permute(1, 0, 2).split(self.width, -1)
            return keys.contiguous(), values.contiguous()
        sides = [self._flat[block[:, None], :, order[inside]] for order in self.order]
        return sides[0].permute(2, 0, 1).contiguous(), sides[1].permute(2, 0, 1).contiguous()

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The opposite of `read`; nothing else is written. Numbers are rounded to the pages' dtype.

        CacheError also if a slot is given twice, or keys and values do not fit.
        """
        block, inside = self._split(slots, once=True)
        shape = (self.heads, len(block), self.width)
        if keys.shape != shape or values.shape != shape:
            raise CacheError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit pages for {shape}")
        sides = [side.to(self.pages.device, self.pages.dtype) for side in (keys, values)]
        if self.order is None:
            self.pages[block, :, inside] = torch.cat(sides, -1).permute(1, 0, 2)
            return
        for order, side in zip(self.order, sides, strict=True):
            self._flat[block[:, None], :, order[inside]] = side.permute(1, 2, 0)

    def _split(self, slots: torch.Tensor, once: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of each slot, where the pages are. once: no slot may be there twice."""
        places = host_integers(slots, "slots")
        if places.ndim != 1:
            raise CacheError(f"slots: expected [tokens] integers, got shape {places.shape}")
        if len(places) and not 0 <= places.min() <= places.max() < self.blocks * self.block_size:
            raise CacheError(f"slots {places.tolist()} are not all in {self.blocks} blocks of {self.block_size}")
        if once and len(np.unique(places)) != len(places):
            raise CacheError(f"slots: expected {len(places)} different integers, got {len(np.unique(places))}")
        there = torch.from_numpy(places).to(self.pages.device)
        return there // self.block_size, there % self.block_size


@dataclass(frozen=True)
class Load:
    """Write the tokens [start, stop) of a stored session into these blocks, which they fill."""

    session: str
    start: int
    stop: int
    blocks: list[int]


@dataclass(frozen=True)
class Save:
    """Store these tokens, which fill these blocks, as a session."""

    session: str
    token_ids: list[int]
    blocks: list[int]


class Prompts:
    """Which prompts to load and to save: what a scheduler asks.

    block_size: tokens in a block of the scheduler; only whole blocks are loaded and saved.
    find: the longest stored prefix of some token ids, as `SessionStore.longest_prefix` says it.

    A prompt is saved once, in the step that computes the last of its whole blocks, unless all of it is stored. Nothing
    is remembered of blocks from one step to the next, so that requests can be preempted, resumed and prefilled in
    chunks.
    """

    def __init__(self, block_size: int, find: Callable[[Sequence[int]], Prefix]) -> None:
        self._block_size, self._find = block_size, find
        self._found: dict[str, tuple[str, int]] = {}  # requests: what was found for them, and from where on
        self._loads: dict[str, tuple[str, int, int]] = {}
        self._unsaved: dict[str, Sequence[int]] = {}  # requests: the whole blocks of their prompts

    def match(self, request: str, token_ids: Sequence[int], computed: int) -> int:
        """How many of a request's tokens can be loaded, beyond `computed` ones that the server has.

        All but the last at most: the server needs a token to run the model on. May be asked again.
        """
        self._found.pop(request, None)
        prefix = self._find(token_ids)
        more = self._whole(min(prefix.tokens, len(token_ids) - 1)) - computed
        if more <= 0:
            return 0
        self._found[request] = str(prefix.session), computed
        return more

    def admit(self, request: str, prompt: Sequence[int] | None, loaded: int) -> None:
        """A request is about to run, with `loaded` tokens from the store. prompt: None if it is not to be saved."""
        session, start = self._found.pop(request, ("", 0))
        if loaded:
            self._loads[request] = session, start, start + loaded
        if prompt is not None and (whole := self._whole(len(prompt))):
            self._unsaved[request] = prompt[:whole]

    def step(
        self, computed: Iterable[tuple[str, int]], blocks_of: Callable[[str], Sequence[int]]
    ) -> tuple[list[Load], list[Save]]:
        """What to do in a step of the server.

        computed: the requests in it, and how many tokens of each will have been computed after it.
        blocks_of: the blocks of such a request, for all these tokens.
        """
        loads, saves, size = [], [], self._block_size
        for request, count in computed:
            if request in self._loads:
                session, start, stop = self._loads.pop(request)
                loads.append(Load(session, start, stop, list(blocks_of(request)[start // size : stop // size])))
            prompt = self._unsaved.get(request)
            if prompt is not None and count >= len(prompt):
                del self._unsaved[request]
                if self._find(prompt).tokens < len(prompt):
                    blocks = list(blocks_of(request)[: len(prompt) // size])
                    saves.append(Save(session_name(prompt), list(prompt), blocks))
        return loads, saves

    def forget(self, request: str) -> None:
        """A request is over."""
        self._found.pop(request, None)
        self._loads.pop(request, None)
        self._unsaved.pop(request, None)

    def _whole(self, tokens: int) -> int:
        return tokens // self._block_size * self._block_size


def session_name(token_ids: Sequence[int]) -> str:
    """The name of the session with these tokens: the same tokens are the same session."""
    return hashlib.blake2b(np.asarray(token_ids, "<i8").tobytes(), digest_size=16).hexdigest()


def tensor(array: Any) -> torch.Tensor:
    """A layer's array of a KVCache, where it is. torch warns of arrays that cannot be written: those are copied."""
    if not on_device(array):
        return torch.from_numpy(np.require(array, requirements="W"))
    shared = torch.from_dlpack(array)
    return shared.view(torch.bfloat16) if shared.dtype == torch.uint16 else shared
