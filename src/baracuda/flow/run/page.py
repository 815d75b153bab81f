"""The report as one page: no scripts, no fonts, no files beside it. Its plots are SVG, drawn here from the numbers.

Everything is made by `element`, which escapes each value that is not markup: names in files are not to be trusted. The
page's policy allows this style and nothing else, so colours are classes, never `style` attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .markup import Markup, document, element, join

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667085; --line: #d8dee8; --paper: #fff; --card: #f6f8fb;
        --a: #2563eb; --b: #f59e0b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --dim: #98a2b3; --line: #344054; --paper: #101828;
        --card: #182230; --a: #6ea8fe; --b: #fbbf24; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       padding: 2rem 1.5rem 4rem; max-width: 68rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; } p { margin: .4rem 0; }
.dim { color: var(--dim); } .cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { background: var(--card); border-radius: .6rem; padding: .7rem 1rem; flex: 1 1 8.5rem; max-width: 14rem; }
.card b { display: block; font-size: 1.35rem; } .card span { color: var(--dim); font-size: .85rem; }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; } td.text { white-space: normal; }
th { position: sticky; top: 0; background: var(--card); } td { overflow-wrap: anywhere; }
.plot { overflow-x: auto; margin-bottom: .6rem; } svg { width: 100%; min-width: 40rem; height: auto; display: block; }
@media (max-width: 40rem) { body { padding: 1.2rem .9rem 3rem; } th, td { padding: .25rem .5rem; }
  .names td { white-space: normal; } }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; } .legend i { display: inline-block; width: .8em;
height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
.a { background: var(--a); fill: var(--a); } .b { background: var(--b); fill: var(--b); }
svg line { stroke: var(--line); }
"""


def page(content: dict[str, Any]) -> str:
    """The whole page, of a report whose types `require_report` has checked or a run has just made."""
    model, run = content["model"], content["run"]
    static = (content["scheme"]["input_activations"] or {}).get("dynamic") is False
    title = f"{model['name']}, {content['scheme']['name']}{', static activations' if static else ''}"
    architecture = ", ".join(model["architectures"] or ["unknown architecture"])
    origin = (
        f"{architecture}, quantized by baracuda {content['baracuda']} in {run['seconds']:.1f} s "
        f"({run['megabytes_per_second']:.3g} MB/s, {run['device']}, "
        f"{run['ranks']} process{'' if run['ranks'] == 1 else 'es'})"
    )
    parts = [
        element("h1", title),
        element("p", origin, class_="dim"),
        _cards(content),
        _evaluation(content["evaluation"]),
        _weights(content["layers"]),
        _outputs(content["evaluation"]),
        _outliers(content["layers"], content["smoothing"]),
        _smoothing(content["smoothing"]),
        _left(content),
    ]
    return document(title, STYLE, *(join("\n", part) for part in parts if part), "\n")


def _cards(content: dict[str, Any]) -> Markup:
    size, layers, evaluation = content["size"], content["layers"], content["evaluation"] or {}
    known = [layer["sqnr_db"] for layer in layers if layer["sqnr_db"] is not None]
    cards = [
        (f"{size['ratio']:.0%}", f"of the size: {_bytes(size['before'])} to {_bytes(size['after'])}"),
        (str(len(layers)), f"Linears quantized, {len(content['left'])} left"),
    ]
    if known:
        cards.append((f"{min(known):.1f} dB", f"lowest weight SQNR, mean {sum(known) / len(known):.1f} dB"))
    if "kl" in evaluation:
        perplexity = evaluation["perplexity"]
        quantized, exact = (number(perplexity[name], ".4g") for name in ("quantized", "float"))
        agreement = f"KL of the logits, same top token {number(evaluation['top1_agreement'], '.1%')}"
        cards += [(number(evaluation["kl"], ".2e"), agreement), (quantized, f"perplexity, float {exact}")]
    if "cosine" in evaluation:
        mean, least = (number(evaluation["cosine"][name], ".4f") for name in ("mean", "min"))
        cards.append((mean, f"embedding cosine, least {least}"))
    speed = content["run"].get("tokens_per_second")
    if speed:
        quantized, exact = (number(speed[name], ".0f") for name in ("quantized", "float"))
        cards.append((quantized, f"tokens/s here, float {exact}"))
    inner = (element("div", element("b", big), element("span", small), class_="card") for big, small in cards)
    return element("div", *inner, class_="cards")


