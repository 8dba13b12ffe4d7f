"""The connector between vLLM's own classes, without a running server (bench/vllm_connector.py runs one)."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request  # noqa: E402

from seqkv.adapters import paged  # noqa: E402
from seqkv.adapters import vllm as adapter  # noqa: E402
from seqkv.engine import CacheError, KVCache  # noqa: E402
from tests import tiny_llama  # noqa: E402

LAYERS, HEADS, BLOCK, WIDTH = 2, 2, 32, 64
IDS = [i * i % 90 + 1 for i in range(100)]
ROOT = Path(__file__).parents[1]
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]

if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
    pytest.skip("not vLLM for the CPU", allow_module_level=True)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """(role, extra configuration) makes a connector as vLLM does, of a small model."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": 97}
    heads = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH}
    LlamaConfig(architectures=["LlamaForCausalLM"], **sizes, **heads).save_pretrained(tmp_path / "model")
    args = EngineArgs(str(tmp_path / "model"), skip_tokenizer_init=True, dtype="bfloat16", block_size=BLOCK)
    config = args.create_engine_config()

    def do(role: str = "WORKER", change: Any = None, spec: Any = None, kv_role: str = "kv_both", **extra: Any) -> Any:
        extra = {"path": str(tmp_path / "store"), "tier": "lossless"} | extra
        mine = copy.copy(config)
        mine.parallel_config = copy.copy(config.parallel_config)
        mine.kv_transfer_config = KVTransferConfig(
            kv_connector="SeqkvConnector",
            kv_connector_module_path="seqkv.adapters.vllm",
            kv_role=kv_role,  # type: ignore[arg-type]
            kv_connector_extra_config=extra,
        )
        if change:
            setattr(mine.parallel_config, *change)
        spec = spec or FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16)
        caches = KVCacheConfig(16, [], [KVCacheGroupSpec(NAMES, spec)])
        assert not KVConnectorFactory.supports_hma_config(mine.kv_transfer_config)
        return KVConnectorFactory.get_connector_class(mine.kv_transfer_config)(mine, KVConnectorRole[role], caches)

    return do


def request(ids: list[int], **more: Any) -> Request:
    return Request("r", ids, SamplingParams(max_tokens=4), None, **more)


def caches(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shape = (16, HEADS, BLOCK, 2 * WIDTH)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name in reversed(NAMES)}


def true(layer: int) -> Any:
    """Keys and values of IDS, [2, tokens, heads, width]."""
    return torch.randn(2, len(IDS), HEADS, WIDTH, generator=torch.Generator().manual_seed(layer)).bfloat16()


def write(pages: dict[str, Any], blocks: list[int], count: int) -> None:
    """What vLLM's attention does with the keys and values of the first tokens."""
    slots = paged.slots(blocks, BLOCK)[:count]
    for layer, name in enumerate(NAMES):
        keys, values = (side[:count] for side in true(layer))
        cache = pages[name].view(16, HEADS, 2 * BLOCK, WIDTH)
        isa = _get_attn_isa(torch.bfloat16, BLOCK, WIDTH)
        ops.cpu_attn_reshape_and_cache(keys, values, *cache.chunk(2, dim=2), slots, isa)


