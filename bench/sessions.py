"""What a session costs beside another that holds the same tokens, and what it loses: on a real model.

    python bench/sessions.py PROFILE.safetensors --text A.txt B.txt ... [--model smollm2] [--kl 0.01] [--measured]
        [--out FILE]

Each text is tried with the two after it (the last with the first), the cache of its first 1,024 tokens in these cases:

changed      one sentence near the start is another: coded against the text as it was.
chain 2, 3   a second and a third sentence changed, each coded against the one before: at depth 2 and 3 of a chain.
offset       624 tokens of the text behind 400 of one other text, coded against the same 624 behind 300 of a second one:
             the same document behind another long prefix, at another offset.
again        the same session once more.
unrelated    another text, against this one.

`aligned` tokens are those that the reference holds too, `copied` those of copied chunks. `cost` is what the aligned
tokens cost, in part of what the same tokens cost alone: their deltas, means and runs, and their share of importance
classes, to their share (by tokens, chunk by chunk) of the session coded alone. `whole` is the whole stream's bytes,
in part of those alone; copied chunks do not count, as a store keeps them once. KL in nats a token of the 512 that
follow; `alone` is that of the session coded alone. With --measured, each is coded at a step at which the first MEASURED
of these lose at most --kl.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from seqkv import engine, models  # noqa: E402
from seqkv.engine import form  # noqa: E402
from seqkv.engine.container import Container  # noqa: E402
from seqkv.engine.reference import Aligned  # noqa: E402

CONTEXT, CONTINUATION, MEASURED = 1024, 512, 160
SENTENCES = (
    "Yesterday the committee met in a small town and agreed on something else entirely.",
    "Nobody had expected that the bridge would be closed for the whole of the summer.",
    "The second edition leaves this paragraph out and refers the reader to the appendix.",
)


@dataclass
class Row:
    text: str
    case: str
    tokens: int
    aligned: int
    copied: int
    cost: float | None
    whole: float
    kl: float
    kl_alone: float


class Bench:
    def __init__(self, model: str, profile: Path, kl: float, measured: bool) -> None:
        self.source = models.load(model, CONTEXT, CONTINUATION)
        self.profile, self.kl, self.measured = engine.Profile.load(profile), kl, measured
        self.streams: dict[str, bytes] = {}
        self.rows: list[Row] = []

    def tokens(self, text: str) -> NDArray[np.int64]:
        return self.source.begin(self.source.tokenize(text))

    def prefill(self, ids: Any) -> dict[str, Any]:
        """A session: the context of these ids, and what the model truly predicts of the rest."""
        self.source.context = len(ids) - CONTINUATION
        kv, probs, attention = self.source.prefill(ids)
        return {"kv": kv, "probs": probs, "attention": attention, "ids": ids, "true": self.source.logprobs(ids, kv)}

    def encode(self, session: dict[str, Any], reference: bytes | None = None) -> bytes:
        def lost(decoded: engine.KVCache) -> float:
            self.source.continuation = MEASURED
            return self.source.divergence(session["ids"], decoded, session["true"][:MEASURED])[0]

        given = reference and engine.Reference(reference, self.profile, self.streams.__getitem__)
        stream = engine.encode(
            session["kv"],
            session["probs"],
            profile=self.profile,
            kl=self.kl,
            measure=lost if self.measured else None,
            importance=session["attention"],
            reference=given or None,
        )
        self.source.continuation = CONTINUATION
        self.streams[engine.stream_key(stream)] = stream
        return stream

    def loss(self, session: dict[str, Any], stream: bytes) -> float:
        self.source.context = session["kv"].tokens
        decoded = engine.decode(stream, profile=self.profile, reference=self.streams.__getitem__)
        return self.source.divergence(session["ids"], decoded, session["true"])[0]

    def compare(self, text: str, case: str, session: dict[str, Any], reference: bytes) -> bytes:
        """One row; returns the session's stream."""
        alone, stream = self.encode(session), self.encode(session, reference)
        tokens = session["kv"].tokens
        ours, theirs, source = (Container.parse(x) for x in (stream, alone, reference))
        aligned = Aligned.read(ours, form.Form(ours), self.profile, self.streams.__getitem__)
        held = np.zeros(tokens, bool) if aligned is None else aligned.held(slice(None))
        spent = sum(ours.length(*key) for key in ours.sections if key[0] in (form.DELTA, form.DELTA_MEANS, form.RUNS))
        instead, copied, shared = 0.0, 0, 0
        for chunk in range(form.chunks(tokens)):
            part = slice(*form.chunk_bounds(chunk, tokens))
            share = held[part].mean()
            kinds = [(kind, chunk) for kind in (form.TOKENS, form.CLASSES, form.CHUNK, form.MEANS)]
            instead += share * sum(theirs.length(*key) for key in kinds)
            spent += share * ours.length(form.CLASSES, chunk)
            if all(key in source.sections and ours.section(*key) == source.section(*key) for key in kinds):
                copied += part.stop - part.start
                shared += sum(ours.length(*key) for key in kinds)
        row = Row(
            text,
            case,
            tokens,
            int(held.sum()),
            copied,
            spent / instead if instead else None,
            (len(stream) - shared) / len(alone),
            self.loss(session, stream),
            self.loss(session, alone),
        )
        self.rows.append(row)
        cost = "     -" if row.cost is None else f"{row.cost:6.1%}"
        print(
            f"{text:24.24} {case:10} {row.tokens:6,} {row.aligned:8,} {row.copied:7,} {cost} {row.whole:7.1%} "
            f"{row.kl:8.4f} {row.kl_alone:8.4f}",
            flush=True,
        )
        return stream

    def run(self, name: str, text: str, others: list[str]) -> None:
        ids = self.tokens(text)
        first = self.prefill(ids[: CONTEXT + CONTINUATION])
        alone = self.encode(first)
        changed, stream = text, alone
        for depth, sentence in enumerate(SENTENCES):
            changed = replaced(changed, 400 + 700 * depth, sentence)
            session = self.prefill(self.tokens(changed)[: CONTEXT + CONTINUATION])
            stream = self.compare(name, f"chain {depth + 1}" if depth else "changed", session, stream)
        document = ids[len(self.source.bos) :][: 624 + CONTINUATION]
        before = [self.tokens(other) for other in others]
        reference = self.encode(self.prefill(np.concatenate([before[0][:300], document])))
        self.compare(name, "offset", self.prefill(np.concatenate([before[1][:400], document])), reference)
        self.compare(name, "again", first, alone)
        unrelated = self.prefill(before[0][: CONTEXT + CONTINUATION])
        self.compare(name, "unrelated", unrelated, alone)


