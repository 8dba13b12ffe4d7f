"""LMCache (0.5.6) <-> `seqkv.engine`: a serde for its second tier, and a file adapter that loads what varies in length.

Importing this module registers the serde "seqkv". LMCache imports the module of a plugin adapter, so that this is all
that its configuration needs (docs/lmcache.md):

    {"type": "plugin", "module_path": "seqkv.adapters.lmcache", "class_name": "FileAdapter",
     "adapter_params": {"base_path": "/cache"},
     "serde": {"type": "seqkv", "profile": "profile.safetensors", "model": "path/to/model", "kl": 0.01}}
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)

from seqkv.adapters.chunks import OVERHEAD, ChunkCodec
from seqkv.engine import CacheError

NAME = "seqkv"
_BLOCK = 4096  # bytes; buffers of fixed size are multiples, as direct input and output want them

FileAdapterConfig = FSL2AdapterConfig  # LMCache looks for it by this name


class SeqkvSerializer(Serializer):
    """Codes a chunk into the first bytes of a buffer.

    codec: of the chunks. bits: if given, every chunk takes this many bits for each value, rounded up, whatever its
        stream takes: for storage that must know the length before it loads.
    """

    def __init__(self, codec: ChunkCodec, bits: float | None = None) -> None:
        self.codec, self.bits = codec, bits

    def serialize(self, src: Any, dst: Any, key: Any = None) -> int:
        """Bytes written to dst.

        CacheError or ProfileError if the chunk is not one of the codec's model, or does not fit into `bits`.
        """
        if len(src.get_shapes()) != 1 or src.tensor is None:
            raise CacheError(f"one tensor is coded, not a group of {len(src.get_shapes())}")
        data = self.codec.encode(src.tensor)
        out = memoryview(dst.byte_array).cast("B")
        if len(data) > out.nbytes:
            raise CacheError(f"the chunk takes {len(data)} bytes, there is room for {out.nbytes}: give more bits")
        out[: len(data)] = data
        if self.bits is None:
            return len(data)
        out[len(data) :] = bytes(out.nbytes - len(data))  # what was there before is nobody's business
        return out.nbytes

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """The most that `serialize` writes, in bytes: a chunk that does not become smaller is kept as it is."""
        if self.bits is not None:
            values = sum(math.prod(shape) for shape in layout_desc.shapes)
            return -(-math.ceil(values * self.bits / 8 + OVERHEAD) // _BLOCK) * _BLOCK
        sizes = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes) + OVERHEAD


class SeqkvDeserializer(Deserializer):
    """Decodes what SeqkvSerializer wrote."""

    def __init__(self, codec: ChunkCodec) -> None:
        self.codec = codec

    def deserialize(self, src: Any, dst: Any, key: Any = None) -> None:
        """Fill dst. StreamError if src is damaged, or is of another shape; ProfileError if of another profile."""
        if len(dst.get_shapes()) != 1 or dst.tensor is None:
            raise CacheError(f"one tensor is decoded, not a group of {len(dst.get_shapes())}")
        self.codec.decode(src.byte_array, dst.tensor)


def create(config: Mapping[str, Any]) -> AsyncSerdeProcessor:
    """The serde of a configuration: ChunkCodec.from_config's entries, bits, and max_workers (threads, 1 if not given).

    ValueError if something of it is not understood, ProfileError if the profile cannot be read.
    """
    rest = dict(config)
    bits, workers = rest.pop("bits", None), rest.pop("max_workers", 1)
    if bits is not None and not (isinstance(bits, int | float) and 0 < bits <= 64):
        raise ValueError(f"bits must be a number of bits for each value, not {bits!r}")
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"max_workers must be a number of threads, not {workers!r}")
    codec = ChunkCodec.from_config(rest)
    return AsyncSerdeProcessor(SeqkvSerializer(codec, bits), SeqkvDeserializer(codec), max_workers=workers)


class FileAdapter(FSL2Adapter):
    """LMCache's adapter for a folder, for files of any length.

    LMCache loads into a buffer for the largest stream that there could be, and its adapters take a file that does not
    fill it for damaged.
    """

    def __init__(self, config: FSL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        super().__init__(config)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load the files of these keys into these buffers. Buffers for bytes become as long as the files."""
        for key, buffer in zip(keys, objects, strict=True):
            if len(buffer.get_shape()) == 1:  # a serde's, not a chunk itself
                with contextlib.suppress(OSError, ValueError):  # not there, or too long: LMCache says so
                    buffer.set_used_size(self._key_to_path(key).stat().st_size)
        return super().submit_load_task(keys, objects)


if NAME not in get_registered_serde_types():
    register_serde_factory(NAME, create)
