"""`baracuda eval` and `baracuda bench`: what quantization cost and what it gained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from .terminal import MODEL, Device, Dtype, Json, Output, Quiet, bars, dtype_named, errors_told, stderr


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help=MODEL)],
    text: Annotated[Path, typer.Option(help="Texts (.txt, .jsonl, .parquet), tokens (.safetensors), or builtin.")],
    against: Annotated[str | None, typer.Option(help="The float model, to compare with.")] = None,
    samples: Annotated[int, typer.Option(help="Sequences to evaluate with.")] = 128,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    device: Device = "cpu",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a model on a text: its perplexity, and with --against what quantization cost it."""
    output = Output(json=json, quiet=quiet)
    with errors_told():
        from baracuda.flow import evaluate_checkpoint

        with bars(output) as progress:
            sizes = {"samples": samples, "sequence_length": sequence_length}
            found = evaluate_checkpoint(checkpoint, text, against=against, device=device, progress=progress, **sizes)
    output.show(figures(found))
    output.data(found)


def bench(
    model_dir: Annotated[str, typer.Argument(help=MODEL)],
    quantized_dir: Annotated[str | None, typer.Argument(help="The quantized checkpoint to put beside it.")] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that is prefilled.")] = 512,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate.")] = 32,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure tokens a second of prefill and decode, and memory, on this machine; two models in turns in one run."""
    output = Output(json=json, quiet=quiet)
    with errors_told(), stderr.status("") as status:
        from baracuda.flow.run.speed import advice, compare_speed

        say = lambda what: status.update(escape(what))  # noqa: E731
        sizes = {"batch": batch, "length": length, "tokens": tokens}
        rows = compare_speed(model_dir, quantized_dir, device=device, dtype=dtype_named(dtype), progress=say, **sizes)
        told = advice(rows, device)
    table = Table("model", "memory", "prefill", "decode", *(["decode, compiled"] if rows[0].compiled else []))
    first = rows[0]
    for row in rows:
        cells = [f"{row.memory / 2**20:.0f} MiB ({row.memory / first.memory:.2f}x)"]
        for name in ("prefill", "decode", "compiled"):
            if (value := getattr(row, name)) is not None:
                cells.append(f"{value:.1f} tokens/s ({value / getattr(first, name):.2f}x)")
        table.add_row(escape(row.name), *cells)
    output.show(table)
    if told is not None:
        output.show(f"note: {told}")
    output.data([asdict(row) for row in rows])


def figures(found: dict[str, Any]) -> Table:
    """What was measured, a figure a row."""
    from baracuda.flow.run.overlap import warning

    rows = Table("", "", box=SIMPLE_HEAD, show_header=False)
    perceives = "inputs" in found
    rows.add_row("outputs" if perceives else "tokens", str(found["tokens"]))
    perplexity = found.get("perplexity")
    if isinstance(perplexity, dict):
        rows.add_row("perplexity, float", f"{perplexity['float']:.3f}")
        rows.add_row("perplexity, quantized", f"{perplexity['quantized']:.3f}")
    elif perplexity is not None:
        rows.add_row("perplexity", f"{perplexity:.3f}")
    if "kl" in found:
        rows.add_row("KL divergence", f"{found['kl']:.5f}")
    if "top1_agreement" in found:
        same = "same largest output" if perceives else "same most likely token"
        rows.add_row(same, f"{100 * found['top1_agreement']:.2f} %")
    if "cosine" in found:
        rows.add_row("cosine, mean", f"{found['cosine']['mean']:.5f}")
    for token in found.get("worst", [])[:3]:
        where = f"sequence {token['sequence']}, token {token['position']}"
        context = f"...{token['before'][-40:]!r} -> {token['text']!r}" if token.get("before") else ""
        rows.add_row("worst token", escape(f"KL {token['kl']:.3g}, {where} {context}"))
    noisy = sorted((db, name) for name, db in found.get("layers", {}).items() if db is not None)
    for db, name in noisy[:3]:
        rows.add_row("noisiest layer", escape(f"{name}: {db:.1f} dB"))
    if (told := warning(found)) is not None:
        rows.add_row("warning", told)
    return rows
