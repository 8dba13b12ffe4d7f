"""Sessions that share what they hold, in a store: what each costs there, and what it would cost alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import seqkv
from seqkv import display, engine, evaluate, models, session_texts
from seqkv.demo import cached_profile
from seqkv.engine import container, form
from seqkv.engine.container import Buffer, Container
from seqkv.engine.store import SessionStore
from seqkv.models import UsageError
from seqkv.session_texts import Session

KL = 0.01  # nats
CONTINUATION = 512  # tokens at most, from whose predictions the loss is measured, as `kl` has it
ANSWER = 160  # the first of them, which lean on the session most


@dataclass(frozen=True)
class Origin:
    """Where a session's tokens come from: chunks copied from its reference, tokens coded as the difference to the
    reference's, and tokens coded alone. aligned_share: of the bytes that the second would cost alone, what they cost.
    """

    copied: int
    aligned: int
    new: int
    aligned_share: float | None


@dataclass(frozen=True)
class Row:
    """What a session cost.

    reference: the session that it was coded against; depth: how many streams it needs, one after the other.
    alone_bytes: of its stream without a reference; stored_bytes: what was added to the store for it.
    kl, top1: of the decoded cache against the true one, nats a token and a share, over `continuation` tokens;
    kl_answer: over the first ANSWER of them; kl_alone: of what comes back without a reference.
    """

    session: str
    tokens: int
    reference: str | None
    depth: int
    copied: int
    aligned: int
    new: int
    aligned_share: float | None
    alone_bytes: int
    stored_bytes: int
    kl_requested: float
    kl: float
    kl_answer: float
    kl_alone: float
    top1: float
    continuation: int

    @property
    def share(self) -> float:
        """Of the bytes alone, what was added."""
        return self.stored_bytes / self.alone_bytes


def origin(stream: Buffer, reference: Buffer | None, alone: Buffer) -> Origin:
    """Of a stream's tokens. reference: the stream that it was coded against, if there is one; alone: the same session
    coded without."""
    parsed, without = Container.parse(stream), Container.parse(alone)
    about = form.Form(parsed)
    aligned = copied = spent = replaced = 0
    if about.reference is not None:
        runs = container.unpack(parsed.section(form.RUNS), np.int64, max_items=3 * about.tokens)
        aligned = int(runs[:, 2].sum())
    for chunk in range(form.chunks(about.tokens)):
        start, stop = form.chunk_bounds(chunk, about.tokens)
        if (form.DELTA, chunk) in parsed.sections:
            spent += parsed.length(form.DELTA, chunk) + parsed.length(form.DELTA_MEANS, chunk)
            # what the chunk's other tokens cost, they cost alone too
            own = (form.CHUNK, form.MEANS)
            replaced += sum(without.length(kind, chunk) - parsed.length(kind, chunk) for kind in own)
        elif copied == start and reference is not None and _copied(parsed, Container.parse(reference), chunk):
            copied = stop
    return Origin(copied, aligned, about.tokens - copied - aligned, spent / replaced if replaced > 0 else None)


def _copied(parsed: Container, reference: Container, chunk: int) -> bool:
    """Whether a chunk is the reference's, byte for byte."""
    if (form.CHUNK, chunk) not in reference.sections:
        return False
    kinds = (form.TOKENS, form.CLASSES, form.CHUNK, form.MEANS)
    return all(parsed.section(kind, chunk) == reference.section(kind, chunk) for kind in kinds)


def stream_of(store: SessionStore, session: str) -> Buffer:
    """A stored session's stream."""
    return next(iter(store.streams(session).values()))


def measure(source: Any, store: SessionStore, session: Session, streams: Mapping[str, Buffer]) -> Row:
    """Put a session, get it again, and continue from it. streams: those of the sessions that are stored already."""
    text, follows = source.begin(source.tokenize(session.text)), source.tokenize(session.follows)
    source.context, source.continuation = len(text), CONTINUATION
    ids = np.concatenate([text, follows])
    subject = evaluate.prepare(source, session.name, ids, prefill_s=0.0)

    def lost(decoded: engine.KVCache, tokens: int = ANSWER) -> float:
        """By default what a server can measure that has answered, and now stores the prompt's cache."""
        source.continuation = tokens
        return source.divergence(ids, decoded, subject.reference[:tokens])[0]

    options: Any = {"kl": KL, "measure": lost, "importance": subject.importance}
    alone = engine.encode(subject.kv, subject.probs, profile=store.profile, **options)
    kl_alone = lost(engine.decode(alone, profile=store.profile), CONTINUATION)
    entry = store.put(session.name, subject.kv, subject.probs, **options)
    decoded = store.get(session.name)
    kl_answer = lost(decoded)
    source.continuation = CONTINUATION
    kl, top1 = source.divergence(ids, decoded, subject.reference)
    return Row(
        session=session.name,
        tokens=entry.tokens,
        reference=entry.reference,
        depth=entry.depth,
        **asdict(origin(stream_of(store, session.name), streams.get(entry.reference or ""), alone)),
        alone_bytes=len(alone),
        stored_bytes=entry.own_bytes,
        kl_requested=KL,
        kl=kl,
        kl_answer=kl_answer,
        kl_alone=kl_alone,
        top1=top1,
        continuation=len(subject.reference),
    )


