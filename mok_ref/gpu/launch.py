"""Kernel launches that are prepared once and repeated.

CuPy describes every argument of a kernel at every launch, which costs more than the driver's own
work on small steps. A `Launch` holds what the driver wants, grid, shared memory and the addresses
of its arguments, so that repeating it is one call. Launches belong to the parameter block that they
carry: `prepared` keeps them there, and they go when it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

MAX_PREPARED = 256
"""What one block keeps; the oldest goes first."""

FIRST_WITH_EARLY_LAUNCH = 90
"""Compute capability from which a kernel can wait for the one before it."""

NUM_MULTIPROCESSORS = 132
"""Of an H200. Work is cut for so many where the cut changes no bit; a launch of one CTA per
multiprocessor asks the device."""


class ParamBlock(np.ndarray):
    """A parameter block of shape () with what was prepared from its values."""

    prepared: dict[Any, Any]

    def __array_finalize__(self, source: Any) -> None:
        self.prepared = {}  # a copy may be changed: nothing of its source is valid for it


class Launch:
    """One kernel with all its arguments; call it with the stream to enqueue it on.

    kernel      of `mok_ref.gpu.compiler.load_kernel`
    grid        CTAs, up to three numbers
    arguments   parameter blocks and NumPy scalars by value, copied now; CuPy arrays by address
    early       the kernel begins with `follow_previous_kernel` (cuda_src/sync.cuh): it may take its
                place while the kernel before it ends
    """

    __slots__ = ("_kept", "_launch")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        smem_bytes: int = 0,
        early: bool = False,
    ) -> None:
        values = [_argument_bytes(argument) for argument in arguments]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        self._kept = (kernel, arguments, values, pointers)
        shape = (*grid, 1, 1)[:3]
        launcher = early_launcher if early else plain_launcher
        self._launch = launcher(kernel.kernel.ptr, shape, threads, smem_bytes, pointers.ctypes.data)

    def __call__(self, stream: Any) -> None:
        """Enqueue it on a CuPy stream."""
        self._launch(stream.ptr)


def plain_launcher(
    function: int, grid: tuple[int, ...], threads: int, smem_bytes: int, arguments: int
) -> Callable[[int], None]:
    """What enqueues the kernel on a stream behind everything that is there.

    arguments   address of the addresses of its arguments
    """
    import cupy

    launch = cupy.cuda.driver.launchKernel

    def enqueue_on(stream: int) -> None:
        launch(function, *grid, threads, 1, 1, smem_bytes, stream, arguments, 0)

    return enqueue_on


def early_launcher(
    function: int, grid: tuple[int, ...], threads: int, smem_bytes: int, arguments: int
) -> Callable[[int], None]:
    """The same by programmatic dependent launch, where the device has it.

    Raises: RuntimeError naming the driver's answer if it refuses a launch.
    """
    import cupy

    if int(cupy.cuda.Device().compute_capability) < FIRST_WITH_EARLY_LAUNCH:
        return plain_launcher(function, grid, threads, smem_bytes, arguments)
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    ids = driver.CUlaunchAttributeID
    attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem_bytes
    config.attrs, config.numAttrs = [attribute], 1
    launch, kernel, done = driver.cuLaunchKernelEx, driver.CUfunction(function), 0

    def enqueue_on(stream: int) -> None:
        config.hStream = stream
        (status,) = launch(config, kernel, arguments, 0)
        if status != done:
            raise RuntimeError(f"kernel launch refused: {status}")

    return enqueue_on


def clearing(array: Any) -> Callable[[Any], None]:
    """What enqueues zeros for the whole of an array, which must live as long."""
    import cupy

    clear, address, num_bytes = cupy.cuda.runtime.memsetAsync, int(array.data.ptr), array.nbytes

    def enqueue_on(stream: Any) -> None:
        clear(address, 0, num_bytes, stream.ptr)

    return enqueue_on


def _argument_bytes(argument: Any) -> np.ndarray:
    """The bytes that the driver copies into the kernel's parameter."""
    by_value = isinstance(argument, (np.generic, ParamBlock)) or type(argument) is np.ndarray
    value = np.asarray(argument if by_value else np.uint64(argument.data.ptr))
    return np.frombuffer(value.tobytes(), np.uint8)


def prepared(block: Any, key: Any, build: Callable[[], Any]) -> Any:
    """What `build()` gave for this block and key, made at the first use.

    The block's values are fixed from then on.
    """
    found = block.prepared.get(key)
    if found is None:
        block.flags.writeable = False
        found = remember(block.prepared, key, build())
    return found


def enqueue(block: Any, key: Any, stream: Any, build: Callable[[], list[Launch]]) -> None:
    """Launch on `stream` what `build()` prepared for this block and key."""
    for launch in prepared(block, key, build):
        launch(stream)


def remember(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    """`value`, kept under `key`; the cache stays within MAX_PREPARED entries."""
    if len(cache) >= MAX_PREPARED:
        cache.pop(next(iter(cache)))
    cache[key] = value
    return value
