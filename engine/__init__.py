"""The codec: what of a KV cache is coded, and why. NumPy and Numba only."""

if __name__ == "engine":
    # `import engine` from a checkout must give the installed package's modules, not a second copy of their classes.
    import importlib
    import sys

    importlib.import_module("seqkv.engine")
    for _name, _module in list(sys.modules.items()):
        if _name == "seqkv.engine" or _name.startswith("seqkv.engine."):
            sys.modules[_name.removeprefix("seqkv.")] = _module

from seqkv.cuda_kernels.errors import DeviceError
from seqkv.engine.cache import KVCache, Rope
from seqkv.engine.calibration import calibrate
from seqkv.engine.codec import decode, decode_into, encode, inspect, token_ids
from seqkv.engine.errors import (
    CacheError,
    CalibrationError,
    ProbsError,
    ProfileError,
    RecomputeError,
    SeqkvError,
    SessionError,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StreamError,
)
from seqkv.engine.planning import Rates, plan
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile
from seqkv.engine.reference import Reference, stream_key
from seqkv.engine.store import SessionStore

__all__ = [
    "CacheError",
    "CalibrationError",
    "DeviceError",
    "KVCache",
    "ProbsError",
    "Profile",
    "ProfileError",
    "Rates",
    "RecomputeError",
    "Reference",
    "Rope",
    "SeqkvError",
    "SessionError",
    "SessionStore",
    "StoreBusy",
    "StoreDamaged",
    "StoreError",
    "StoreFull",
    "StreamError",
    "TokenProbs",
    "calibrate",
    "decode",
    "decode_into",
    "encode",
    "inspect",
    "plan",
    "stream_key",
    "token_ids",
]
