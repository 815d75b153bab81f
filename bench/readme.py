"""Writes README's figures from a committed bench run: `python -m bench cpu --json docs/bench-cpu.json`, then this."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUN = Path("docs/bench-cpu.json")
BEGIN, END = "<!-- from docs/bench-cpu.json by python -m bench readme -->", "<!-- end -->"
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


def section(run: dict[str, Any]) -> str:
    rows = {(r["op"], r["scope"], r["element"]): r for r in run["rows"] if r["quantized"] == "s8"}
    size = " x ".join(map(str, run["shape"]))
    lines = [
        BEGIN,
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
    lines += ["", f"`quantized_linear` over `F.linear` in f32: {linears}.", END]
    return "\n".join(lines)


def rewritten(readme: str, run: dict[str, Any]) -> str:
    before, rest = readme.split(BEGIN, 1)
    return before + section(run) + rest.split(END, 1)[1]


def main(argv: Sequence[str]) -> None:
    readme = Path("README.md")
    readme.write_text(rewritten(readme.read_text(), json.loads(RUN.read_text())))
