"""Writes README's table from bench/results, where `python -m bench AREA --json bench/results/AREA.json` puts runs."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import linear_table
from ._decoder import LATE, LLAMA_8B, SMOLLM2_135M
from .linear_table import markdown

Run = dict[str, Any]
#: What, where, beside what, and how many times as fast.
Row = tuple[str, str, str, str]
BEGIN, END = "<!-- from bench/results by python -m bench readme -->", "<!-- end -->"
#: Up to this many tokens a linear is bound by reading its weight, as it is when a model generates.
FEW_TOKENS = 64
#: The sizes and names of `bench model`.
ONE, AFTER, FLOATS = "batch 1", "after 512 tokens", ("f32", "bf16", LATE)
#: How the rows of other programs begin.
OTHERS = "llama.cpp"


def model_rows(run: Run) -> Iterable[Row]:
    """A whole decoder on a GPU: one sequence generated, compiled where that was measured; then its longest prefill."""
    where = f"{run['device']}, {shapes_of(run)}"
    compiled = {row["size"] for row in run["rows"] if row["part"] == "decode-compiled"}
    how, part = ("compiled", "decode-compiled") if ONE in compiled else ("eager", "decode")
    if gains := _gains(run, part, ONE):
        late = _gains(run, part, ONE, LATE)
        gains += f"; beside bf16 that does not wait for its tokens either: {late}" if late else ""
        yield f"decode of a whole model, batch 1, {how}", where, "the same model in bf16", gains
    sizes = [row["size"] for row in run["rows"] if row["part"] == "prefill"]
    if sizes and (gains := _gains(run, "prefill", sizes[-1])):
        yield f"prefill of a whole model, {sizes[-1]} tokens", where, "the same model in bf16", gains


def model_cpu_rows(run: Run) -> Iterable[Row]:
    """A whole decoder on a CPU: one row, decode after a short and a long prompt, and prefill."""
    parts = {"decode": ("decode", ONE), AFTER: ("decode", f"{ONE}, {AFTER}"), "prefill": ("prefill", "1 x 512")}
    found = [(name, _gains(run, part, size)) for name, (part, size) in parts.items()]
    gains = "; ".join(f"{name}: {gained}" for name, gained in found if gained)
    if gains:
        device = "a CPU" if run["device"] == "cpu" else run["device"]
        yield "a whole model on a CPU, batch 1", f"{device}, {shapes_of(run)}", "the same model in f32", gains


def _gains(run: Run, part: str, size: str, beside: str | None = None) -> str:
    """Each model of ours, and the fastest of other programs, in times as fast as one, or the run's float model."""
    rows = {row["model"]: row for row in run["rows"] if (row["part"], row["size"]) == (part, size)}
    given = [row["ms"] for name, row in rows.items() if (name == beside if beside else row["ratio"] == 1)]
    if not given:
        return ""
    gains = {name: given[0] / row["ms"] for name, row in rows.items() if name not in FLOATS}
    others = {name: gain for name, gain in gains.items() if name.startswith(OTHERS)}
    best = sorted(others, key=lambda name: -others[name])[:1]
    return ", ".join(f"{name} {gain:.2f}x" for name, gain in gains.items() if name not in others or name in best)


def shapes_of(run: Run) -> str:
    """The model of a run of `bench model`, in words."""
    shapes = {key: value for key, value in run["shapes"].items() if key != "dtype"}
    if "directory" in shapes:
        return Path(shapes["directory"]).name
    known = {"Llama-3 8B": LLAMA_8B, "SmolLM2-135M": SMOLLM2_135M}
    names = [name for name, each in known.items() if asdict(each) == shapes]
    return f"the shapes of {names[0]}" if names else f"{shapes['layers']} layers of {shapes['hidden']}"


def linear_rows(run: Run) -> Iterable[Row]:
    """Whole linears, bf16 in and out, on the shapes of Llama-3."""
    for name, few in (("decode", True), ("prefill", False)):
        yield from _linears(run, f"int8 linears, {name}", few, {"linear": ""})


