"""Compress a transformer's KV cache by predicting it.

    from seqkv import engine
    stream = engine.encode(kv, probs)
    kv = engine.decode(stream)

`seqkv.engine` is the codec (NumPy and Numba only), `seqkv.adapters` connects it to PyTorch models,
`seqkv.entropy_coding` turns symbols into bytes. Importing this package needs neither PyTorch nor a GPU.
"""

from seqkv import engine

__version__ = "0.1.0"
__all__ = ["__version__", "engine"]
