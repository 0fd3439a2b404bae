"""Measure what docs/training_results.md says, and write that page.

    python examples/06_train_evidence.py bits       # same loss bits on 1, 2, 4, 8 ranks, mpiexec,
                                                    # and after kill -9 and resume
    python examples/06_train_evidence.py compare    # mixture, ordinary mixture, dense; 6 seeds
    python examples/06_train_evidence.py collapse   # alarm, action, recovery
    python examples/06_train_evidence.py effects    # unlocking, capacity, litters
    python examples/06_train_evidence.py page       # tables and pictures from the stored numbers

Each part stores its numbers in docs/results/. `compare` takes about an hour on one core; a part
that was interrupted continues where it stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.bench.entry import one_line_errors, script_parser
from mok_ref.heap import run_ranks
from mok_ref.install import install_hint
from mok_ref.routing import RoutingOptions
from mok_ref.training.balance import BalanceOptions
from mok_ref.training.capacity import CapacityOptions
from mok_ref.training.choosers import LitterOptions
from mok_ref.training.data import load_text
from mok_ref.training.loop import train
from mok_ref.training.monitors import ActionOptions
from mok_ref.training.optimizer import AdamWOptions
from mok_ref.training.parameters import ModelConfig
from mok_ref.training.report import draw_run, events
from mok_ref.training.router import RouterConfig
from mok_ref.training.trainer import CollapseOptions, TrainConfig
from mok_ref.training.unlocking import UnlockOptions

HOME = Path(__file__).parents[1]
RESULTS = HOME / "docs" / "results"
IMAGES = HOME / "docs" / "images"
PAGE = HOME / "docs" / "training_results.md"

Record = dict[str, Any]


def store(name: str, values: Any) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"training_{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(temporary, path)


def stored(name: str) -> Any:
    path = RESULTS / f"training_{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def run(config: TrainConfig, ranks: int = 1) -> list[Record]:
    text = load_text()
    return run_ranks(ranks, lambda heap: train(config, heap, text))[0]


# --------------------------------------------------------------------------- bits

BITS_STEPS = 50
KILL_AFTER = 27
BITS_LINE = (
    "--steps 50 --batch 8 --sequence 16 --hidden 32 --layers 1 --heads 2 --intermediate 32 "
    "--experts 8 --shared 16 --capacity 1.1 --unlock 4:2:10 --aux 0.01 --bias-speed 0.001 "
    "--valid-every 25 --json"
)


def mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit(f"mpiexec is missing: {install_hint('mpi')}")
    return found


DENSE_LINE = (
    "--steps 10 --batch 4 --sequence 16 --hidden 128 --layers 1 --heads 4 --intermediate 512 "
    "--ffn dense --valid-every 5 --json"
)


def command(*options: str, mpi: int = 0, line: str = BITS_LINE) -> list[str]:
    start = [mpiexec(), "-n", str(mpi)] if mpi else []
    return [*start, sys.executable, "-m", "mok_ref", "train", *line.split(), *options]


def loss_bits(*options: str, mpi: int = 0, line: str = BITS_LINE) -> list[str]:
    """Bits of the loss (and of the validation loss) of every step that the command line ran."""
    done = subprocess.run(
        command(*options, mpi=mpi, line=line),
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=HOME,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [f"{r['loss_bits']} {r.get('valid_loss', '')}".strip() for r in records]


def kill_in_the_middle(run_dir: str, ranks: int) -> int:
    """Start a run, kill -9 it after KILL_AFTER steps; returns how many steps it had printed."""
    steps = 0
    with subprocess.Popen(
        command("--run-dir", run_dir, "--checkpoint-every", "10", "--ranks", str(ranks)),
        stdout=subprocess.PIPE,
        text=True,
        cwd=HOME,
    ) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            steps += 1
            if steps == KILL_AFTER:
                process.kill()
                break
        process.wait(timeout=60)
    return steps


def bits() -> None:
    """Loss bits at every step for several numbers of ranks, and across a kill."""
    runs: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    for ranks in (1, 2, 4, 8):
        begin = time.perf_counter()
        runs[f"{ranks} virtual ranks"] = loss_bits("--ranks", str(ranks))
        seconds[f"{ranks} virtual ranks"] = time.perf_counter() - begin
        print(ranks, "virtual ranks", f"{time.perf_counter() - begin:.0f} s", flush=True)
    begin = time.perf_counter()
    runs["mpiexec -n 4"] = loss_bits(mpi=4)
    seconds["mpiexec -n 4"] = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as run_dir:
        steps = kill_in_the_middle(run_dir, 4)
        after = loss_bits("--run-dir", run_dir, "--resume", "--ranks", "2")
        name = f"4 ranks, kill -9 after step {steps}, resumed on 2"
        runs[name] = runs["1 virtual ranks"][: BITS_STEPS - len(after)] + after
    runs["4 virtual ranks, --recompute"] = loss_bits("--ranks", "4", "--recompute")
    table = bits_table(runs, seconds)
    resumed = next(row for row in table if "kill" in row["run"])  # its first steps are not its own
    resumed["steps_computed"] = len(after)
    resumed["steps_equal"] -= BITS_STEPS - len(after)
    dense = {"1 rank": loss_bits(line=DENSE_LINE)}
    for ranks in (1, 2, 4):
        options = ("--tensor-parallel", "--ranks", str(ranks))
        dense[f"tensor parallel {ranks}, virtual"] = loss_bits(*options, line=DENSE_LINE)
    dense["tensor parallel 4, mpiexec -n 4"] = loss_bits(
        "--tensor-parallel", mpi=4, line=DENSE_LINE
    )
    values = {
        "options": BITS_LINE,
        "text_sha256": load_text().sha256,
        "runs": table,
        "losses": runs["1 virtual ranks"],
        "dense_options": DENSE_LINE,
        "dense_runs": bits_table(dense, {}),
    }
    store("bits", values)
    for row in table + values["dense_runs"]:
        print(row)
    for group in (runs, dense):
        if any(losses != next(iter(group.values())) for losses in group.values()):
            raise SystemExit("losses differ")


def bits_table(runs: dict[str, list[str]], seconds: dict[str, float]) -> list[Record]:
    """One row per run, compared with the first."""
    reference = next(iter(runs.values()))
    return [
        {
            "run": name,
            "steps_computed": len(values),
            "steps_equal": sum(a == b for a, b in zip(values, reference)),
            "last": values[-1],
            "seconds": seconds.get(name),
        }
        for name, values in runs.items()
    ]


# --------------------------------------------------------------------------- compare

COMPARE_STEPS = 600
COMPARE_MODEL = ModelConfig(
    sequence=64, hidden=64, num_layers=2, num_heads=4, intermediate=64, num_experts=16,
    arithmetic="fast",
)  # fmt: skip
# The router's E * H multiply-adds are given to the dense model as well: E / 3 more columns.
DENSE_WIDTH = 2 * 64 + -(-16 // 3)


def compare_configs(seed: int) -> dict[str, TrainConfig]:
    base = TrainConfig(
        COMPARE_MODEL,
        steps=COMPARE_STEPS,
        batch=16,
        seed=seed,
        optimizer=AdamWOptions(rate=6e-3, final_rate=6e-4),
        valid_every=100,
        valid_batches=8,
    )
    return {
        "mixture": base,
        "ordinary mixture": replace(base, model=replace(COMPARE_MODEL, ffn="ordinary")),
        "dense": replace(base, model=replace(COMPARE_MODEL, ffn="dense", intermediate=DENSE_WIDTH)),
    }


def active_multiply_adds(model: ModelConfig) -> int:
    """Per token and forward, all products with weights."""
    h = model.hidden
    block = 4 * h * h + 3 * h * model.intermediate
    if model.ffn != "dense":
        block = 4 * h * h + 3 * h * model.intermediate * model.router.num_slots
        block += h * model.num_experts
    return model.num_layers * block + 256 * h


def compare(seeds: int = 6) -> None:
    """Validation loss at equal steps, three models, several seeds."""
    results = stored("compare") or {}
    for seed in range(seeds):
        for name, config in compare_configs(seed).items():
            key = f"{name}/{seed}"
            if key in results:
                continue
            begin = time.perf_counter()
            records = run(config)
            results[key] = {
                "valid": [(r["step"] + 1, r["valid_loss"]) for r in records if "valid_loss" in r],
                "last_bits": records[-1]["loss_bits"],
                "active_multiply_adds": active_multiply_adds(config.model),
                "seconds": time.perf_counter() - begin,
            }
            store("compare", results)
            print(key, results[key], flush=True)


# --------------------------------------------------------------------------- collapse

COLLAPSE_AT = 160
COLLAPSE_STEPS = 320


def collapse_configs() -> dict[str, TrainConfig]:
    """One expert per token; the logit of expert 0 raised from COLLAPSE_AT on and for good."""
    model = ModelConfig(
        sequence=32, hidden=32, num_layers=1, num_heads=2, intermediate=32, num_experts=8,
        arithmetic="fast", router=RouterConfig(options=RoutingOptions(1)),
    )  # fmt: skip
    base = TrainConfig(
        model,
        steps=COLLAPSE_STEPS,
        valid_every=50,
        balance=BalanceOptions(kitten=0.005, z=0.0001),
        collapse=CollapseOptions(COLLAPSE_AT, strength=6.0),
    )
    action = ActionOptions(raise_aux=True)
    return {
        "no action, coefficient 0.005": base,
        "raise 0.001 to 0.003": replace(
            base, actions=action, balance=BalanceOptions(kitten=0.001, z=0.0001)
        ),
        "raise 0.005 to 0.015": replace(base, actions=action),
    }


def collapse() -> None:
    """Entropy of the load before, during and after a provoked collapse."""
    results = {}
    for name, config in collapse_configs().items():
        records = run(config)
        entropy = [r["layers"][0]["entropy"] for r in records]
        back = [i for i in range(COLLAPSE_AT + 1, len(entropy)) if entropy[i] >= 0.6]
        after = [e for e in events(records) if e["step"] >= COLLAPSE_AT]
        results[name] = {
            "entropy": entropy,
            "loss": [r["loss"] for r in records],
            "recovered_after": back[0] - COLLAPSE_AT if back else None,
            "steps_in_alarm": sum(e < 0.6 for e in entropy[COLLAPSE_AT:]),
            "events": after,
        }
        print(name, {k: v for k, v in results[name].items() if k not in ("entropy", "loss")})
        if name == "raise 0.005 to 0.015":
            IMAGES.mkdir(parents=True, exist_ok=True)
            draw_run(IMAGES / "training_collapse.png", records)
    store("collapse", results)


# --------------------------------------------------------------------------- effects

EFFECT_SEEDS = 3
EFFECT_STEPS = 240


def effect_base(seed: int, **model: Any) -> TrainConfig:
    sizes = dict(
        sequence=32, hidden=32, num_layers=1, num_heads=2, intermediate=32, num_experts=8,
        arithmetic="fast",
    )  # fmt: skip
    return TrainConfig(
        ModelConfig(**{**sizes, **model}),
        steps=EFFECT_STEPS,
        batch=8,
        seed=seed,
        balance=BalanceOptions(kitten=0.003, z=0.0001),
        valid_every=EFFECT_STEPS,
        valid_batches=8,
    )


def unlocking_runs(seed: int) -> dict[str, tuple[TrainConfig, int]]:
    base = effect_base(seed)
    out = {"all 8 open": (base, 1)}
    for init in ("copy", "fresh"):
        unlock = UnlockOptions(2, 2, 48, init=init)
        out[f"2 open, 2 more every 48 steps, {init}"] = (replace(base, unlock=unlock), 1)
    return out


def capacity_runs(seed: int) -> dict[str, tuple[TrainConfig, int]]:
    base = effect_base(seed)
    fixed = {f: CapacityOptions(f, f, f) for f in (1.0, 1.25)}
    out = {"dropless": (base, 1)}
    out |= {f"fixed {f}": (replace(base, capacity=c), 1) for f, c in fixed.items()}
    adaptive = CapacityOptions(1.0, 1.0, 1.25)
    out["adaptive from 1.0"] = (replace(base, capacity=adaptive), 1)
    by_score = CapacityOptions(1.0, 1.0, 1.25, policy="score")
    out["adaptive from 1.0, lowest score goes"] = (replace(base, capacity=by_score), 1)
    return out


def litter_runs(seed: int) -> dict[str, tuple[TrainConfig, int]]:
    """16 experts on 4 ranks, 4 of them per token."""
    plain = RoutingOptions(4, renormalize=True)
    grouped = replace(plain, num_groups=4, keep_groups=2)
    routers = {
        "top-4": RouterConfig(options=plain),
        "top-4 inside 2 of 4 groups": RouterConfig(options=grouped),
        "litters of 4, 1 kept": RouterConfig(
            "litter", plain, LitterOptions(4, 4, 1, renormalize=True)
        ),
        "litters of 4, 2 kept": RouterConfig(
            "litter", plain, LitterOptions(4, 4, 2, renormalize=True)
        ),
    }
    return {
        name: (effect_base(seed, num_experts=16, router=router), 4)
        for name, router in routers.items()
    }


def measure(records: list[Record]) -> Record:
    """What the tables show of one run: later half means, and the worst jump of the loss."""
    half = records[len(records) // 2 :]
    losses = np.array([r["loss"] for r in records])
    layer = lambda key: float(np.mean([r["layers"][0][key] for r in half]))  # noqa: E731
    out = {
        "valid": records[-1]["valid_loss"],
        "entropy": layer("entropy"),
        "variance": layer("utilisation_variance"),
        "overflow": layer("overflow"),
        "ranks_touched": layer("ranks_touched"),
        "alarm_steps": sum(bool(r["alarms"]) for r in records),
    }
    unlocks = [r["step"] for r in records if any("unlock" in a for a in r["actions"])]
    if unlocks:
        jumps = [losses[s + 1 : s + 6].mean() - losses[s - 4 : s + 1].mean() for s in unlocks]
        out["jump_at_unlock"] = float(np.mean(jumps))
    if "capacity_factor" in records[-1]["layers"][0]:
        out["factor"] = float(np.mean(records[-1]["layers"][0]["capacity_factor"]))
    return out


def effects() -> None:
    """Unlocking, capacity and litters, three seeds each."""
    groups: dict[str, Callable[[int], dict[str, tuple[TrainConfig, int]]]] = {
        "unlocking": unlocking_runs,
        "capacity": capacity_runs,
        "litters": litter_runs,
    }
    results = stored("effects") or {}
    for group, make in groups.items():
        for seed in range(EFFECT_SEEDS):
            for name, (config, ranks) in make(seed).items():
                rows = results.setdefault(group, {}).setdefault(name, {})
                if str(seed) not in rows:
                    rows[str(seed)] = measure(run(config, ranks))
                    store("effects", results)
                    print(group, name, seed, rows[str(seed)], flush=True)


# --------------------------------------------------------------------------- page


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)


def shown(values: list[float], digits: int = 4) -> str:
    mean, error = spread(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def bits_section(values: Any) -> list[str]:
    lines = [
        "## Same loss bits on any number of ranks",
        "",
        f"`mok-ref train {values['options']}`: every step's loss and every validation loss,",
        "compared as text of the bits with one rank.",
        "",
        "| run | steps computed | steps equal to 1 rank | last loss bits, validation loss |",
        "|---|---:|---:|---|",
    ]
    lines += bits_rows(values["runs"])
    lines += [
        "",
        "A dense model whose SwiGLU is cut over the ranks (`--tensor-parallel`) instead of its",
        f"tokens: `mok-ref train {values['dense_options']}`.",
        "",
        "| run | steps computed | steps equal to 1 rank | last loss bits, validation loss |",
        "|---|---:|---:|---|",
    ]
    return [*lines, *bits_rows(values["dense_runs"]), ""]


def bits_rows(table: Any) -> list[str]:
    return [
        f"| {r['run']} | {r['steps_computed']} | {r['steps_equal']} | {r['last']} |" for r in table
    ]


def compare_section(values: Any) -> list[str]:
    models = list(compare_configs(0))
    seeds = complete_seeds(values)
    last = {m: [values[f"{m}/{s}"]["valid"][-1][1] for s in seeds] for m in models}
    steps = values[f"{models[0]}/0"]["valid"][-1][0]
    lines = [
        "## Mixture, ordinary mixture, dense model of equal active work",
        "",
        f"Validation loss (nats per byte) after {steps} steps of 1,024 bytes; mean and standard",
        f'error of {len(seeds)} seeds. `mixture` is this layer with arithmetic "fast"; `ordinary`',
        "sums in an order drawn anew from the operating system in every step.",
        "",
        "| model | active multiply-adds per byte | "
        + " | ".join(f"seed {s}" for s in seeds)
        + " | mean ± s.e. | bits of the last loss, seed 0 |",
        "|---|---:|" + "---:|" * len(seeds) + "---:|---|",
    ]
    for m in models:
        one = values[f"{m}/{seeds[0]}"]
        cells = " | ".join(f"{v:.4f}" for v in last[m])
        lines.append(
            f"| {m} | {one['active_multiply_adds']:,} | {cells} | {shown(last[m])} | "
            f"{one['last_bits']} |"
        )
    return [*lines, "", *verdicts(last), "", "![validation loss](images/training_compare.png)", ""]


def complete_seeds(values: Any) -> list[int]:
    """Seeds that every model has run."""
    found = sorted({int(key.split("/")[1]) for key in values})
    return [s for s in found if all(f"{m}/{s}" in values for m in compare_configs(0))]


def verdicts(last: dict[str, list[float]]) -> list[str]:
    """The two statements, computed: equal within two standard errors; better than dense.

    Seeds share data and starting weights between models, so the difference is taken per seed too.
    """
    out = []
    for a, b in (("mixture", "ordinary mixture"), ("mixture", "dense")):
        (mean_a, error_a), (mean_b, error_b) = spread(last[a]), spread(last[b])
        difference, error = mean_a - mean_b, (error_a**2 + error_b**2) ** 0.5
        word = "within" if abs(difference) <= 2 * error else "outside"
        paired, paired_error = spread([x - y for x, y in zip(last[a], last[b])])
        out += [
            f"* {a} − {b}: {difference:+.4f}, standard error {error:.4f}: {word} two standard "
            f"errors. Per seed: {paired:+.4f} ± {paired_error:.4f}."
        ]
    return out


def collapse_section(values: Any) -> list[str]:
    lines = [
        "## A collapse provoked on purpose",
        "",
        f"Top-1 routing, 8 experts. From step {COLLAPSE_AT} on, and for good, every token's logit",
        "of expert 0 is raised by 6: all tokens go there, the entropy of the load falls to 0. The",
        "alarm is at 0.6 of the maximum.",
        "",
        "| action | back above 0.6 after | steps in alarm of "
        f"{COLLAPSE_STEPS - COLLAPSE_AT} | last entropy | last loss |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in values.items():
        back = "never" if row["recovered_after"] is None else f"{row['recovered_after']} steps"
        lines.append(
            f"| {name} | {back} | {row['steps_in_alarm']} | {row['entropy'][-1]:.3f} | "
            f"{np.mean(row['loss'][-10:]):.3f} |"
        )
    lines += ["", "Events of the last row:", "", "| step | kind | what |", "|---:|---|---|"]
    for event in list(values.values())[-1]["events"]:
        lines.append(f"| {event['step']} | {event['kind']} | {event['text']} |")
    return [*lines, "", "![collapse and recovery](images/training_collapse.png)", ""]


EFFECT_COLUMNS = {
    "unlocking": ("valid", "variance", "jump_at_unlock", "alarm_steps"),
    "capacity": ("valid", "overflow", "factor", "variance"),
    "litters": ("valid", "ranks_touched", "entropy"),
}
EFFECT_TITLES = {
    "unlocking": "## Unlocking experts gradually",
    "capacity": "## Capacity",
    "litters": "## Litters: ranks touched per token",
}
EFFECT_NOTES = {
    "unlocking": "variance: of the load over the mean load, second half of the run; "
    "jump_at_unlock: mean loss of the 5 steps after an unlock minus the 5 before; alarm_steps: "
    "steps with any alarm.",
    "capacity": "overflow: share of routes dropped, second half of the run; factor: mean capacity "
    "factor at the end.",
    "litters": "16 experts on 4 ranks, 4 experts per token; litter g lives on rank g.",
}


def effects_section(values: Any) -> list[str]:
    lines = []
    for group, rows in values.items():
        columns = EFFECT_COLUMNS[group]
        lines += [
            EFFECT_TITLES[group],
            "",
            EFFECT_NOTES[group],
            f"{EFFECT_SEEDS} seeds, mean ± s.e.",
        ]
        lines += ["", "| run | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
        for name, seeds in rows.items():
            cells = []
            for column in columns:
                numbers = [s[column] for s in seeds.values() if column in s]
                cells.append(shown(numbers, 3) if len(numbers) > 1 else "–")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def draw_compare(values: Any) -> None:
    from mok_ref.plotting import import_pyplot, save

    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for color, model in zip(("tab:blue", "tab:orange", "tab:green"), compare_configs(0)):
        runs = [values[f"{model}/{seed}"]["valid"] for seed in complete_seeds(values)]
        losses = np.array([[loss for _, loss in r] for r in runs])
        steps = [step for step, _ in runs[0]]
        error = losses.std(axis=0, ddof=1) / len(runs) ** 0.5 if len(runs) > 1 else 0
        axes.errorbar(steps, losses.mean(axis=0), error, label=model, color=color, capsize=3)
    axes.set(xlabel="step", ylabel="validation loss, nats per byte", title="Mean ± standard error")
    axes.legend()
    IMAGES.mkdir(parents=True, exist_ok=True)
    save(figure, IMAGES / "training_compare.png")
    pyplot.close(figure)


def page() -> None:
    """docs/training_results.md from the stored numbers."""
    sections = {
        "bits": bits_section,
        "compare": compare_section,
        "collapse": collapse_section,
        "effects": effects_section,
    }
    lines = [
        "# Training: what was measured",
        "",
        "Written by `examples/06_train_evidence.py page` from docs/results/training_*.json; run",
        "its parts to measure again. Text: Python's `pydoc_data.topics`, the last tenth held out.",
        "",
    ]
    for name, section in sections.items():
        values = stored(name)
        if values is None:
            lines += [f"(`{name}` has not been measured)", ""]
            continue
        lines += section(values)
        if name == "compare":
            draw_compare(values)
    PAGE.write_text("\n".join(lines))
    print(f"wrote {PAGE}")


PARTS = {"bits": bits, "compare": compare, "collapse": collapse, "effects": effects, "page": page}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS)
    part = parser.parse_args().part
    if part is None:
        parser.error(f"part must be one of {', '.join(PARTS)}, got none")
    PARTS[part]()


if __name__ == "__main__":
    with one_line_errors():
        main()
