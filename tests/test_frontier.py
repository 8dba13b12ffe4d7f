"""The bench of the frontier: what it measures is what it says, and nothing it measures on was calibrated on."""

from __future__ import annotations

import csv
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from bench import captures, domains, frontier, growth, peers, retrieval
from bench import frontier_tables as tables
from bench.frontier_tables import OURS, Point
from seqkv.engine import mixture
from tests import tiny_llama


def point(codec: str, bits: float, kl: float, text: str = "a", domain: str = "d", **more: Any) -> Point:
    return Point(domain, text, codec, f"{bits}", 1000, bits, kl, 0.0, 0.9, **more)


OWN = [point(OURS, bits, kl) for bits, kl in ((0.1, 0.1), (0.4, 0.01), (1.6, 0.001))]


def test_bits_at_equal_loss() -> None:
    assert tables.bits_at(OWN, 0.01) == (pytest.approx(0.4), "")
    assert tables.bits_at(OWN, 0.001 * 10**0.5) == (pytest.approx(0.8), "")
    assert tables.bits_at(OWN, 0.5) == (pytest.approx(0.1), ">")
    assert tables.bits_at(OWN, 1e-5) == (pytest.approx(1.6), "?")


def test_a_peer_is_compared_at_its_own_loss_on_the_same_text() -> None:
    other = [point(OURS, p.bits_per_value / 2, p.kl, text="b") for p in OWN]
    points = [*OWN, *other, point("X", 4.0, 0.01), point("X", 4.0, 0.01, text="b"), point("Y", 2.0, 1.0)]
    points.append(point("bfloat16", 16.0, 0.0))
    found = {c.peer: c for c in tables.compared(points, ["bfloat16"])}
    assert found["X"].factor == pytest.approx((10 * 20) ** 0.5) and found["X"].bound == ""
    assert found["Y"].factor == pytest.approx(20) and found["Y"].bound == ">"
    assert "bfloat16" not in found
    columns, rows = tables.smaller_by(list(found.values()))
    assert columns[2:] == ["d"] and [row[2] for row in rows] == ["14.1", ">20.0"]


def test_ladder_is_at_equal_loss() -> None:
    rung = [
        point("rung", bits, kl, explained_keys=0.5, explained_values=0.25) for bits, kl in ((2.0, 0.002), (1, 0.02))
    ]
    _, rows = tables.ladder([*OWN, *rung], 0.02)
    assert rows == [["rung", "0.500", "0.250", "1.000"]]


def test_every_domain_has_a_text() -> None:
    issue = {"prose", "code", "French", "German", "Chinese", "Japanese", "Russian", "chat", "JSON", "log lines"}
    assert set(domains.DOMAINS) == issue
    assert all(place.package and place.files for place in domains.PLACES)


