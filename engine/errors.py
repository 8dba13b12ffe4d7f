"""The errors that seqkv raises on purpose. Each message names what is wrong and where."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from seqkv.entropy_coding import CorruptGroup


class SeqkvError(Exception):
    """Base of all errors below: catch it to catch every refusal of a cache, a stream, a profile or a store.

    Not below it: ValueError and TypeError, for arguments that are wrong whatever the data, and DeviceError, if there is
    no device to code on.
    """


class CacheError(SeqkvError):
    """A KV cache cannot be coded, or does not fit the model it was given with.

    Shapes that disagree, an unsupported dtype, NaN or infinity, no tokens, or a kind of layer that is not understood.
    The message names the layer, the side (keys or values) and the token. Check the forward pass that made the cache;
    convert float64 arrays before; a cache with a layer kind that is refused must be stored some other way.
    """


class ProbsError(SeqkvError):
    """Token ids or next-token probabilities are not what they claim to be.

    Rows that do not sum to 1, negative or NaN entries, ids outside the vocabulary, lengths that disagree. Pass logits
    to `TokenProbs.from_logits` and probabilities to `TokenProbs.from_probs`, or `TokenProbs.from_tokens` without any.
    """


class ProfileError(SeqkvError):
    """A profile cannot be read, or is not the one that the stream or the cache needs.

    Give the profile whose fingerprint the message names, or calibrate one for this model (`seqkv calibrate`).
    """


class StreamError(SeqkvError):
    """A stream is truncated, altered, or written in a format version that this release does not know.

    The message names the part that failed. Nothing of a damaged part is ever returned: fetch the stream again, or
    recompute the cache; for an unknown version, use the release of seqkv that wrote it.
    """


class RecomputeError(SeqkvError):
    """A model is missing, or is another one, or does not give again what a stream of the tokens tier was made from.

    The message names the chunk and the layer from which on it differs, and what of library, device, dtype or threads
    is not as it was. Decode with these, or recompute the cache from `token_ids` and use it as a new one.
    """


class SessionError(SeqkvError):
    """A session is not known, or is known already.

    The message names the session. Remove it before it is put there again.
    """


class StoreError(SeqkvError):
    """A store of sessions cannot do what it was asked to, as the kind of the error says; what it holds is unharmed.

    The message names the session. Not of the kinds below: the folder or the server cannot be reached or written.
    """


class StoreDamaged(StoreError):
    """What is stored of a session is missing or altered. Other sessions are not affected, but those that share it.

    `SessionStore.verify` lists all that are. Put the session again: what is damaged of it is replaced.
    """


class StoreBusy(StoreError):
    """Another process was writing for longer than the store's timeout. Nothing was changed: try again."""


class StoreFull(StoreError):
    """The disk, the server or the store's own limit leaves no room. Nothing was changed: delete sessions."""


class CalibrationError(SeqkvError):
    """A profile cannot be fitted from what was given.

    Too little text, or text too uniform for the number of coefficients. Give more, and more varied, text.
    """


@contextlib.contextmanager
def reading(part: str) -> Iterator[None]:
    """Lets what is wrong with a part of a stream begin with its name; all of it is a StreamError, bad token ids too."""
    try:
        yield
    except CorruptGroup as error:
        raise StreamError(f"{part}: altered: {error}") from error
    except (StreamError, ProbsError) as error:
        raise StreamError(f"{part}: {error}") from error
