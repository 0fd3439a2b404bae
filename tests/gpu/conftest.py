"""Where the kernels under test run: on the CPU through tests/gpu/host_cuda, or on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from host_cupy import host_cuda_device

from gpu.host_cuda import compiler as host_compiler


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """ "host" or "cuda"; modules take it for all their tests."""
    if request.param == "cuda":
        pytest.importorskip("cupy")
        yield "cuda"
        return
    if host_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    with host_cuda_device():
        yield "host"
