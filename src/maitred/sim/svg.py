"""Plots as SVG text, by hand: axes with ticks, lines, bars. No fonts, scripts or files from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#111111",
    "#66c2a5",
)
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 34  # margins of a panel

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**decade for decade in decades]
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis(values: Sequence[float], *, log: bool = False) -> Axis:
    """Wide enough for all `values`; logarithmic ones end at whole decades."""
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        low = 10.0 ** math.floor(math.log10(min(positive)))
        return Axis(low, max(10.0 ** math.ceil(math.log10(max(positive))), 10 * low), log=True)
    return Axis(0.0, max([*values, 0.0]) or 1.0)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)


@dataclass(slots=True)
class Panel:
    """One plot of `width` x `height` pixels; draws in data coordinates."""

    title: str
    x: Axis
    y: Axis
    x_label: str
    width: int = 460
    height: int = 250
    _parts: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], colour: str, *, step: bool = False) -> None:
        """Draw a line through the points; `step` holds each value until the next point."""
        if not points:
            return
        words, last_y = [], 0.0
        for number, (x, y) in enumerate(points):
            px, py = self._px(x), self._py(y)
            if number == 0:
                words.append(f"M{px:.1f},{py:.1f}")
            else:
                words.append(f"L{px:.1f},{last_y:.1f}L{px:.1f},{py:.1f}" if step else f"L{px:.1f},{py:.1f}")
            last_y = py
        self._parts.append(f'<path d="{"".join(words)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')

    def bar(self, x0: float, x1: float, y: float, thickness: float, colour: str, hint: str = "") -> None:
        """Lying, from x0 to x1, its middle at y; `thickness` in units of y."""
        left, top = self._px(x0), self._py(y + thickness / 2)
        width, height = max(self._px(x1) - left, 0.4), max(self._py(y - thickness / 2) - top, 0.5)
        title = f"<title>{escape(hint)}</title>" if hint else ""
        place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {place} fill="{colour}">{title}</rect>')

    def svg(self, at_x: int, at_y: int) -> str:
        return f'<g transform="translate({at_x},{at_y})">{self._frame()}{"".join(self._parts)}</g>'

    def _px(self, x: float) -> float:
        return LEFT + self.x.place(x) * (self.width - LEFT - RIGHT)

    def _py(self, y: float) -> float:
        return self.height - BOTTOM - self.y.place(y) * (self.height - TOP - BOTTOM)

    def _frame(self) -> str:
        parts = [_text(self.width / 2, 16, self.title, "middle", "title")]
        for value in self.x.ticks():
            px = self._px(value)
            parts.append(f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}" class="grid"/>')
            parts.append(_text(px, self.height - BOTTOM + 14, number_text(value), "middle"))
        for value in self.y.ticks():
            py = self._py(value)
            parts.append(f'<line x1="{LEFT}" x2="{self.width - RIGHT}" y1="{py:.1f}" y2="{py:.1f}" class="grid"/>')
            parts.append(_text(LEFT - 5, py + 4, number_text(value), "end"))
        parts.append(_text(self.width / 2, self.height - 6, self.x_label, "middle"))
        return "".join(parts)


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    classes = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}>{escape(text)}</text>'


STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}.title{font-size:13px;font-weight:600}"
    ".grid{stroke:#ddd;stroke-width:.6}.heading{font-size:14px;font-weight:600}"
)


def sheet(heading: str, legend: Sequence[tuple[str, str]], panels: Sequence[Panel], *, columns: int = 2) -> str:
    """All panels on one SVG, with a legend of (name, colour)."""
    width = max(panel.width for panel in panels) * columns
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    parts, top = [], 58
    for row in rows:
        parts += [panel.svg(i * width // columns, top) for i, panel in enumerate(row)]
        top += max(panel.height for panel in row) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{_text(12, 20, heading, 'start', 'heading')}{_legend(legend)}{''.join(parts)}</svg>\n"
    )


def _legend(legend: Sequence[tuple[str, str]]) -> str:
    parts, left = [], 12.0
    for name, colour in legend:
        parts.append(f'<rect x="{left:.0f}" y="32" width="14" height="8" fill="{colour}"/>')
        parts.append(_text(left + 18, 40, name, "start"))
        left += 34 + 6.6 * len(name)
    return "".join(parts)
