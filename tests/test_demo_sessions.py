from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from seqkv import cli, demo_sessions, engine, session_texts
from seqkv.demo_sessions import Origin, Row
from seqkv.engine import Profile
from seqkv.engine.mixture import default_pieces
from seqkv.engine.store import SessionStore
from seqkv.session_texts import Session
from tests.conftest import calibrated
from tests.sessions import CausalModel

ROWS = [
    Row("first [a]", 900, None, 0, 0, 0, 900, None, 500_000, 502_000, 0.01, 0.011, 0.02, 0.011, 0.95, 512),
    Row("second", 910, "first [a]", 1, 256, 600, 54, 0.118, 510_000, 51_000, 0.01, 0.0123, 0.02, 0.0117, 0.94, 512),
]


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel()


@pytest.fixture(scope="module")
def profile(model: CausalModel) -> Profile:
    return calibrated(model)


def streams(model: CausalModel, profile: Profile, ids: Any, reference: bytes) -> tuple[bytes, bytes]:
    """Of a session with these tokens: coded against a reference, and alone."""
    kv, probs, importance = model.session(ids)
    against, alone = (
        engine.encode(kv, probs, profile=profile, importance=importance, reference=given) for given in (reference, None)
    )
    return against, alone


def test_origin_tells_copied_from_aligned_from_new(model: CausalModel, profile: Profile) -> None:
    first, other = model.tokens(1, 900), model.tokens(2, 900)
    kv, probs, importance = model.session(first)
    reference = engine.encode(kv, probs, profile=profile, importance=importance)

    ids = np.concatenate([first[:300], other[:20], first[330:]])  # differs after the first chunk
    against, alone = streams(model, profile, ids, reference)
    found = demo_sessions.origin(against, reference, alone)
    assert found.copied == 256 and found.new >= 20 and found.copied + found.aligned + found.new == len(ids)
    assert found.aligned > 500 and found.aligned_share is not None and 0 < found.aligned_share < 0.9

    against, alone = streams(model, profile, np.concatenate([first[:512], other[:200]]), reference)
    assert demo_sessions.origin(against, reference, alone) == Origin(512, 0, 200, None)
    assert demo_sessions.origin(alone, None, alone) == Origin(0, 0, 712, None)


def test_measure_puts_and_gets(model: CausalModel, profile: Profile, tmp_path: Path) -> None:
    text = model.text(1, 700)
    sessions = [
        Session("first", text, model.text(2, 200)),
        Session("second", model.text(3, 40) + text[5:], model.text(4, 200)),
    ]
    kept: dict[str, Any] = {}
    with SessionStore(tmp_path, profile=profile) as store:
        rows = []
        for session in sessions:
            rows.append(demo_sessions.measure(model, store, session, kept))
            kept[session.name] = demo_sessions.stream_of(store, session.name)
        entries = {entry.name: entry for entry in store.list()}
    first, second = rows
    assert (first.reference, first.tokens, first.new) == (None, 700, 700) and first.kl == first.kl_alone
    assert (second.reference, second.depth, second.tokens) == ("first", 1, 735) and second.aligned > 500
    assert all(row.stored_bytes == entries[row.session].own_bytes and row.continuation == 200 for row in rows)
    assert all(0.004 < row.kl_answer <= 0.01 for row in rows)
    assert 0 < second.kl != second.kl_alone and second.share < 0.9


def test_texts_are_ten_sessions_that_share() -> None:
    sessions = {session.name: session for session in session_texts.sessions()}
    assert len(sessions) == 10
    ana, other, *_ = (session.text.split() for name, session in sessions.items() if name.startswith("system prompt, "))
    assert ana != other and ana[12:] != other[12:] and set(ana) - set(other) <= {"Monday,", "4", "May", "Ana."}
    one, edited = sessions["story, question 1"], sessions["story edited, question 1"]
    assert edited == Session("story edited, question 1", session_texts.edited(one.text), one.follows)
    assert sum(a != b for a, b in zip(one.text.splitlines(), edited.text.splitlines(), strict=True)) == 2
    third = sessions["another text, story, question 3"].text
    assert one.text.partition("\n\nQuestion:")[0] in third and not third.startswith(one.text[:20])
    before, after = sessions["chat, turn 2"], sessions["chat, turn 3"]
    assert before.text + before.follows == after.text + after.follows and len(before.text) < len(after.text)
    with pytest.raises(ValueError, match="does not hold"):
        session_texts.edited("another text")


def test_texts_are_long_enough_and_not_calibrated_on() -> None:
    known = "\n".join(piece for pieces in default_pieces().values() for piece in pieces)
    for session in session_texts.sessions():
        assert len(session.text) > 1500 and len(session.follows) > 2000
        lines = [line for line in (session.text + session.follows).splitlines() if len(line) > 60]
        assert not any(line in known for line in lines)


def test_show_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    found = demo_sessions.summary(ROWS, stored=600_000, clean=True)
    assert json.loads(json.dumps(found)) == found
    assert found["total"] == {"alone_bytes": 1_010_000, "stored_bytes": 600_000, "share": 600 / 1010, "verified": True}
    assert found["sessions"][1]["share"] == 0.1 and found["sessions"][1]["reference"] == "first [a]"
    demo_sessions.show(ROWS, found)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("second", "12%", "51,000", "0.0123", "600,000 in the store", "clean"))
    demo_sessions.show(ROWS, demo_sessions.summary(ROWS, stored=600_000, clean=False))
    assert "damaged" in capsys.readouterr().out


def test_png_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert demo_sessions.write_png(ROWS, tmp_path / "sessions.png")
    data = (tmp_path / "sessions.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("precious")
    assert cli.main(["demo", "sessions", "--store", str(tmp_path)]) == 2
    assert "holds something already" in capsys.readouterr().err
    assert cli.main(["demo", "--store", str(tmp_path)]) == 2
    assert "belongs to seqkv demo sessions" in capsys.readouterr().err
