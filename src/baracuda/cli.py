"""`baracuda` on the command line: parses, calls, draws."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from importlib import metadata
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

from . import __version__, demo
from .backends.registry import BACKENDS, kernels
from .errors import BaracudaError
from .matrix import Cell, cells
from .plan import resolve_device
from .types import BackendKind

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.callback()
def baracuda() -> None:
    """Quantization kernels behind plans: the same bits on CPU, GPU and reference."""


@app.command()
def info(
    device: Annotated[str | None, typer.Option(help="The device to ask for; torch's default unless given.")] = None,
) -> None:
    """The machine, the versions, and which backend serves which operation, as the registry answers it."""
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
) -> None:
    """A first minute: quantize a tensor with outlier channels in every scope, then run a SmoothQuant linear."""
    demo.run(console, _device(device))


def _device(name: str | None) -> torch.device:
    try:
        return resolve_device(name)
    except BaracudaError as error:
        console.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(2) from None


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
    backends = [f"{backend.value}\n[dim]{kernels(backend)[0].arch(device)}[/]" for backend in BACKENDS]
    operation = Column("operation", no_wrap=True)
    table = Table(operation, "scopes", "floats", "integers", *backends, title="Who computes what, fastest first")
    for (op, *columns), scopes in rows.items():
        table.add_row(op, " ".join(scopes), *columns)
    return table, list(reasons), sum(not cell.served for cell in asked)


def _answer(group: list[Cell], backend: BackendKind, reasons: dict[str, int]) -> str:
    declined = [cell for cell in group if cell.answers.get(backend, "") is not None]
    if not declined:
        return "[green]yes[/]"
    why = sorted({cell.answers.get(backend) or "has no kernel for this operation" for cell in declined})
    notes = " ".join(f"[cyan]{reasons.setdefault(reason, len(reasons) + 1)}[/]" for reason in why)
    return f"no {notes}" if len(declined) == len(group) else f"not {' / '.join(_elements(declined))} {notes}"


def _elements(group: list[Cell]) -> tuple[str, str]:
    floats = dict.fromkeys(cell.problem.element.value for cell in group)
    integers = dict.fromkeys(cell.problem.quantized.value for cell in group)
    return " ".join(floats), " ".join(integers)
