"""Just enough SVG: rectangles, lines, text, axes. Text is escaped; same input, same file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

FONT = "font-family='sans-serif'"
COLOURS = {
    "pull": "#7aa6c2",
    "shared": "#9a8fbf",
    "gate_up": "#2f6f9f",
    "down": "#e08a3c",
    "push": "#c9b458",
    "dgrad_hidden": "#2f8f6f",
    "dgrad_input": "#c9603c",
    "wgrad": "#7a4f8f",
    "shared_gate_up": "#9a8fbf",
    "shared_down": "#b3a8d6",
    "gate_up_again": "#5f93b8",
    "store": "#c9b458",
    "load": "#b7cbd6",
    "combine": "#8fae5d",
}
COLOURS |= dict.fromkeys(
    ("wait_rows", "wait_operands", "wait_store", "wait_tile", "wait_ring", "wait_token"), "#e6e1dc"
)
PALETTE = ("#2f6f9f", "#e08a3c", "#2f8f6f", "#c9603c", "#7a4f8f", "#c9b458", "#7aa6c2", "#8a8a8a")


class Drawing:
    """Elements in the order they were drawn."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, title: str = ""
    ) -> None:
        inner = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(width, 0.2):.2f}' height='{height:.2f}' "
            f"fill='{fill}'>{inner}</rect>"
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = "#999", width: float = 1.0
    ) -> None:
        self.parts.append(
            f"<line x1='{x1:.2f}' y1='{y1:.2f}' x2='{x2:.2f}' y2='{y2:.2f}' stroke='{stroke}' "
            f"stroke-width='{width:g}'/>"
        )

    def polyline(self, points: Sequence[tuple[float, float]], stroke: str) -> None:
        text = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.parts.append(
            f"<polyline points='{text}' fill='none' stroke='{stroke}' stroke-width='1.5'/>"
        )

    def circle(self, x: float, y: float, fill: str, title: str = "") -> None:
        self.parts.append(
            f"<circle cx='{x:.2f}' cy='{y:.2f}' r='4' fill='{fill}'>"
            f"<title>{escape(title)}</title></circle>"
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 11,
        anchor: str = "start",
        fill: str = "#222",
    ) -> None:
        self.parts.append(
            f"<text x='{x:.2f}' y='{y:.2f}' {FONT} font-size='{size:g}' fill='{fill}' "
            f"text-anchor='{anchor}'>{escape(text)}</text>"
        )

    def legend(self, entries: Sequence[tuple[str, str]], x: float, y: float) -> None:
        """(name, colour) side by side."""
        for name, colour in entries:
            self.rect(x, y - 9, 10, 10, colour)
            self.text(x + 14, y, name)
            x += 26 + 6.5 * len(name)

    def render(self) -> str:
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width:g} "
            f"{self.height:g}' width='{self.width:g}' height='{self.height:g}'>"
            f"<rect width='100%' height='100%' fill='white'/>{''.join(self.parts)}</svg>"
        )


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers between low and high."""
    if not math.isfinite(high - low) or high <= low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def shade(share: float) -> str:
    """White to dark blue for 0..1."""
    share = min(max(share, 0.0), 1.0)
    red, green, blue = (round(255 + (dark - 255) * share) for dark in (22, 66, 120))
    return f"#{red:02x}{green:02x}{blue:02x}"
