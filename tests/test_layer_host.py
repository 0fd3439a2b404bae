"""The device layer without a GPU: its kernels compiled for the CPU, against the NumPy layer.

Covers everything of mok_ref.gpu but Hopper's own kernels: staging, heap, schedule, portable
products, epilogues, gradients. tests/gpu/test_layer_gpu.py has more cases (slow on the CPU).
"""

from __future__ import annotations

import pytest
from gpu.host_cuda import compiler
from gpu.test_layer_gpu import assert_same, make_case, on_device, reference
from host_cupy import host_cuda_device


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the kernels for the CPU")
@pytest.mark.parametrize("name", ["shared_two_ranks", "clamp_three_ranks", "turns", "mxfp8"])
def test_forward_and_backward_bits(name: str) -> None:
    config, inputs = make_case(name)
    with host_cuda_device():
        actual = on_device(config, inputs, "portable")
    assert_same(actual, reference(config, inputs))
