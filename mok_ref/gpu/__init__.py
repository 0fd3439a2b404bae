"""CUDA side of mok_ref: compile, load and launch the kernels of `cuda_src/`.

Importing this package needs nothing beyond NumPy; CuPy and cuda-core are imported by the functions
that use them, so that a machine without a GPU can import, inspect and (with cuda-core) compile.
"""
