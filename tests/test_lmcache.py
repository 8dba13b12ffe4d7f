"""Against LMCache itself, which is not among the test dependencies: it wants older ones of what they have too.

pip install --no-deps lmcache==0.5.6, and what it asks for when it is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")

from lmcache.v1.distributed.api import (  # noqa: E402
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (  # noqa: E402
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import (  # noqa: E402
    add_l2_adapters_args,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor  # noqa: E402
from lmcache.v1.distributed.storage_manager import StorageManager  # noqa: E402

from seqkv.adapters import lmcache  # noqa: E402
from seqkv.adapters.chunks import OVERHEAD, ChunkCodec  # noqa: E402
from seqkv.engine import CacheError, Profile, ProfileError  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "lmcache.md"
SHAPE = (2, 3, 256, 32)  # keys and values, layers, tokens, channels
LOSSLESS = {"type": "seqkv", "tier": "lossless"}


def chunks(count: int = 3, shape: Sequence[int] = SHAPE, dtype: Any = torch.bfloat16) -> list[Any]:
    """Chunks that are easy to code."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(shape), generator=generator).cumsum(2).to(dtype) for _ in range(count)]


def layout(chunk: Any) -> MemoryLayoutDesc:
    return MemoryLayoutDesc(shapes=[chunk.shape], dtypes=[chunk.dtype])


@contextlib.contextmanager
def server(folder: Path, serde: dict[str, Any], adapter: str = "plugin") -> Iterator[Any]:
    """LMCache's storage: a first tier in memory, and a folder behind a serde, configured as its command line is."""
    spec: dict[str, Any] = {"type": adapter, "base_path": str(folder)}
    if adapter == "plugin":
        spec = {"type": "plugin", "module_path": "seqkv.adapters.lmcache", "class_name": "FileAdapter"}
        spec["adapter_params"] = {"base_path": str(folder)}
    parser = argparse.ArgumentParser()
    add_l2_adapters_args(parser)
    args = parser.parse_args(["--l2-adapter", json.dumps(spec | {"serde": serde})])
    memory = L1MemoryManagerConfig(1 << 26, False, shm_name="")
    config = StorageManagerConfig(
        L1ManagerConfig(memory), EvictionConfig("LRU"), parse_args_to_l2_adapters_config(args)
    )
    manager = StorageManager(config)
    try:
        yield manager
    finally:
        manager.close()


def put(
    manager: Any, folder: Path, given: list[Any], expected: int | None = None
) -> tuple[list[ObjectKey], list[Path]]:
    """Write chunks into the first tier, wait until they are in the folder, and forget them in the first tier."""
    keys = [ObjectKey(bytes([i]) * 8, "a model", kv_rank=0) for i in range(len(given))]
    objects = manager.reserve_write(keys, layout(given[0]))
    for key, chunk in zip(keys, given, strict=True):
        objects[key].tensor.copy_(chunk)
    manager.finish_write(keys)
    deadline = time.monotonic() + 60
    wanted = len(given) if expected is None else expected
    while time.monotonic() < deadline:
        time.sleep(0.05)
        # only what is no longer being written can be deleted
        if len(list(folder.glob("*.data"))) >= wanted and manager.delete_l1_keys(keys)[0] == len(keys):
            return keys, sorted(folder.glob("*.data"))
    raise TimeoutError(f"after a minute {folder} holds {list(folder.iterdir())}")


