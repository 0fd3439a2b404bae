"""`mok-ref report run_dir`: tables and a picture of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.training.loop import read_records

PICTURE = "report.png"
MAX_EVENTS = 40


def is_training_run(run_dir: Path) -> bool:
    """Whether `mok-ref train` wrote this folder."""
    return (run_dir / "metrics.jsonl").exists() and (run_dir / "config.json").exists()


def report_run(run_dir: Path, as_json: bool = False) -> dict[str, Any]:
    """Print a training run's tables, draw run_dir/report.png where matplotlib is there.

    Returns what --json prints. Raises: ValueError if run_dir is not a training run.
    """
    run_dir = Path(run_dir)
    if not is_training_run(run_dir):
        raise ValueError(f"run_dir must hold metrics.jsonl and config.json of a run, got {run_dir}")
    about = json.loads((run_dir / "config.json").read_text())
    records = read_records(run_dir)
    if not records:
        raise ValueError(f"run_dir must hold at least one step, got none in {run_dir}")
    summary = summarize(about, records)
    try:
        draw_run(run_dir / PICTURE, records, about["config"]["monitor"]["entropy_share"])
        summary["picture"] = str(run_dir / PICTURE)
    except RuntimeError as error:  # no matplotlib: the tables are still there
        summary["picture"] = str(error)
    if as_json:
        print(json.dumps(summary))
    else:
        print_summary(summary)
    return summary


def summarize(about: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of a run: losses, balance per layer, events."""
    valid = [(r["step"] + 1, r["valid_loss"]) for r in records if "valid_loss" in r]
    tokens = about["config"]["batch"] * about["config"]["model"]["sequence"]
    seconds = float(np.median([r["seconds"] for r in records]))
    layers = []
    for layer in range(len(records[-1].get("layers", []))):
        numbers = [r["layers"][layer] for r in records]
        layers.append(
            {
                "layer": layer,
                "entropy_min": min(n["entropy"] for n in numbers),
                "entropy_last": numbers[-1]["entropy"],
                "litter_entropy_last": numbers[-1].get("litter_entropy"),
                "utilisation_variance_last": numbers[-1]["utilisation_variance"],
                "overflow_mean": float(np.mean([n["overflow"] for n in numbers])),
                "dropped_total": sum(n["dropped"] for n in numbers),
                "ranks_touched_mean": float(np.mean([n["ranks_touched"] for n in numbers])),
            }
        )
    return {
        "text": about["text"],
        "ffn": about["config"]["model"]["ffn"],
        "steps": len(records),
        "last_step": records[-1]["step"] + 1,
        "loss_first": records[0]["loss"],
        "loss_last": records[-1]["loss"],
        "loss_bits_last": records[-1]["loss_bits"],
        "valid": valid,
        "valid_best": min((v for _, v in valid), default=None),
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "layers": layers,
        "events": events(records),
    }