def replaced(text: str, at: int, sentence: str) -> str:
    """A text whose first sentence (or line) after a place is another."""
    found = re.compile(r"[.!?。]\s+|\n").search(text, at)
    end = re.compile(r"[.!?。]\s+|\n").search(text, found.end() + 20) if found else None
    if not (found and end):
        raise SystemExit("a text is too short, or has no sentences")
    return text[: found.end()] + sentence + " " + text[end.end() :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--model", default=models.SMOLLM2)
    parser.add_argument("--kl", type=float, default=0.01)
    parser.add_argument("--measured", action="store_true", help="look for the step that meets --kl, by measuring")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    texts = [path.read_text("utf-8") for path in args.text]
    if len(texts) < 3:
        parser.error("at least three texts are needed")
    bench = Bench(args.model, args.profile, args.kl, args.measured)
    print(f"{'text':24} {'case':10} tokens  aligned  copied   cost   whole       KL    alone")
    for i, path in enumerate(args.text):
        bench.run(path.stem, texts[i], [texts[(i + 1) % len(texts)], texts[(i + 2) % len(texts)]])
    if args.out:
        about = {"model": args.model, "kl": args.kl, "profile": bench.profile.fingerprint}
        args.out.write_text(json.dumps(about | {"rows": [asdict(row) for row in bench.rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
