"""The report as one page: no scripts, no fonts, no files beside it. Its plots are SVG, drawn here from the numbers."""

from __future__ import annotations

import math
from html import escape
from typing import Any

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
"""


def page(content: dict[str, Any]) -> str:
    """The whole page. Every string from a checkpoint is escaped: names in files are not to be trusted."""
    model, run = content["model"], content["run"]
    static = (content["scheme"]["input_activations"] or {}).get("dynamic") is False
    title = f"{model['name']}, {content['scheme']['name']}{', static activations' if static else ''}"
    architecture = ", ".join(model["architectures"] or ["unknown architecture"])
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(architecture)}, quantized by baracuda {escape(content["baracuda"])} in '
        f"{run['seconds']:.1f} s ({run['megabytes_per_second']:.3g} MB/s, {escape(run['device'])}, "
        f"{run['ranks']} process{'' if run['ranks'] == 1 else 'es'})</p>",
        _cards(content),
        _evaluation(content["evaluation"]),
        _weights(content["layers"]),
        _outputs(content["evaluation"]),
        _outliers(content["layers"], content["smoothing"]),
        _smoothing(content["smoothing"]),
        _left(content),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _cards(content: dict[str, Any]) -> str:
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
        agreement = f"KL of the logits, same top token {evaluation['top1_agreement']:.1%}"
        cards += [(number(evaluation["kl"], ".2e"), agreement), (quantized, f"perplexity, float {exact}")]
    if "cosine" in evaluation:
        mean, least = (number(evaluation["cosine"][name], ".4f") for name in ("mean", "min"))
        cards.append((mean, f"embedding cosine, least {least}"))
    speed = content["run"].get("tokens_per_second")
    if speed:
        cards.append((f"{speed['quantized']:.0f}", f"tokens/s here, float {speed['float']:.0f}"))
    inner = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in cards)
    return f'<div class="cards">{inner}</div>'


def _evaluation(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return (
            '<p class="dim">No evaluation data was given: accuracy below is that of the weights alone. '
            "Add <code>--evaluate FILE</code> for perplexity, KL or embedding cosine.</p>"
        )
    return f'<p class="dim">Evaluated on {evaluation["tokens"]} tokens of {escape(evaluation["data"])}.</p>'


def _weights(layers: list[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(layer['name'])}</td><td>{' x '.join(map(str, layer['shape']))}</td>"
        f"<td>{number(layer['sqnr_db'], '.1f', 'exact')}</td><td>{number(layer['max_error'], '.2e')}</td>"
        f"<td>{layer['measured_rows']}</td>"
        f"<td>{_bytes(layer['bytes_before'])}</td><td>{_bytes(layer['bytes_after'])}</td></tr>"
        for layer in layers
    )
    return (
        "<h2>Weights</h2><p>Signal over quantization noise of each weight, in decibels: 6 dB is one bit. Where a "
        "weight is large, a sample of its rows is measured.</p>"
        f"{_bars([(layer['name'], [layer['sqnr_db']]) for layer in layers], ['SQNR, dB'])}"
        '<div class="scroll"><table><tr><th>layer</th><th>shape</th><th>SQNR dB</th><th>max error</th>'
        "<th>rows measured</th>"
        f"<th>before</th><th>after</th></tr>{rows}</table></div>"
    )


def _outputs(evaluation: dict[str, Any] | None) -> str:
    if not evaluation or not evaluation.get("layers"):
        return ""
    return (
        "<h2>Outputs</h2><p>Signal over noise of each layer's output in the running model, the noise of all layers "
        f"before it included.</p>{_bars([(n, [v]) for n, v in evaluation['layers'].items()], ['SQNR, dB'])}"
    )


def _outliers(layers: list[dict[str, Any]], smoothing: dict[str, Any] | None) -> str:
    known = [layer for layer in layers if "outlier_before" in layer]
    if not known:
        return ""
    bars = [(layer["name"], [layer["outlier_before"], layer["outlier_after"]]) for layer in known]
    alpha = (smoothing or {}).get("alpha")
    note = f" Smoothing strength alpha: {escape(str(alpha))}." if alpha is not None else ""
    return (
        "<h2>Activation outliers</h2><p>The largest channel of each layer's input over the typical one: what a scale "
        f"shared by all channels has to bear.{note}</p>{_bars(bars, ['before', 'after smoothing'], log=True)}"
    )


def _smoothing(smoothing: dict[str, Any] | None) -> str:
    if not smoothing or "folded" not in smoothing:
        return ""
    gate = smoothing["gate"]
    folded = "".join(
        f'<tr><td>{escape(fold["from"])}</td><td class="text">{escape(", ".join(fold["into"]))}</td></tr>'
        for fold in smoothing["folded"]
    )
    reasons = "".join(
        f'<tr><td>{escape(name)}</td><td class="text">{escape(why)}</td></tr>'
        for name, why in smoothing["not_folded"].items()
    )
    left = (
        f"<p>{len(smoothing['not_folded'])} layers were left unsmoothed, because folding is not provable there:</p>"
        f'<div class="scroll names"><table><tr><th>layer</th><th class="text">why</th></tr>{reasons}</table></div>'
    )
    return (
        f"<h2>Smoothing</h2><p>{len(smoothing['folded'])} folds, proved on the traced graph. The smoothed float model "
        f"differs from the original by {gate['largest_difference']:.1e} of an output's size at most (allowed "
        f"{gate['tolerance']:.0e}, computed in {escape(gate['dtype'])}).</p>"
        '<div class="scroll names"><table><tr><th>divided</th><th class="text">multiplied</th></tr>'
        f"{folded}</table></div>"
        f"{left if smoothing['not_folded'] else ''}"
    )


def _left(content: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{escape(entry["name"])}</td><td class="text">{escape(entry["reason"])}</td></tr>'
        for entry in content["left"]
    )
    table = (
        f'<div class="scroll names"><table><tr><th>module</th><th class="text">why</th></tr>{rows}</table></div>'
        if rows
        else "<p>Nothing.</p>"
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in content.get("notes", []))
    found = escape(content["linears_found_by"])
    return f"<h2>Left in floating point</h2><p>Linears were found by {found}.</p>{notes}{table}"


# -- drawing -----------------------------------------------------------------------------------------------------


def _bars(rows: list[tuple[str, list[float | None]]], series: list[str], *, log: bool = False) -> str:
    """A column a layer, in the order of the model; names appear on hover, since hundreds do not fit."""
    values = [v for _, row in rows for v in row if v is not None and math.isfinite(v) and (v > 0 or not log)]
    if not values:
        return ""
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
    shapes = []
    for tick in ticks:
        at = y(tick)
        shapes.append(f'<line x1="{left}" x2="{width}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>')
        shapes.append(f'<text x="{left - 6}" y="{max(at, 8) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    thick = max(0.8, slot * 0.8 / len(series))
    for i, (name, row) in enumerate(rows):
        for j, value in enumerate(row):
            if value is None or not math.isfinite(value) or (log and value <= 0):
                continue
            x, edge = left + i * slot + slot * 0.1 + j * thick, y(value)
            shapes.append(
                f'<rect x="{x:.1f}" y="{edge:.1f}" width="{thick:.1f}" height="{max(0.5, height - bottom - edge):.1f}" '
                f'fill="var(--{"ab"[j]})"><title>{escape(name)}: {value:.4g}</title></rect>'
            )
    shapes.append(f'<text x="{left}" y="{height - 4}">first layer</text>')
    shapes.append(f'<text x="{width}" y="{height - 4}" text-anchor="end">last layer</text>')
    legend = "".join(f'<i style="background: var(--{"ab"[j]})"></i>{escape(name)}' for j, name in enumerate(series))
    svg = f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(shapes)}</svg>'
    return f'<p class="legend dim">{legend}</p><div class="plot">{svg}</div>'


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
