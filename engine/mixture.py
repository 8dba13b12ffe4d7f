"""The texts that a profile is calibrated on by default, and how sequences are cut from texts.

A profile from prose alone fails on Chinese and on code, so the default is a mixture: languages in many scripts, code,
chat, structured text. Its sources and their licences are in the file NOTICE.
"""

from __future__ import annotations

import importlib.util
import itertools
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqkv.engine.errors import CalibrationError

COUNTS = {
    "prose_en": 7,
    **dict.fromkeys(("docs", "stdlib", "code", "chat", "french", "chinese"), 2),
    **dict.fromkeys(("german", "spanish", "portuguese_italian", "other_latin", "russian", "arabic", "hindi"), 1),
    **dict.fromkeys(("japanese", "korean", "other_scripts", "dialogue", "json", "logs", "markup"), 1),
}
"""How many sequences `cut` takes of each kind of the default mixture, twice as many where they are SHORT."""

SEQUENCES = sum(COUNTS.values())
SHORT = 1024  # tokens: it is by tokens, not by sequences, that what is fitted gets better

_SEPARATOR = "\n%%\n"  # between the pieces of a file in calibration_text
_EXCERPT = 2400  # characters of a piece that is cut from something longer
_ENOUGH_PIECES, _ENOUGH_TOKENS, _ENOUGH_VARIETY = 20, 20_000, 0.25


def default_pieces() -> dict[str, list[str]]:
    """The default mixture: for each kind of text, the texts. The same on every call; it needs no network.

    What ships with seqkv, the documentation topics (`docs`) and sources (`stdlib`) of this Python, and dialogues in 27
    languages (`dialogue`) if the package chatterbot-corpus is installed.
    """
    folder = Path(__file__).parent / "calibration_text"
    pieces = {path.stem: path.read_text("utf-8").strip("\n").split(_SEPARATOR) for path in sorted(folder.glob("*.txt"))}
    pieces |= {"docs": _docs(), "stdlib": _stdlib(), "dialogue": _dialogue()}
    return {kind: texts for kind, texts in pieces.items() if texts}


def split(text: str, size: int = _EXCERPT) -> list[str]:
    """A text as pieces of about `size` characters, cut between lines. Texts with lines of "%%" are cut there instead.

    For texts of one's own: `cut({"text": split(text)}, ...)`.
    """
    text = text.strip("\n")
    if _SEPARATOR in text:
        return text.split(_SEPARATOR)
    pieces: list[str] = []
    start = 0
    for line in text.splitlines(keepends=True):
        if not pieces or start >= size:
            pieces.append("")
            start = 0
        pieces[-1] += line
        start += len(line)
    return [piece.strip("\n") for piece in pieces if piece.strip()]


def times(length: int) -> int:
    """How many times as many sequences of `length` tokens are taken, of whatever kind: twice where they are SHORT."""
    return 2 if length <= SHORT else 1


