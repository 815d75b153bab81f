"""The report as one page: no fonts, no files beside it, no script but its own; bars are SVG, drawn from the numbers.

Everything is made by `element`, which escapes each value that is not markup: names in files are not to be trusted. The
page's policy allows this style and this script and nothing else, so colours are classes, never `style` attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .charts import bars
from .command import repeat_command
from .data import BUILTIN
from .markup import Markup, document, element, join
from .verdict import rows as verdict_rows
from .verdict import verdict

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667085; --line: #d8dee8; --paper: #fff; --card: #f6f8fb;
        --a: #2563eb; --b: #f59e0b; --good: #067647; --fair: #b54708; --poor: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --dim: #98a2b3; --line: #344054; --paper: #101828;
        --card: #182230; --a: #6ea8fe; --b: #fbbf24; --good: #47cd89; --fair: #fdb022; --poor: #f97066; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       padding: 2rem 1.5rem 4rem; max-width: 68rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; } p { margin: .4rem 0; }
.dim { color: var(--dim); } .cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { background: var(--card); border-radius: .6rem; padding: .7rem 1rem; flex: 1 1 7.5rem; max-width: 14rem; }
.card b { display: block; font-size: 1.35rem; } .card span { color: var(--dim); font-size: .85rem; }
.verdict { border-left: .4rem solid var(--dim); background: var(--card); border-radius: .4rem; margin: 1.2rem 0 0;
           padding: .7rem 1rem; } .verdict p b { font-size: 1.3rem; text-transform: capitalize; }
.verdict.good { border-color: var(--good); } .verdict.fair { border-color: var(--fair); }
.verdict.poor { border-color: var(--poor); } b.good { color: var(--good); } b.fair { color: var(--fair); }
b.poor { color: var(--poor); } td b { white-space: nowrap; } .names td { white-space: normal; vertical-align: top; }
.verdict td:nth-child(2) { white-space: nowrap; }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; } td.text { white-space: normal; }
th { position: sticky; top: 0; background: var(--card); } td { overflow-wrap: anywhere; }
th[tabindex] { cursor: pointer; } th[aria-sort]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
input { font: inherit; font-size: .85rem; padding: .25rem .6rem; margin: .2rem 0 .5rem; width: 16rem; max-width: 100%;
        border: 1px solid var(--line); border-radius: .4rem; background: var(--paper); color: var(--ink); }
code { font: .85rem/1.5 ui-monospace, monospace; background: var(--card); border-radius: .3rem; padding: .1rem .3rem;
       overflow-wrap: anywhere; } p.command code { display: block; padding: .6rem .8rem; }
.plot { margin-bottom: .8rem; } svg { width: 100%; min-width: 40rem; height: auto; display: block; padding: .4rem 0; }
@media (max-width: 40rem) { body { padding: 1.2rem .9rem 3rem; } th, td { padding: .25rem .5rem; }
  .names td { min-width: 6.3rem; } .verdict .names td { min-width: 0; } }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } .legend i { display: inline-block; width: .8em;
height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
.a { background: var(--a); fill: var(--a); } .b { background: var(--b); fill: var(--b); }
@media print { :root { color-scheme: light; --ink: #000; --dim: #444; --line: #bbb; --paper: #fff; --card: #f4f4f4;
  --good: #067647; --fair: #b54708; --poor: #b42318; --a: #2563eb; --b: #f59e0b; } body { max-width: none; padding: 0; }
  .scroll { max-height: none; overflow: visible; } input { display: none; }
  tr, .card, .verdict { break-inside: avoid; } }
"""

