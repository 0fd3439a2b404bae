"""What command lines beside `mok-ref` share, those of the benchmarks and of the examples: errors in
one line, and what must be there to measure.

A wrong word, a file that is no report, a missing library or GPU: one line on stderr, status 2. Of
several processes the first that fails says its line and ends the others, which may wait for it.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from mok_ref.heap.protocol import HeapError
from mok_ref.launch import MpiJob, end_with_error, one_line


class WordParser(argparse.ArgumentParser):
    """Raises ValueError for wrong words instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def script_parser(usage: str | None) -> WordParser:
    """Of a script whose text, as it stands, is what --help prints."""
    return WordParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)


@contextmanager
def one_line_errors(job: MpiJob | None = None) -> Iterator[None]:
    """Errors of the caller's words, files, libraries and devices end the program with status 2.

    job   started already: errors of this process alone, which name their rank
    """
    try:
        yield
    except (ValueError, OSError, HeapError, RuntimeError) as error:
        where = "" if job is None else f"rank {job.rank}: "
        end_with_error(job, f"error: {where}{one_line(error)}")
    except Exception:  # a fault of this program: the other processes must not wait for it
        if job is None:
            raise
        end_with_error(job, traceback.format_exc(), 1)


def require_gpu(what: str, with_torch: bool = True) -> None:
    """Raises: HeapError or ValueError naming what `what` lacks: CuPy, a CUDA device, torch, a torch
    that sees the device."""
    from mok_ref.heap.cuda_device import import_cupy

    import_cupy()  # without a GPU that is what to say first
    if not with_torch:
        return
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{what} needs torch beside this layer: pip install torch") from error
    if not torch.cuda.is_available():
        raise ValueError(
            f"{what} needs a torch with CUDA, got torch {torch.__version__}: pip install torch"
        )


def kernels_name() -> str:
    """The kernels of this checkout as reports name them: 12 hex digits of `source_digest`."""
    from mok_ref.gpu.compiler import source_digest

    return source_digest()[:12]


def is_older(device: dict[str, Any]) -> bool:
    """Whether a report's figures belong to other kernels than those of this checkout."""
    return device.get("kernels") != kernels_name()


def kernels_line(device: dict[str, Any]) -> str:
    """What a page says under a report's tables about the kernels that were measured."""
    if "kernels" not in device:
        return "- Older kernels: the report does not name the sources it was measured on."
    name = f"SHA-256 of cuda_src begins {device['kernels']}"
    if is_older(device):
        return f"- Older kernels: {name}, which are not the present sources."
    return f"- Kernels: {name}, the present sources."
