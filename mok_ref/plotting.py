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
    check_writable(path)


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


def pulls_in_time(config: MoEConfig, schedule: Schedule, rank: int) -> np.ndarray:
    """(P,) source rank of each row in the order of time: forward's walk, then `pull_order`."""
    macrobatch, minibatch = config.ring_rows(schedule.num_rows)
    pieces = [np.zeros(0, np.int32)]
    for batch in walk(schedule.num_rows, macrobatch, minibatch, "forward"):
        sources = schedule.peer_rank[batch.rows]
        pieces.append(sources[pull_order(sources, rank, config.ep_size)])
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
    colors = rank_colors(config.ep_size)
    longest = max(1, *(schedule.num_rows for schedule in schedules))
    image = np.ones((config.ep_size, longest, 3))
    padding = tuple(int(PADDING_COLOR[i : i + 2], 16) / 255 for i in (1, 3, 5))
    for rank, schedule in enumerate(schedules):
        sources = pulls_in_time(config, schedule, rank)
        real = sources >= 0
        image[rank, : len(sources)] = padding
        image[rank, np.flatnonzero(real)] = colors[sources[real]]
    axes.imshow(image, aspect="auto", interpolation="none")
    axes.set_title("Rows in the order they are pulled, coloured by the rank that owns the token")
    axes.set_xlabel("row (grey: padding to a multiple of 128)")
    axes.set_ylabel("rank that pulls")
    axes.set_yticks(range(config.ep_size) if config.ep_size <= 16 else [0, config.ep_size - 1])
    for edge in np.arange(0.5, config.ep_size - 1):
        axes.axhline(edge, color="white", linewidth=2)
    if config.ep_size <= 10:
        handles = [axes.plot([], [], "s", color=colors[r])[0] for r in range(config.ep_size)]
        names = [f"rank {r}" for r in range(config.ep_size)]
        place = {"loc": "upper right", "bbox_to_anchor": (1, -0.12), "frameon": False}
        axes.legend(handles, names, ncols=config.ep_size, fontsize=8, **place)


def draw_traffic(axes: Any, traffic: np.ndarray) -> None:
    """Rows that each rank pulls from each rank, as a heat map with numbers where they fit."""
    axes.imshow(traffic, cmap="Blues", vmin=0)
    axes.set_title("Rows pulled")
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
    """Which expert each token went to, rows per expert, and the rank-to-rank matrix.

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
    axes[0].scatter(token, experts, s=3, c=slot, cmap="viridis", linewidths=0)
    axes[0].set(title=title, xlabel="token", ylabel="expert", ylim=(num_experts - 0.5, -0.5))
    rows = np.bincount(experts, minlength=num_experts)
    axes[1].barh(np.arange(num_experts), rows)
    axes[1].set(title="Rows per expert", xlabel="rows", ylim=(num_experts - 0.5, -0.5))
    draw_traffic(axes[2], traffic)
    save(figure, path)
    pyplot.close(figure)
