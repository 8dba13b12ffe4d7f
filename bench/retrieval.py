"""Whether facts survive: codes hidden in a context, asked for when its cache has been coded.

A context is prose with a note of a person's code in each of eight places. Two caches are made of it. In `quiet`
nobody asks; the eight are asked after decoding. In `asked` the context ends with a question for one of them, so that
its note is what the last queries attended to when the cache was coded: that one is the `first` question, the other
seven are `second` questions, over a restored cache, of what nobody had asked about. Answers are read one digit at a
time with those before given (teacher forcing), after "The code of NAME is".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import KVCache, TokenProbs

NAMES = ("Anna", "Peter", "Maria", "John", "Lucy", "Simon", "Clara", "Victor")
_DIGITS = 5


@dataclass(frozen=True)
class Question:
    """kind: "quiet", "first" or "second". digits: places in the ids of the digits that are to be found."""

    kind: str
    digits: NDArray[np.intp]


@dataclass
class Document:
    """A context with its cache, and what is asked after it. ids: the context, then questions and answers."""

    ids: NDArray[np.int64]
    questions: list[Question]
    kv: KVCache
    probs: TokenProbs
    attention: NDArray[np.float32]


@dataclass(frozen=True)
class Found:
    """Over all digits of one kind of question: how many there are, the share that is right, and nats a digit."""

    kind: str
    digits: int
    right: float
    nll: float


def documents(source: Any, filler: str, count: int) -> list[Document]:
    """`count` contexts in each of both ways, with prose of their own as far as `filler` reaches."""
    prose, found = source.tokenize(filler), []
    for number in range(count):
        rng = np.random.default_rng(number)
        codes = ["".join(map(str, rng.integers(0, 10, _DIGITS))) for _ in NAMES]
        order = rng.permutation(len(NAMES))
        notes = [source.tokenize(f"\nThe code of {NAMES[i]} is {codes[i]}.\n") for i in rng.permutation(len(NAMES))]
        start = number * source.context % max(1, len(prose) - source.context)
        for asked in (False, True):
            question = f"\nQuestion: what is the code of {NAMES[order[0]]}?\n" if asked else ""
            end = source.tokenize(question) if asked else np.zeros(0, np.int64)
            context = _hidden(prose[start:], notes, source.context - len(end) - len(source.bos), rng)
            ids = np.concatenate([source.bos, context, end])
            questions = []
            for place, i in enumerate(order):
                before, code = source.tokenize(f"\nThe code of {NAMES[i]} is"), source.tokenize(f" {codes[i]}")
                ids = np.concatenate([ids, before, code, source.tokenize(".")])
                kind = ("second" if place else "first") if asked else "quiet"
                digits = len(ids) - 1 - len(code) + np.flatnonzero([_is_digit(source, token) for token in code])
                questions.append(Question(kind, digits))
            found.append(Document(ids, questions, *source.prefill(ids)))
    return found


def score(source: Any, asked: list[Document], restored: Callable[[Document], KVCache]) -> list[Found]:
    """What is found with the caches that `restored` makes of these."""
    right: dict[str, list[bool]] = {}
    nll: dict[str, list[float]] = {}
    for document in asked:
        logp = source.logprobs(document.ids, restored(document))
        for question in document.questions:
            rows = logp[question.digits - document.kv.tokens - 1]
            true = document.ids[question.digits]
            right.setdefault(question.kind, []).extend((rows.argmax(-1).numpy() == true).tolist())
            nll.setdefault(question.kind, []).extend((-rows.numpy()[np.arange(len(true)), true]).tolist())
    return [
        Found(kind, len(right[kind]), float(np.mean(right[kind])), float(np.mean(nll[kind]))) for kind in sorted(right)
    ]


def _hidden(
    prose: NDArray[np.int64], notes: list[NDArray[np.int64]], length: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """`length` ids: notes in prose, apart from each other, not at its beginning or end."""
    free = length - sum(map(len, notes))
    gaps = rng.dirichlet(np.full(len(notes) + 1, 8.0))
    cuts = np.rint(np.cumsum(gaps)[:-1] * free).astype(int)
    parts = np.split(prose[:free], cuts)
    return np.concatenate([x for pair in zip(parts, [*notes, prose[:0]], strict=True) for x in pair])


def _is_digit(source: Any, token: int) -> bool:
    return source.tokenizer.decode([int(token)]).strip().isdigit()
