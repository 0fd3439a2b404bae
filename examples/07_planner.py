"""Plan a rack you do not own, see why, and take two training steps of the same description here.

    python examples/07_planner.py [OUTPUT_FOLDER]

Writes a plan of DeepSeek-V3 for a GB300 NVL72 (72 GPUs) with its report and its timeline (open the
trace in Perfetto), then compiles a small model with litters and trains it for two steps on one
and on two virtual ranks: the losses have the same bits.
"""

from __future__ import annotations

import time
from pathlib import Path

import mok_ref.planner.compile as planner
from mok_ref.bench.entry import one_line_errors, script_parser
from mok_ref.planner import make_plan, plan_text
from mok_ref.planner.report import plan_trace, write_report


def plan_a_rack(folder: Path) -> None:
    """Search, print, and write plan, report and trace."""
    begin = time.perf_counter()
    plan = make_plan("deepseek-v3", "gb300-nvl72", tokens=4096)
    print(plan_text(plan))
    print(f"planned in {time.perf_counter() - begin:.1f} s")
    plan.write(folder / "deepseek-v3-nvl72.json")
    write_report(folder / "deepseek-v3-nvl72.json", folder / "deepseek-v3-nvl72.html")
    plan_trace(plan, folder / "deepseek-v3-nvl72.trace.json")
    print(f"wrote plan, report and trace to {folder}")


def train_here(ranks: int) -> list[str]:
    """Loss bits of two steps of the small example model."""
    with planner.compile("tiny-litters", "gb300-nvl72", sequence=16, batch=2, ranks=ranks) as made:
        return [made.step()["loss_bits"] for _ in range(2)]


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("planned"),
        metavar="OUTPUT_FOLDER", help="is made where it is missing (default: %(default)s)",
    )  # fmt: skip
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    plan_a_rack(folder)
    one, two = train_here(1), train_here(2)
    print(f"two steps on one rank:  {' '.join(one)}\ntwo steps on two ranks: {' '.join(two)}")
    return int(one != two)


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main())
