"""What a store knows of a session and of a stream, and how a stream is taken apart into blobs.

A stream's sections are stored apart: small ones in the stream's record, the others as blobs, named by a hash of their
bytes, so that what two streams of one tenant have in common is stored once. The hash is keyed by the tenant: another
tenant's blobs have other names even where their bytes are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import container
from seqkv.engine.cached import cached_property
from seqkv.engine.container import Buffer, Container, Section
from seqkv.engine.errors import StoreDamaged, StreamError
from seqkv.engine.form import MAX_DEPTH, Form
from seqkv.engine.probs import TokenProbs
from seqkv.engine.reference import stream_key

SMALL = 1024  # bytes; sections up to here are in the record

RESOLUTION = 8  # steps a bit in which surprisal is kept: it weighs what to keep, and decodes nothing

_INLINE, _TOKENS, _SURPRISAL = range(3)  # kinds of a record's sections
_MOST_TOKENS = 1 << 31
_LARGEST = 1 << 53  # number: of bytes, uses, seconds
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "float": (float, int),
    "dict": (dict,),
}
_KINDS_OF_STREAM = {"key": "str", "reference": "str | None", "depth": "int", "profile": "str | None", "header": "dict"}


@dataclass(frozen=True)
class Entry:
    """A session in a store.

    name, and key of its stream; profile: fingerprint of the profile that it was coded with, if any.
    tokens: of the session; stream_bytes: of its stream.
    reference: the session that it was coded against, or None; depth: how many streams it needs to be decoded, one
        after the other; shared_tokens: how many of its tokens the reference holds too.
    own_bytes: what was added to the store for it; shared_bytes: bytes of its stream that were there already.
    uses: how often it was put or got; created, used: when it was put, and when last used, in seconds since 1970.
    """

    name: str
    key: str
    profile: str | None
    tokens: int
    stream_bytes: int
    reference: str | None
    depth: int
    shared_tokens: int
    own_bytes: int
    shared_bytes: int
    uses: int
    created: float
    used: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_kind("the index's entry", field.name, getattr(self, field.name), str(field.type))

    def to_bytes(self) -> bytes:
        """As an object."""
        return container.write(dataclasses.asdict(self), [])

    @classmethod
    def from_bytes(cls, data: Buffer) -> Entry:
        """StoreDamaged."""
        try:
            return cls(**Container.parse(data).header)
        except (StreamError, TypeError) as error:  # also if there are other entries in the header
            raise StoreDamaged(f"the index's entry is damaged: {error}") from error


@dataclass(frozen=True)
class Part:
    """A section of a stream: its bytes in `data`, or in a blob of that name and size."""

    kind: int
    index: int
    blob: str | None
    size: int
    data: bytes = b""


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream taken apart.

    key: `engine.stream_key` of it; reference: key of the stream that it needs; profile: a fingerprint, or None.
    header: the stream's; parts: its sections, in order.
    token_ids [tokens] int32, surprisal [tokens] float32, bits, rounded to multiples of 1/RESOLUTION.
    """

    key: str
    reference: str | None
    depth: int
    profile: str | None
    header: dict[str, Any]
    parts: tuple[Part, ...]
    token_ids: NDArray[np.int32]
    surprisal: NDArray[np.float32]

    @property
    def blobs(self) -> dict[str, int]:
        """Names and sizes of the blobs that it needs."""
        return {part.blob: part.size for part in self.parts if part.blob is not None}

    @classmethod
    def split(cls, stream: bytes, probs: TokenProbs, tenant: str) -> tuple[Stream, dict[str, Buffer]]:
        """Takes a stream apart, into what the index keeps of it and blobs by name."""
        parsed = Container.parse(stream)
        form = Form(parsed)
        parts: list[Part] = []
        blobs: dict[str, Buffer] = {}
        for kind, index in parsed.sections:
            data = parsed.section(kind, index)
            if data.nbytes <= SMALL:
                parts.append(Part(kind, index, None, data.nbytes, bytes(data)))
            else:
                name = blob_name(data, tenant)
                parts.append(Part(kind, index, name, data.nbytes))
                blobs[name] = data
        ids, surprisal = probs.token_ids.astype(np.int32), _bits(_steps(probs.surprisal))
        about = stream_key(stream), form.reference, form.depth, form.profile, parsed.header
        return cls(*about, tuple(parts), ids, surprisal), blobs

    def join(self, blobs: Mapping[str, Buffer]) -> bytes:
        """The stream again, from blobs that are what their names say. StoreDamaged if it is not the same."""
        try:
            sections = [Section(p.kind, p.index, p.data if p.blob is None else blobs[p.blob]) for p in self.parts]
            stream = container.write(self.header, sections)
        except (LookupError, TypeError, ValueError) as error:
            raise StoreDamaged(f"the index's record of stream {self.key} is damaged: {error}") from error
        if stream_key(stream) != self.key:
            raise StoreDamaged(f"its parts do not make stream {self.key} again: put the session again")
        return stream

    @cached_property
    def record(self) -> bytes:
        """What the index keeps of it."""
        header = {name: getattr(self, name) for name in ("key", "reference", "depth", "profile", "header")}
        header["parts"] = [[part.kind, part.index, part.blob, part.size] for part in self.parts]
        sections = [Section(_INLINE, i, part.data) for i, part in enumerate(self.parts) if part.blob is None]
        sections.append(Section(_TOKENS, 0, container.pack(self.token_ids)))
        sections.append(Section(_SURPRISAL, 0, container.pack(_steps(self.surprisal))))
        return container.write(header, sections)

    @classmethod
    def from_bytes(cls, data: Buffer, key: str) -> Stream:
        """From its record; key: by which it was found. StoreDamaged, also if it is another stream's."""
        try:
            parsed = Container.parse(data)
            parts = []
            for place, (kind, index, blob, size) in enumerate(parsed.header.pop("parts")):
                _check_kind(f"the index's record of stream {key}", "blob", blob, "str | None")
                _check_kind(f"the index's record of stream {key}", "size", size, "int")
                data = b"" if blob is not None else bytes(parsed.section(_INLINE, place))
                parts.append(Part(kind, index, blob, size, data))
            ids = container.unpack(parsed.section(_TOKENS), np.int32, max_items=_MOST_TOKENS)
            steps = container.unpack(parsed.section(_SURPRISAL), np.uint16, shape=ids.shape)
            about = parsed.header
            for entry, kind in _KINDS_OF_STREAM.items():
                _check_kind(f"the index's record of stream {key}", entry, about[entry], kind)
            if about["key"] != key:
                raise StreamError(f"it is of stream {about['key']}")
            if (about["depth"] == 0) != (about["reference"] is None) or not 0 <= about["depth"] <= MAX_DEPTH:
                raise StreamError(f"altered: depth {about['depth']} with reference {about['reference']}")
            return cls(**about, parts=tuple(parts), token_ids=ids, surprisal=_bits(steps))
        except (StreamError, LookupError, TypeError, ValueError) as error:
            raise StoreDamaged(f"the index's record of stream {key} is damaged: {error}") from error


def _check_kind(part: str, name: str, value: Any, kind: str) -> None:
    known = isinstance(value, _KINDS[kind]) and not isinstance(value, bool)
    if not known or (isinstance(value, int | float) and not 0 <= value <= _LARGEST):
        raise StoreDamaged(f"{part} is damaged: its {name} is {value!r}")


def tenant_id(name: str) -> str:
    """A tenant as stores know it: 32 hexadecimal digits."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"seqkv tenant").hexdigest()


def blob_name(data: Buffer, tenant: str) -> str:
    """The name of a tenant's blob with these bytes. tenant: a `tenant_id`."""
    digest = hashlib.blake2b(data, digest_size=20, key=bytes.fromhex(tenant)).hexdigest()
    return f"blobs/{digest[:2]}/{digest}"


def _steps(surprisal: NDArray[np.float32]) -> NDArray[np.uint16]:
    return np.rint(surprisal * RESOLUTION).astype(np.uint16)


def _bits(steps: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (steps / RESOLUTION).astype(np.float32)