def events(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beginnings and ends of alarms, and every action, in the order they happened."""
    out: list[dict[str, Any]] = []
    before: set[str] = set()
    for record in records:
        now = {alarm_name(alarm): alarm for alarm in record["alarms"]}
        for name in sorted(set(now) - before):
            out.append({"step": record["step"], "kind": "alarm", "text": now[name]})
        for name in sorted(before - set(now)):
            out.append({"step": record["step"], "kind": "clear", "text": name})
        for action in record["actions"]:
            out.append({"step": record["step"], "kind": "action", "text": action})
        before = set(now)
    return out


def alarm_name(alarm: str) -> str:
    """An alarm without its numbers: what it is about."""
    words = alarm.split()
    return " ".join(words[: 2 + (2 * ("expert" in words))]).rstrip(",")


def print_summary(summary: dict[str, Any]) -> None:
    """Tables on the terminal."""
    from mok_ref.printing import console, table

    out = console()
    out.print(
        f"{summary['ffn']} model on {summary['text']}: {summary['last_step']} steps, "
        f"{summary['tokens_per_s']:.0f} tokens/s, loss {summary['loss_first']:.4f} -> "
        f"{summary['loss_last']:.4f} (bits {summary['loss_bits_last']})"
    )
    if summary["valid"]:
        shown = table("Validation", ">step", ">loss")
        for step, loss in summary["valid"]:
            shown.add_row(str(step), f"{loss:.4f}")
        out.print(shown)
    if summary["layers"]:
        columns = [key for key in summary["layers"][0] if key != "layer"]
        shown = table("Layers", ">layer", *(f">{c.replace('_', ' ')}" for c in columns))
        for layer in summary["layers"]:
            cells = ("-" if layer[c] is None else f"{layer[c]:.4g}" for c in columns)
            shown.add_row(str(layer["layer"]), *cells)
        out.print(shown)
    happened = summary["events"]
    if happened:
        shown = table("Alarms and actions", ">step", "kind", "what")
        for event in happened[:MAX_EVENTS]:
            shown.add_row(str(event["step"]), event["kind"], event["text"])
        out.print(shown)
        if len(happened) > MAX_EVENTS:
            out.print(f"{len(happened) - MAX_EVENTS} more; all of them: --json")
    out.print(f"picture: {summary['picture']}")


# --------------------------------------------------------------------------- picture


def draw_run(path: Path, records: list[dict[str, Any]], entropy_share: float = 0.6) -> None:
    """Loss, entropy, load of each expert, and what the controls did, over the steps.

    entropy_share  below this share of its maximum the entropy raised an alarm
    """
    from mok_ref.plotting import import_pyplot, save

    pyplot = import_pyplot()
    has_layers = bool(records[0].get("layers"))
    rows = 4 if has_layers else 1
    figure, axes = pyplot.subplots(
        rows, 1, figsize=(10, 2.6 * rows + 0.6), sharex=True, layout="constrained", squeeze=False
    )
    panels = list(axes[:, 0])
    steps = [r["step"] + 1 for r in records]
    draw_loss(panels[0], steps, records)
    if has_layers:
        draw_entropy(panels[1], steps, records, entropy_share)
        draw_load(panels[2], steps, records)
        draw_controls(panels[3], steps, records)
    panels[-1].set_xlabel("step")
    panels[-1].set_xlim(min(steps) - 0.5, max(steps) + 0.5)
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    save(figure, path)
    pyplot.close(figure)


def draw_loss(axes: Any, steps: list[int], records: list[dict[str, Any]]) -> None:
    axes.plot(steps, [r["loss"] for r in records], linewidth=0.8, label="training loss")
    valid = [(s, r["valid_loss"]) for s, r in zip(steps, records) if "valid_loss" in r]
    if valid:
        axes.plot(*zip(*valid), "o-", markersize=3, label="validation loss")
    for event in events(records):
        if event["kind"] == "action":
            axes.axvline(event["step"] + 1, color="tab:red", linewidth=0.6, alpha=0.5)
    axes.set(title="Loss (red lines: actions)", ylabel="nats per byte")
    axes.legend(loc="upper right", fontsize=8)


def draw_entropy(
    axes: Any, steps: list[int], records: list[dict[str, Any]], entropy_share: float
) -> None:
    for layer in range(len(records[0]["layers"])):
        numbers = [r["layers"][layer] for r in records]
        axes.plot(steps, [n["entropy"] for n in numbers], linewidth=0.9, label=f"layer {layer}")
        if "litter_entropy" in numbers[0]:
            litter = [n["litter_entropy"] for n in numbers]
            axes.plot(steps, litter, linewidth=0.9, linestyle=":", label=f"layer {layer}, litters")
    axes.axhline(entropy_share, color="tab:red", linewidth=0.6)
    title = f"How even the load is (red: alarm below {entropy_share:g})"
    axes.set(title=title, ylabel="entropy / its maximum", ylim=(0, 1.05))
    axes.legend(loc="lower right", fontsize=8, ncols=4)


def draw_load(axes: Any, steps: list[int], records: list[dict[str, Any]]) -> None:
    """Share of the routes each expert of layer 0 gets, as a heat map: of a step that was run again
    after a roll-back, the last time counts."""
    last = dict(zip(steps, records))
    first, columns = min(last), max(last) - min(last) + 1
    load = np.full((len(records[0]["layers"][0]["load"]), columns), np.nan)
    for step, record in last.items():
        load[:, step - first] = record["layers"][0]["load"]
    share = load / np.maximum(load.sum(axis=0), 1)
    extent = (first - 0.5, max(last) + 0.5, len(load) - 0.5, -0.5)
    image = axes.imshow(
        share, aspect="auto", interpolation="none", cmap="viridis", extent=extent, vmin=0
    )
    axes.figure.colorbar(image, ax=axes, label="share of the routes", pad=0.01)
    axes.set(title="Load of the experts of layer 0", ylabel="expert")
    axes.yaxis.get_major_locator().set_params(integer=True)


def draw_controls(axes: Any, steps: list[int], records: list[dict[str, Any]]) -> None:
    """Coefficient, overflow, mean capacity factor, open experts, each over its maximum."""
    lines = {
        "auxiliary coefficient": [r["aux_coefficient"] for r in records],
        "open experts": [r["num_open"] for r in records],
        "overflow": [max(n["overflow"] for n in r["layers"]) for r in records],
    }
    if "capacity_factor" in records[0]["layers"][0]:
        lines["mean capacity factor"] = [
            float(np.mean([n["capacity_factor"] for n in r["layers"]])) for r in records
        ]
    for name, values in lines.items():
        top = max(values)
        if top > 0:
            axes.plot(steps, np.array(values) / top, linewidth=0.9, label=f"{name} (1 = {top:g})")
    axes.set(title="Controls", ylabel="value / its greatest", ylim=(-0.02, 1.05))
    axes.legend(loc="lower right", fontsize=8)
