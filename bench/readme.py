"""Writes README's figures from bench/results, where `python -m bench AREA --json bench/results/AREA.json` puts them."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import linear_table

Run = dict[str, Any]
#: What a reader compares first; the file has the rest.
SHOWN = [
    ("quantize", "tensor", "f32"),
    ("quantize", "channel 0", "f32"),
    ("quantize", "token", "bf16"),
    ("dequantize", "tensor", "f32"),
    ("fake_quantize", "tensor", "f32"),
    ("fake_quantize", "tensor", "bf16"),
    ("fake_quantize_backward", "tensor", "f32"),
    ("dynamic_quantize", "token", "f32"),
    ("dynamic_quantize", "token", "bf16"),
]


def cpu_section(run: Run) -> str:
    rows = {(r["op"], r["scope"], r["element"]): r for r in run["rows"] if r["quantized"] == "s8"}
    size = " x ".join(map(str, run["shape"]))
    lines = [
        f"{run['machine']}, {run['isa']}, {run['threads']} threads, torch {run['torch']}, {size} elements to s8, "
        "one run; GB/s counts every byte read and written once, the last columns how many times faster than a peer:",
        "",
        "| operation | scope | from | GB/s | of a copy | torch | torch.compile | ONNX Runtime |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for op, scope, element in SHOWN:
        row = rows[op, scope, element]
        ours = row["seconds"]["ours"]
        peers = [row["seconds"].get(peer) for peer in ("torch", "torch.compile", "onnxruntime")]
        ratios = " | ".join("" if peer is None else f"{peer / ours:.1f}x" for peer in peers)
        cells = f"{row['moved'] / ours / 1e9:.0f} | {row['ratio_to_copy']:.0%} | {ratios}"
        lines.append(f"| {op} | {scope} | {element} | {cells} |")
    linears = ", ".join(f"{x['ratio']:.1f}x at {x['m']} x {x['n']} x {x['k']}" for x in run["linears"])
    lines += ["", f"`quantized_linear` over `F.linear` in f32: {linears}."]
    return "\n".join(lines)


#: Columns of README's GPU table.
SCOPES = ["tensor", "token", "channel 0", "channel -1", "group 128", "group 128 axis 0"]


def gpu_section(run: Run) -> str:
    lines = run["lines"]
    reached = sum(line["share"] >= line["bar"] for line in lines)
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    shares = {(x["op"], x["scope"]): x["share"] for x in lines if (x["element"], x["quantized"]) == ("bf16", "s8")}
    text = [
        f"{run['device']}, {versions}, {run['date']}, one run, 256 MiB or more to read, bf16 and s8: the share of what "
        f"a copy moves ({run['copy_terabytes']:.2f} TB/s). Over all types, {reached} of {len(lines)} "
        "rows reach their bar, 95 % (85 % for f64 and strided segments). A checked launch takes "
        f"{run['host_microseconds']:.1f} us of the host.",
        "",
        f"| operation | {' | '.join(SCOPES)} |",
        "| --- |" + " --- |" * len(SCOPES),
    ]
    for op in dict.fromkeys(op for op, _ in shares):
        text.append(f"| {op} | {' | '.join(f'{shares[op, scope]:.0%}' for scope in SCOPES)} |")
    beside = [said for peer, who in PEERS.items() if (said := _times_as_long(lines, peer, who))]
    return "\n".join([*text, *(["", f"In the same run, {' and '.join(beside)} as long."] if beside else [])])


#: Who was measured beside ours, in words.
PEERS = {"torch.compile": "the kernels torch.compile makes of the formulas take", "torch": "torch's own"}


def _times_as_long(lines: list[Run], peer: str, who: str) -> str:
    ratios = [line["peers"][peer] / line["microseconds"] for line in lines if peer in line["peers"]]
    if not ratios:
        return ""
    return (
        f"{who} {min(ratios):.2f} to {max(ratios):.1f} times (median {statistics.median(ratios):.2f} of {len(ratios)})"
    )


def small_section(run: Run) -> str:
    lines = run["lines"]
    ratios = [line["ratio"] for line in lines]
    slower = sum(ratio < 1 for ratio in ratios)
    worst = f", by at most {1 - min(ratios):.1%}" if slower else ""
    shapes = list(dict.fromkeys(tuple(line["shape"]) for line in lines))
    text = [
        f"Tensors of {' x '.join(map(str, shapes[0]))} and less, {run['date']}: how many times as fast as "
        "torch.compile's kernel for the same formula, which need not give the same bits; on the device alone, with "
        "data from memory. "
        f"The least and the median over scopes, bf16 and f32; of {len(lines)} rows {slower} are slower{worst}.",
        "",
        f"| operation | {' | '.join(' x '.join(map(str, shape)) for shape in shapes)} |",
        "| --- |" + " --- |" * len(shapes),
    ]
    for op in dict.fromkeys(line["op"] for line in lines):
        found = [[x["ratio"] for x in lines if x["op"] == op and tuple(x["shape"]) == shape] for shape in shapes]
        cells = (f"{min(each):.2f} to {statistics.median(each):.2f}" if each else "" for each in found)
        text.append(f"| {op} | {' | '.join(cells)} |")
    return "\n".join(text)


#: Areas with a section in README; a run that is not committed leaves its section as it is.
SECTIONS: dict[str, Callable[[Run], str]] = {
    "cpu": cpu_section,
    "gpu": gpu_section,
    "gpu-small": small_section,
    "linear": linear_table.section,
}
#: Areas with pages and plots beside their run.
PAGES: dict[str, Callable[[Run, Path], None]] = {"linear": linear_table.write}


def committed(root: Path) -> dict[str, Run]:
    """The runs of a repository, by area."""
    paths = {area: root / "bench" / "results" / f"{area}.json" for area in SECTIONS}
    return {area: json.loads(path.read_text()) for area, path in paths.items() if path.exists()}


def rewritten(readme: str, runs: dict[str, Run]) -> str:
    """README with the section of each run, between its two marks, written anew."""
    for area, run in runs.items():
        begin, end = f"<!-- from bench/results/{area}.json by python -m bench readme -->", "<!-- end -->"
        if begin not in readme:
            raise ValueError(f"README.md: expected the line {begin}, and {end} behind it, where the figures go")
        before, rest = readme.split(begin, 1)
        readme = f"{before}{begin}\n{SECTIONS[area](run)}\n{end}{rest.split(end, 1)[1]}"
    return readme


def main(argv: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m bench readme", description=__doc__).parse_args(argv)
    root = Path()
    readme, runs = root / "README.md", committed(root)
    readme.write_text(rewritten(readme.read_text(), runs))
    for area in PAGES.keys() & runs.keys():
        PAGES[area](runs[area], root)