#: Sorts a table by the column whose head is clicked, and filters the rows of long ones. It is a constant: the page's
#: policy allows this text by its hash and no other script. Without scripts, the tables stand as they are.
SCRIPT = """
const units = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
const value = (cell) => {
  const found = cell.textContent.match(/^(-?[0-9.]+(?:e[+-]?[0-9]+)?)\\s*(%|B|kB|MB|GB|TB|dB)?$/);
  return found ? Number(found[1]) * (units[found[2]] || 1) : null;
};
const compare = (a, b) => {
  const [x, y] = [value(a), value(b)];
  if (x !== null && y !== null) return x - y;
  if (x !== null || y !== null) return x !== null ? -1 : 1;
  return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
};
for (const table of document.querySelectorAll("table")) {
  const [head, ...rows] = table.rows;
  if (rows.length < 2) continue;
  [...head.cells].forEach((cell, i) => {
    const sort = () => {
      const up = cell.getAttribute("aria-sort") !== "ascending";
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      rows.sort((a, b) => (up ? 1 : -1) * compare(a.cells[i], b.cells[i]));
      table.tBodies[0].append(...rows);
    };
    cell.tabIndex = 0;
    cell.title = "sort by this column";
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
  if (rows.length < 8) continue;
  const search = document.createElement("input");
  search.type = "search";
  search.placeholder = "find in " + rows.length + " rows";
  search.setAttribute("aria-label", search.placeholder);
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
  table.parentElement.before(search);
}
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
        _verdict(content),
        _cards(content),
        _notes(content),
        _samples(content["evaluation"]),
        _sizes(content),
        _weights(content["layers"], (content["evaluation"] or {}).get("layers", {})),
        _outputs(content["evaluation"]),
        _outliers(content["layers"], content["smoothing"]),
        _smoothing(content["smoothing"]),
        _left(content),
        _repeat(content),
    ]
    return document(title, STYLE, *(join("\n", part) for part in parts if part), "\n", script=SCRIPT)


def _verdict(content: dict[str, Any]) -> Markup:
    """The grade, and the figures it comes from with their limits."""
    found, evaluation = verdict(content), content["evaluation"]
    known = found.grade if found.figures and not found.flattered else None
    parts = [element("p", element("b", found.title, class_=known), " ", found.advice)]
    if evaluation is None:
        parts.append(
            element("p", "No evaluation data was given: accuracy below is that of the weights alone.", class_="dim")
        )
    else:
        data = "the text that comes with baracuda" if evaluation["data"] == BUILTIN else evaluation["data"]
        parts.append(element("p", f"Evaluated on {evaluation['tokens']} tokens of {data}.", class_="dim"))
    if found.figures:
        graded = [
            (name, value, element("b", grade, class_=grade), limits)
            for name, value, grade, limits in verdict_rows(found)
        ]
        parts.append(table(("figure", "here", "grade", "limits"), graded, words=True))
    return element("div", *parts, class_=f"verdict {known or ''}".strip())


def _notes(content: dict[str, Any]) -> Markup:
    notes = content.get("notes", [])
    if not notes:
        return Markup()
    return join(element("h2", "What to know"), element("ul", *(element("li", note) for note in notes)))


def _samples(evaluation: dict[str, Any] | None) -> Markup:
    samples = (evaluation or {}).get("samples") or []
    if not samples:
        return Markup()
    return join(
        element("h2", "What both models say"),
        element("p", "The most likely continuation of some beginnings from the evaluation data."),
        table(
            ("prompt", "float model", "quantized model"),
            [(sample["prompt"], sample["float"], sample["quantized"]) for sample in samples],
            words=True,
        ),
    )


def _sizes(content: dict[str, Any]) -> Markup:
    size, layers = content["size"], content["layers"]
    before, after = (sum(layer[name] for layer in layers) for name in ("bytes_before", "bytes_after"))
    rest = [(max(0, size["before"] - before), max(0, size["after"] - after))]
    rows = [
        (f"{len(layers)} quantized Linears", before, after),
        ("everything else", *rest[0]),
        ("the checkpoint", size["before"], size["after"]),
    ]
    return join(
        element("h2", "Sizes"),
        table(
            ("part", "before", "after", "ratio"),
            [(name, byte_count(old), byte_count(new), f"{new / old:.0%}" if old else "-") for name, old, new in rows],
        ),
    )


def _repeat(content: dict[str, Any]) -> Markup:
    command = repeat_command(content)
    if command is None:
        return Markup()
    run = content["run"]
    versions = ", ".join(f"{name} {run[name]}" for name in ("torch", "python") if name in run)
    return join(
        element("h2", "Make it again"),
        element("p", element("code", command), class_="command"),
        element("p", f"baracuda {content['baracuda']}, {versions}.", class_="dim"),
    )


def _cards(content: dict[str, Any]) -> Markup:
    size, layers, evaluation = content["size"], content["layers"], content["evaluation"] or {}
    known = [layer["sqnr_db"] for layer in layers if layer["sqnr_db"] is not None]
    cards = [
        (f"{size['ratio']:.0%}", f"of the size: {byte_count(size['before'])} to {byte_count(size['after'])}"),
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
        cards.append((quantized, f"tokens/s evaluated, float {exact}"))
    inner = (element("div", element("b", big), element("span", small), class_="card") for big, small in cards)
    return element("div", *inner, class_="cards")


def _weights(layers: list[dict[str, Any]], outputs: dict[str, float | None]) -> Markup:
    worst = sorted(layers, key=lambda layer: (layer["sqnr_db"] is None, layer["sqnr_db"] or 0.0))

    def output(name: str) -> str:
        return number(outputs[name], ".1f", "exact") if name in outputs else "-"

    rows = (
        (
            layer["name"],
            " x ".join(map(str, layer["shape"])),
            number(layer["sqnr_db"], ".1f", "exact"),
            *(
                (number(outputs[layer["name"]], ".1f", "exact") if layer["name"] in outputs else "-",)
                if outputs
                else ()
            ),
            number(layer["max_error"], ".2e"),
            layer["measured_rows"],
            byte_count(layer["bytes_before"]),
            byte_count(layer["bytes_after"]),
        )
        for layer in worst
    )
    measured = ("SQNR dB", "output dB") if outputs else ("SQNR dB",)
    columns = ("layer", "shape", *measured, "max error", "rows measured", "before", "after")
    return join(
        element("h2", "Weights, worst first"),
        element(
            "p",
            "Signal over quantization noise of each weight, in decibels: 6 dB is one bit. Where a weight is large, a "
            "sample of its rows is measured. A layer that is much worse than the others can stay in floating point: ",
            element("code", "--ignore NAME"),
            ".",
        ),
        bars([(layer["name"], [layer["sqnr_db"]]) for layer in worst], ["SQNR of the weight, dB"]),
        table(columns, rows),
    )


def _outputs(evaluation: dict[str, Any] | None) -> Markup:
    if not evaluation or not evaluation.get("layers"):
        return Markup()
    worst = sorted(evaluation["layers"].items(), key=lambda item: (item[1] is None, item[1] or 0.0))
    return join(
        element("h2", "Outputs, worst first"),
        element(
            "p",
            "Signal over noise of each layer's output in the running model, the noise of all layers before it "
            "included.",
        ),
        bars([(name, [value]) for name, value in worst], ["SQNR of the output, dB"]),
    )


def _outliers(layers: list[dict[str, Any]], smoothing: dict[str, Any] | None) -> Markup:
    known = [layer for layer in layers if "outlier_before" in layer and "outlier_after" in layer]
    if not known:
        return Markup()
    known.sort(key=lambda layer: -(layer["outlier_after"] or 0.0))
    drawn = [(layer["name"], [layer["outlier_before"], layer["outlier_after"]]) for layer in known]
    alpha = (smoothing or {}).get("alpha")
    note = f" Smoothing strength alpha: {alpha}." if alpha is not None else ""
    return join(
        element("h2", "Activation outliers"),
        element(
            "p",
            "The largest channel of each layer's input over the typical one: what a scale shared by all channels has "
            f"to bear.{note}",
        ),
        bars(drawn, ["before", "after smoothing"], log=True),
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
        table(("divided", "multiplied"), folded, words=True),
        join(element("p", left), table(("layer", "why"), reasons.items(), words=True)) if reasons else "",
    )


def _left(content: dict[str, Any]) -> Markup:
    rows = [(entry["name"], entry["reason"]) for entry in content["left"]]
    return join(
        element("h2", "Left in floating point"),
        element("p", f"Linears were found by {content['linears_found_by']}."),
        table(("module", "why"), rows, words=True) if rows else element("p", "Nothing."),
    )


# -- drawing -----------------------------------------------------------------------------------------------------


def table(columns: Iterable[object], rows: Iterable[Iterable[object]], *, words: bool = False) -> Markup:
    """A table that scrolls; with `words`, all columns but the first hold sentences."""

    def cells(tag: str, row: Iterable[object]) -> Markup:
        return element(
            "tr", *(element(tag, cell, class_="text" if words and i else None) for i, cell in enumerate(row))
        )

    table = element("table", cells("th", columns), *(cells("td", row) for row in rows))
    return element("div", table, class_="scroll names" if words else "scroll")


def number(value: float | None, form: str, otherwise: str = "not finite") -> str:
    """As text; JSON has null for what is not finite."""
    return otherwise if value is None else format(value, form)


def byte_count(count: float) -> str:
    """Bytes in words: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