def get(manager: Any, keys: list[ObjectKey], like: Any) -> list[Any]:
    """What is found of these keys: copies, None for what is not."""
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout(like))]))
    assert manager.wait_prefetch_status(handle, 60)
    hits = manager.query_prefetch_status(handle).l2_hit_cells[0]
    found = [key for i, key in enumerate(keys) if hits.test(i)]
    if not found:
        return [None] * len(keys)
    with manager.read_prefetched_results(found) as objects:
        there = dict(zip(found, [o.tensor.clone() for o in objects], strict=True))
    manager.finish_read_prefetched(found)
    return [there.get(key) for key in keys]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_put_and_get_without_loss(tmp_path: Path, dtype: Any) -> None:
    given = chunks(dtype=dtype)
    with server(tmp_path, LOSSLESS) as manager:
        keys, files = put(manager, tmp_path, given)
        back = get(manager, keys, given[0])
    assert all(file.stat().st_size < chunk.nbytes for file, chunk in zip(files, given, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(given, back, strict=True))


def test_put_and_get_with_a_profile(tmp_path: Path, model: Any, profile: Profile, sample: Any) -> None:
    """Keys and values of different widths side by side in one plane, as a fused layout has them, at a place that nobody
    tells."""
    kv = sample(64, positions=range(640, 704)).kv
    layers = [torch.cat([torch.tensor(k), torch.tensor(v)], -1) for k, v in zip(kv.keys, kv.values, strict=True)]
    given = torch.stack([x.transpose(0, 1).flatten(1) for x in layers]).half()
    profile.save(tmp_path / "profile.safetensors")
    serde = {"type": "seqkv", "profile": str(tmp_path / "profile.safetensors"), "step": 2.0**-9}
    with server(tmp_path, serde | {"rope": {"theta": 1e4, "dim": 8}}) as manager:
        keys, (file,) = put(manager, tmp_path, [given])
        (back,) = get(manager, keys, given)
    assert file.stat().st_size < 0.7 * given.nbytes
    assert 0 < (back.float() - given.float()).square().mean() < 0.01 * given.float().var()


def test_another_process_finds_what_was_put(tmp_path: Path) -> None:
    given = chunks()
    with server(tmp_path, LOSSLESS) as manager:
        keys, _ = put(manager, tmp_path, given)
    with server(tmp_path, LOSSLESS) as manager:
        assert all(torch.equal(a, b) for a, b in zip(given, get(manager, keys, given[0]), strict=True))


@pytest.mark.parametrize("harm", ["a bit", "the end", "all", "something after it"])
def test_a_damaged_file_is_a_miss(tmp_path: Path, harm: str) -> None:
    (given,) = chunks(1)
    with server(tmp_path, {"type": "seqkv"}) as manager:
        keys, (file,) = put(manager, tmp_path, [given])
        data = file.read_bytes()
        middle = len(data) // 2
        altered = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        file.write_bytes({"a bit": altered, "the end": data[:-1], "all": b"", "something after it": data + b"?"}[harm])
        (back,) = get(manager, keys, given)
    assert (back is not None) == (harm == "something after it")


def test_other_adapters_need_buffers_of_one_size(tmp_path: Path) -> None:
    """LMCache's own adapter for folders loads no file that does not fill the buffer."""
    given = chunks()
    for bits, found in ((None, False), (12, True)):
        folder = tmp_path / str(bits)
        folder.mkdir()
        with server(folder, LOSSLESS if bits is None else LOSSLESS | {"bits": bits}, adapter="fs") as manager:
            keys, files = put(manager, folder, given)
            back = get(manager, keys, given[0])
        assert [b is not None for b in back] == [found] * 3
    assert {file.stat().st_size for file in files} == {-(-(given[0].numel() * 12 // 8 + OVERHEAD) // 4096) * 4096}
    assert all(torch.equal(a, b) for a, b in zip(given, back, strict=True))


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " found, " in line]
    found, size, whole, error = (float(x) for x in re.findall(r"[\d.]+", line))
    assert found == 1 and 0 < size < whole / 2 and 0 < error < 0.05


class Buffer:
    """What of LMCache's memory objects a serde uses."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.byte_array = tensor, memoryview(tensor.view(torch.uint8).view(-1).numpy())

    def get_shapes(self) -> list[Any]:
        return [self.tensor.shape]


@pytest.mark.parametrize("bits", [None, 20])
def test_never_more_bytes_than_estimated(bits: float | None) -> None:
    noise = torch.randint(-(2**15), 2**15, SHAPE, dtype=torch.int16).view(torch.bfloat16)
    serializer = lmcache.SeqkvSerializer(ChunkCodec(), bits)
    buffer = torch.full((serializer.estimate_serialized_size(layout(noise)),), 255, dtype=torch.uint8)
    written = serializer.serialize(Buffer(noise), Buffer(buffer))
    assert written == (buffer.numel() if bits else noise.nbytes + OVERHEAD)
    assert not buffer[noise.nbytes + OVERHEAD :].any()  # of another's chunk, perhaps
    back = torch.empty_like(noise)
    lmcache.SeqkvDeserializer(ChunkCodec()).deserialize(Buffer(buffer[:written]), Buffer(back))
    assert torch.equal(back.view(torch.int16), noise.view(torch.int16))


def test_what_does_not_fit_is_not_stored() -> None:
    serializer = lmcache.SeqkvSerializer(ChunkCodec(tier="lossless"), bits=1)
    (given,) = chunks(1)
    buffer = torch.zeros(serializer.estimate_serialized_size(layout(given)), dtype=torch.uint8)
    with pytest.raises(CacheError, match="more bits"):
        serializer.serialize(Buffer(given), Buffer(buffer))
    assert not buffer.any()


@pytest.mark.parametrize(
    ("config", "message"),
    [({"bits": 0}, "bits"), ({"bits": "4"}, "bits"), ({"max_workers": 0}, "workers"), ({"level": 3}, "level")],
    ids=str,
)
def test_configurations_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_serde_processor(SerdeConfig("seqkv", config))
    with pytest.raises(ProfileError, match="no such file"):
        create_serde_processor(SerdeConfig("seqkv", {"profile": "nowhere", "rope": None}))
