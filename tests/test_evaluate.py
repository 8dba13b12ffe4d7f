from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from seqkv import engine, evaluate  # noqa: E402
from seqkv.adapters.source import ModelSource  # noqa: E402

CONTEXT, CONTINUATION = 48, 16
IDS = np.arange(CONTEXT + CONTINUATION, dtype=np.int64) ** 2 % 97


@pytest.fixture(scope="module")
def source() -> ModelSource:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter *= 4  # a fresh model hardly minds what is in its cache
    return ModelSource(model, None, CONTEXT, CONTINUATION)


@pytest.fixture(scope="module")
def subject(source: ModelSource) -> evaluate.Subject:
    return evaluate.prepare(source, "squares", IDS)


def result(**kw: Any) -> evaluate.Result:
    fields: dict[str, Any] = dict.fromkeys(evaluate.Result.__dataclass_fields__, 1)
    return evaluate.Result(**fields | kw)


def test_prepare(source: ModelSource, subject: evaluate.Subject) -> None:
    assert subject.kv.tokens == subject.probs.tokens == CONTEXT
    assert subject.reference.shape == (CONTINUATION, 97)
    assert source.divergence(IDS, subject.kv, subject.reference) == (0.0, 1.0)
    assert subject.prefill_s > 0
    assert evaluate.prepare(source, "squares", IDS, prefill_s=7.0).prefill_s == 7.0


def test_measure_counts_all_bytes(source: ModelSource, subject: evaluate.Subject) -> None:
    found = evaluate.measure(source, subject, step=0.01)
    stream = engine.encode(subject.kv, subject.probs, step=0.01, importance=subject.importance)
    values = 2 * 2 * 2 * CONTEXT * 8  # sides, layers, heads, tokens, width
    assert (found.text, found.tokens, found.values, found.bytes) == ("squares", CONTEXT, values, len(stream))
    assert found.bits_per_value == pytest.approx(8 * len(stream) / values)
    assert found.cache_ratio == pytest.approx(4 * values / len(stream)) and found.cache_dtype == "float32"
    assert found.fp16_ratio == pytest.approx(2 * values / len(stream))
    assert found.encode_s > 0 and found.decode_s > 0 and found.prefill_s == subject.prefill_s
    assert found.encode_peak is None
    ratios = found.to_dict()
    assert ratios["prefill_per_decode"] == pytest.approx(found.prefill_s / found.decode_s)


def test_measure_tells_fine_from_coarse(source: ModelSource, subject: evaluate.Subject) -> None:
    fine, coarse = (evaluate.measure(source, subject, step=step, repeats=1) for step in (0.001, 0.3))
    assert fine.bytes > coarse.bytes
    assert 0 <= fine.kl < coarse.kl
    assert fine.top1 >= coarse.top1


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_measure_can_tell_peaks(source: ModelSource, subject: evaluate.Subject) -> None:
    found = evaluate.measure(source, subject, repeats=1, memory=True)
    assert isinstance(found.encode_peak, int) and isinstance(found.decode_peak, int)


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_peak_is_what_a_call_holds_at_most() -> None:
    def hold() -> int:
        return int(np.ones(40_000_000, np.uint8).sum()) + int(np.ones(30_000_000, np.uint8).sum())

    extra, total = evaluate.peak(hold)
    assert total == 70_000_000
    assert extra is not None and 35e6 < extra < 60e6


def test_timed_takes_the_median_of_the_runs_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits, calls = [0.0], iter([9.0, 1.0, 5.0, 2.0, 4.0]), []

    def call() -> int:
        clock[0] += next(waits)
        calls.append(1)
        return len(calls)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert evaluate.timed(call, 3) == (2.0, 4)  # the first, of 9 s, does not count
    assert evaluate.timed(call, 1) == (4.0, 5)


def test_mean_weighs_times_not_ratios() -> None:
    found = evaluate.mean(
        [
            result(kl=0.01, top1=0.9, bits_per_value=0.3, encode_s=1.0, decode_s=1.0, prefill_s=2.0),
            result(kl=0.03, top1=0.7, bits_per_value=0.5, encode_s=3.0, decode_s=1.0, prefill_s=2.0),
        ]
    )
    assert found == pytest.approx(
        {"kl": 0.02, "top1": 0.8, "bits_per_value": 0.4, "prefill_per_encode": 1.0, "prefill_per_decode": 2.0}
    )
