"""Pictures of a plan: timeline, communication matrix, roofline, memory, and curves of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .hardware import Hardware
from .minibatch_simulation import Span
from .svg import COLOURS, PALETTE, Drawing, shade, ticks
from .trace import lane_order

LEFT, TOP, ROW = 110.0, 34.0, 11.0
MOST_LANES = 64
MOST_NUMBERS = 16  # ranks up to which a heat map's cells hold their numbers
HOME = "#f3e9d8"  # the diagonal of a heat map


def colour_of(name: str) -> str:
    return COLOURS.get(name.split(" ")[0], "#8a8a8a")


def timeline_picture(spans: Sequence[Span], title: str, width: float = 1000.0) -> str:
    """Bars over time, a lane per (rank, lane); the first MOST_LANES lanes."""
    keys = sorted({(s.rank, s.lane) for s in spans}, key=lambda k: (k[0], lane_order(k[1])))
    hidden = max(0, len(keys) - MOST_LANES)
    keys = keys[:MOST_LANES]
    row = {key: i for i, key in enumerate(keys)}
    end = max((s.end for s in spans), default=1e-9)
    picture = Drawing(width, TOP + ROW * len(keys) + 46)
    picture.text(8, 18, title, 13)
    scale = (width - LEFT - 16) / end
    bottom = TOP + ROW * len(keys)
    for tick in ticks(0.0, end * 1e3):
        x = LEFT + tick * 1e-3 * scale
        picture.line(x, TOP, x, bottom, "#ddd")
        picture.text(x, bottom + 13, f"{tick:g}", 9, "middle")
    picture.text(width - 16, bottom + 26, "ms", 9, "end")
    for (rank, lane), i in row.items():
        picture.text(LEFT - 6, TOP + ROW * i + 9, f"rank {rank} {lane}", 8, "end")
    for span in spans:
        if (span.rank, span.lane) in row:
            picture.rect(
                LEFT + span.start * scale,
                TOP + ROW * row[span.rank, span.lane] + 1,
                (span.end - span.start) * scale,
                ROW - 2,
                colour_of(span.name),
                f"{span.name}: {span.start * 1e3:.3f} to {span.end * 1e3:.3f} ms",
            )
    names = sorted({s.name.split(" ")[0] for s in spans})
    picture.legend([(name, colour_of(name)) for name in names], LEFT, bottom + 36)
    if hidden:
        picture.text(width - 16, bottom + 38, f"{hidden} more lanes in the trace file", 9, "end")
    return picture.render()


def matrix_picture(megabytes: np.ndarray, title: str, side: float = 520.0) -> str:
    """Heat map (R, R): source rank per row, destination per column; the diagonal stays at home."""
    num = len(megabytes)
    cell = (side - 90) / max(num, 1)
    picture = Drawing(side, side + 40)
    picture.text(8, 18, title, 13)
    foreign = megabytes * (1 - np.eye(num))
    most = float(foreign.max()) if num > 1 else 0.0
    for i in range(num):
        for j in range(num):
            value = float(megabytes[i, j])
            share = value / most if most and i != j else 0.0
            fill = HOME if i == j else shade(share)
            label = f"{i} to {j}: {value:.2f} MB"
            x, y = 60 + j * cell, 50 + i * cell
            picture.rect(x, y, cell, cell, fill, label)
            if num <= MOST_NUMBERS:
                ink = "#fff" if share > 0.5 else "#222"
                picture.text(
                    x + cell / 2, y + cell / 2 + 3, short_number(value), 9, "middle", fill=ink
                )
    for tick in ticks(0, num - 1 if num > 1 else 1):
        if tick == int(tick) and tick < num:
            picture.text(54, 53 + (tick + 0.5) * cell, f"{tick:g}", 9, "end")
            picture.text(60 + (tick + 0.5) * cell, 46, f"{tick:g}", 9, "middle")
    picture.text(60, 34, "destination rank", 10)
    picture.text(8, 46, "source rank", 9)
    add_shades(picture, 60, side - 18, most)
    return picture.render()


def short_number(value: float) -> str:
    """At most four characters for what fits a small cell: 0.25, 3.1, 27, 1e+04."""
    if value >= 10:
        return f"{value:.0f}" if value < 9999.5 else f"{value:.0e}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def add_shades(picture: Drawing, x: float, y: float, most: float) -> None:
    """The colour scale of a heat map, with its ends, and the colour of the diagonal."""
    picture.text(x, y + 10, "0 MB", 9)
    for step in range(11):
        picture.rect(x + 28 + 12 * step, y, 12, 12, shade(step / 10))
    picture.text(x + 166, y + 10, f"{most:.2f} MB", 9)
    picture.rect(x + 250, y, 12, 12, HOME)
    picture.text(x + 266, y + 10, "stays on its rank", 9)


def memory_picture(parts: Mapping[str, float], capacity: float, width: float = 760.0) -> str:
    """One bar per part in GB, the capacity as a line over the running sum."""
    shown = sorted(((n, v) for n, v in parts.items() if v > 0), key=lambda item: -item[1])
    total = sum(parts.values())
    picture = Drawing(width, 60 + 20 * (len(shown) + 1))
    picture.text(8, 18, f"Memory per GPU: {total / 1e9:.1f} of {capacity / 1e9:.1f} GB", 13)
    scale = (width - 270) / max(total, capacity)
    start = 0.0
    for i, (name, value) in enumerate(shown):
        y = 34 + 20 * i
        picture.text(172, y + 11, name, 10, "end")
        picture.rect(180 + start * scale, y, value * scale, 14, PALETTE[i % len(PALETTE)], name)
        picture.text(184 + (start + value) * scale, y + 11, f"{value / 1e9:.2f} GB", 9)
        start += value
    x = 180 + capacity * scale
    picture.line(x, 28, x, 38 + 20 * len(shown), "#b00", 1.5)
    picture.text(x, 50 + 20 * len(shown), "capacity", 9, "middle")
    return picture.render()


def roofline_picture(
    hardware: Hardware, points: Sequence[tuple[str, float, float]], width: float = 640.0
) -> str:
    """TFLOP/s over FLOPs per byte of HBM traffic, log-log; points: (name, intensity, TFLOP/s)."""
    height, left, right, top, bottom = 380.0, 64.0, 20.0, 34.0, 46.0
    peak, memory = hardware.peak_bf16_flops / 1e12, hardware.read_bytes_per_s / 1e12
    lowest = min([p[1] for p in points] + [peak / memory]) / 8
    highest = max([p[1] for p in points] + [peak / memory]) * 8
    low_y = min([p[2] for p in points] + [memory * lowest]) / 2
    picture = Drawing(width, height)
    picture.text(8, 18, f"Roofline of one GPU: {hardware.title}", 13)

    def place(intensity: float, rate: float) -> tuple[float, float]:
        x = math.log(intensity / lowest) / math.log(highest / lowest)
        y = math.log(rate / low_y) / math.log(2 * peak / low_y)
        return left + x * (width - left - right), height - bottom - y * (height - top - bottom)

    for exponent in range(math.ceil(math.log10(lowest)), math.floor(math.log10(highest)) + 1):
        x, _ = place(10.0**exponent, low_y)
        picture.line(x, top, x, height - bottom, "#eee")
        picture.text(x, height - bottom + 14, f"{10.0**exponent:g}", 9, "middle")
    for exponent in range(math.ceil(math.log10(low_y)), math.floor(math.log10(2 * peak)) + 1):
        _, y = place(lowest, 10.0**exponent)
        picture.line(left, y, width - right, y, "#eee")
        picture.text(left - 6, y + 3, f"{10.0**exponent:g}", 9, "end")
    ceilings = [("dense peak", peak), ("sustained", hardware.sustained_bf16_flops / 1e12)]
    for (name, rate), colour in zip(ceilings, ("#222", "#b00"), strict=True):
        knee = rate / memory
        picture.polyline([place(lowest, memory * lowest), place(knee, rate)], colour)
        picture.polyline([place(knee, rate), place(highest, rate)], colour)
        x, y = place(highest, rate)
        picture.text(x - 4, y - 4, f"{name} {rate:.0f}", 9, "end")
    for i, (name, intensity, rate) in enumerate(points):
        x, y = place(intensity, rate)
        picture.circle(x, y, PALETTE[i % len(PALETTE)], f"{name}: {rate:.0f} TFLOP/s")
        picture.text(x + 7, y + 12, f"{name} {rate:.0f}", 10)
    picture.text(width / 2, height - 10, "FLOPs per byte of HBM traffic", 10, "middle")
    picture.text(8, top - 2, "TFLOP/s", 9)
    return picture.render()


def curves_picture(
    curves: Mapping[str, Sequence[tuple[float, float]]], title: str, width: float = 760.0
) -> str:
    """Lines over steps; not-finite values are left out."""
    height, left, right, top, bottom = 260.0, 70.0, 16.0, 34.0, 52.0
    picture = Drawing(width, height)
    picture.text(8, 18, title, 13)
    kept = {
        name: [(x, y) for x, y in line if math.isfinite(x) and math.isfinite(y)]
        for name, line in curves.items()
    }
    kept = {name: line for name, line in kept.items() if line}
    if not kept:
        picture.text(left, height / 2, "nothing to draw", 11)
        return picture.render()
    xs = [x for line in kept.values() for x, _ in line]
    ys = [y for line in kept.values() for _, y in line]
    low, high = min(ys), max(ys)
    high = high if high > low else low + 1.0
    last = max(xs) if max(xs) > min(xs) else min(xs) + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - min(xs)) / (last - min(xs))
        return (
            left + across * (width - left - right),
            height - bottom - (y - low) / (high - low) * (height - top - bottom),
        )

    for tick in ticks(low, high, 4):
        _, y = place(min(xs), tick)
        picture.line(left, y, width - right, y, "#eee")
        picture.text(left - 6, y + 3, f"{tick:.4g}", 9, "end")
    for tick in ticks(min(xs), last):
        x, _ = place(tick, low)
        picture.text(x, height - bottom + 14, f"{tick:g}", 9, "middle")
    entries = []
    for i, (name, line) in enumerate(kept.items()):
        colour = PALETTE[i % len(PALETTE)]
        picture.polyline([place(x, y) for x, y in line], colour)
        entries.append((name, colour))
    picture.legend(entries, left, height - 12)
    return picture.render()
