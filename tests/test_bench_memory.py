"""A case that does not fit is named before anything of it is made."""

from __future__ import annotations

from unittest import mock

import pytest

from mok_ref.bench.cases import CASES, BenchCase
from mok_ref.bench.commands import parse_sizes
from mok_ref.bench.memory import check_memory, device_bytes
from mok_ref.config import MoEConfig
from mok_ref.gpu.workspace import workspace_bytes

H200 = 140 << 30


def test_the_table_fits_into_an_h200() -> None:
    for dtype in ("bf16", "mxfp8"):
        check_memory(
            [case.as_mxfp8() if dtype == "mxfp8" else case for case in CASES.values()], H200
        )


@pytest.mark.parametrize(
    "name", ["999999999x999999999x999999999x1x1", "8192x7168x2048x4096x8", "1000000x7168x16x8x8"]
)
def test_a_case_that_does_not_fit_is_named(name: str) -> None:
    (case,) = parse_sizes(name)
    assert isinstance(case, BenchCase)
    with pytest.raises(ValueError, match=r"^(cases|ranks \* max_tokens) must .*") as caught:
        check_memory([CASES["qwen3"], case], H200)
    assert "\n" not in str(caught.value)


def test_routes_of_many_experts_take_memory_of_the_host() -> None:
    case = BenchCase("many", 1 << 20, 16, 16, 4096, 1)
    with (
        mock.patch("mok_ref.bench.memory.memory_bytes", lambda: 32 << 30),
        pytest.raises(
            ValueError, match=r"^cases must fit into the host's 32 GiB of memory, got many"
        ),
    ):
        check_memory([case], 1 << 60)


def test_everything_the_bench_keeps_is_counted() -> None:
    """Counted by hand for one shape: what is there besides the workspaces."""
    case = BenchCase("one", 8, 16, 32, 2, 1)
    config = MoEConfig(16, 32, 2, 1)
    hopper, portable = (
        workspace_bytes(config, 0, 8, path=path)["total"] for path in ("hopper", "portable")
    )
    weight = 2 * 16 * 32
    inputs = 2 * (8 * 16 * 2) + 3 * weight * 2 + 8 * 1 * (4 + 4)
    copies = 3 * (2 * weight * 2)
    gradients = 3 * weight * 4 + 3 * weight * 2 + 3 * weight * 4
    assert device_bytes(case) == inputs + copies + gradients + 2 * hopper + portable
