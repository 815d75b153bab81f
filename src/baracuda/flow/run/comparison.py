"""Several reports in one page: `baracuda compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint.directory import REPORT
from ..errors import FlowError
from .charts import bars
from .markup import document, element, join
from .page import SCRIPT, STYLE, byte_count, number, table
from .report import natural, read_report
from .verdict import verdict

DATA = "evaluated on"
INCOMPARABLE = "The checkpoints were evaluated on different data: their figures cannot be compared."


def differ(rows: list[list[str]]) -> bool:
    """Whether the rows of `compare_reports` are of different evaluation data."""
    head, *checkpoints = rows
    return DATA in head and len({row[head.index(DATA)] for row in checkpoints} - {"-"}) > 1


def compare_reports(outs: list[str | Path]) -> tuple[list[list[str]], str]:
    """A table, a row for each checkpoint behind its header, and the page that shows it with every layer."""
    if len(outs) < 2:
        raise FlowError(f"expected at least two checkpoints to compare, got {len(outs)}; name another")
    missing = [str(out) for out in outs if not (Path(out) / REPORT).is_file()]
    if missing:
        raise FlowError(f"{missing[0]}: no {REPORT} there; `baracuda quantize` writes one")
    names = _names([Path(out) for out in outs])
    contents = [read_report(Path(out)) for out in outs]
    shown = [(title, read) for title, read in _FIGURES if any(read(content) is not None for content in contents)]
    rows = [["checkpoint", *(title for title, _ in shown)]]
    rows += [
        [name, *(value if (value := read(content)) is not None else "-" for _, read in shown)]
        for name, content in zip(names, contents, strict=True)
    ]
    return rows, _page(names, contents, rows)


def _names(outs: list[Path]) -> list[str]:
    """The last part of each path, or all of it where two are alike."""
    short = [out.resolve().name for out in outs]
    return short if len(set(short)) == len(short) else [str(out) for out in outs]


def _figure(*path: str, form: str) -> Callable[[dict[str, Any]], str | None]:
    def read(content: dict[str, Any]) -> str | None:
        value: Any = content
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else format(value, form)

    return read


def _lowest(content: dict[str, Any]) -> str | None:
    known = [layer["sqnr_db"] for layer in content["layers"] if layer["sqnr_db"] is not None]
    return f"{min(known):.1f}" if known else None


_FIGURES: list[tuple[str, Callable[[dict[str, Any]], str | None]]] = [
    ("verdict", lambda content: verdict(content).grade),
    ("scheme", lambda content: str(content["scheme"]["name"])),
    ("size", lambda content: byte_count(content["size"]["after"])),
    ("of the float size", _figure("size", "ratio", form=".0%")),
    ("Linears left", lambda content: str(len(content["left"]))),
    ("lowest SQNR dB", _lowest),
    (DATA, _figure("evaluation", "data", form="")),
    ("KL", _figure("evaluation", "kl", form=".2e")),
    ("same top token", _figure("evaluation", "top1_agreement", form=".1%")),
    ("perplexity", _figure("evaluation", "perplexity", "quantized", form=".4g")),
    ("float perplexity", _figure("evaluation", "perplexity", "float", form=".4g")),
    ("least cosine", _figure("evaluation", "cosine", "min", form=".4f")),
    ("seconds", _figure("run", "seconds", form=".1f")),
]


def _page(names: list[str], contents: list[dict[str, Any]], rows: list[list[str]]) -> str:
    measured = [
        {layer["name"]: number(layer["sqnr_db"], ".1f", "exact") for layer in content["layers"]} for content in contents
    ]
    layers = sorted({name for found in measured for name in found}, key=natural)
    each = [(layer, *(found.get(layer, "float") for found in measured)) for layer in layers]
    kls = [(name, [(content["evaluation"] or {}).get("kl")]) for name, content in zip(names, contents, strict=True)]
    sizes = [(name, [content["size"]["after"] / 1e6]) for name, content in zip(names, contents, strict=True)]
    return document(
        "Checkpoints compared",
        STYLE,
        element("h1", f"{len(names)} checkpoints compared"),
        element("p", INCOMPARABLE, class_="verdict poor") if differ(rows) else "",
        table(("", *names), list(zip(*rows, strict=True))[1:]),
        join(element("h2", "KL divergence from the float model"), bars(kls, ["KL, smaller is better"])),
        join(element("h2", "Size"), bars(sizes, ["MB"])),
        element("h2", "SQNR of every weight, in decibels"),
        table(("layer", *names), each),
        script=SCRIPT,
    )