def _evaluation(evaluation: dict[str, Any] | None) -> Markup:
    if evaluation is None:
        nothing = "No evaluation data was given: accuracy below is that of the weights alone. Add "
        return element(
            "p", nothing, element("code", "--evaluate FILE"), " for perplexity, KL or embedding cosine.", class_="dim"
        )
    return element("p", f"Evaluated on {evaluation['tokens']} tokens of {evaluation['data']}.", class_="dim")


def _weights(layers: list[dict[str, Any]]) -> Markup:
    rows = (
        (
            layer["name"],
            " x ".join(map(str, layer["shape"])),
            number(layer["sqnr_db"], ".1f", "exact"),
            number(layer["max_error"], ".2e"),
            layer["measured_rows"],
            _bytes(layer["bytes_before"]),
            _bytes(layer["bytes_after"]),
        )
        for layer in layers
    )
    columns = ("layer", "shape", "SQNR dB", "max error", "rows measured", "before", "after")
    return join(
        element("h2", "Weights"),
        element(
            "p",
            "Signal over quantization noise of each weight, in decibels: 6 dB is one bit. Where a weight is large, a "
            "sample of its rows is measured.",
        ),
        _bars([(layer["name"], [layer["sqnr_db"]]) for layer in layers], ["SQNR, dB"]),
        _table(columns, rows),
    )


def _outputs(evaluation: dict[str, Any] | None) -> Markup:
    if not evaluation or not evaluation.get("layers"):
        return Markup()
    return join(
        element("h2", "Outputs"),
        element(
            "p",
            "Signal over noise of each layer's output in the running model, the noise of all layers before it "
            "included.",
        ),
        _bars([(name, [value]) for name, value in evaluation["layers"].items()], ["SQNR, dB"]),
    )


def _outliers(layers: list[dict[str, Any]], smoothing: dict[str, Any] | None) -> Markup:
    known = [layer for layer in layers if "outlier_before" in layer and "outlier_after" in layer]
    if not known:
        return Markup()
    bars = [(layer["name"], [layer["outlier_before"], layer["outlier_after"]]) for layer in known]
    alpha = (smoothing or {}).get("alpha")
    note = f" Smoothing strength alpha: {alpha}." if alpha is not None else ""
    return join(
        element("h2", "Activation outliers"),
        element(
            "p",
            "The largest channel of each layer's input over the typical one: what a scale shared by all channels has "
            f"to bear.{note}",
        ),
        _bars(bars, ["before", "after smoothing"], log=True),
    )


def _smoothing(smoothing: dict[str, Any] | None) -> Markup:
    if not smoothing or "folded" not in smoothing:
        return Markup()
    gate, reasons = smoothing["gate"], smoothing["not_folded"]
    folded = ((fold["from"], ", ".join(fold["into"])) for fold in smoothing["folded"])
    said = (
        f"{len(smoothing['folded'])} folds, proved on the traced graph. The smoothed float model differs from the "
        f"original by {number(gate['largest_difference'], '.1e')} of an output's size at most (allowed "
        f"{gate['tolerance']:.0e}, computed in {gate['dtype']})."
    )
    left = f"{len(reasons)} layers were left unsmoothed, because folding is not provable there:"
    return join(
        element("h2", "Smoothing"),
        element("p", said),
        _table(("divided", "multiplied"), folded, words=True),
        join(element("p", left), _table(("layer", "why"), reasons.items(), words=True)) if reasons else "",
    )


