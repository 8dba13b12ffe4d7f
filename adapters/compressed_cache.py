"""A transformers cache that holds what is older than a window in a compact form, or as streams: `CompressedCache`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from seqkv.adapters import cache_layers, rope, session_file
from seqkv.adapters.attention import OBSERVED_SDPA, AttentionObserver, listen
from seqkv.adapters.compact_past import CompactPast
from seqkv.adapters.parts import decoder_of, text_config
from seqkv.adapters.past import StreamedPast, Tier, layered
from seqkv.engine import CacheError, Profile, ProfileError
from seqkv.engine.profile import check_kind
from seqkv.engine.rate_control import check

Keep = Literal["compact", "streams", "decoded"]
CHUNK_COMPACT, CHUNK, CHUNK_WITHOUT_PROFILE = 8, 32, 256
"""Tokens that are coded at a time: few, as what waits for them is held as it is, but a stream has a header, and one
without a profile brings statistics of its own, which must be worth it."""

OBSERVED, QUERIES = 64, 256
"""How many tokens a pass must have for its attention to be observed, and of how many of its last queries it is."""


class CompressedCache(Cache):
    """The cache of a decoder, for `model.generate(ids, cache=CompressedCache(model, profile=profile))`.

    (transformers before 5.24: `past_key_values=`; `huggingface.cache_kwarg` tells.)

    model: whose cache this is. The cache reads from its calls, through a hook that goes when the cache goes, which
        tokens they are of: call the model itself, with `input_ids`.
    profile: of the model's layers of full attention; None codes without calibration.
    kl: requested loss, as in `engine.encode`. tier: "near", or "lossless", which is as exact as it is slow here.
    window: tokens that at least are held as they are, the last ones. Whole chunks of those before are coded together in
        all layers, once, when the last layer has been updated.
    keep: what is held of older tokens from one forward pass to the next. "compact": a form that attention reads nearly
        as it is ("streams" without a profile, with one of the predictor "expectation", and with tier="lossless"). It
        has at most 11 bits a number, so that a kl below about 1e-5 asks in vain. "streams": streams, smaller, which
        every pass decodes, layer by layer. "decoded": streams and what was decoded of them. A pass is as fast as with a
        DynamicCache then, and `nbytes` is more than a DynamicCache's, until `rest` drops what was decoded.

    Layers of full attention are coded (MLA among them, whose keys and values differ in width). All others are held as
    they are, and counted: sliding windows, which do not grow, and linear attention. Of hybrid layers the attention is
    coded. Batches may be padded: columns that `attention_mask` hides are not held, and stay hidden. Beam search and
    assisted generation work; tokens that are coded cannot be cropped.

    CacheError for a model whose cache is of another kind, and from a forward pass without ids, or with a mask that is
    not [batch, tokens]; ProfileError if the profile is of other layers; ValueError for numbers out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        profile: Profile | None = None,
        kl: float = 0.01,
        tier: Tier = "near",
        window: int = 128,
        keep: Keep = "compact",
    ) -> None:
        check(kl, None)
        check_kind(profile)
        if tier not in ("near", "lossless"):
            raise ValueError(f'tier must be "near" or "lossless", not {tier!r}')
        if keep not in get_args(Keep):
            raise ValueError(f"keep must be one of {', '.join(get_args(Keep))}, not {keep!r}")
        if isinstance(window, bool) or not isinstance(window, int | Integral) or window < 1:
            raise ValueError(f"window must be an integer of at least 1, not {window!r}")
        if getattr(model.config, "is_encoder_decoder", False):
            raise CacheError(
                "a CompressedCache is of a decoder alone: encoder-decoder models keep another kind of cache"
            )
        layers, coded = cache_layers.make(decoder_of(model), text_config(model))
        if not coded:
            kinds = sorted({type(layer).__name__ for layer in layers})
            raise CacheError(
                f"no layer of this model can be compressed, they are {', '.join(kinds)}: use a DynamicCache"
            )
        super().__init__(layers=layers)
        compact = keep == "compact" and layered(profile, tier)
        self.past = (CompactPast if compact else StreamedPast)(profile, kl, tier, len(coded))
        self.window, self.keep, self.coded = int(window), keep, coded
        self.chunk = CHUNK_COMPACT if compact else CHUNK_WITHOUT_PROFILE if profile is None else CHUNK
        for index, layer in enumerate(coded.values()):
            layer.join(self.past, index, keep == "decoded")
        self._ids: torch.Tensor | None = None  # [batch, columns that are held as they are]
        self._observer: AttentionObserver | None = None  # of the forward pass that goes on
        self._model = weakref.ref(model)
        _watch(self, model)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add a layer's keys and values, [batch, kv_heads, tokens, width]; returns those of all tokens."""
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._observer is not None and layer_idx in self.coded:
            listen(self, layer_idx, out[0])
        if layer_idx == self._last and not self._others_told():
            self._settle()  # else when this layer has told as well
        return out

    @property
    def model(self) -> PreTrainedModel:
        """Whose cache this is. CacheError if it is gone."""
        model = self._model()
        if model is None:
            raise CacheError("the model of this cache is gone: keep it while the cache is used")
        return model

    @property
    def nbytes(self) -> int:
        """Bytes held: the compact form or streams, recent tokens, layers of other kinds, and what is kept decoded."""
        tensors = [tensor for layer in self.layers for tensor in cache_layers.tensors_of(layer)]
        tensors += [x for x in (self._ids, self.past.hidden) if x is not None]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}  # views keep more
        return self.past.nbytes + sum(storages.values())

    @property
    def most_decoded_nbytes(self) -> int:
        """The most bytes that a forward pass had beside `nbytes`: what it decodes with, and one layer decoded."""
        return max(layer.most_decoded for layer in self.coded.values())

    def rest(self) -> None:
        """Drop what was decoded; the next forward pass decodes it again."""
        self.past.pass_ended()
        for layer in self.coded.values():
            layer.before = None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.past.clear()
        self._ids = self._observer = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens; a positive number is the length that is to be left.

        CacheError if some of these are coded already (`window` tokens never are), or the model has layers that cannot
        go back.
        """
        length, recent = self._length(), next(iter(self.coded.values())).recent
        remove = -tokens_to_remove if tokens_to_remove <= 0 else max(0, length - tokens_to_remove)
        others: list[Any] = [layer for place, layer in enumerate(self.layers) if place not in self.coded]
        # a coded layer refuses to remove more than is recent, before anything has changed
        for layer in [*self.coded.values()] if remove > recent else [*others, *self.coded.values()]:
            if remove or getattr(layer, "record_past", False):
                try:
                    layer.crop(-remove)
                except (RuntimeError, ValueError) as error:
                    raise CacheError(f"a {type(layer).__name__} cannot be cropped: {error}") from error
        if remove and self._ids is not None and self.past.hidden is not None:
            self._ids, self.past.hidden = self._ids[:, :-remove], self.past.hidden[:, :-remove]

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take these sequences, in this order, as beam search asks for."""
        rows: Any = self._rows(beam_idx)  # to transformers a LongTensor
        super().reorder_cache(rows)
        self._select(rows)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these sequences: their indices, or a boolean mask over all."""
        rows = self._rows(indices)
        super().batch_select_indices(rows)
        self._select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence that many times."""
        super().batch_repeat_interleave(repeats)
        if self._ids is not None:
            self._select(torch.arange(len(self._ids)).repeat_interleave(repeats))

    def save_session(self, path: str | Path) -> None:
        """Write everything as a safetensors file, whole or not at all; the compact form as new streams, finer than kl.

        CacheError if a layer holds what a file cannot, or after a forward pass that failed on its way.
        """
        self._agreed()
        session_file.save(self, path)

    @classmethod
    def load_session(
        cls, path: str | Path, model: PreTrainedModel, *, profile: Profile | None = None, keep: Keep = "compact"
    ) -> CompressedCache:
        """The cache that `save_session` wrote, on the model's device; generation goes on from it.

        keep: as for a new cache; the file does not say what it was.

        StreamError if the file is damaged or something else, CacheError if it is of another model, ProfileError if it
        needs another profile.
        """
        return session_file.load(cls, path, model, profile, keep)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """A cache that goes on by itself; what is coded and the model are shared."""
        past = self.past
        other = type(self)(
            self.model,
            profile=past.profile,
            kl=past.kl,
            tier=past.tier,
            window=self.window,
            keep=self.keep,
        )
        for mine, layer in zip(self.layers, other.layers, strict=True):
            own = {"past", "index", "keep"}
            vars(layer).update({k: copy.deepcopy(v, memo) for k, v in vars(mine).items() if k not in own})
        other.past.copy_from(past)
        other.chunk, other._ids = self.chunk, copy.deepcopy(self._ids, memo)
        return other

    def _rows(self, given: Any) -> torch.Tensor:
        """Indices of sequences, [rows]. CacheError, before anything is changed, if there are no such sequences."""
        rows = torch.as_tensor(given)
        known = (rows.dim() == 1 and not rows.is_floating_point()) or rows.shape == (0,)
        if known and self._ids is not None:
            batch = len(self._ids)
            inside = len(rows) == batch if rows.dtype == torch.bool else ((rows >= -batch) & (rows < batch)).all()
            known = bool(inside)
        if not known:
            raise CacheError(f"{given!r} are not sequences of this cache: give their indices, or a mask over all")
        if rows.dtype == torch.bool:
            return rows.nonzero()[:, 0]
        return rows.long() if self._ids is None else rows.long() % len(self._ids)

    def _select(self, rows: torch.Tensor) -> None:
        chosen = rows.cpu()
        self.past.select(chosen.tolist())
        if self._ids is not None:
            self._ids = self._ids[chosen]

    def _length(self) -> int:
        """Columns that all coded layers hold. CacheError if they differ."""
        lengths = {layer.get_seq_length() for layer in self.coded.values()}
        if len(lengths) != 1:
            raise CacheError("a forward pass ended before the last layer: reset the cache, or load a session")
        return lengths.pop()

    def _agreed(self) -> int:
        """How many columns layers, ids and mask hold. CacheError if they differ.

        A call that failed before the first layer, as with an id that is not in the vocabulary, is forgotten.
        """
        length, start = self._length(), self.past.stop
        if self._ids is not None and start + self._ids.shape[1] > length and cache_layers.hold(self.layers, length):
            if length == 0:
                self._ids = self.past.hidden = None  # the next call may be of another number of sequences
            elif self.past.hidden is not None:
                self._ids, self.past.hidden = self._ids[:, : length - start], self.past.hidden[:, :length]
        told = (0, 0) if self._ids is None else (len(self._ids), start + self._ids.shape[1])
        masked = (0, 0) if self.past.hidden is None else tuple(self.past.hidden.shape)
        if told != masked or told[1] != length:
            raise CacheError("a call before this one did not go through: reset the cache, or load a session")
        return length

    def saw(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """What a call of the model is about to add. Called by the hook, before it."""
        given = [kwargs.get("cache"), kwargs.get("past_key_values"), *args]
        if not any(one is self for one in given):
            return
        ids = kwargs.get("input_ids", args[0] if args and args[0] is not self else None)
        if ids is None:
            raise CacheError("a CompressedCache needs the token ids: call the model with input_ids, not inputs_embeds")
        length = self._agreed()
        untold, self._observer = self._observer is not None, None
        if untold and length:  # the pass before is over, and its last layer never told
            self._settle()
        if isinstance(self.past, CompactPast):
            implementation = decoder_of(self.model).config._attn_implementation
            self.past.whole = implementation not in ("sdpa", OBSERVED_SDPA)
        self._see_mask(kwargs.get("attention_mask"), length, *ids.shape)
        new = ids.detach().cpu()
        self._ids = new if self._ids is None else torch.cat([self._ids, new], dim=1)
        if self.past.tier == "near" and new.shape[1] >= OBSERVED and self._ids.shape[1] >= self.window + self.chunk:
            self._observer = AttentionObserver(QUERIES)

    def attended(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> None:
        """What a layer attended with. Called by the attention, in a pass that is observed."""
        if self._observer is not None:
            self._observer.record(layer, query, key, mask, scaling)
            if layer == self._last:
                self._settle()

    @property
    def _last(self) -> int:
        """The last layer that is coded."""
        return next(reversed(self.coded))

    def _others_told(self) -> bool:
        """Whether this pass is observed, and all coded layers before the last one told."""
        return self._observer is not None and self._observer.layers == set(self.coded) - {self._last}

    def _received(self) -> list[NDArray[np.float32]] | None:
        """Attention received by the columns of each sequence, [layers, columns], if all layers told. Ends observing."""
        observer, self._observer = self._observer, None
        if observer is None or observer.layers != set(self.coded) or self._ids is None:
            return None
        return [observer.importance(b) for b in range(len(self._ids))]

    def _see_mask(self, mask: Any, length: int, batch: int, new: int) -> None:
        """Which columns are hidden. CacheError if that changes."""
        known = torch.zeros((batch, 0), dtype=torch.bool) if self.past.hidden is None else self.past.hidden
        if known.shape != (batch, length):
            raise CacheError(f"the cache holds {len(known)} sequences of {length} tokens, the call is of {batch}")
        if mask is None:
            mask = torch.ones((batch, length + new), dtype=torch.long)
        if getattr(mask, "shape", None) != (batch, length + new):
            raise CacheError(
                f"attention_mask must be of shape [{batch} sequences, {length + new} tokens], or not given; it is "
                f"{list(getattr(mask, 'shape', [])) or type(mask).__name__}"
            )
        hidden = (mask == 0).cpu()
        if not torch.equal(hidden[:, :length], known):
            raise CacheError("attention_mask hides other tokens than before: those that are hidden are not held")
        self.past.hidden = hidden

    def _settle(self) -> None:
        """Code the whole chunks that are older than the window."""
        received, layers = self._received(), list(self.coded.values())
        if not self.past.rope:
            self.begin()
        if len({layer.recent for layer in layers}) != 1:
            raise CacheError(
                "layers of full attention hold different numbers of tokens: this model's cache is not known"
            )
        held = layers[0].recent
        if self._ids is None or self._ids.shape[1] != held:
            raise CacheError(
                "the cache was not told which tokens these are: call the model that it was made for itself"
            )
        due = max(0, held - self.window) // self.chunk * self.chunk
        if due:
            keys, values = ([getattr(x, side)[:, :, :due] for x in layers] for side in ("keys", "values"))
            self.past.add(keys, values, self._ids[:, :due], received)
            self._ids = self._ids[:, due:].clone()
            for layer in layers:
                layer.drop(due)

    def begin(self) -> None:
        """Get to know the layers, when the first tokens are there. ProfileError if the profile is of others."""
        model, profile, shape = self.model, self.past.profile, []
        for layer in self.coded.values():
            shape.append((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
        if profile is not None and profile.shape != tuple(shape):
            raise ProfileError(
                f"the profile is for {len(profile.shape)} layers, the model has {len(shape)} of full attention, "
                f"or these are of other widths: {sorted(set(shape))}, not {sorted(set(profile.shape))}"
            )
        widths = [0] * len(self.layers)
        for place, (_, width, _) in zip(self.coded, shape, strict=True):
            widths[place] = width
        ropes = rope.of_decoder(decoder_of(model), text_config(model), widths)
        self.past.rope = [ropes[place] for place in self.coded]


def _watch(cache: CompressedCache, model: PreTrainedModel) -> None:
    """Tell the cache of the model's calls, for as long as there is a cache."""
    there = weakref.ref(cache)

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        one = there()
        if one is not None:
            one.saw(args, kwargs)

    weakref.finalize(cache, model.register_forward_pre_hook(before, with_kwargs=True).remove)