def four_bit_rows(run: Run) -> Iterable[Row]:
    """The same with weights at four bits."""
    yield from _linears(run, "4-bit linears, decode", True, {"w4a8": "w4a8 ", "w4a16": "w4a16 "})


def _linears(run: Run, name: str, few: bool, ours: dict[str, str]) -> Iterable[Row]:
    rows = [row for row in linear_table.rows_of(run) if row.name != "bar" and (row.shape[0] <= FEW_TOKENS) == few]
    rows = [row for row in rows if all(key in row.us for key in ours)]
    tokens = sorted({row.shape[0] for row in rows})
    if rows:
        found = ", ".join(f"{said}{_span([row.ratio(key, 'bf16') for row in rows])}" for key, said in ours.items())
        where = f"{run['device']}, Llama-3 8B and 70B"
        yield f"{name}, {tokens[0]} to {tokens[-1]} tokens", where, "bf16 cuBLAS", found


def gpu_rows(run: Run) -> Iterable[Row]:
    lines = run["lines"]
    copies = [line["share"] for line in lines]
    beside = [ours for line in lines if (ours := _beside(line, "torch.compile"))]
    name = f"quantize, dequantize and their like, {len(lines)} cases"
    share = f"{statistics.median(copies):.0%} of the copy rate, {min(copies):.0%} at least"
    gain = f"; {statistics.median(beside):.2f}x the speed of torch.compile" if beside else ""
    yield name, run["device"], "a copy", f"{share}{gain} (medians)"


def cpu_linear_rows(run: Run) -> Iterable[Row]:
    rows = sorted(run["linears"], key=lambda row: row["m"])
    if rows:
        tokens = " and ".join(str(row["m"]) for row in rows)
        found = ", ".join(f"{row['ratio']:.1f}x" for row in rows)
        yield f"int8 linears on a CPU, {tokens} tokens", _cpu(run), "`F.linear` in f32", found


def cpu_rows(run: Run) -> Iterable[Row]:
    beside = [row["seconds"]["torch"] / row["seconds"]["ours"] for row in run["rows"] if "torch" in row["seconds"]]
    if beside:
        yield f"the same on a CPU, {len(beside)} cases", _cpu(run), "torch", _span(beside)


def _cpu(run: Run) -> str:
    return f"{run['machine']}, {run['isa']}, {run['threads']} threads"


def _beside(line: Run, peer: str) -> float | None:
    return line["peers"][peer] / line["microseconds"] if peer in line["peers"] else None


def _span(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2g}" if min(ratios) >= 10 else f"{min(ratios):.2f}", max(ratios)
    return f"{low} to {high:.0f}x" if high >= 10 else f"{low} to {high:.2f}x"


#: README's table, in its order. Of each line the first area with a committed run gives the rows: linears stand in for
#: whole models that nobody has measured yet.
LINES: tuple[dict[str, Callable[[Run], Iterable[Row]]], ...] = (
    {"model": model_rows, "linear": linear_rows},
    {"linear": four_bit_rows},
    {"model-cpu": model_cpu_rows, "cpu": cpu_linear_rows},
    {"gpu": gpu_rows},
    {"cpu": cpu_rows},
)
AREAS = tuple(dict.fromkeys(area for line in LINES for area in line))
#: Rows that README has room for.
MOST_ROWS = 5
#: Areas with pages and plots beside their run.
PAGES: dict[str, Callable[[Run, Path], None]] = {"linear": linear_table.write}


def committed(root: Path) -> dict[str, Run]:
    """The runs of a repository, by area."""
    paths = {area: root / "bench" / "results" / f"{area}.json" for area in AREAS}
    return {area: json.loads(path.read_text()) for area, path in paths.items() if path.exists()}


def section(runs: dict[str, Run]) -> str:
    """README's table: a line for each thing that a reader compares first."""
    rows: list[list[str]] = []
    for line in LINES:
        found = ([list(row) for row in read(runs[area])] for area, read in line.items() if area in runs)
        rows += next((each for each in found if each), [])
    return markdown([["what", "where", "beside", "times as fast"], *rows[:MOST_ROWS]])


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
