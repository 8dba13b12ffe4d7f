from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from seqkv import cli, engine, models
from seqkv.engine.store import SessionStore
from tests import tiny_llama

TEXT = (Path(engine.__file__).parent / "calibration_text" / "french.txt").read_text("utf-8")[:700]
CHANGED = f"Autre : {TEXT[20:]}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def profile(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "p.safetensors"
    text = Path(engine.__file__).parent / "calibration_text" / "prose_en.txt"
    assert cli.main(["calibrate", model, "--text", str(text), "--out", str(path)]) == 0
    return str(path)


@pytest.fixture
def store(tmp_path: Path, model: str, profile: str) -> str:
    """A store with two sessions: "second" is "first" after another beginning."""
    folder, file = tmp_path / "store", tmp_path / "first.txt"
    file.write_text(TEXT, "utf-8")
    for name, text in (("first", ("--text", str(file))), ("second", ("--prompt", CHANGED))):
        assert cli.main(["store", "put", str(folder), name, "--model", model, "--profile", profile, *text]) == 0
    return str(folder)


def out(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """What a command prints."""
    capsys.readouterr()
    assert cli.main(argv) == code
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that must fail says: one line."""
    capsys.readouterr()
    assert cli.main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("seqkv:")]
    assert len(lines) == 1
    return lines[0]


def listed(capsys: pytest.CaptureFixture[str], store: str) -> dict[str, Any]:
    return {entry["name"]: entry for entry in json.loads(out(capsys, "store", "ls", store, "--json"))}


def test_put_says_what_is_shared(store: str, model: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    sessions = listed(capsys, store)
    first, second = sessions["first"], sessions["second"]
    assert first["reference"] is None and first["tokens"] == len(TEXT.encode())
    assert second["reference"] == "first" and 0 < second["shared_tokens"] < second["tokens"]
    again = ("store", "put", store, "third", "--model", model, "--profile", profile, "--prompt", TEXT)
    said = out(capsys, *again)
    third = listed(capsys, store)["third"]
    assert "third: " in said and "in common with first" in said
    assert f"{third['own_bytes']:,} bytes added, {third['shared_bytes']:,} were there already" in said


def test_ls_shows_every_session(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown, second = out(capsys, "store", "ls", store), listed(capsys, store)["second"]
    (line,) = (line for line in shown.splitlines() if "second" in line)
    assert "first" in line and f"{second['own_bytes']:,}" in line and f"{second['shared_tokens']:,} (" in line
    total = sum(entry["own_bytes"] for entry in listed(capsys, store).values())
    assert f"2 sessions: {total:,} bytes added" in shown


@pytest.mark.parametrize("name", ["first", "second"])
def test_get_continues(name: str, store: str, model: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = out(capsys, "store", "get", store, name, "--model", model, "--profile", profile, "--continue", "5")
    source = models.load(model)
    ids = source.tokenize({"first": TEXT, "second": CHANGED}[name])
    assert f"tokens={len(ids)}" in said and repr(source.tokenizer.decode(ids[-20:])) in said
    with SessionStore(store, profile=engine.Profile.load(profile)) as opened:
        stored = opened.get(name)
    assert models.continuation(source, ids, stored, 5) in said


def test_rm_leaves_what_others_need(store: str, model: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "store", "rm", store, "first") == ""
    assert list(listed(capsys, store)) == ["second"]
    assert "tokens=" in out(capsys, "store", "get", store, "second", "--model", model, "--profile", profile)
    assert "clean" in out(capsys, "store", "verify", store)
    out(capsys, "store", "rm", store, "second")
    assert "no sessions" in out(capsys, "store", "ls", store)


def test_verify_finds_damage(store: str, model: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(out(capsys, "store", "verify", store, "--json"))
    assert found["clean"] and found["sessions"] == 2
    blob = max(Path(store).glob("blobs/*/*"), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    found = json.loads(out(capsys, "store", "verify", store, "--json", code=1))
    (problem,) = found["problems"]
    said = out(capsys, "store", "verify", store, code=1)
    assert problem["what"] in said and all(name in said for name in problem["sessions"])
    broken = problem["sessions"][0]
    assert broken in refused(capsys, "store", "get", store, broken, "--model", model, "--profile", profile)


def test_stats(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(out(capsys, "store", "stats", store, "--json"))
    assert found["sessions"] == 2 and found["tokens"] == len(TEXT.encode()) + len(CHANGED.encode())
    assert f"{found['stored_bytes']:,} bytes stored" in out(capsys, "store", "stats", store)


def test_tenants_do_not_see_each_other(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(out(capsys, "store", "ls", store, "--tenant", "other", "--json")) == []
    assert "first" in refused(capsys, "store", "rm", store, "first", "--tenant", "other")
    assert "first" in listed(capsys, store)


def test_refusals(store: str, model: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use = ("--model", model, "--profile", profile)
    nowhere = str(tmp_path / "nowhere")
    for action in (("ls",), ("verify",), ("stats",)):
        assert "no store here" in refused(capsys, "store", *action, nowhere)
        assert "no store here" in refused(capsys, "store", *action, f"file://{nowhere}")
    assert "no store here" in refused(capsys, "store", "rm", nowhere, "first")
    assert "no store here" in refused(capsys, "store", "get", nowhere, "first", *use)
    assert "no such directory" in refused(capsys, "store", "put", nowhere, "a", "--model", "nothing", "--prompt", "b")
    assert "kl" in refused(capsys, "store", "put", nowhere, "a", *use, "--prompt", "b", "--kl", "-1")
    assert not Path(nowhere).exists()  # none of these made one
    assert "'third'" in refused(capsys, "store", "get", store, "third", *use)
    assert "profile" in refused(capsys, "store", "get", store, "first", "--model", model)
    assert "no tokens" in refused(capsys, "store", "put", store, "third", *use, "--prompt", "")
    assert "nothing.txt" in refused(capsys, "store", "put", store, "third", *use, "--text", "nothing.txt")
    assert set(listed(capsys, store)) == {"first", "second"}
    out(capsys, "store", "put", store, "short", *use, "--prompt", "a")
    assert "one token" in refused(capsys, "store", "get", store, "short", *use, "--continue", "1")


@pytest.mark.parametrize(
    "argv",
    [
        ["store"],
        ["store", "put", "s", "n", "--model", "m"],
        ["store", "put", "s", "n", "--model", "m", "--text", "t", "--prompt", "p"],
        ["store", "rm", "s"],
        ["store", "get", "s", "n", "--model", "m", "--continue", "0"],
    ],
)
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: seqkv store" in capsys.readouterr().err
