"""Digests of all golden cases as a GPU computes them, for tests/golden/device_digests.json.

    PYTHONPATH=. python tests/gpu/golden_digests.py tests/golden/device_digests.json

tests/test_golden.py, which needs no GPU, proves that the reference still produces them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mok_ref.bench.gpu import device_facts
from mok_ref.casefile import load_case
from mok_ref.golden import golden_pairs
from mok_ref.gpu import compiler
from mok_ref.runner import Settings, make_plan, run_virtual

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PATHS = ("auto", "portable")


def digests_of(case_file: Path) -> dict[str, Any]:
    """The path that ran, the digest of all outputs and those of single tensors.

    Raises: AssertionError when kernels of two paths disagree.
    """
    case = load_case(case_file)
    results = []
    for path in PATHS:
        settings = Settings(device="cuda", path=path, backward=case.dy is not None, timeout_s=60)
        results.append(run_virtual(make_plan(case, settings)))
    chosen, portable = results
    assert chosen.digests == portable.digests, f"{case_file.name}: paths differ"
    return {
        "paths": sorted({chosen.path, portable.path}),
        "ranks": chosen.plan.config.ep_size,
        "digest": chosen.digest,
        "digests": chosen.digests,
    }


def main() -> None:
    facts = device_facts() | {
        "arch": compiler.device_arch(),
        "compiler": f"NVRTC {compiler.compiler_version()}",
    }
    cases = {name: digests_of(case_file) for name, case_file, _ in golden_pairs(GOLDEN)}
    report = {"device": facts, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases on {facts['gpu']}, driver {facts['driver']}, {facts['date']}")


if __name__ == "__main__":
    main()
