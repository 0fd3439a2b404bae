"""Benchmarks: this layer beside dense cuBLAS and whole-layer peers, on one GPU."""
