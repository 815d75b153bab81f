"""Writes README's table from bench/results, where `python -m bench AREA --json bench/results/AREA.json` puts runs."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from . import linear_table
from .linear_table import markdown

Run = dict[str, Any]
#: What, where, beside what, and how many times as fast.
Row = tuple[str, str, str, str]
BEGIN, END = "<!-- from bench/results by python -m bench readme -->", "<!-- end -->"
#: Up to this many tokens a linear is bound by reading its weight, as it is when a model generates.
FEW_TOKENS = 64


def model_rows(run: Run) -> Iterable[Row]:
    """Whole models: the least and the greatest gain of each format, by part."""
    where = f"{run['device']}, {run['shapes']}"
    for part in dict.fromkeys(row["part"] for row in run["rows"]):
        ratios: dict[str, list[float]] = {}
        for row in run["rows"]:
            if row["part"] == part and row["ratio"] is not None and row["ratio"] != 1:
                ratios.setdefault(row["model"], []).append(row["ratio"])
        if ratios:
            gains = ", ".join(f"{name} {_span(found)}" for name, found in ratios.items())
            yield f"a whole model, {part}", where, "the float model", gains


def linear_rows(run: Run) -> Iterable[Row]:
    """Whole linears, bf16 in and out, on the shapes of Llama-3."""
    where = f"{run['device']}, Llama-3 8B and 70B"
    rows = [row for row in linear_table.rows_of(run) if row.name != "bar"]
    for name, few in (("int8 linears, prefill", False), ("int8 linears, decode", True)):
        mine = [row for row in rows if (row.shape[0] <= FEW_TOKENS) == few]
        tokens = sorted({row.shape[0] for row in mine})
        if mine:
            found = _span([row.ratio("linear", "bf16") for row in mine])
            yield f"{name}, {tokens[0]} to {tokens[-1]} tokens", where, "bf16 cuBLAS", found


def gpu_rows(run: Run) -> Iterable[Row]:
    lines = run["lines"]
    copies = [line["share"] for line in lines]
    beside = [ours for line in lines if (ours := _beside(line, "torch.compile"))]
    name = f"quantize, dequantize and their like, {len(lines)} cases"
    share = f"{statistics.median(copies):.0%} of the copy rate, {min(copies):.0%} at least"
    gain = f"; {statistics.median(beside):.2f}x the speed of torch.compile" if beside else ""
    yield name, run["device"], "a copy", f"{share}{gain} (medians)"


def cpu_rows(run: Run) -> Iterable[Row]:
    where = f"{run['machine']}, {run['isa']}, {run['threads']} threads"
    beside = [row["seconds"]["torch"] / row["seconds"]["ours"] for row in run["rows"] if "torch" in row["seconds"]]
    if beside:
        yield f"the same on a CPU, {len(beside)} cases", where, "torch", _span(beside)
    if run["linears"]:
        tokens = ", ".join(str(row["m"]) for row in run["linears"])
        found = ", ".join(f"{row['ratio']:.1f}x" for row in run["linears"])
        yield f"int8 linears on a CPU, {tokens} tokens", where, "`F.linear` in f32", found


def _beside(line: Run, peer: str) -> float | None:
    return line["peers"][peer] / line["microseconds"] if peer in line["peers"] else None


def _span(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2g}" if min(ratios) >= 10 else f"{min(ratios):.2f}", max(ratios)
    return f"{low} to {high:.0f}x" if high >= 10 else f"{low} to {high:.2f}x"


#: Areas with rows in README's table, in its order; one without a committed run has none.
AREAS: dict[str, Callable[[Run], Iterable[Row]]] = {
    "model": model_rows,
    "linear": linear_rows,
    "gpu": gpu_rows,
    "cpu": cpu_rows,
}
#: Areas with pages and plots beside their run.
PAGES: dict[str, Callable[[Run, Path], None]] = {"linear": linear_table.write}


def committed(root: Path) -> dict[str, Run]:
    """The runs of a repository, by area."""
    paths = {area: root / "bench" / "results" / f"{area}.json" for area in AREAS}
    return {area: json.loads(path.read_text()) for area, path in paths.items() if path.exists()}


def section(runs: dict[str, Run]) -> str:
    """README's table: a line for each thing that a reader compares first."""
    rows = [list(row) for area, read in AREAS.items() if area in runs for row in read(runs[area])]
    return markdown([["what", "where", "beside", "times as fast"], *rows])


def rewritten(readme: str, runs: dict[str, Run]) -> str:
    """README with the table between its two marks written anew."""
    if BEGIN not in readme:
        raise ValueError(f"README.md: expected the line {BEGIN}, and {END} behind it, where the figures go")
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{section(runs)}\n{END}{rest.split(END, 1)[1]}"


def main(argv: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m bench readme", description=__doc__).parse_args(argv)
    root = Path()
    readme, runs = root / "README.md", committed(root)
    readme.write_text(rewritten(readme.read_text(), runs))
    for area in PAGES.keys() & runs.keys():
        PAGES[area](runs[area], root)
