"""Print the tables of docs/device_checks.md: every device function against NumPy at full size.

    PYTHONPATH=. python tests/gpu/device_checks.py            # on a machine with a GPU from sm_80
    on

Exit status 1 if any bit differs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu import units
from mok_ref import mxfp8, numerics
from mok_ref.gpu import compiler
from mok_ref.gpu import mxfp8 as gpu_mxfp8
from mok_ref.numerics import bf16_to_bits, bits_to_bf16, to_bf16
from mok_ref.swiglu import swiglu_backward, swiglu_forward
from mok_ref.tensor_core import tc

CHAINS = (1, 4, 32)
BATCH, SIZE = 16, (64, 128)  # 131,072 outputs per kind and chain


def tc_case(kind: str, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([units.KINDS.index(kind), steps])
    a = units.operand_bits(rng, (BATCH, SIZE[0], 16 * steps), kind)
    b = units.operand_bits(rng, (BATCH, SIZE[1], 16 * steps), kind)
    return a, b, units.accumulators(rng, (BATCH, *SIZE), kind)


def tc_table() -> int:
    """Differing outputs of every instruction, kind and chain; returns their number."""
    instructions = [
        name
        for name in units.INSTRUCTIONS
        if not name.startswith("wgmma") or compiler.device_arch() == "sm_90a"
    ]
    cases = [(kind, steps) for steps in CHAINS for kind in units.KINDS]
    print(f"| operands | steps | {' | '.join(instructions)} |")
    print("|---|" + "---|" * (len(instructions) + 1))
    total = 0
    for kind, steps in cases:
        arguments = tc_case(kind, steps)
        expected = np.stack([tc(*product) for product in zip(*arguments, strict=True)])
        wrong = [
            units.count_different(units.device_tc(name, *arguments), expected)
            for name in instructions
        ]
        print(f"| {kind} | {steps} | {' | '.join(map(str, wrong))} |", flush=True)
        total += sum(wrong)
    outputs = len(cases) * len(instructions) * BATCH * SIZE[0] * SIZE[1]
    print(f"\n{total} of {outputs:,} outputs differ from mok_ref.tensor_core.tc.")
    return total


def resumed_table() -> int:
    """Chains cut after each group and resumed through `c`, against the whole chain."""
    total = 0
    for kind in units.KINDS:
        a, b, c = tc_case(kind, 4)
        whole = units.device_tc("soft", a, b, c)
        for name in ("soft", "mma.sync"):
            part = c
            for k in range(0, a.shape[2], 16):
                part = units.device_tc(name, a[..., k : k + 16], b[..., k : k + 16], part)
            total += units.count_different(part, whole)
    print(f"\nResumed chains (8 kinds, 4 steps, soft and mma.sync): {total} outputs differ.")
    return total


def scalar_table() -> int:
    """The float32 rules and the quantiser."""
    rng = np.random.default_rng(7)
    x = units.random_floats(rng, 1 << 22)
    gate, up = (units.operand_bits(rng, (1 << 20,), kind) for kind in ("bit patterns", "normal"))
    wide = bits_to_bf16(gate), bits_to_bf16(up)
    dh = units.random_floats(rng, 1 << 20)
    d_gate, d_up = units.elementwise("swiglu_backward", [gate, up, dh], [np.uint16, np.uint16])
    want = swiglu_backward(wide[0][None], wide[1][None], dh[None], None)
    terms = units.random_floats(rng, 1 << 20).reshape(-1, 512)
    bf16 = units.ALL_BF16

    def one(kernel: str, inputs: list[np.ndarray], dtype: type, *scalars: object) -> np.ndarray:
        return units.elementwise(kernel, inputs, [dtype], *scalars)[0]

    checks = {
        "exp": (one("exp", [x], np.float32), numerics.exp(x)),
        "sigmoid": (one("sigmoid", [x], np.float32), numerics.sigmoid(x)),
        "sigmoid of all 65,536 bf16": (
            one("sigmoid_bf16", [bf16], np.float32),
            numerics.sigmoid(bits_to_bf16(bf16)),
        ),
        "bf16 rounding": (one("to_bf16", [x], np.uint16), bf16_to_bits(to_bf16(x))),
        "SwiGLU forward": (
            one("swiglu_forward", [gate, up], np.uint16, np.float32(0)),
            bf16_to_bits(swiglu_forward(wide[0][None], wide[1][None], None)[0]),
        ),
        "d_gate": (d_gate, bf16_to_bits(want[0][0])),
        "d_up": (d_up, bf16_to_bits(want[1][0])),
        "dot128": (units.dot128(terms), numerics.dot128(terms)),
    }
    values = np.concatenate([units.operand_bits(rng, (2048, 96), kind) for kind in units.KINDS])
    for rule in ("fit", "ocp"):
        codes, scales = gpu_mxfp8.quantize(units.on_device(values), rule)
        expected = mxfp8.quantize(values, rule)
        checks[f"MXFP8 codes, {rule}"] = (codes.get(), expected[0])
        checks[f"MXFP8 scales, {rule}"] = (scales.get(), expected[1])
    return print_checks(checks)


def cupy_table() -> int:
    """The reference functions themselves on CuPy arrays, against NumPy; subnormals included."""
    import cupy

    rng = np.random.default_rng(8)
    x, y, z = (units.random_floats(rng, 1 << 18) for _ in range(3))
    there = [cupy.asarray(v) for v in (x, y, z)]
    checks = {}
    for name, count in (("add", 2), ("sub", 2), ("mul", 2), ("div", 2), ("fma", 3), ("exp", 1),
                        ("sigmoid", 1), ("to_bf16", 1)):  # fmt: skip
        function = getattr(numerics, name)
        checks[f"CuPy {name}"] = (function(*there[:count]).get(), function(*(x, y, z)[:count]))
    terms = x.reshape(-1, 512)
    checks["CuPy dot128"] = (numerics.dot128(cupy.asarray(terms)).get(), numerics.dot128(terms))
    for kind in units.KINDS:
        a, b, c = (operand[0] for operand in tc_case(kind, 4))
        got = tc(*(cupy.asarray(v) for v in (a, b, c))).get()
        checks[f"CuPy tc, {kind}"] = (got, tc(a, b, c))
    values = units.operand_bits(rng, (512, 80), "subnormal")
    for rule in ("fit", "ocp"):
        codes, scales = mxfp8.quantize(cupy.asarray(values), rule)
        want = mxfp8.quantize(values, rule)
        checks[f"CuPy MXFP8 codes, {rule}"] = (codes.get(), want[0])
        checks[f"CuPy MXFP8 scales, {rule}"] = (scales.get(), want[1])
    return print_checks(checks)


def print_checks(checks: dict[str, tuple[np.ndarray, np.ndarray]]) -> int:
    print("\n| function | values | differ |\n|---|---|---|")
    total = 0
    for name, (actual, expected) in checks.items():
        wrong = units.count_different(actual, expected)
        print(f"| {name} | {actual.size:,} | {wrong} |", flush=True)
        total += wrong
    return total


def main() -> int:
    import cupy

    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    driver = cupy.cuda.runtime.driverGetVersion()
    started = time.time()
    compute = f"CUDA driver {driver // 1000}.{driver % 1000 // 10}"
    compiled = f"NVRTC {compiler.compiler_version()}, {compiler.device_arch()}"
    print(f"{time.strftime('%Y-%m-%d')}, {device}, {compute}, {compiled}\n")
    with np.errstate(all="ignore"):
        wrong = tc_table() + resumed_table() + scalar_table() + cupy_table()
    print(f"\n{wrong} differences, {time.time() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
