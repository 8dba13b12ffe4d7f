"""vLLM (0.32, V1 engine): prompts that were computed once are loaded from a store, in this server or another one.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SeqkvConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "seqkv.adapters.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": "/var/cache/seqkv", "tier": "lossless"}}'

See `SeqkvConnector` for what may be in `kv_connector_extra_config`. What is where in vLLM's pages, and which prompts to
load and to save, is decided in `adapters.paged`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVQuantMode
from vllm.v1.request import Request

from seqkv import engine
from seqkv.adapters import paged, rope
from seqkv.cuda_kernels.device import available
from seqkv.engine import (
    CacheError,
    KVCache,
    Rope,
    SeqkvError,
    SessionStore,
    StoreDamaged,
    StoreError,
    TokenProbs,
    rate_control,
)
from seqkv.engine.trie import Prefix

logger = init_logger("vllm.seqkv")

_WAITING = 4  # prompts that may wait to be coded, each a copy of its keys and values


@dataclass(frozen=True)
class Options:
    """What `kv_connector_extra_config` may hold.

    path: of the store, as `engine.SessionStore` takes it. More than one server may use it if it is a folder.
    profile: file of the model's profile, from `seqkv calibrate`.
    tier: "lossless" keeps every bit, "near" loses what is asked for.
    kl, step: of the near tier, as in `engine.encode`.
    limit: bytes that the store may take.
    """

    path: str
    profile: str | None = None
    tier: Literal["near", "lossless"] = "near"
    kl: float = 0.01
    step: float | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.tier not in ("near", "lossless"):
            raise ValueError(f'seqkv: tier must be "near" or "lossless", not {self.tier!r}')
        rate_control.check(self.kl, self.step)


@dataclass
class Transfers(KVConnectorMetadata):
    """What a worker has to load and to save in a step."""

    loads: list[paged.Load] = field(default_factory=list)
    saves: list[paged.Save] = field(default_factory=list)


class SeqkvConnector(KVConnectorBase_V1):
    """Keeps prompts in an `engine.SessionStore`, and loads the longest stored prefix of a new one.

    A prompt's whole blocks are read in the step that computes the last of them, and coded and stored in the background.
    They are loaded before the step that needs them. Requests whose keys and values depend on more than their tokens
    (LoRA, images, prompt embeddings, a cache salt) are neither stored nor loaded.

    Sessions are seen only by servers of the same model (name, configuration, weight files as they are in its folder),
    dtype, tier, kl and step.

    CacheError for what is not understood: tensor, pipeline and context parallelism, caches that are quantised, or of
    other layers than full attention.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        try:
            self._options = Options(**transfer.kv_connector_extra_config)
        except TypeError as error:
            raise ValueError(f"seqkv: kv_connector_extra_config: {error}") from error
        self._spec = _understood(vllm_config, kv_cache_config)
        profile = None if self._options.profile is None else engine.Profile.load(self._options.profile)
        tenant = _identity(vllm_config, self._spec, self._options)
        self._store = SessionStore(self._options.path, profile=profile, tenant=tenant, limit=self._options.limit)
        self._prompts = paged.Prompts(self._spec.block_size, self._find)
        self._requests: dict[str, Request] = {}  # that may be loaded and saved
        self._pages: list[paged.Pages] = []
        self._rope: list[Rope | None] = []
        self._failed: set[int] = set()  # blocks that could not be loaded in this step
        self._coder = ThreadPoolExecutor(1, "seqkv")
        self._saving: dict[str, Future[None]] = {}  # by session, the oldest first

    # Scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """A prompt that is not saved is computed again."""
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens of a request are stored beyond those that vLLM has; loaded within the step."""
        if not self._kv_transfer_config.is_kv_consumer or not _is_tokens_alone(request):
            return 0, False
        return self._prompts.match(request.request_id, list(request.all_token_ids), num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A request gets its blocks."""
        if _is_tokens_alone(request):
            self._requests[request.request_id] = request
            prompt = request.prompt_token_ids if self._kv_transfer_config.is_kv_producer else None
            self._prompts.admit(request.request_id, prompt, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Transfers:
        """What the worker does in this step."""
        state = scheduler_output.kv_connector_block_state

        def blocks_of(request: str) -> Sequence[int]:
            tables = None if state is None else state.get_block_ids(request)
            if tables is None:
                raise StoreError(f"seqkv: vLLM does not tell the blocks of request {request}, which it runs")
            return tables[0]

        computed = [
            (name, self._requests[name].num_computed_tokens + count)
            for name, count in scheduler_output.num_scheduled_tokens.items()
            if name in self._requests
        ]
        return Transfers(*self._prompts.step(computed, blocks_of))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing of a request is needed after its prompt."""
        self._requests.pop(request.request_id, None)
        self._prompts.forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Refused: other servers may use the store, and it does not tell one state of the weights from another."""
        logger.warning("seqkv: a store is not reset. After a change of weights, start with another path.")
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's pages, by layer. CacheError if there are other layers than the configuration tells."""
        config = self._vllm_config.model_config.hf_config
        layers = config.get_text_config(decoder=True).num_hidden_layers
        if len(kv_caches) != layers:
            raise CacheError(
                f"seqkv: {len(kv_caches)} layers keep a cache, the model has {layers} (speculative decoding?)"
            )
        for name in sorted(kv_caches, key=_layer_index):
            pages = kv_caches[name]
            self._pages.append(paged.Pages(pages, _cpu_order(pages) if pages.device.type == "cpu" else None))
        try:
            self._rope = rope.of_config(config, [pages.width for pages in self._pages])
        except Exception as error:  # whatever transformers raises; a rotation that is not known costs compression only
            logger.warning("seqkv: how keys are turned is not understood, so they compress less well: %s", error)
            self._rope = [None] * layers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads what this step needs."""
        self._failed.clear()
        for load in self._transfers.loads:
            try:
                self._load(load)
            except SeqkvError as error:
                logger.warning("seqkv: %d tokens are computed again: %s", load.stop - load.start, error)
                self._failed.update(load.blocks)
                if isinstance(error, StoreDamaged):
                    with contextlib.suppress(SeqkvError):
                        self._store.delete(load.session)  # so that it is stored again

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are loaded before the first runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers are saved after the last has run."""

    def wait_for_save(self) -> None:
        """Copies the prompts that are to be stored, and leaves the rest to the background."""
        for save in self._transfers.saves:
            if save.session not in self._saving and self._failed.isdisjoint(save.blocks):
                while len(self._saving) >= _WAITING:
                    wait(list(self._saving.values())[:1])
                    self._forget_saved()
                slots = paged.slots(save.blocks, self._spec.block_size)
                sides = [[side.cpu() for side in pages.read(slots)] for pages in self._pages]
                self._saving[save.session] = self._coder.submit(self._save, save, sides)
        self._forget_saved()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """What could not be loaded: vLLM computes it again, or fails, as kv_load_failure_policy says."""
        return set(self._failed)

    def shutdown(self) -> None:
        """Stores what waits to be stored."""
        self._coder.shutdown()
        self._store.close()

    @property
    def _transfers(self) -> Transfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        return transfers

    def _find(self, token_ids: Sequence[int]) -> Prefix:
        try:
            return self._store.longest_prefix(token_ids)
        except SeqkvError as error:
            logger.warning("seqkv: the store is not asked: %s", error)
            return Prefix(0, 0.0, None)

    def _forget_saved(self) -> None:
        self._saving = {session: saving for session, saving in self._saving.items() if not saving.done()}

    def _load(self, load: paged.Load) -> None:
        backend: Literal["cpu", "cuda"] = "cuda" if self._pages[0].pages.is_cuda and available() else "cpu"
        kv = self._store.get(load.session, tokens=slice(load.start, load.stop), backend=backend)
        if kv.layers != len(self._pages) or kv.tokens != load.stop - load.start:
            raise CacheError(f"session {load.session!r} is not of this model: give it another name, or delete it")
        slots = paged.slots(load.blocks, self._spec.block_size)
        for pages, keys, values in zip(self._pages, kv.keys, kv.values, strict=True):
            pages.write(slots, paged.tensor(keys), paged.tensor(values))

    def _save(self, save: paged.Save, sides: list[list[torch.Tensor]]) -> None:
        """In the background."""
        options = self._options
        try:
            keys, values = ([pair[side] for pair in sides] for side in (0, 1))
            kv = KVCache(keys, values, rope=self._rope, exact=options.tier == "lossless")
            probs = TokenProbs.from_tokens(save.token_ids)
            self._store.put(save.session, kv, probs, tier=options.tier, kl=options.kl, step=options.step)
        except SeqkvError as error:
            logger.warning("seqkv: a prompt of %d tokens is not stored: %s", len(save.token_ids), error)
        except Exception:  # nobody waits for the result, and a server goes on without its cache
            logger.exception("seqkv: a prompt of %d tokens is not stored", len(save.token_ids))


def _understood(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    """How the cache is kept. CacheError if that, or the way the model is run, is not understood."""
    parallel = vllm_config.parallel_config
    for name in (
        *("tensor_parallel_size", "pipeline_parallel_size"),
        *("decode_context_parallel_size", "prefill_context_parallel_size"),
    ):
        if getattr(parallel, name) != 1:
            raise CacheError(f"seqkv: {name} is {getattr(parallel, name)}; only 1 is supported (several servers are)")
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec:
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise CacheError(f"seqkv: only caches of full attention are understood, not {kinds or 'none'}")
    spec = specs[0]
    plain = spec.kv_quant_mode == KVQuantMode.NONE and spec.num_head_slots is None and spec.state_content_bytes is None
    if not plain or spec.dtype not in (torch.bfloat16, torch.float16, torch.float32) or torch.version.hip:
        raise CacheError(f"seqkv: pages of {spec.dtype} that are quantised or packed are not understood: {spec}")
    if spec.head_size != spec.head_size_v:
        raise CacheError(f"seqkv: keys of width {spec.head_size} with values of {spec.head_size_v} are not understood")
    return spec


def _identity(vllm_config: VllmConfig, spec: FullAttentionSpec, options: Options) -> str:
    """What two servers must have in common to use the same sessions."""
    model = vllm_config.model_config
    folder = Path(model.model)
    weights = sorted(folder.iterdir()) if folder.is_dir() else []
    about = {
        "model": [model.model, model.revision, str(model.dtype), model.quantization],
        "weights": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights],
        "config": [model.hf_config.to_dict(), getattr(model.hf_config, "_commit_hash", None)],
        "cache": [str(spec.dtype), spec.sliding_window],
        "loss": [options.tier, *([] if options.tier == "lossless" else [options.kl, options.step])],
    }
    return json.dumps(about, sort_keys=True, default=str)


def _is_tokens_alone(request: Request) -> bool:
    """Whether nothing but its tokens decides on the keys and values of a request, and who may use them."""
    more = request.lora_request, request.prompt_embeds, request.cache_salt
    return not request.mm_features and not request.resumable and all(x is None for x in more)


def _layer_index(name: str) -> int:
    """Of a layer's name, such as model.layers.3.self_attn.attn."""
    return int(next(part for part in name.split(".") if part.isdigit()))


def _cpu_order(pages: torch.Tensor) -> torch.Tensor:
    """Where vLLM's attention on the CPU has the numbers of a head's page, as `paged.Pages` takes it.

    That depends on the processor and the dtype, so a page of consecutive numbers is written, in digits that every dtype
    holds, and looked at. CacheError if it is not understood.
    """
    size, width = pages.shape[2], pages.shape[3] // 2
    numbers, found = (
        torch.arange(2 * size * width).view(2, size, 1, width),
        torch.zeros(2 * size * width, dtype=torch.int64),
    )
    isa, places = _get_attn_isa(pages.dtype, size, width), torch.arange(size)
    for digit in (0, 8, 16):
        keys, values = (numbers >> digit & 255).to(pages.dtype)
        page = torch.zeros(1, 1, 2 * size, width, dtype=pages.dtype)
        _custom_ops.cpu_attn_reshape_and_cache(keys, values, *page.chunk(2, dim=2), places, isa)
        found += page.flatten().to(torch.int64) << digit
    return found.argsort().view(2, size, width)
