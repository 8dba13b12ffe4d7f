"""Pages, and which prompts a server loads and saves: with a server that is only its pages and its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seqkv import engine  # noqa: E402
from seqkv.adapters import paged  # noqa: E402
from seqkv.engine import CacheError, KVCache, Profile, SessionStore, TokenProbs  # noqa: E402
from seqkv.engine.trie import Prefix, Trie  # noqa: E402
from tests.conftest import LinearModel, calibrated  # noqa: E402
from tests.sessions import CausalModel  # noqa: E402

BLOCK = 8


def transposed(block: int, width: int) -> Any:
    """Keys of a head's page with tokens last, values with tokens first: vLLM's pages on a processor with AVX-512."""
    numbers = torch.arange(2 * block * width)
    keys = numbers[: block * width].view(width, block).T
    return torch.stack([keys, numbers[block * width :].view(block, width)])


def shuffled(block: int, width: int) -> Any:
    return torch.randperm(2 * block * width, generator=torch.Generator().manual_seed(1)).view(2, block, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("order", [None, transposed, shuffled])
def test_what_is_written_is_read_and_nothing_else_changes(order: Any, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(5, 2, BLOCK, 12, generator=generator).to(dtype)
    pages = paged.Pages(memory, None if order is None else order(BLOCK, 6))
    before = pages.read(torch.arange(40))
    slots = paged.slots([3, 0], BLOCK)[2:13]
    assert slots.tolist() == [26, 27, 28, 29, 30, 31, 0, 1, 2, 3, 4]
    keys, values = torch.randn(2, 2, 11, 6, generator=generator)
    pages.write(slots, keys, values)
    after = pages.read(torch.arange(40))
    for new, side, old in zip((keys, values), after, before, strict=True):
        assert torch.equal(side[:, slots], new.to(dtype))
        rest = np.setdiff1d(np.arange(40), slots)
        assert torch.equal(side[:, rest], old[:, rest])
    assert len({tensor.data_ptr() for tensor in (memory, *before, *after)}) == 5
    if order is None:
        assert torch.equal(memory[3, :, 2], torch.cat([keys[:, 0], values[:, 0]], -1).to(dtype))
    if order is transposed:
        head = memory[0, 1].flatten()  # a token's keys are apart by a block
        assert torch.equal(head[4 : 6 * BLOCK : BLOCK], keys[1, 10].to(dtype))


def test_pages_in_another_order_of_heads_and_tokens() -> None:
    memory = torch.arange(3 * BLOCK * 2 * 12.0).view(3, BLOCK, 2, 12)
    keys, values = paged.Pages(memory.transpose(1, 2)).read(torch.tensor([2 * BLOCK + 1]))
    assert torch.equal(torch.cat([keys, values], -1)[:, 0], memory[2, 1])


def test_what_does_not_fit_is_refused() -> None:
    pages = paged.Pages(torch.zeros(3, 2, BLOCK, 12))
    with pytest.raises(CacheError, match="kv_heads, block_size"):
        paged.Pages(torch.zeros(3, 2, BLOCK, 11))
    with pytest.raises(CacheError, match="order"):
        paged.Pages(torch.zeros(3, 2, BLOCK, 12), torch.zeros(2, BLOCK, 6, dtype=torch.int64))
    for slots in ([-1], [3 * BLOCK]):
        with pytest.raises(CacheError, match="slots"):
            pages.read(torch.tensor(slots))
    with pytest.raises(CacheError, match="do not fit"):
        pages.write(torch.tensor([0]), torch.zeros(2, 2, 6), torch.zeros(2, 2, 6))


def test_an_order_needs_a_page_in_one_piece() -> None:
    apart = torch.zeros(4, BLOCK, 2, 12).transpose(1, 2)
    with pytest.raises(CacheError, match="one piece of memory"):
        paged.Pages(apart, shuffled(BLOCK, 6))


@pytest.mark.parametrize("order", [None, shuffled])
@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([1, 1, 2, 3]), "4 different integers, got 3"),
        (torch.tensor([True, False, True, False]), "integers, got bool"),
        (torch.tensor([0.0, 1, 2, 3]), "integers, got float32"),
        (torch.tensor([[0], [1], [2], [3]]), r"shape \(4, 1\)"),
        (torch.tensor(3), r"shape \(\)"),
        ([0, 1, 2, 3 * BLOCK], "not all in"),
        ([0, 1, [2], 3], "slots|read as an array"),
    ],
)
def test_slots_that_are_wrong_are_refused(order: Any, slots: Any, message: str) -> None:
    memory = torch.zeros(3, 2, BLOCK, 12)
    pages = paged.Pages(memory, None if order is None else order(BLOCK, 6))
    with pytest.raises(CacheError, match=message):
        pages.write(slots, torch.ones(2, 4, 6), torch.ones(2, 4, 6))
    assert not memory.any()
    if "different" not in message:
        with pytest.raises(CacheError, match=message):
            pages.read(slots)


class Stored:
    """What is in the store, for `Prompts`."""

    def __init__(self, *sessions: list[int]) -> None:
        self.trie = Trie()
        for tokens in sessions:
            self.trie.insert(paged.session_name(tokens), tokens, np.zeros(len(tokens)))

    def __call__(self, token_ids: Any) -> Prefix:
        return self.trie.longest_prefix(token_ids)


IDS = list(range(100, 130))
BLOCKS = [9, 4, 7, 1]


def plan(prompts: paged.Prompts, *computed: tuple[str, int]) -> Any:
    return prompts.step(computed, lambda request: BLOCKS)


def test_a_prompt_is_loaded_in_whole_blocks_beyond_those_there() -> None:
    stored = Stored(IDS[:21] + [5] * 11)
    name = next(iter(stored.trie))
    prompts = paged.Prompts(BLOCK, stored)
    assert prompts.match("a", IDS, 0) == 16
    assert prompts.match("a", IDS, 8) == 8  # asked again, with a block of vLLM's own by now
    prompts.admit("a", None, 8)
    assert plan(prompts, ("a", 30)) == ([paged.Load(name, 8, 16, [4])], [])
    assert plan(prompts, ("a", 31)) == ([], [])
    assert prompts.match("a", IDS, 16) == 0


def test_one_token_is_left_to_compute() -> None:
    prompts = paged.Prompts(BLOCK, Stored(IDS[:24]))
    assert [prompts.match("a", IDS[:count], 0) for count in (7, 8, 9, 23, 24, 25, 30)] == [0, 0, 8, 16, 16, 24, 24]


def test_what_was_found_is_not_loaded_unless_the_server_says_so() -> None:
    prompts = paged.Prompts(BLOCK, Stored(IDS))
    assert prompts.match("a", IDS, 0) == 24
    prompts.admit("a", None, 0)
    assert plan(prompts, ("a", 30)) == ([], [])


def test_a_prompt_in_chunks_is_saved_when_its_last_block_is_computed() -> None:
    prompts = paged.Prompts(BLOCK, Stored())
    prompts.match("a", IDS, 0)
    prompts.admit("a", IDS, 0)
    assert [plan(prompts, ("a", count)) for count in (10, 20, 23)] == [([], [])] * 3
    save = paged.Save(paged.session_name(IDS[:24]), IDS[:24], BLOCKS[:3])
    assert plan(prompts, ("b", 40), ("a", 24)) == ([], [save])
    assert plan(prompts, ("a", 30)) == ([], [])


def test_a_request_that_is_preempted_starts_anew() -> None:
    prompts = paged.Prompts(BLOCK, Stored(IDS[:8]))
    for _ in range(2):
        assert prompts.match("a", IDS, 0) == 8
        prompts.admit("a", IDS, 8)
        loads, saves = plan(prompts, ("a", 20))
        assert [load.blocks for load in loads] == [[9]] and saves == []
    prompts.match("a", IDS, 8)
    prompts.admit("a", IDS, 0)
    assert len(plan(prompts, ("a", 30))[1]) == 1


def test_what_is_stored_is_not_saved_again() -> None:
    stored = Stored()
    prompts = paged.Prompts(BLOCK, stored)
    for request in "ab":
        prompts.match(request, IDS, 0)
        prompts.admit(request, IDS, 0)
    assert len(plan(prompts, ("a", 30))[1]) == 1
    stored.trie.insert("a", IDS[:24], np.zeros(24))
    assert plan(prompts, ("b", 30)) == ([], [])


def test_short_and_forgotten_requests() -> None:
    prompts = paged.Prompts(BLOCK, Stored(IDS))
    prompts.admit("short", IDS[:7], 0)
    prompts.match("over", IDS, 0)
    prompts.admit("over", IDS + IDS, 24)
    prompts.forget("over")
    assert plan(prompts, ("short", 7), ("over", 60)) == ([], [])


def test_the_same_tokens_have_the_same_name() -> None:
    assert paged.session_name(IDS) == paged.session_name(np.array(IDS, np.int32))  # type: ignore[arg-type]
    assert paged.session_name(IDS) != paged.session_name(IDS[:-1])


class Server:
    """Pages in which a prompt's keys and values appear as a model has them, and the store behind them."""

    def __init__(self, model: LinearModel, folder: Path, profile: Profile, tier: Any) -> None:
        self.model, self.tier = model, tier
        self.store = SessionStore(folder, profile=profile)
        self.prompts = paged.Prompts(BLOCK, self.store.longest_prefix)
        generator = torch.Generator().manual_seed(3)
        memory = torch.full((model.layers, 60, model.heads, BLOCK, 16), torch.nan, dtype=torch.bfloat16)
        self.pages = [paged.Pages(pages, shuffled(BLOCK, 8)) for pages in memory]
        self.free = torch.randperm(60, generator=generator).tolist()
        self.computed = 0

    def run(self, ids: Any) -> Any:
        """Prefills, with what is stored; the cache as it is in the pages."""
        prompt = ids.tolist()
        blocks = [self.free.pop() for _ in range(-(-len(ids) // BLOCK))]
        loaded = self.prompts.match("request", prompt, 0)
        self.prompts.admit("request", prompt, loaded)
        loads, saves = self.prompts.step([("request", len(ids))], lambda _: blocks)
        slots = paged.slots(blocks, BLOCK)[: len(ids)]
        for load in loads:
            kv = self.store.get(load.session, tokens=slice(load.start, load.stop))
            for pages, keys, values in zip(self.pages, kv.keys, kv.values, strict=True):
                pages.write(paged.slots(load.blocks, BLOCK), paged.tensor(keys), paged.tensor(values))
        true = self.cache(ids)
        for pages, keys, values in zip(self.pages, true.keys, true.values, strict=True):
            pages.write(slots[loaded:], torch.tensor(keys)[:, loaded:], torch.tensor(values)[:, loaded:])
        self.computed += len(ids) - loaded
        for save in saves:
            sides = [pages.read(paged.slots(save.blocks, BLOCK)) for pages in self.pages]
            kv = KVCache([keys for keys, _ in sides], [values for _, values in sides], rope=self.model.rope)
            self.store.put(save.session, kv, TokenProbs.from_tokens(save.token_ids), tier=self.tier)
        sides = [pages.read(slots) for pages in self.pages]
        return KVCache([keys for keys, _ in sides], [values for _, values in sides])

    def cache(self, ids: Any) -> KVCache:
        kv = self.model.cache(ids)[0]
        return KVCache(kv.keys, kv.values, dtype="bfloat16", rope=kv.rope)


@pytest.fixture(scope="module")
def model() -> CausalModel:
    class Even(CausalModel):
        """Keys and values of the same width, as pages have them."""

        def __init__(self) -> None:
            super().__init__(value=8)

    return Even()


@pytest.fixture(scope="module")
def profile(model: CausalModel) -> Profile:
    return calibrated(model)


def error(true: KVCache, got: KVCache) -> float:
    lost = sum(((a - b) ** 2).sum() for a, b in zip(true.keys + true.values, got.keys + got.values, strict=True))
    return float(np.sqrt(lost / sum((a**2).sum() for a in true.keys + true.values)))


@pytest.mark.parametrize("tier", ["lossless", "near"])
def test_a_restarted_server_goes_on_from_the_store(
    tier: Any, model: CausalModel, profile: Profile, tmp_path: Path
) -> None:
    ids = model.tokens(1, 150)
    first = Server(model, tmp_path, profile, tier)
    assert error(first.cache(ids), first.run(ids)) == 0 and first.computed == 150
    first.store.close()
    second = Server(model, tmp_path, profile, tier)
    got = second.run(ids)
    assert second.computed == 150 - 144
    assert error(second.cache(ids), got) == 0 if tier == "lossless" else 0 < error(second.cache(ids), got) < 0.2
    other = np.concatenate([ids[:77], model.tokens(2, 60)])
    got = second.run(other)
    assert second.computed == 6 + 137 - 72
    assert error(second.cache(other), got) < (1e-9 if tier == "lossless" else 0.2)
    assert len(second.store.list()) == 2 and second.store.verify().clean
    entries = [engine.inspect(next(iter(second.store.streams(e.name).values()))) for e in second.store.list()]
    assert {entry["tier"] for entry in entries} == {tier} and {entry["dtype"] for entry in entries} == {"bfloat16"}
