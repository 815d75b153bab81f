"""Bars for a report: SVG drawn from the numbers, a name and a value beside each bar."""

from __future__ import annotations

import math

from .markup import Markup, element, join

#: Widths in the drawing's own units: the name, the longest bar, the value.
NAME, BAR, VALUE = 330, 560, 90
ROW = 18
#: Characters of a name that fit; the beginning is cut, since names differ at their end.
LONGEST_NAME = 52


def bars(rows: list[tuple[str, list[float | None]]], series: list[str], *, log: bool = False) -> Markup:
    """A group of bars for each row, in the given order, with its name and values in words."""
    drawn = [(name, [v if _drawable(v, log) else None for v in row]) for name, row in rows]
    values = [v for _, row in drawn for v in row if v is not None]
    if not values:
        return Markup()
    low, high = (math.log10(min(values)) - 0.1, math.log10(max(values))) if log else (0.0, max(values))
    span = max(high - low, 1e-9)
    shapes: list[Markup] = []
    y = 0
    for name, row in drawn:
        middle = y + ROW * len(series) / 2
        label = name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"
        shapes.append(
            element("text", label, element("title", name), x=NAME - 8, y=f"{middle + 4:.0f}", text_anchor="end")
        )
        for j, value in enumerate(row):
            if value is not None:
                length = max(1.0, BAR * max(0.0, ((math.log10(value) if log else value) - low) / span))
                box = {"x": NAME, "y": y + 3, "width": f"{length:.1f}", "height": ROW - 6}
                shapes.append(element("rect", class_="ab"[j], **box))
                shapes.append(element("text", f"{value:.3g}", x=f"{NAME + length + 6:.1f}", y=y + ROW - 5))
            y += ROW
        y += 6 if len(series) > 1 else 0
    legend = (join(element("i", class_="ab"[j]), name) for j, name in enumerate(series))
    svg = element("svg", *shapes, viewBox=f"0 0 {NAME + BAR + VALUE} {y}", role="img", aria_label=", ".join(series))
    return join(element("p", *legend, class_="legend dim"), element("div", svg, class_="scroll plot"))


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)
