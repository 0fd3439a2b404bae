"""Symmetric memory: one protocol, several backends. Backends beyond `local` load on demand."""

from mok_ref.heap.local import LocalHeap, LocalWorld, run_on_world, run_ranks
from mok_ref.heap.protocol import HeapError, SymmetricHeap

__all__ = ["HeapError", "LocalHeap", "LocalWorld", "SymmetricHeap", "run_on_world", "run_ranks"]
