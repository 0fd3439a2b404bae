"""Golden cases on the device: the stored bits at the cases' own ranks and at every other R.

The stored outputs belong to the case's own split. At another R the tokens are split in units of 16,
which leaves everything but replicated gradients equal; round_robin's row order, and with it the
experts' dW, depends on R.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu.test_layer_gpu import PATH, device
from mok_ref.casefile import OUTPUT_EXPERTS, OUTPUT_REPLICATED, load_case, read_npz
from mok_ref.runner import Settings, make_plan, run_virtual
from mok_ref.testing import assert_bitwise_equal

assert device  # the fixture

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(path.stem.removeprefix("case") for path in GOLDEN.glob("case*.npz"))


def run_and_compare(name: str, ranks: int | None, path: str) -> None:
    case = load_case(GOLDEN / f"case{name}.npz")
    stored = read_npz(GOLDEN / f"out{name}.npz")
    own = len(case.splits) if case.splits is not None else 1
    settings = Settings(
        ranks=ranks, device="cuda", path=path, backward=case.dy is not None, timeout_s=60
    )
    try:
        plan = make_plan(case, settings)
    except ValueError as error:  # this R does not divide E, or the placement is for another R
        assert ranks is not None and ("divisible" in str(error) or "placement" in str(error))
        pytest.skip(str(error))
    tensors = run_virtual(plan).tensors
    left_out: tuple[str, ...] = ()
    if ranks not in (None, own):
        left_out = OUTPUT_REPLICATED
        left_out += OUTPUT_EXPERTS if plan.config.row_order == "round_robin" else ()
    compared = [n for n in stored if n not in ("digest", "digests", *left_out)]
    assert "y" in compared
    for tensor in compared:
        assert_bitwise_equal(np.asarray(tensors[tensor]), stored[tensor], tensor)


@pytest.mark.parametrize("name", NAMES)
def test_stored_bits(name: str, device: str) -> None:
    run_and_compare(name, None, PATH[device])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_stored_bits_at_other_ranks(name: str, ranks: int, device: str) -> None:
    if device == "host":
        pytest.skip("one R on the CPU, every R on a GPU")
    run_and_compare(name, ranks, PATH[device])
