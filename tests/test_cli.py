from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from seqkv import cli, display, engine, models
from tests import tiny_llama

TEXTS = Path(engine.__file__).parent / "calibration_text"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a small random model that reads bytes."""
    return tiny_llama.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def profile(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "p.safetensors"
    assert cli.main(["calibrate", model, "--text", str(TEXTS / "prose_en.txt"), "--out", str(path)]) == 0
    return str(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "french.txt"
    path.write_text((TEXTS / "french.txt").read_text("utf-8")[:2000], "utf-8")
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that must fail says: one line."""
    capsys.readouterr()
    assert cli.main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("seqkv:")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("with_profile", [True, False])
def test_encode_info_decode(
    with_profile: bool,
    model: str,
    profile: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use = ["--profile", profile] if with_profile else []
    stream = tmp_path / "s"
    assert cli.main(["encode", model, "--text", text, "--tokens", "200", *use, "--out", str(stream)]) == 0
    assert f"{stream.stat().st_size:,}" in capsys.readouterr().out
    assert cli.main(["info", str(stream), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(engine.inspect(stream.read_bytes())))
    assert cli.main(["decode", model, str(stream), *use, "--prompt-continue", "5"]) == 0
    out = capsys.readouterr().out
    assert "tokens=200" in out
    source = models.load(model)
    ids = source.tokenize(Path(text).read_text("utf-8"))[:200]
    assert repr(source.tokenizer.decode(ids[-20:])) in out


def test_calibrate_says_what_it_made(model: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    fingerprint = engine.Profile.load(profile).fingerprint
    assert cli.main(["info", profile]) == 0
    assert fingerprint in capsys.readouterr().out


def test_eval_json(model: str, profile: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> dict[str, Any]:
        sizes = ["--context", "128", "--continuation", "64"]
        assert cli.main(["eval", model, "--text", text, "--profile", profile, *sizes, "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    found = run()
    (one,) = found["texts"]
    assert one["text"] == text and one["tokens"] == 128 and one["values"] == 2 * 2 * 2 * 128 * 8
    assert one["bits_per_value"] == pytest.approx(8 * one["bytes"] / one["values"])
    assert found["kl"] == 0.01 and found["profile"] == engine.Profile.load(profile).fingerprint
    assert found["mean"]["kl"] == pytest.approx(one["kl"])
    fine = run("--step", "0.0001")
    assert fine["step"] == 0.0001 and "kl" not in fine
    assert fine["texts"][0]["bytes"] > one["bytes"] and fine["texts"][0]["kl"] <= one["kl"]
    assert run("--offset", "300")["texts"][0]["bytes"] != one["bytes"]


def test_eval_table(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", model, "--text", text, "--context", "64", "--continuation", "16", "--memory"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("bits/value", "x float32", "x fp16", "top-1", "prefill", "encode peak"))


def test_refusals(model: str, profile: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = tmp_path / "s"
    encode = ("encode", model, "--text", text, "--tokens", "100", "--out", str(stream))
    assert "no such directory" in refused(capsys, "encode", "nothing", "--text", text, "--out", str(stream))
    assert "nothing.txt" in refused(capsys, "encode", model, "--text", "nothing.txt", "--out", str(stream))
    assert "there is no directory" in refused(capsys, *encode[:-1], str(tmp_path / "no" / "s"))
    assert "nothing.safetensors" in refused(capsys, *encode, "--profile", "nothing.safetensors")
    assert "3000 are needed" in refused(
        capsys, "eval", model, "--text", text, "--context", "2000", "--continuation", "1000"
    )
    assert "kl" in refused(capsys, *encode, "--kl", "-1")
    assert "step" in refused(capsys, "eval", model, "--text", text, "--step", "nan")
    assert "negative" in refused(capsys, "eval", model, "--text", text, "--offset", "-1")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1") * 2000)
    assert "UTF-8" in refused(capsys, "eval", model, "--text", str(latin))
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded" in refused(capsys, "eval", str(tmp_path / "empty"), "--text", text)

    assert cli.main([*encode, "--profile", profile]) == 0
    refused(capsys, "decode", model, str(stream))  # needs its profile
    stream.write_bytes(stream.read_bytes()[:-1])
    refused(capsys, "decode", model, str(stream), "--profile", profile)
    refused(capsys, "info", str(stream))
    refused(capsys, "info", text)


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in refused(capsys, "eval", "smollm2", "--text", "x")


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    said = refused(capsys, "encode", model, "--text", "x", "--out", "y")
    assert "transformers" in said and "pip install" in said


def test_poor_text_is_one_line_of_warning(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text((TEXTS / "prose_en.txt").read_text("utf-8")[:9000], "utf-8")
    assert cli.main(["calibrate", model, "--text", str(short), "--out", str(tmp_path / "p.safetensors")]) in (0, 2)
    assert "warning: the calibration text will not do" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nothing"],
        ["eval", "m", "--text", "t", "--kl", "0.1", "--step", "0.1"],
        ["eval", "m", "--text", "t", "--context", "0"],
    ],
)
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: seqkv" in capsys.readouterr().err


def test_help_needs_no_model_library() -> None:
    code = (
        "import sys\nfrom seqkv import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'rich'} & set(sys.modules)"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "calibrate" in done.stdout


def test_table_takes_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    display.table("a [b]", ("name [c]", "n"), [("d [e]", "1")])
    out = capsys.readouterr().out
    assert all(text in out for text in ("a [b]", "name [c]", "d [e]"))


def test_display_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    display.table("title", ("name", "n"), [("a", "1"), ("bcdef", "20")])
    assert capsys.readouterr().out == "title\nname    n\na       1\nbcdef  20\n"
    with display.progress("working") as report:
        report(0.25, "first")
        report(0.5, "too soon to show")
    assert capsys.readouterr().err == "working  25%  first\n"