def run(out: Path, fresh: bool = False, folder: Path | None = None) -> None:
    """What `seqkv demo sessions` does: a table on stdout; sessions.json and sessions.png in the directory `out`.

    folder: where the store is made and kept; a temporary one if not given.
    """
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: holds something already; give a folder that is not there")
    sessions = session_texts.sessions()
    with display.progress("demo") as report:
        report(0.0, "loading SmolLM2-135M")
        source = models.load(models.SMOLLM2)
    with display.progress("calibrating") as report:
        report(0.0, "looking for a profile")
        profile = cached_profile(source, fresh, report)
    rows: list[Row] = []
    streams: dict[str, Buffer] = {}
    with opened(folder, profile) as store, display.progress("demo") as report:
        for session in sessions:
            report(len(rows) / len(sessions), f"{session.name}: prefill, put, get, continue")
            rows.append(measure(source, store, session, streams))
            streams[session.name] = stream_of(store, session.name)
        report(1.0, "verifying the store")
        stored, clean = store.stats().stored_bytes, store.verify().clean
    found = summary(rows, stored, clean) | {"model": source.fingerprint, "profile": profile.fingerprint}
    show(rows, found)
    out.mkdir(parents=True, exist_ok=True)
    (out / "sessions.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print(f"\n{out / 'sessions.json'}")
    if write_png(rows, out / "sessions.png"):
        print(out / "sessions.png")
    if folder is not None:
        print(f"the store is kept: seqkv store ls {folder}")


@contextmanager
def opened(folder: Path | None, profile: engine.Profile) -> Iterator[SessionStore]:
    """A store in a folder, or in a temporary one."""
    with (
        tempfile.TemporaryDirectory(prefix="seqkv-") as temporary,
        SessionStore(folder or temporary, profile=profile) as store,
    ):
        yield store


def summary(rows: list[Row], stored: int, clean: bool) -> dict[str, Any]:
    """As JSON has it. stored: bytes of the whole store; clean: whether it was found in order."""
    alone = sum(row.alone_bytes for row in rows)
    total = {"alone_bytes": alone, "stored_bytes": stored, "share": stored / alone, "verified": clean}
    about = {"seqkv": seqkv.__version__, "kl_requested": KL, "total": total}
    return about | {"sessions": [asdict(row) | {"share": row.share} for row in rows]}


def show(rows: list[Row], found: dict[str, Any]) -> None:
    """Print a table, and what it comes to. found: from `summary`."""
    columns = ["session", "tokens", "reference", "copied", "aligned", "at", "new"]
    columns += ["alone", "stored", "share", "KL", "first", "KL alone"]
    table = [
        (
            row.session,
            f"{row.tokens:,}",
            row.reference or "-",
            f"{row.copied:,}",
            f"{row.aligned:,}",
            "" if row.aligned_share is None else f"{row.aligned_share:.0%}",
            f"{row.new:,}",
            f"{row.alone_bytes:,}",
            f"{row.stored_bytes:,}",
            f"{row.share:.0%}",
            f"{row.kl:.4f}",
            f"{row.kl_answer:.4f}",
            f"{row.kl_alone:.4f}",
        )
        for row in rows
    ]
    title = (
        f"SmolLM2-135M, KL {KL} requested: bytes alone and in the store; KL (nats) over the next {CONTINUATION} tokens"
    )
    display.table(title, columns, table)
    total = found["total"]
    kl, kl_alone = np.mean([(row.kl, row.kl_alone) for row in rows], axis=0)
    state = "clean" if total["verified"] else "damaged"
    print(f"At: what aligned tokens cost, of what they would alone. First: KL over {ANSWER} tokens.")
    print(
        f"{len(rows)} sessions: {total['alone_bytes']:,} bytes alone, {total['stored_bytes']:,} in the store, all told "
        f"({total['share']:.0%}), which is {state}. Mean KL {kl:.4f}, alone {kl_alone:.4f}."
    )


def write_png(rows: list[Row], path: Path) -> bool:
    """Bars: alone against stored. False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        display.note("no picture: matplotlib is not installed (pip install 'seqkv[demo]')")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(rows) + 1.2), layout="constrained")
    places = np.arange(len(rows))
    axes.barh(places - 0.2, [row.alone_bytes / 1000 for row in rows], 0.4, label="alone", color="tab:gray")
    axes.barh(places + 0.2, [row.stored_bytes / 1000 for row in rows], 0.4, label="in the store", color="tab:blue")
    for place, row in zip(places, rows, strict=True):
        against = f", against {row.reference}" if row.reference else ""
        axes.annotate(
            f"{row.share:.0%}{against}",
            (row.stored_bytes / 1000, place + 0.2),
            textcoords="offset points",
            xytext=(4, 0),
            va="center",
            fontsize=7,
        )
    axes.set_yticks(places, [row.session for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("kB")
    axes.set_title(f"SmolLM2-135M, KL {KL} requested: what the KV caches of sessions add to a store")
    axes.grid(axis="x", alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