def _left(content: dict[str, Any]) -> Markup:
    rows = [(entry["name"], entry["reason"]) for entry in content["left"]]
    return join(
        element("h2", "Left in floating point"),
        element("p", f"Linears were found by {content['linears_found_by']}."),
        *(element("p", note) for note in content.get("notes", [])),
        _table(("module", "why"), rows, words=True) if rows else element("p", "Nothing."),
    )


# -- drawing -----------------------------------------------------------------------------------------------------


def _table(columns: Iterable[object], rows: Iterable[Iterable[object]], *, words: bool = False) -> Markup:
    """A table that scrolls; with `words`, all columns but the first hold sentences."""

    def cells(tag: str, row: Iterable[object]) -> Markup:
        return element(
            "tr", *(element(tag, cell, class_="text" if words and i else None) for i, cell in enumerate(row))
        )

    table = element("table", cells("th", columns), *(cells("td", row) for row in rows))
    return element("div", table, class_="scroll names" if words else "scroll")


def _bars(rows: list[tuple[str, list[float | None]]], series: list[str], *, log: bool = False) -> Markup:
    """A column a layer, in the order of the model; names appear on hover, since hundreds do not fit."""
    values = [v for _, row in rows for v in row if v is not None and math.isfinite(v) and (v > 0 or not log)]
    if not values:
        return Markup()
    width, height, left, bottom = 1000, 220, 44, 18
    top = max(values)
    low = math.log10(max(min(values), 1e-3)) - 0.1 if log else 0.0
    high = math.log10(top) + 0.05 if log else top * 1.05
    high = max(high, low + 1e-6)
    ticks = _ticks(10**low, 10**high) if log else _ticks(0.0, high)

    def y(value: float) -> float:
        level = math.log10(max(value, 1e-3)) if log else value
        return (height - bottom) * (1 - (level - low) / (high - low))

    slot = (width - left) / len(rows)
    shapes: list[Markup] = []
    for tick in ticks:
        at = y(tick)
        shapes.append(element("line", x1=left, x2=width, y1=f"{at:.1f}", y2=f"{at:.1f}"))
        shapes.append(_label(f"{tick:.4g}", left - 6, max(at, 8) + 4, end=True))
    thick = max(0.8, slot * 0.8 / len(series))
    for i, (name, row) in enumerate(rows):
        for j, value in enumerate(row):
            if value is None or not math.isfinite(value) or (log and value <= 0):
                continue
            x, edge = left + i * slot + slot * 0.1 + j * thick, y(value)
            box = {"x": x, "y": edge, "width": thick, "height": max(0.5, height - bottom - edge)}
            named = element("title", f"{name}: {value:.4g}")
            shapes.append(element("rect", named, class_="ab"[j], **{key: f"{v:.1f}" for key, v in box.items()}))
    shapes += [_label("first layer", left, height - 4), _label("last layer", width, height - 4, end=True)]
    legend = (join(element("i", class_="ab"[j]), name) for j, name in enumerate(series))
    svg = element("svg", *shapes, viewBox=f"0 0 {width} {height}", role="img")
    return join(element("p", *legend, class_="legend dim"), element("div", svg, class_="plot"))


def _label(words: str, x: float, y: float, *, end: bool = False) -> Markup:
    return element("text", words, x=x, y=f"{y:.1f}", text_anchor="end" if end else None)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers for an axis: multiples of one for a linear axis, which begins at 0, else 1, 2, 5, 10, ..."""
    if low == 0:
        step = next(s for s in _round_numbers(high / 1e3, high * 10) if high / s <= 6)
        return [step * i for i in range(int(high / step) + 1)]
    ticks = _round_numbers(low, high)
    tens = [tick for tick in ticks if math.log10(tick) % 1 == 0]
    return ticks if len(ticks) <= 7 or len(tens) < 2 else tens


def _round_numbers(low: float, high: float) -> list[float]:
    first, last = (math.floor(math.log10(end)) for end in (low, high))
    numbers = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 2, 5)]
    return [number for number in numbers if low <= number <= high]


def number(value: float | None, form: str, otherwise: str = "not finite") -> str:
    """As text; JSON has null for what is not finite."""
    return otherwise if value is None else format(value, form)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
