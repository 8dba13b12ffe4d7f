"""`seqkv.engine` -> plain PyTorch tensors. The other way needs no adapter: the engine takes tensors as they are.

    kv = engine.KVCache(keys, values, rope=engine.Rope.from_theta(1e4, 64))
    stream = engine.encode(kv, engine.TokenProbs.from_logits(logits, ids))
    keys, values = to_tensors(engine.decode(stream))

What tensors require grad or belong to a graph does not matter, and what comes back has none.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from seqkv.cuda_kernels import device as cuda
from seqkv.engine import KVCache
from seqkv.engine.arrays import on_device


def to_tensors(
    kv: KVCache, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of a cache, a tensor [kv_heads, tokens, head_dim] for each layer.

    dtype: the cache's own if not given: every bit is kept then, those of NaN too.
    device: where the cache is, if not given.

    They share memory with the cache where they can: write to a clone, unless the cache is not used any more.
    """
    keys, values = ([to_tensor(array, kv.dtype).to(device, dtype) for array in side] for side in (kv.keys, kv.values))
    return keys, values


def to_tensor(array: Any, name: str) -> torch.Tensor:
    """An array of a `KVCache` of dtype `name`, NumPy or CuPy, as a tensor of that dtype where the array is."""
    if on_device(array):
        tensor = torch.from_dlpack(array)
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    if name == "bfloat16":  # float32 of the same values; its upper half is bfloat16, and arithmetic might alter NaN
        bits = (np.ascontiguousarray(array).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.require(array, requirements="W"))  # torch warns of what cannot be written: a copy then


def on_current_stream(device: torch.device | str | int | None = None) -> contextlib.AbstractContextManager[Any]:
    """A context in which the engine works on the stream of `device` that is PyTorch's current one, and on that device.

    Needed where the current stream is not the default one: the engine follows CuPy's. Work queued before is waited for,
    and work queued after waits, on the device; the host does not wait. DeviceError without CuPy.
    """
    stream = torch.cuda.current_stream(device)
    cupy = cuda.cupy()
    context = contextlib.ExitStack()
    context.enter_context(cupy.cuda.Device(stream.device_index))
    context.enter_context(cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index))
    return context
