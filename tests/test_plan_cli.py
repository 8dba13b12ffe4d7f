from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from seqkv import cli, models  # noqa: E402
from seqkv.adapters.source import ModelSource  # noqa: E402

GIVEN = ["plan", "--cache", "llama-3.1-70b", "--tokens", "131072", "--prefill", "5000", "--decode", "40"]


def test_given_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*GIVEN, "--link", "100", "--kl", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits_per_token"] == 8 * 327_680 and found["options"][0]["tier"] == found["best"] == "lossless"
    assert {o["tier"] for o in found["options"]} == {"raw", "lossless", "tokens"}
    size = 131072 * 327_680
    ready = {o["tier"]: o["ready_s"] for o in found["options"]}
    assert ready["raw"] == pytest.approx(size / 12.5e9) and ready["tokens"] == pytest.approx(131072 / 5000, rel=1e-3)
    assert ready["lossless"] == pytest.approx(size / 1.75 / 12.5e9 + size / 40e9)
    even = str(found["break_even"] * 8 / 1e9 * 0.99)
    assert cli.main([*GIVEN, "--link", even, "--kl", "0"]) == 0
    out = capsys.readouterr().out
    assert "131,072 tokens" in out and "Break-even: below" in out
    assert cli.main([*GIVEN, "--link", even, "--kl", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == "tokens"


def test_measures_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)).eval().requires_grad_(False)

    def tokenizer(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode()[:2000])}

    monkeypatch.setattr(models, "load", lambda name: ModelSource(model, tokenizer))
    assert cli.main(["plan", "tiny", "--link", "1", "--tokens", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits_per_token"] == 2 * 2 * 2 * 8 * 16 and found["rates"]["link"] == 1e9 / 8
    assert found["rates"]["prefill"] > 0 and found["rates"]["near"] > 0
    near = next(o for o in found["options"] if o["tier"] == "near")
    assert found["rates"]["lossless"] > 0
    assert 0 < near["bytes"] < 64 * found["bits_per_token"] / 8 and near["loss"] == 0.01


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--link", "1"], "give a model to measure, or --cache"),
        (["tiny", "--cache", "llama-3.1-8b", "--link", "1"], "give a model to measure, or --cache"),
        (["--cache", "llama-3.1-8b", "--link", "1", "--prefill", "9"], "--cache needs --prefill and --decode"),
        (["--cache", "llama-3.1-8b", "--link", "1", "--kl", "-1"], "--kl must not be negative"),
    ],
)
def test_refuses(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *argv]) == 2
    assert message in capsys.readouterr().err