def cut(
    pieces: Mapping[str, Sequence[str]],
    tokenize: Callable[[str], NDArray[np.int64]],
    length: int,
    counts: Mapping[str, int] | None = None,
    bos: Sequence[int] | NDArray[np.int64] = (),
) -> list[tuple[str, NDArray[np.int64]]]:
    """Sequences of `length` tokens as (kind, ids [length] int64), each from texts of one kind, back to back.

    pieces: for each kind, its texts.
    tokenize: text -> ids [tokens], without special tokens.
    counts: how many sequences of each kind, fewer if its text is short; evenly spaced over the text. COUNTS if not
        given, twice that if they are SHORT; of a kind that it does not name, its share of all by tokens.
    bos: ids that each sequence begins with, as the tokenizer has it. Texts that begin with them, as chats do, are taken
        without.

    Kinds take turns, so that any number of sequences from the start is a mixture too. The same input gives the same
    sequences. Warns if these hold text of fewer than 20 different pieces, fewer than 20,000 tokens, or repeat
    themselves. CalibrationError if not one sequence can be cut.
    """
    begin = np.asarray(bos, np.int64)
    span = length - begin.size  # tokens of text
    if span < 1:
        raise CalibrationError(f"a sequence of {length} tokens holds nothing but the {begin.size} that begin a text")
    texts = {kind: _joined(list(dict.fromkeys(some)), tokenize, begin) for kind, some in pieces.items()}
    total = sum(ids.size for ids, _ in texts.values())
    sequences: list[tuple[float, str, NDArray[np.int64]]] = []
    more = times(length) if counts is None else 1
    touched = 0
    for kind, (ids, piece) in texts.items():
        share = max(1, round(SEQUENCES * ids.size / max(total, 1)))
        count = min(more * (COUNTS if counts is None else counts).get(kind, share), ids.size // span)
        starts = np.linspace(0, ids.size - span, count).astype(int) if count > 1 else [0] * count
        sequences += [
            ((i + 0.5) / count, kind, np.concatenate([begin, ids[at : at + span]])) for i, at in enumerate(starts)
        ]
        touched += len(set().union(*(piece[at : at + span].tolist() for at in starts)))
    if not sequences:
        raise CalibrationError(
            f"no text is as long as one sequence of {length} tokens: there are {total} tokens in {len(pieces)} kinds"
        )
    _warn(touched, [ids for _, _, ids in sequences])
    return [(kind, ids) for _, kind, ids in sorted(sequences, key=lambda sequence: sequence[0])]


def _joined(
    texts: Sequence[str], tokenize: Callable[[str], NDArray[np.int64]], bos: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens of all texts, without the `bos` of any, and for each the number of its text."""
    between = tokenize("\n\n")
    parts = []
    for text in texts:
        ids = tokenize(text)
        begun = np.array_equal(ids[: bos.size], bos)
        parts.append(np.concatenate([ids[bos.size :] if begun else ids, between]))
    owner = np.repeat(np.arange(len(parts)), [part.size for part in parts])
    return np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.int64), owner


def _warn(pieces: int, sequences: list[NDArray[np.int64]]) -> None:
    tokens = sum(ids.size for ids in sequences)
    triples = np.concatenate([np.stack([ids[:-2], ids[1:-1], ids[2:]]) for ids in sequences], axis=1)
    variety = np.unique(triples, axis=1).shape[1] / max(triples.shape[1], 1)
    faults = []
    if pieces < _ENOUGH_PIECES:
        faults.append(f"it comes from {pieces} different texts, at least {_ENOUGH_PIECES} are needed")
    if tokens < _ENOUGH_TOKENS:
        faults.append(f"it has {tokens:,} tokens, at least {_ENOUGH_TOKENS:,} are needed")
    if variety < _ENOUGH_VARIETY:
        faults.append(f"it repeats itself, only {variety:.0%} of its token triples differ")
    if faults:
        warnings.warn(
            f"the calibration text will not do for a good profile: {'; '.join(faults)}. Caches of other text will lose "
            "more, or cost more, than they should: give more, and more varied, text.",
            stacklevel=3,
        )


def _docs() -> list[str]:
    """The documentation topics that `help()` shows."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return []
    return [text[:_EXCERPT].strip("\n") for _, text in sorted(topics.items()) if len(text) > _EXCERPT / 2]


def _stdlib(count: int = 40) -> list[str]:
    """An excerpt of each of `count` modules."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [text for text in (m.read_text("utf-8", "replace") for m in modules) if len(text) > 3 * _EXCERPT]
    excerpts = []
    for i in range(min(count, len(sources))):
        text = sources[i * len(sources) // count if len(sources) > count else i]
        start = text.find("\n", i * 7919 % (len(text) - 2 * _EXCERPT)) + 1  # anywhere, the same place each time
        excerpts.append(text[start : start + _EXCERPT].rpartition("\n")[0])
    return excerpts


def _dialogue() -> list[str]:
    """A text for each language of chatterbot-corpus but English, in which much is code."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        return []
    folders = sorted(p for p in (Path(spec.origin).parent / "data").iterdir() if p.is_dir() and p.name != "english")
    texts = ("\n".join(itertools.chain.from_iterable(map(_lines, sorted(folder.glob("*.yml"))))) for folder in folders)
    return [text[: _EXCERPT // 8] for text in texts if text]  # short, so that one sequence holds many languages


def _lines(path: Path) -> Iterator[str]:
    """What is said in a file of conversations: YAML that needs no more than this to be read."""
    for line in path.read_text("utf-8").partition("conversations:")[2].splitlines():
        said = line.removeprefix("- ").strip().removeprefix("- ").strip("'\" ")
        if said:
            yield "- " + said
