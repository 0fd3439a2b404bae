"""Draws docs/images/layer.svg, the README's picture, from a real schedule.

    python docs/images/draw_layer.py

Needs matplotlib: pip install ".[plot]"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import FancyBboxPatch

from mok_ref import MoEConfig
from mok_ref.plotting import import_pyplot, rank_colors, save
from mok_ref.schedule import Schedule, build_schedule
from mok_ref.testing import random_routes

RANKS, EXPERTS, TOP_K, TOKENS_PER_RANK = 4, 8, 2, 4
TOKEN_X, ROW_X, RESULT_X = 0.0, 4.0, 8.0
CELL = 0.34
BOX_WIDTH, BOX_HEIGHT = 2.5, 1.95


def token_y(token: int) -> float:
    """Height of a token's mark: ranks from top to bottom, a gap between them."""
    return -(token * 0.5 + (token // TOKENS_PER_RANK) * 0.45)


def draw_tokens(axes: Any, x: float, colors: np.ndarray, side: str) -> None:
    for token in range(RANKS * TOKENS_PER_RANK):
        axes.plot(x, token_y(token), "o", color=colors[token // TOKENS_PER_RANK], markersize=9)
    for rank in range(RANKS):
        middle = token_y(rank * TOKENS_PER_RANK) - 0.75
        shift = -0.3 if side == "right" else 0.3
        axes.text(x + shift, middle, f"rank {rank}", ha=side, va="center", fontsize=10)


def draw_rank(axes: Any, rank: int, schedule: Schedule, colors: np.ndarray) -> None:
    """The rows of a rank's experts in schedule order, with the lines to and from their tokens."""
    top = token_y(rank * TOKENS_PER_RANK) + 0.25
    box = {"width": BOX_WIDTH, "height": BOX_HEIGHT, "boxstyle": "round,pad=0.02"}
    corner = (ROW_X - BOX_WIDTH / 2, top - BOX_HEIGHT + 0.12)
    look = {"facecolor": "white", "edgecolor": colors[rank], "linewidth": 1.6, "zorder": 1}
    axes.add_patch(FancyBboxPatch(corner, **box, **look))
    place = (corner[0] + 0.08, top - 0.09)
    axes.text(*place, f"rank {rank}", ha="left", va="center", fontsize=9, color=colors[rank])
    for local, expert in enumerate(schedule.expert_ids):
        y = top - local * 0.9 - 0.36
        first, count = schedule.expert_offset[local], schedule.expert_count[local]
        left = ROW_X - (count - 1) * CELL / 2
        axes.text(ROW_X, y + 0.27, f"expert {expert}", ha="center", va="center", fontsize=8)
        for i in range(int(count)):
            source = int(schedule.peer_rank[first + i])
            token = source * TOKENS_PER_RANK + int(schedule.peer_row[first + i]) // TOP_K
            x, color = left + i * CELL, colors[source]
            line = {"color": color, "linewidth": 1.0, "alpha": 0.55, "zorder": 0}
            axes.plot([TOKEN_X, ROW_X - BOX_WIDTH / 2], [token_y(token), y], **line)
            axes.plot([ROW_X + BOX_WIDTH / 2, RESULT_X], [y, token_y(token)], **line)
            axes.plot(x, y, "s", color=color, markersize=9, markeredgecolor="white", zorder=3)


def main() -> None:
    pyplot = import_pyplot()
    config = MoEConfig(16, 16, EXPERTS, TOP_K, RANKS)
    counts = np.full(RANKS, TOKENS_PER_RANK)
    topk_ids, _ = random_routes(np.random.default_rng(3), int(counts.sum()), EXPERTS, TOP_K)
    figure, axes = pyplot.subplots(figsize=(9, 6.2), layout="constrained")
    colors = rank_colors(RANKS)
    draw_tokens(axes, TOKEN_X, colors, "right")
    draw_tokens(axes, RESULT_X, colors, "left")
    for rank in range(RANKS):
        draw_rank(axes, rank, build_schedule(config, rank, topk_ids, counts), colors)
    for x, text in (
        (TOKEN_X, "tokens x"),
        ((TOKEN_X + ROW_X) / 2, "pull"),
        (ROW_X, "gate, up, SwiGLU, down"),
        ((ROW_X + RESULT_X) / 2, "push"),
        (RESULT_X, "combine: y"),
    ):
        axes.text(x, 0.75, text, ha="center", va="center", fontsize=11, weight="bold")
    axes.set(xlim=(-1.3, 9.3), ylim=(token_y(RANKS * TOKENS_PER_RANK - 1) - 0.4, 1.0))
    axes.axis("off")
    save(figure, Path(__file__).with_name("layer.svg"))


if __name__ == "__main__":
    main()
