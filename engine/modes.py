"""The two ways to code: with a profile, or with nothing but the cache itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import container, free, importance, near
from seqkv.engine.cache import KVCache
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import ProfileError, StreamError, reading
from seqkv.engine.form import CHANNELS, NAMES, SCALES, Form
from seqkv.engine.layout import block_starts, block_widths
from seqkv.engine.profile import Profile, check_kind

BlocksOf = Callable[[KVCache, slice], Callable[[int], Any]]
"""The blocks of some tokens of a cache: block -> [tokens, channels] float32, keys before rotation."""


class Calibrated:
    """Coding with a profile: the same model for every chunk."""

    sequential = False
    means = True  # of what quantisation leaves out are coded too: see near

    def __init__(self, profile: Profile) -> None:
        self.profile, self.places = profile, near.Scale(profile.scale)
        self.starts, self.gains, self.curve = profile.starts, profile.gains, profile.curve
        self.table, self.predictor, self.fingerprint = profile.table, profile.predictor, profile.fingerprint

    def model(self) -> near.Model:
        """What the next chunk is coded with."""
        return self.profile

    def begin(self) -> None:
        """Nothing to forget."""

    def learn(self, decoded: Any) -> None:
        """Nothing to learn."""

    def attention(self, kv: KVCache, blocks_of: BlocksOf, span: int) -> NDArray[np.float32]:
        """Attention received, [layers, tokens], estimated; `span` tokens at a time."""
        return importance.estimated(self.profile.attention, kv.tokens, lambda part: blocks_of(kv, part), span)

    def scale(self, magnitude: NDArray[np.int64], tokens: int, step: int) -> tuple[near.Scale, bytes]:
        """The scale of a chunk's coefficients, and what of it is to be stored.

        magnitude [coefs]: sum of the magnitudes of its symbols.
        """
        return self.places, b""

    def stored_scale(self, parsed: Container, chunk: int, step: int) -> near.Scale:
        return self.places

    def sections(self) -> list[Section]:
        return []


class Free:
    """Coding without a profile (engine.free): each chunk's model is fitted to the chunks before."""

    sequential = True
    means = False  # symbols are 0 for few coefficients only
    predictor, fingerprint = "layers", None
    curve = free.CURVE
    table = np.zeros((0, 0), np.float16)

    def __init__(self, shape: tuple[tuple[int, int, int], ...], channels: NDArray[np.int16]) -> None:
        self.widths = block_widths(shape)
        self.starts = block_starts(self.widths)
        self.channels, self.gains = channels, free.gain_table(len(shape))
        self.history: Any = None

    @classmethod
    def measure(cls, kv: KVCache, blocks_of: BlocksOf) -> Free:
        return cls(kv.shape, free.statistics(blocks_of(kv, slice(None)), 2 * kv.layers))

    def model(self) -> near.Model:
        return free.Model(self.widths, self.channels, self.history)

    def begin(self) -> None:
        """Forget what was decoded: the next chunk is the first one."""
        self.history = None

    def learn(self, decoded: Any) -> None:
        """decoded: [tokens, coefs], NumPy or CuPy."""
        self.history = free.remembered(self.history, decoded)

    def attention(self, kv: KVCache, blocks_of: BlocksOf, span: int) -> NDArray[np.float32]:
        return np.ones((kv.layers, kv.tokens), np.float32)

    def scale(self, magnitude: NDArray[np.int64], tokens: int, step: int) -> tuple[near.Scale, bytes]:
        classes = free.scales(magnitude, tokens)
        return near.Scale(free.places(classes, step)), container.pack(classes)

    def stored_scale(self, parsed: Container, chunk: int, step: int) -> near.Scale:
        with reading(f"chunk {chunk}: {NAMES[SCALES]}"):
            stored = container.unpack(parsed.section(SCALES, chunk), np.int8, shape=(int(self.starts[-1]),))
        return near.Scale(free.places(stored, step))

    def sections(self) -> list[Section]:
        return [Section(CHANNELS, 0, container.pack(self.channels))]


Mode = Calibrated | Free


def stored_profile(form: Form, profile: Profile | None) -> Profile | None:
    """The profile that a stream was coded with, if there was one, of which `profile` was given. ProfileError if that is
    another."""
    check_kind(profile)
    if form.profile is None:
        return None
    if profile is None or profile.fingerprint != form.profile:
        given = "no profile was given" if profile is None else f"the profile given is {profile.fingerprint}"
        raise ProfileError(f"the stream was encoded with profile {form.profile}, {given}: give that one")
    if profile.shape != form.shape:
        raise StreamError("altered: its shape is not its profile's")
    return profile


def stored_mode(parsed: Container, form: Form, profile: Profile | None) -> Mode:
    """What a stream was coded with. ProfileError if that is another profile than the one given."""
    profile = stored_profile(form, profile)
    if profile is not None:
        return Calibrated(profile)
    with reading(NAMES[CHANNELS]):
        channels = container.unpack(parsed.section(CHANNELS), np.int16, shape=(2, form.coefs))
    return Free(form.shape, channels)
