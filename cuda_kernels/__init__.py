"""The engine's operations on a GPU: the interleaved coder as CUDA C++ through CuPy (`coder.cu`, `compaction.cu`), what is
done to each value as Numba CUDA kernels (`elementwise`), products of matrices by cuBLAS (`linear`).

Knows nothing of models, caches or files. CuPy and Numba for CUDA are loaded when they are first needed.
"""
