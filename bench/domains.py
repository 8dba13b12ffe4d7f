"""The texts that the frontier is measured on, by domain. None of them is calibrated on: `overlap` checks it.

They come from Debian packages (fetched with `apt-get download`, unpacked and not installed), from modules of this
Python's standard library that calibration does not read, and from the English dialogues of chatterbot-corpus, of which
calibration reads the other languages.
"""

from __future__ import annotations

import gzip
import html
import importlib.util
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHARACTERS = 20_000  # of each text: more than 1,536 tokens of any tokenizer
_LEAST_LINE = 30  # characters: shorter lines are alike by chance


@dataclass(frozen=True)
class Place:
    """Where a text is. package: of Debian; "python" for the standard library, "chatterbot-corpus". files: within it.
    start: the part of the text, from 0 to 1, where the excerpt begins."""

    domain: str
    package: str
    files: tuple[str, ...]
    start: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.domain}: {Path(self.files[0]).name}"


@dataclass(frozen=True)
class Text:
    domain: str
    name: str
    text: str


_FAQ = "usr/share/doc/anarchism/html/"
_MANUAL = "usr/share/debian-reference/debian-reference.{}.txt.gz"
_LOGS = "usr/lib/python3/dist-packages/fail2ban/tests/files/logs/"

PLACES = (
    Place("prose", "anarchism", (_FAQ + "secD3.html",), 0.2),
    Place("prose", "anarchism", (_FAQ + "secG4.html",), 0.5),
    Place("prose", "anarchism", (_FAQ + "secI5.html",), 0.7),
    Place("code", "python", ("asyncio/base_events.py",), 0.3),
    Place("French", "debian-reference-fr", (_MANUAL.format("fr"),), 0.15),
    Place("German", "debian-reference-de", (_MANUAL.format("de"),), 0.15),
    Place("Chinese", "debian-reference-zh-cn", (_MANUAL.format("zh-cn"),), 0.15),
    Place("Japanese", "debian-reference-ja", (_MANUAL.format("ja"),), 0.15),
    Place("Russian", "debian-faq-ru", ("usr/share/doc/debian/FAQ/debian-faq.ru.txt.gz",), 0.4),
    Place("chat", "chatterbot-corpus", ("conversations.yml", "ai.yml", "psychology.yml", "humor.yml")),
    Place("JSON", "iso-codes", ("usr/share/iso-codes/json/iso_3166-2.json",), 0.4),
    Place("log lines", "fail2ban", (_LOGS + "sshd", _LOGS + "postfix", _LOGS + "dovecot")),
)
"""All texts, in the order of the results. Log lines are the examples that fail2ban tests its filters on."""

DOMAINS = tuple(dict.fromkeys(place.domain for place in PLACES))


class MissingText(Exception):
    """A text cannot be had here. The message says which, and what to do."""


def texts(folder: Path, tokenizer: Any, domains: Sequence[str] = DOMAINS, characters: int = CHARACTERS) -> list[Text]:
    """The texts of these domains, as far as they reach. folder: where packages are kept. tokenizer: whose chat template
    chats are in."""
    wanted = [place for place in PLACES if place.domain in domains]
    return [
        Text(place.domain, place.name, excerpt(_read(place, folder, tokenizer), place.start, characters))
        for place in wanted
    ]


def excerpt(text: str, start: float, size: int = CHARACTERS) -> str:
    """About `size` characters of a text, from the first whole line after `start` (0 to 1) on."""
    at = int(start * len(text))
    at = text.find("\n", at) + 1 if at else 0
    return text[at : at + size]


def overlap(evaluated: Iterable[Text], calibrated: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Lines of 30 characters or more that are in a text of calibration too: (name of the text, line)."""
    known = {line.strip() for pieces in calibrated.values() for piece in pieces for line in piece.splitlines()}
    return [
        (text.name, line.strip())
        for text in evaluated
        for line in text.text.splitlines()
        if len(line.strip()) >= _LEAST_LINE and line.strip() in known
    ]


def _read(place: Place, folder: Path, tokenizer: Any) -> str:
    if place.package == "chatterbot-corpus":
        return _chat(place, tokenizer)
    root = Path(sysconfig.get_path("stdlib")) if place.package == "python" else _unpacked(place.package, folder)
    parts = []
    for name in place.files:
        raw = (root / name).read_bytes()
        parts.append((gzip.decompress(raw) if name.endswith(".gz") else raw).decode("utf-8", "replace"))
    return _CLEANED.get(place.package, str)("\n".join(parts))


def _unpacked(package: str, folder: Path) -> Path:
    """A Debian package's files, below a folder of their own."""
    target = folder / "packages" / package
    if target.exists():
        return target
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fetched = subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True, text=True)
        (file,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", file.name, f"{package}.new"], cwd=folder, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise MissingText(f"texts come from Debian packages, and there is no {error.filename} here") from error
    except ValueError as error:
        raise MissingText(f"Debian's package {package} cannot be fetched: {fetched.stderr.strip()}") from error
    file.unlink()
    (folder / f"{package}.new").rename(target)
    return target


def _chat(place: Place, tokenizer: Any) -> str:
    """Dialogues, one after the other, as one long chat in the model's own template."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        raise MissingText("the chats are those of chatterbot-corpus: pip install chatterbot-corpus")
    folder = Path(spec.origin).parent / "data" / "english"
    dialogues = [turns for name in place.files for turns in _dialogues((folder / name).read_text("utf-8"))]
    said = [turn for turns in dialogues for turn in turns[: len(turns) // 2 * 2]]  # every turn is answered
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(said)]
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tokenize=False)
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages)


def _dialogues(yaml: str) -> list[list[str]]:
    """What is said in a file of conversations, turn by turn: YAML that needs no more than this to be read."""
    found: list[list[str]] = []
    for line in yaml.partition("conversations:")[2].splitlines():
        said = line.strip()
        if line.startswith("- - "):
            found.append([said[4:]])
        elif said.startswith("- ") and found:
            found[-1].append(said[2:])
        elif said and found:  # the rest of a long turn
            found[-1][-1] += " " + said
    return [[turn.strip("'\"") for turn in turns] for turns in found]


def _page(text: str) -> str:
    text = re.sub(r"(?is)<(script|style|head).*?</\1>", "", text)
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", text)))


def _in_russian(text: str) -> str:
    """The paragraphs that are translated."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(p for p in paragraphs if len(re.findall(r"[\u0400-\u04ff]", p)) > len(re.findall("[a-zA-Z]", p)))


def _log(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("#"))


_CLEANED: dict[str, Callable[[str], str]] = {"anarchism": _page, "debian-faq-ru": _in_russian, "fail2ban": _log}
