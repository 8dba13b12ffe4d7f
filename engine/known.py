"""What a stream says of each chunk's tokens: their ids, and the importance classes of every layer.

Sections of their own for each chunk, so that chunks which two sessions share are the same bytes in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import container, importance, near
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import reading
from seqkv.engine.form import CLASSES, NAMES, TOKENS, Form, chunk_bounds

if TYPE_CHECKING:
    from seqkv.engine.reference import Aligned

MORE, LESS = 2, 1
"""How many classes above or below a reference's an aligned token's may be, and be taken for it: what the last queries
looked at is not known better than that."""


@dataclass
class Known:
    """ids [tokens] int64, classes [layers, tokens] uint8; of chunks that were not read, anything."""

    ids: NDArray[np.int64]
    classes: NDArray[np.uint8]

    @classmethod
    def read(cls, parsed: Container, form: Form, some: range, aligned: Aligned | None = None) -> Known:
        """Of some chunks of a stream. StreamError on damage."""
        known = cls(np.zeros(form.tokens, np.int64), np.zeros((len(form.shape), form.tokens), np.uint8))
        begins = importance.sinks(form.positions) > 0
        for chunk in some:
            part = slice(*chunk_bounds(chunk, form.tokens))
            count, expected = part.stop - part.start, None if aligned is None else aligned.known(part)
            own = np.ones(count, bool) if expected is None else expected.classes[0] == near.UNKNOWN
            with reading(f"chunk {chunk}: {NAMES[TOKENS]}"):
                ids = container.unpack(parsed.section(TOKENS, chunk), np.uint32, shape=(int(own.sum()),))
            if expected is not None:
                known.ids[part] = expected.ids
            known.ids[part][own] = ids
            given = None if expected is None else expected.classes
            with reading(f"chunk {chunk}: {NAMES[CLASSES]}"):
                data = parsed.section(CLASSES, chunk)
                classes = near.unpack_classes(data, len(form.shape), count, begins and chunk == 0, given)
            known.classes[:, part] = classes
        return known

    def sections(self, chunk: int, aligned: Aligned | None = None) -> list[Section]:
        """Of one chunk."""
        part = slice(*chunk_bounds(chunk, len(self.ids)))
        ids, expected = self.ids[part], None if aligned is None else aligned.known(part)
        own = ids if expected is None else ids[expected.classes[0] == near.UNKNOWN]
        classes = None if expected is None else expected.classes
        packed = near.pack_classes(self.classes[:, part], classes)
        return [Section(TOKENS, chunk, container.pack(own.astype(np.uint32))), Section(CLASSES, chunk, packed)]

    def settle(self, aligned: Aligned, start: int) -> None:
        """Give aligned tokens from `start` on the class that the reference has for them, where that will do."""
        expected = aligned.known(slice(start, None)).classes
        own = self.classes[:, start:]
        plain = (expected < importance.LEVELS) & (own < importance.LEVELS)
        change = own.astype(np.int16) - expected
        near_by = (change >= -LESS) & (change <= MORE)
        self.classes[:, start:] = np.where(plain & near_by, expected, own)


def plain_ids(parsed: Container, form: Form, some: range) -> NDArray[np.int64]:
    """The token ids of some chunks of a stream that stores all, [tokens]; 0 elsewhere. StreamError on damage."""
    ids = np.zeros(form.tokens, np.int64)
    for chunk in some:
        start, stop = chunk_bounds(chunk, form.tokens)
        with reading(f"chunk {chunk}: {NAMES[TOKENS]}"):
            ids[start:stop] = container.unpack(parsed.section(TOKENS, chunk), np.uint32, shape=(stop - start,))
    return ids
