"""References: stored streams that others are coded against, and which of their tokens a new session holds too."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from seqkv.engine import container, host, importance, near, quantiser
from seqkv.engine.align import Aligner
from seqkv.engine.cached import cached_property
from seqkv.engine.container import Buffer, Container, Section
from seqkv.engine.errors import ProfileError, StreamError, reading
from seqkv.engine.form import CHUNK, CLASSES, DELTA, MAX_DEPTH, MEANS, NAMES, RUNS, TOKENS, Form, chunk_bounds, chunks
from seqkv.engine.known import Known
from seqkv.engine.modes import stored_mode
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile

KEPT = 4  # decoded chunks that a reference keeps
LARGEST_ID = (1 << 31) - 1  # that the aligner takes

Find = Callable[[str], Buffer]
"""The stream with a key; raises if there is none."""


def stream_key(stream: Buffer) -> str:
    """The name by which others refer to a stream: xxh3_128 of its bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(memoryview(stream))


class Reference:
    """A stream to code others against, or to decode what was coded against it. Decoded a chunk at a time, as needed.
    May be used by several threads.

    find: the stream that this one was coded against in turn, by its key. Needed if `depth` is not 0.

    Attributes: key (`stream_key`), token_ids [tokens], depth: how many references follow in the chain.

    Raises StreamError if it is damaged, of another tier than near, was coded without a profile, or what it depends on
    is missing; ProfileError for another profile.
    """

    def __init__(self, stream: Buffer, profile: Profile, find: Find | None = None) -> None:
        self.parsed = Container.parse(stream)
        self.form = Form(self.parsed)
        if self.form.tier != "near":
            raise StreamError(f"a reference must be of the near tier, not of the {self.form.tier} tier")
        if self.form.profile is None:
            raise StreamError("a stream that was coded without a profile cannot be a reference: encode with one")
        self.key, self.depth = stream_key(stream), self.form.depth
        self.mode = stored_mode(self.parsed, self.form, profile)
        self.aligned = Aligned.read(self.parsed, self.form, profile, find)
        with reading(f"reference {self.key}"):
            self.known = Known.read(self.parsed, self.form, range(chunks(self.form.tokens)), self.aligned)
            self.token_ids = self.known.ids
            if int(self.token_ids.max()) > LARGEST_ID:
                raise StreamError(f"token ids: altered: {int(self.token_ids.max())} is beyond every vocabulary")
        self._decoded: OrderedDict[int, NDArray[np.float32]] = OrderedDict()

    @classmethod
    def of(cls, given: Any, profile: Profile, find: Find | None = None) -> Reference:
        """From a stream, or a Reference, which must be of this profile."""
        if not isinstance(given, cls):
            return cls(given, profile, find)
        stored_mode(given.parsed, given.form, profile)  # refuses another profile
        return given

    @classmethod
    def needed(cls, form: Form, profile: Profile, given: Any) -> Reference:
        """What a stream of this form was coded against. given: as `decode` takes it: a stream, a Reference, or Find.

        All that can be is checked before the reference's own reference is asked for, so that every chain ends.
        """
        find = given if callable(given) else None
        stream = given if find is None else find(str(form.reference))
        if stream is None:
            raise StreamError(
                f"the stream was coded against reference {form.reference}, which was not given (reference=...)"
            )
        key, there = (stream.key, stream.form) if isinstance(stream, cls) else _key_and_form(stream)
        if key != form.reference:
            raise StreamError(
                f"the stream was coded against reference {form.reference}, the one given is {key}: another stream, or "
                "it was altered"
            )
        if (there.depth + 1, there.profile, there.shape) != (form.depth, form.profile, form.shape):
            raise StreamError(f"altered: no stream like this was ever coded against reference {key}")
        return cls.of(stream, profile, find)

    @property
    def sinks(self) -> int:
        """How many of the first tokens are sinks."""
        return importance.sinks(self.form.positions)

    @cached_property
    def probs(self) -> TokenProbs:
        return TokenProbs.from_tokens(self.token_ids)

    def usual_loss(self, chunk: int) -> float:
        """What quantisation lost in a chunk, a token, in the Fisher metric, about; 0 if that is not known."""
        said = self.parsed.header.get("loss")
        lost = said.get("fisher") if isinstance(said, dict) else None
        # of all chunks; one of a finer step lost less, by that factor or by its square
        finer = quantiser.step_size(self.form.steps[chunk]) / quantiser.step_size(min(self.form.steps))
        return lost * finer if isinstance(lost, float) else 0.0

    def blocks(self, chunk: int) -> NDArray[np.float32]:
        """Decoded blocks of a chunk, side by side, keys un-rotated: [tokens, coefs]."""
        decoded = self._decoded.pop(chunk, None)
        if decoded is None:
            coding = host.Coding(self.parsed, self.form, self.mode, self.probs, self.known.classes, self.aligned)
            with reading(f"reference {self.key}"):
                unpacked = coding.unpack(chunk, len(self.form.shape))
            decoded = coding.decode(unpacked, len(self.form.shape))
        self._decoded[chunk] = decoded  # the last one used; other threads may have taken out any
        with contextlib.suppress(KeyError):
            while len(self._decoded) > KEPT:
                self._decoded.popitem(last=False)
        return decoded

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Decoded blocks of some tokens, [len(tokens), coefs]."""
        out = np.empty((len(tokens), self.mode.starts[-1]), np.float32)
        for chunk in np.unique(tokens // near.CHUNK):
            here = tokens // near.CHUNK == chunk
            out[here] = self.blocks(int(chunk))[tokens[here] - chunk * near.CHUNK]
        return out

    def chunk_sections(self, chunk: int) -> list[Section]:
        """A chunk as others may copy it, if `shared_chunks` says so."""
        with reading(f"reference {self.key}: chunk {chunk}"):
            return [Section(kind, chunk, self.parsed.section(kind, chunk)) for kind in (TOKENS, CLASSES, CHUNK, MEANS)]

    def shared_chunks(self, token_ids: NDArray[np.int64], step: int) -> int:
        """How many leading chunks could be copied for a session with these tokens: the same tokens, no coarser step,
        nothing that depends on other streams."""
        count = min(len(token_ids), len(self.token_ids))
        same = int(np.argmin(np.append(token_ids[:count] == self.token_ids[:count], False)))
        for chunk in range(chunks(count)):
            start, stop = chunk_bounds(chunk, len(token_ids))
            whole = stop <= same and chunk_bounds(chunk, len(self.token_ids)) == (start, stop)
            if not whole or self.form.steps[chunk] < step or (DELTA, chunk) in self.parsed.sections:
                return chunk
        return chunks(count)


def _key_and_form(stream: Buffer) -> tuple[str, Form]:
    with reading("the reference given"):
        return stream_key(stream), Form(Container.parse(stream))


@dataclass
class Aligned:
    """Which token of a reference each token of a session is: index [tokens] int64, or NONE."""

    index: NDArray[np.int64]
    reference: Reference

    @classmethod
    def find(cls, token_ids: NDArray[np.int64], sinks: int, reference: Reference) -> Aligned:
        """Where the reference holds the same tokens; nowhere if its chain is too long to be continued.

        sinks: how many of the first tokens are sinks.
        """
        index = np.full(len(token_ids), NONE, np.int64)
        if reference.depth < MAX_DEPTH:
            aligner = Aligner()
            aligner.add(0, reference.token_ids)
            for run in aligner.align(token_ids):
                index[run.start : run.start + run.length] = run.reference_start + np.arange(run.length)
        sink_here, sink_there = np.arange(len(index)) < sinks, index < reference.sinks
        index[sink_here != sink_there] = NONE  # the same token is quite another where attention sinks
        return cls(index, reference)

    @classmethod
    def read(cls, parsed: Container, form: Form, profile: Profile | None, given: Any) -> Aligned | None:
        """Of a stream; None if it depends on no reference. given: as Reference.needed takes it."""
        if form.reference is None:
            return None
        if profile is None:
            raise ProfileError(f"the stream was coded against a reference and with profile {form.profile}: give both")
        reference = Reference.needed(form, profile, given)
        with reading(NAMES[RUNS]):
            runs = container.unpack(parsed.section(RUNS), np.int64, max_items=3 * form.tokens)
            if runs.ndim != 2 or runs.shape[1] != 3:
                raise StreamError(f"altered: shape {runs.shape}")
        index = np.full(form.tokens, NONE, np.int64)
        last = 0
        for start, there, length in runs.tolist():
            inside = last <= start < start + length <= form.tokens and 0 <= there <= len(reference.token_ids) - length
            if not inside:
                raise StreamError("runs: altered: outside the stream or its reference")
            index[start : start + length] = there + np.arange(length)
            last = start + length
        return cls(index, reference)

    def section(self) -> Section:
        """The runs, as `read` has them."""
        held = np.flatnonzero(self.index != NONE)
        breaks = np.flatnonzero((np.diff(held) != 1) | (np.diff(self.index[held]) != 1)) + 1
        starts = np.concatenate([held[:1], held[breaks]])
        lengths = np.diff(np.concatenate([[0], breaks, [held.size]])) if held.size else np.zeros(0, np.int64)
        return Section(RUNS, 0, container.pack(np.stack([starts, self.index[starts], lengths], 1).astype(np.int64)))

    def held(self, part: slice) -> NDArray[np.bool_]:
        """Which of some tokens are aligned."""
        return self.index[part] != NONE

    def any(self, part: slice = slice(None)) -> bool:
        """Whether any of some tokens is aligned."""
        return bool(self.held(part).any())

    def known(self, part: slice) -> Known:
        """What the reference knows of some tokens; class UNKNOWN for those that are not aligned."""
        index = self.index[part]
        held = index != NONE
        layers = len(self.reference.form.shape)
        known = Known(np.zeros(len(index), np.int64), np.full((layers, len(index)), near.UNKNOWN, np.uint8))
        known.ids[held] = self.reference.known.ids[index[held]]
        known.classes[:, held] = self.reference.known.classes[:, index[held]]
        return known


NONE = -1
