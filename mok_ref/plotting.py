"""Pictures of the schedule and of the routing. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.casefile import check_writable
from mok_ref.config import MoEConfig
from mok_ref.install import install_hint
from mok_ref.schedule import Schedule, pull_order, walk

FORMATS = (".png", ".svg", ".pdf")
PADDING_COLOR = "#e4e4e4"
MAX_LANES = 8  # up to this many ranks every source has a lane of its own


def import_pyplot() -> Any:
    """matplotlib's pyplot without a display. Raises: RuntimeError naming the install command."""
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError(f"drawing needs matplotlib: {install_hint('plot')}") from error
    matplotlib.use("Agg")
    # Same input, same svg file: ids of elements come from this salt instead of random numbers.
    matplotlib.rcParams["svg.hashsalt"] = "mok_ref"
    import matplotlib.pyplot as pyplot

    return pyplot


def check_picture_path(path: str | Path) -> None:
    """Raises: ValueError for a format that is not drawn or a folder that cannot be written to."""
    if Path(path).suffix not in FORMATS:
        raise ValueError(f"plot must end in {', '.join(FORMATS)}, got {path}")
    check_writable(path, "plot")


def save(figure: Any, path: str | Path) -> None:
    """Write the picture whole or not at all; no date enters the file."""
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    try:
        figure.savefig(temporary, metadata=metadata, dpi=150)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def rank_colors(num_ranks: int) -> np.ndarray:
    """(R, 3) colours, one per source rank."""
    import matplotlib

    if num_ranks <= 10:
        return matplotlib.colormaps["tab10"](np.arange(num_ranks))[:, :3]
    return matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, num_ranks))[:, :3]


def rows_in_time(config: MoEConfig, schedule: Schedule, rank: int) -> np.ndarray:
    """(P,) rows in the order of time: forward's walk, then `pull_order` inside a minibatch."""
    macrobatch, minibatch = config.ring_rows(schedule.num_rows)
    pieces = [np.zeros(0, np.int64)]
    for batch in walk(schedule.num_rows, macrobatch, minibatch, "forward"):
        sources = schedule.peer_rank[batch.rows]
        pieces.append(batch.first + pull_order(sources, rank, config.ep_size))
    return np.concatenate(pieces)


def draw_schedule(
    path: str | Path, config: MoEConfig, schedules: list[Schedule], traffic: np.ndarray
) -> None:
    """Who pulls what and when (one strip per rank), and the rank-to-rank matrix.

    traffic  (R, R) rows that rank i (down) pulls from rank j (across)
    Raises:  ValueError for a bad path, RuntimeError without matplotlib.
    """
    check_picture_path(path)
    pyplot = import_pyplot()
    size = config.ep_size
    height = max(3.2, min(12.0, 0.5 * size + 1.6))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, height), width_ratios=[2.4, 1], layout="constrained"
    )
    _draw_strips(left, config, schedules)
    draw_traffic(right, traffic)
    save(figure, path)
    pyplot.close(figure)


def _draw_strips(axes: Any, config: MoEConfig, schedules: list[Schedule]) -> None:
    """One strip per rank; time runs to the right, few ranks get a lane per source inside it."""
    size = config.ep_size
    lanes = size if 1 < size <= MAX_LANES else 1
    image = _strips(config, schedules, lanes)
    axes.imshow(image, aspect="auto", interpolation="none")
    axes.set_title("Who pulls from whom, in the order of time")
    axes.set_xlabel("place in the order of pulling (grey: padding to a multiple of 128)")
    axes.set_ylabel("rank that pulls" + (", a lane per source" if lanes > 1 else ""))
    shown = range(size) if size <= 16 else [0, size - 1]
    axes.set_yticks([rank * lanes + (lanes - 1) / 2 for rank in shown], map(str, shown))
    for rank in range(1, size):
        axes.axhline(rank * lanes - 0.5, color="black" if lanes > 1 else "white", linewidth=1)
    if size <= 10:
        names = [f"from rank {r}" for r in range(size)]
        handles = [axes.plot([], [], "s", color=color)[0] for color in rank_colors(size)]
        axes.figure.legend(
            handles, names, loc="outside lower left", ncols=size, fontsize=8, frameon=False
        )


def _strips(config: MoEConfig, schedules: list[Schedule], lanes: int) -> np.ndarray:
    """(R * lanes, longest schedule, 3) colours of the rows' sources."""
    colors = rank_colors(config.ep_size)
    longest = max(1, *(schedule.num_rows for schedule in schedules))
    image = np.ones((config.ep_size * lanes, longest, 3))
    padding = tuple(int(PADDING_COLOR[i : i + 2], 16) / 255 for i in (1, 3, 5))
    for rank, schedule in enumerate(schedules):
        sources = schedule.peer_rank[rows_in_time(config, schedule, rank)]
        strip = image[rank * lanes : (rank + 1) * lanes]
        strip[:, np.flatnonzero(sources < 0)] = padding
        real = np.flatnonzero(sources >= 0)
        strip[sources[real] % lanes, real] = colors[sources[real]]
    return image


def draw_traffic(axes: Any, traffic: np.ndarray) -> None:
    """Rows that each rank pulls from each rank, as a heat map with numbers where they fit."""
    axes.imshow(traffic, cmap="Blues", vmin=0)
    axes.set_title("Rows pulled in all")
    axes.set_xlabel("from rank")
    axes.set_ylabel("by rank")
    size = len(traffic)
    if size <= 16:
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        dark = traffic.max() / 2 if traffic.size else 0
        for (row, column), count in np.ndenumerate(traffic):
            color = "white" if count > dark else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=8)


def draw_routing(
    path: str | Path, title: str, topk_ids: np.ndarray, num_experts: int, traffic: np.ndarray
) -> None:
    """Which expert each token went to, tokens per expert, and the rank-to-rank matrix.

    topk_ids (N, K) of the whole batch. Raises: ValueError for a bad path, RuntimeError without
    matplotlib.
    """
    check_picture_path(path)
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(
        1, 3, figsize=(13, 4.2), width_ratios=[2.2, 0.8, 1], layout="constrained"
    )
    token, slot = np.nonzero(topk_ids >= 0)
    experts = topk_ids[token, slot]
    for k in range(topk_ids.shape[1]):  # a choice sits a little below the one before it
        mine, shift = slot == k, 0.5 * (k / topk_ids.shape[1] - 0.25)
        axes[0].scatter(token[mine], experts[mine] + shift, s=4, linewidths=0, label=f"choice {k}")
    axes[0].set(title=title, xlabel="token", ylabel="expert", ylim=(num_experts - 0.5, -0.5))
    legend = {"loc": "outside lower left", "fontsize": 8, "markerscale": 3, "frameon": False}
    figure.legend(ncols=topk_ids.shape[1], **legend)
    tokens = np.bincount(experts, minlength=num_experts)
    axes[1].barh(np.arange(num_experts), tokens)
    axes[1].set(title="Tokens per expert", xlabel=f"tokens (each has {topk_ids.shape[1]} choices)")
    axes[1].set(ylabel="expert", ylim=(num_experts - 0.5, -0.5))
    draw_traffic(axes[2], traffic)
    save(figure, path)
    pyplot.close(figure)
