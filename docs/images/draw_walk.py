"""Draws docs/images/walk.svg: the order in which the forward kernel's tiles are handed out.

    python docs/images/draw_walk.py

The order comes from the reference (`mok_ref.schedule`), at small sizes. Needs matplotlib:
pip install ".[plot]"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mok_ref.config import ROW_TILE
from mok_ref.plotting import import_pyplot, save
from mok_ref.schedule import Minibatch, forward_task_order, walk

NUM_MINIBATCHES, BLOCKS, RING_MINIBATCHES = 5, 2, 2
COLUMNS = {"gate_up": 3, "down": 2}  # column tiles of h and of y
COLORS = {"gate_up": "#4c78a8", "down": "#e4a84c"}
NAMES = {"gate_up": "gate/up tile", "down": "down tile"}


def tiles() -> list[tuple[str, Minibatch, int, int]]:
    """(kind, minibatch, row block, column) by ticket: column by column over the row blocks."""
    rows = NUM_MINIBATCHES * BLOCKS * ROW_TILE
    macrobatch = RING_MINIBATCHES * BLOCKS * ROW_TILE
    batches = list(walk(rows, macrobatch, BLOCKS * ROW_TILE, "forward"))
    found = []
    for kind, batch in forward_task_order(batches, macrobatch):
        first = batch.first // ROW_TILE
        for column in range(COLUMNS[kind]):
            found += [(kind, batch, first + block, column) for block in range(BLOCKS)]
    return found


def draw_tiles(axes: Any) -> None:
    drawn = set()
    for ticket, (kind, _, block, column) in enumerate(tiles()):
        label = None if kind in drawn else NAMES[kind]
        drawn.add(kind)
        axes.barh(block, 0.92, 0.82, ticket, color=COLORS[kind], align="center", label=label)
        axes.text(ticket + 0.46, block, column, ha="center", va="center", fontsize=7)


def draw_slots(axes: Any) -> None:
    """An arrow from the last down tile of a minibatch to the next user of its ring slot."""
    by_ticket = tiles()
    for batch in {entry[1].index: entry[1] for entry in by_ticket}.values():
        user = batch.index - RING_MINIBATCHES
        starts = [t for t, e in enumerate(by_ticket) if e[0] == "gate_up" and e[1].index == user]
        if not starts:
            continue
        ends = [t for t, e in enumerate(by_ticket) if e[0] == "down" and e[1].index == batch.index]
        tail = (max(ends) + 0.9, by_ticket[max(ends)][2])
        head = (min(starts) + 0.1, by_ticket[min(starts)][2] + 0.35)
        style = {"arrowstyle": "->", "color": "#555555", "linestyle": "dashed"}
        axes.annotate("", head, tail, arrowprops=style)


def main() -> None:
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    draw_tiles(axes)
    draw_slots(axes)
    blocks = NUM_MINIBATCHES * BLOCKS
    for mini in range(NUM_MINIBATCHES):
        text = f"minibatch {mini}, ring slot {mini % RING_MINIBATCHES}"
        axes.text(-0.4, mini * BLOCKS + (BLOCKS - 1) / 2, text, ha="right", va="center", fontsize=9)
        axes.axhline(mini * BLOCKS - 0.5, color="#cccccc", linewidth=0.8, zorder=0)
    axes.set(xlabel="ticket", yticks=[], xlim=(0, len(tiles())), ylim=(blocks - 0.5, -0.5))
    axes.legend(loc="lower right", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    save(figure, Path(__file__).with_name("walk.svg"))


if __name__ == "__main__":
    main()
