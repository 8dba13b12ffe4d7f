"""The engine's operations on a GPU.

The coder is CUDA C++ through CuPy (`coder.cu`, `compaction.cu`), what is done to each value are Numba CUDA kernels
(`elementwise`), products of matrices are cuBLAS's (`linear`). Nothing here knows of models, caches or files. CuPy and
Numba for CUDA are loaded when they are first needed.
"""
