from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from seqkv import cli, models  # noqa: E402
from seqkv.adapters.source import ModelSource  # noqa: E402
from seqkv.engine import KVCache, container, tokens_tier  # noqa: E402
from seqkv.engine.container import Container  # noqa: E402
from seqkv.engine.errors import RecomputeError  # noqa: E402
from seqkv.engine.form import Form  # noqa: E402


class Bytes:
    """Reads bytes."""

    def __init__(self, first: str = "a") -> None:
        self.first = first

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def get_vocab(self) -> dict[str, int]:
        return {self.first: 0}


def make(seed: int = 0, **kw: object) -> ModelSource:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter *= 4
    return ModelSource(model, Bytes(), **kw)


def decode(stream: bytes, source: ModelSource) -> KVCache:
    parsed = Container.parse(stream)
    form = Form(parsed)
    return tokens_tier.decode(parsed, form, source, range(form.tokens), range(len(form.shape)))


@pytest.mark.parametrize("archive", [False, True])
def test_eval(
    archive: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "load", lambda name, context: make(context=context))
    path = tmp_path / "text"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 8)
    argv = ["eval", "tiny", "--tier", "tokens", "--context", "300", "--text", str(path), *["--archive"] * archive]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (text,) = found["texts"]
    assert found["archive"] == archive and found["environment"]["torch"] == torch.__version__
    source = make()
    logits = torch.log_softmax(source.model(torch.tensor([list(path.read_bytes()[:300])])).logits[0].double(), -1)
    own = -logits[range(299), list(path.read_bytes()[1:300])].sum().item() / math.log(2)
    assert text["cross_entropy_bits"] == pytest.approx((own + 8) / 300, rel=1e-4)
    assert text["exact"] is True and text["tokens"] == 300
    if archive:
        assert text["bits_per_token"] == pytest.approx(text["cross_entropy_bits"], rel=0.01)
    assert text["fp16_ratio"] == pytest.approx(16 * 2 * 2 * 2 * 8 / text["bits_per_token"])
    assert text["stream_bits_per_token"] == 8 * text["bytes"] / 300
    assert cli.main(argv) == 0
    assert "yes" in capsys.readouterr().out


def test_archive_belongs_to_the_tokens_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "tiny", "--archive", "--text", "x"]) == 2
    assert "--tier tokens" in capsys.readouterr().err


@pytest.mark.parametrize("archive", [False, True])
def test_a_wrong_model_or_tokenizer_is_refused(archive: bool) -> None:
    source, ids = make(), np.arange(60) * 7 % 256
    stream = container.write(*tokens_tier.encode(source.recompute(ids), ids, model=source, archive=archive))
    assert decode(stream, make()).digest() == source.recompute(ids).digest()
    with pytest.raises(RecomputeError, match="of model"):
        decode(stream, make(1))
    other = make()
    other.tokenizer = Bytes("b")
    with pytest.raises(RecomputeError, match="of tokenizer"):
        decode(stream, other)


def test_a_cache_of_a_chunked_prefill_is_refused_or_repaired() -> None:
    source, ids = make(), np.arange(200) * 7 % 256
    with torch.inference_mode():
        cache = None
        for part in np.split(ids, [70]):
            out = source._forward(part, use_cache=True, **({} if cache is None else {source._cache_kwarg: cache}))
            cache = out[source._cache_kwarg]
    from seqkv.adapters.huggingface import to_kv

    chunked = to_kv(cache, source.model)
    if chunked.digest() == source.recompute(ids).digest():
        pytest.skip("this machine computes both alike")
    with pytest.raises(RecomputeError, match="another cache of these tokens, in chunk 0, layer"):
        tokens_tier.encode(chunked, ids, model=source)
    stream = container.write(*tokens_tier.encode(chunked, ids, model=source, repair=True))
    assert decode(stream, source).digest() == chunked.digest()