def step(scheduler: Any, worker: Any, request: Request, count: int, blocks: list[int]) -> set[int]:
    """A step of `count` tokens of a request; what could not be loaded."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {request.request_id: count}
    output.kv_connector_block_state = KVConnectorBlockState({request.request_id}, lambda _: (blocks,), {})
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(scheduler.build_connector_meta(output))))
    worker.start_load_kv(SimpleNamespace())
    worker.wait_for_layer_load(NAMES[0])
    worker.save_kv_layer(NAMES[0], None, None)
    worker.wait_for_save()
    failed = worker.get_block_ids_with_load_errors()
    worker.clear_connector_metadata()
    return failed


def prefill(make: Callable[..., Any], blocks: list[int], steps: list[int], **extra: Any) -> None:
    """A server that computes IDS and stores them."""
    scheduler, worker, pages, asked = make("SCHEDULER", **extra), make(**extra), caches(1), request(IDS)
    worker.register_kv_caches(pages)
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    scheduler.update_state_after_alloc(asked, None, 0)
    for count in steps:
        write(pages, blocks, len(IDS))
        assert step(scheduler, worker, asked, count, blocks) == set()
        asked.num_computed_tokens += count
        for block in blocks:  # the blocks are another's as soon as the step is over
            if asked.num_computed_tokens == len(IDS):
                for name in NAMES:
                    pages[name][block] = 7
    scheduler.request_finished(asked, blocks)
    worker.shutdown()


@pytest.mark.parametrize("steps", [[100], [40, 40, 20]], ids=["whole", "in chunks"])
def test_another_server_has_the_same_pages(make: Callable[..., Any], steps: list[int]) -> None:
    prefill(make, [3, 11, 5, 0], steps)
    scheduler, worker, pages = make("SCHEDULER"), make(), caches(2)
    expected = copy.deepcopy(pages)
    worker.register_kv_caches(pages)
    asked = request(IDS[:90] + [3] * 10)
    assert scheduler.get_num_new_matched_tokens(asked, 32) == (32, False)
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (64, False)
    scheduler.update_state_after_alloc(asked, None, 64)
    asked.num_computed_tokens = 64
    assert step(scheduler, worker, asked, 10, [9, 2, 14]) == set()
    write(expected, [9, 2], 64)
    for name in NAMES:
        assert torch.equal(pages[name], expected[name])


def test_the_stored_cache_is_the_model_s(make: Callable[..., Any]) -> None:
    prefill(make, [3, 11, 5, 0], [100])
    (entry,) = make()._store.list()
    kv: KVCache = make()._store.get(entry.name)
    assert (kv.dtype, kv.tokens, kv.layers) == ("bfloat16", 96, LAYERS) and kv.rope[0].rotary_dim == WIDTH
    for layer in range(LAYERS):
        for got, side in zip((kv.keys, kv.values), true(layer), strict=True):
            assert torch.equal(torch.tensor(got[layer]), side[:96].permute(1, 0, 2).float())


def test_who_may_use_what(make: Callable[..., Any], tmp_path: Path) -> None:
    prefill(make, [3, 11, 5, 0], [100])

    def found(connector: Any, **more: Any) -> int:
        return connector.get_num_new_matched_tokens(request(IDS, **more), 0)[0]

    assert found(make("SCHEDULER")) == 96
    assert found(make("SCHEDULER", tier="near")) == 0
    assert found(make("SCHEDULER", kv_role="kv_producer")) == 0
    assert found(make("SCHEDULER"), cache_salt="mine") == 0
    assert found(make("SCHEDULER"), lora_request=SimpleNamespace()) == 0
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    assert found(make("SCHEDULER")) == 0


def test_a_consumer_stores_nothing(make: Callable[..., Any]) -> None:
    prefill(make, [3, 11, 5, 0], [100], kv_role="kv_consumer")
    assert make()._store.list() == []


def test_what_is_damaged_is_computed_and_stored_again(make: Callable[..., Any], tmp_path: Path) -> None:
    prefill(make, [3, 11, 5, 0], [100])
    for blob in (tmp_path / "store" / "blobs").rglob("*"):
        if blob.is_file():
            blob.write_bytes(b"")
    scheduler, worker, asked = make("SCHEDULER"), make(), request(IDS)
    worker.register_kv_caches(caches(2))
    assert scheduler.get_num_new_matched_tokens(asked, 32) == (64, False)
    scheduler.update_state_after_alloc(asked, None, 64)
    asked.num_computed_tokens = 96
    assert step(scheduler, worker, asked, 4, [9, 2, 14, 8]) == {2, 14}
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    prefill(make, [3, 11, 5, 0], [100])
    assert make("SCHEDULER").get_num_new_matched_tokens(asked, 0) == (96, False)


def test_what_is_not_understood_is_refused(make: Callable[..., Any]) -> None:
    sizes: Any = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": WIDTH}
    for change in (("tensor_parallel_size", 2), ("pipeline_parallel_size", 2)):
        with pytest.raises(CacheError, match=f"{change[0]} is 2"):
            make(change=change)
    with pytest.raises(CacheError, match="not SlidingWindowSpec"):
        make(spec=SlidingWindowSpec(**sizes, dtype=torch.bfloat16, sliding_window=8))
    with pytest.raises(CacheError, match="float8"):
        make(spec=FullAttentionSpec(**sizes, dtype=torch.float8_e4m3fn))
    with pytest.raises(CacheError, match="width 64"):
        make(spec=FullAttentionSpec(**sizes, dtype=torch.bfloat16, head_size_v=32))
    for extra in ({"tiers": "near"}, {"tier": "tokens"}, {"kl": -1.0}):
        with pytest.raises(ValueError, match=r"tiers|tokens|-1"):
            make(**extra)
    with pytest.raises(CacheError, match="1 layers"):
        make().register_kv_caches({NAMES[0]: caches(1)[NAMES[0]]})


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_the_order_of_pages_is_found(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_get_attn_isa", lambda *_: isa)  # also that of another processor
    pages = torch.zeros(4, 3, 64, 2 * WIDTH, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 100, 3, WIDTH).bfloat16()
    slots = torch.randperm(256)[:100]
    ops.cpu_attn_reshape_and_cache(keys, values, *pages.view(4, 3, 128, WIDTH).chunk(2, dim=2), slots, isa)
    found = paged.Pages(pages, adapter._cpu_order(pages)).read(slots)
    assert torch.equal(found[0], keys.permute(1, 0, 2)) and torch.equal(found[1], values.permute(1, 0, 2))


def test_the_example_loads_in_its_second_run(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "model")  # for its tokenizer; vLLM's attention wants wider heads
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "model")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env["VLLM_LOGGING_LEVEL"] = "ERROR"  # vLLM logs to where the example prints
    command = [sys.executable, "example.py", "model"]
    printed = [subprocess.check_output(command, cwd=tmp_path, env=env, text=True) for _ in range(2)]
    first, second = (re.search(r"(\d+) tokens were not computed\n(.+)", out) for out in printed)
    assert first is not None and second is not None
    assert int(first[1]) == 0 and int(second[1]) > 1000 and first[2] == second[2]