def test_texts_are_not_calibrated_on() -> None:
    read_by_calibration = set(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for place in domains.PLACES:
        if place.package == "python":
            files = {Path(sysconfig.get_path("stdlib")) / name for name in place.files}
            assert all(file.exists() for file in files) and not files & read_by_calibration
    at_hand = ["code"]
    if mixture._dialogue():
        at_hand.append("chat")
    texts = domains.texts(Path("/nonexistent"), None, at_hand)
    pieces = mixture.default_pieces()
    assert {text.domain for text in texts} == set(at_hand)
    assert domains.overlap(texts, pieces) == []
    taken = domains.Text("d", "taken", "first\n" + next(line for line in pieces["prose_en"][0].splitlines() if line))
    assert [name for name, _ in domains.overlap([taken], pieces)] == ["taken"]


def test_an_excerpt_begins_with_a_line() -> None:
    text = "\n".join(f"line {i}" for i in range(100))
    assert domains.excerpt(text, 0.0, 6) == "line 0"
    assert domains.excerpt(text, 0.5, 7).startswith("line 5")


def test_a_text_that_cannot_be_had_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(domains.MissingText, match="Debian packages"):
        domains.texts(tmp_path, None, ["prose"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> captures.Captures:
    folder = tmp_path_factory.mktemp("model")
    return captures.load(tiny_llama.save(folder / "tiny"), folder, 512, 256)


def test_captures_are_kept(source: captures.Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(600) % 251
    kv, probs, attention = source.prefill(ids)
    gradients = source.fisher(ids, kv)
    monkeypatch.setattr(source, "model", None)  # whatever runs it now fails
    again, probs_again, attention_again = source.prefill(ids)
    assert again.digest() == kv.digest() and again.rope == kv.rope
    assert (probs_again.topk_probs == probs.topk_probs).all() and (attention_again == attention).all()
    for before, after in zip(gradients[1], source.fisher(ids, kv)[1], strict=True):
        assert (before == after).all()
    with pytest.raises(AttributeError):
        source.prefill(ids[1:])


def test_loss_is_that_of_the_source(source: captures.Captures) -> None:
    subject = captures.Subject.read(source, "d", "text", "The cache of a text is what it says. " * 40)
    assert subject.loss(source, subject.kv) == captures.Loss(0.0, 0.0, 1.0)
    for values in subject.kv.values:
        values *= np.float32(1.2)
    loss = subject.loss(source, subject.kv)
    kl, top1 = source.divergence(subject.ids, subject.kv, subject.true)
    assert (loss.kl, loss.top1) == (pytest.approx(kl, rel=1e-4), pytest.approx(top1))
    assert loss.kl > 0 and loss.delta_nll != 0


def test_codes_are_hidden_and_found_again(source: captures.Captures) -> None:
    asked = retrieval.documents(source, "Some prose that says nothing of the kind. " * 60, 2)
    assert len(asked) == 4
    for document in asked:
        assert document.kv.tokens == source.context
        context = source.tokenizer.decode(document.ids[: source.context])
        for question in document.questions:
            code = source.tokenizer.decode(document.ids[question.digits])
            assert len(code) == 5 and code.isdigit() and f"is {code}." in context
        kinds = [question.kind for question in document.questions]
        assert kinds in (["quiet"] * 8, ["first"] + ["second"] * 7)
        assert ("Question" in context) == (kinds[0] == "first")
    assert {len({tuple(d.ids[q.digits]) for q in d.questions}) for d in asked} == {8}
    found = {score.kind: score for score in retrieval.score(source, asked, lambda document: document.kv)}
    assert {kind: score.digits for kind, score in found.items()} == {"quiet": 80, "first": 10, "second": 70}
    assert all(0 <= score.right <= 1 and score.nll > 0 for score in found.values())


def test_quick_measures_everything_once(
    source: captures.Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "load", lambda *_: source)
    lossy = [peer for peer in peers.lossy() if "quanto" not in peer.name]  # which compiles itself for minutes
    monkeypatch.setattr(peers, "lossy", lambda: lossy)
    results = frontier.run("tiny", tmp_path, tmp_path / "out", frontier.QUICK)
    rows = list(csv.DictReader((tmp_path / "out" / "frontier_tiny.csv").open()))
    codecs = {row["codec"] for row in rows}
    assert {"seqkv", "seqkv, no profile", "seqkv, narrow profile", "seqkv, predictor token", "KIVI"} <= codecs
    assert {"seqkv, lossless", "bfloat16", "TurboQuant", "CacheGen"} <= codecs
    assert all(float(row["kl"]) >= 0 and int(row["bytes"]) > 0 for row in rows)
    shown = json.loads((tmp_path / "out" / "frontier_tiny.json").read_text())
    assert shown["evaluated"][0]["files"] == ["asyncio/base_events.py"] and "prose_en" in shown["calibrated"]
    assert {row["peer"] for row in shown["equal_kl"]} == {"KIVI", "TurboQuant", "CacheGen"}
    assert shown["retrieval"][0]["codec"] == "true cache"

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(frontier.engine, "encode", fail)
    assert frontier.run("tiny", tmp_path, tmp_path / "out", frontier.QUICK) == results


def test_growth_is_measured_from_caches_put_together(
    source: captures.Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "load", lambda *_: source)
    results = growth.run("tiny", tmp_path, tmp_path, quick=True)
    assert [row["tokens"] for row in results["rows"]] == [256, 512, 1024]
    last = [row["last_bits"] for row in results["rows"]]
    assert last[2] is None and last[0] > 0 and last[1] > 0
    assert set(results["summary"]["bits_per_value"]) == {256, 512, 1024}


def test_joined_sessions_are_turned_to_where_they_are(source: captures.Captures) -> None:
    source.context = 512
    session = growth.Session(*source.prefill(np.arange(512) % 250))
    joined = growth.Session.joined([session, session])
    assert joined.kv.tokens == 1024 and joined.attention.shape[1] == 1024
    for layer, rope in enumerate(joined.kv.rope):
        assert rope is not None
        plain = rope.undo(joined.kv.keys[layer], joined.kv.positions)
        np.testing.assert_allclose(plain[:, 512:], plain[:, :512], atol=1e-4)
        assert not np.allclose(joined.kv.keys[layer][:, 512:], joined.kv.keys[layer][:, :512], atol=1e-2)
