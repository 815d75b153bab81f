"""`baracuda` on the command line: parses, calls, draws."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from .. import __version__
from ..backends.matrix import SCOPES, Cell, cells
from ..backends.registry import BACKENDS, kernels
from ..core.types import BackendKind
from ..plans.plan import resolve_device
from . import demo, evaluation
from .quantize import quantize
from .terminal import bars, console, errors_told

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _say_version(asked: bool) -> None:
    if asked:
        console.print(f"baracuda {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def baracuda(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Quantization kernels behind plans: the same bits on CPU, GPU and reference."""


@app.command()
def info(
    device: Annotated[str | None, typer.Option(help="The device to ask for; torch's default unless given.")] = None,
) -> None:
    """Show the machine, the versions and which backend serves each operation."""
    target = _device(device)
    console.print(_machine(target))
    table, reasons, empty = _matrix(list(cells(target)), target)
    console.print(table)
    for number, reason in enumerate(reasons, 1):
        console.print(f"  [cyan]{number}[/] {reason}", highlight=False)
    if empty:
        console.print(f"[red]{empty} cells are served by no backend")
        raise typer.Exit(1)


@app.command(name="demo")
def run_demo(
    device: Annotated[str | None, typer.Option(help="Where to run; torch's default device unless given.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to work; a temporary folder unless given.")
    ] = None,
    scopes: Annotated[
        bool, typer.Option(help="What each scope costs and saves on one tensor, instead of a model.")
    ] = False,
) -> None:
    """A first minute: make a small model, quantize it in every scheme, check it and see what it cost."""
    if scopes:
        return demo.run_scopes(console, _device(device))
    with errors_told():
        demo.run(console, _device(device), output)
    return None


app.command()(quantize)


@app.command()
def verify(
    out: Annotated[Path, typer.Argument(help="A quantized checkpoint.")],
    against: Annotated[Path | None, typer.Option(help="The checkpoint it was made from.")] = None,
) -> None:
    """Check every tensor, scale and setting a server relies on; exits with 1 when something is wrong."""
    from ..flow import verify as check
    from ..flow.checkpoint.compare import smoothed

    with errors_told():
        _require_checkpoints(out, against)
        findings = check(out, against)
    if findings:
        # A name that was cut short could not be looked for: what does not fit goes on in the next line.
        columns = (Column(name, overflow="fold") for name in ("finding", "where", "what"))
        table = Table(*columns, title=f"{len(findings)} finding{'s' * (len(findings) > 1)}")
        for finding in findings:
            table.add_row(f"[red]{finding.code}[/]", escape(finding.where), escape(finding.message))
        console.print(table)
        raise typer.Exit(1)
    left = len(smoothed(out)) if against is not None else 0
    note = f"; {left} tensors that smoothing changed were not compared with the original's" if left else ""
    console.print(f"[green]{escape(str(out))}: nothing is wrong{note}[/]", highlight=False, soft_wrap=True)


@app.command("eval")
def evaluate_(
    checkpoint: Annotated[Path, typer.Argument(help="A model directory that baracuda or transformers loads.")],
    text: Annotated[Path, typer.Option(help="Texts (.txt, .jsonl) or tokens (.safetensors).")],
    against: Annotated[Path | None, typer.Option(help="The float model, to compare with.")] = None,
    samples: Annotated[int, typer.Option(help="Sequences to evaluate with.")] = 128,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")] = "cpu",
    json_: Annotated[Path | None, typer.Option("--json", help="Also write every figure to this file.")] = None,
) -> None:
    """Measure a model on a text: its perplexity, and with --against what quantization cost it."""
    import json

    with errors_told():
        from ..flow import evaluate_checkpoint

        with bars() as progress:
            sizes = {"samples": samples, "sequence_length": sequence_length}
            found = evaluate_checkpoint(checkpoint, text, against=against, device=device, progress=progress, **sizes)
    console.print(evaluation.figures(found))
    if json_ is not None:
        json_.write_text(json.dumps(found, indent=1) + "\n")


@app.command()
def report(out: Annotated[Path, typer.Argument(help="A quantized checkpoint.")]) -> None:
    """Rebuild baracuda_report.html from baracuda_report.json."""
    from ..flow import report as rebuild

    with errors_told():
        console.print(escape(str(rebuild(out))), highlight=False, soft_wrap=True)


@app.command()
def bench(
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face model directory with safetensors.")],
    quantized_dir: Annotated[Path | None, typer.Argument(help="The quantized checkpoint to put beside it.")] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that is prefilled.")] = 512,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate.")] = 32,
) -> None:
    """Measure tokens a second of prefill and decode, and memory, on this machine; two models in turns in one run."""
    from ..flow.run.speed import compare_speed

    with errors_told(), console.status("") as status:
        say = lambda what: status.update(escape(what))  # noqa: E731
        rows = compare_speed(
            model_dir, quantized_dir, device=device, batch=batch, length=length, tokens=tokens, progress=say
        )
    table = Table("model", "memory", "prefill", "decode", *(["decode, compiled"] if rows[0].compiled else []))
    first = rows[0]
    for row in rows:
        cells = [f"{row.memory / 2**20:.0f} MiB ({row.memory / first.memory:.2f}x)"]
        for name in ("prefill", "decode", "compiled"):
            if (value := getattr(row, name)) is not None:
                cells.append(f"{value:.1f} tokens/s ({value / getattr(first, name):.2f}x)")
        table.add_row(escape(row.name), *cells)
    console.print(table)


def _require_checkpoints(out: Path, against: Path | None) -> None:
    """Raise where a directory is missing: that is an error of the call, not a finding about a checkpoint."""
    from ..flow import FlowError
    from ..flow.checkpoint.directory import Checkpoint

    if not out.is_dir():
        what = "a file" if out.exists() else "not there"
        raise FlowError(f"{out}: expected a directory with a quantized checkpoint; it is {what}")
    if against is not None:
        with Checkpoint.open(against):
            pass


def _device(name: str | None) -> torch.device:
    with errors_told():
        return resolve_device(name)


def _machine(device: torch.device) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    versions = [f"{name} {_version(name)}" for name in ("torch", "triton", "numpy")]
    table.add_row("baracuda", f"{__version__}, python {platform.python_version()}, {', '.join(versions)}")
    table.add_row(
        "machine",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    table.add_row("device", f"{device} ({name})")
    return table


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _matrix(asked: list[Cell], device: torch.device) -> tuple[Table, list[str], int]:
    """A row per op, or more where scopes differ; a column per backend: yes, or what it declines and why, by number."""
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in asked:
        groups[cell.problem.op.value, cell.scope_name].append(cell)
    reasons: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (op, scope), group in groups.items():
        rows[op, *_elements(group), *(_answer(group, backend, reasons) for backend in BACKENDS)].append(scope)
    plain = [Column(name, no_wrap=True) for name in ("operation", "scopes")]
    elements = [Column("float", width=8), Column("integer", width=7)]
    backends = [Column(_heading(backend, asked, device), no_wrap=True) for backend in BACKENDS]
    title = "Who computes what, fastest first"
    table = Table(*plain, *elements, *backends, title=title, box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for (op, *answers), scopes in rows.items():
        table.add_row(op, "every" if len(scopes) == len(SCOPES) else " ".join(scopes), *answers)
    return table, list(reasons), sum(not cell.served for cell in asked)


def _heading(backend: BackendKind, asked: list[Cell], device: torch.device) -> str:
    serves = any(cell.answers[backend] is None for cell in asked)
    return f"{backend.value}\n[dim]{kernels(backend)[0].arch(device) if serves else '-'}[/]"


def _answer(group: list[Cell], backend: BackendKind, reasons: dict[str, int]) -> str:
    declined = [cell for cell in group if cell.answers[backend] is not None]
    if not declined:
        return "[green]yes[/]"
    why = sorted({str(cell.answers[backend]) for cell in declined})
    notes = " ".join(f"[cyan]{reasons.setdefault(reason, len(reasons) + 1)}[/]" for reason in why)
    return f"no {notes}" if len(declined) == len(group) else f"not {' / '.join(_elements(declined))} {notes}"


def _elements(group: list[Cell]) -> tuple[str, str]:
    floats = dict.fromkeys(cell.problem.element.value for cell in group)
    integers = dict.fromkeys(cell.problem.quantized.value for cell in group)
    return " ".join(floats), " ".join(integers)
