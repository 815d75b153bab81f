"""`baracuda info`: the machine, the versions, and which backend computes what."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from .terminal import Json, Output, Quiet, console, device_named, version_of

if TYPE_CHECKING:
    import torch

    from baracuda.backends.matrix import Cell
    from baracuda.core.types import BackendKind


def info(
    device: Annotated[str | None, typer.Option(help="The device to ask for; torch's default unless given.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the machine, the versions and which backend computes each operation."""
    target, output = device_named(device), Output(json=json, quiet=quiet)
    from baracuda.backends.matrix import cells

    asked, machine = list(cells(target)), _machine(target)
    table, reasons, empty = _matrix(asked, target)
    drawn = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in machine.items():
        drawn.add_row(name, value)
    output.show(drawn, table, *(f"  [cyan]{number}[/] {reason}" for number, reason in enumerate(reasons, 1)))
    output.data({**machine, "operations": [_record(cell) for cell in asked]})
    if empty:
        console.print(f"[red]{empty} cells are served by no backend")
        raise typer.Exit(1)


def _record(cell: Cell) -> dict[str, Any]:
    problem = cell.problem
    return {
        "operation": problem.op.value,
        "scope": cell.scope_name,
        "float": problem.element.value,
        "integer": problem.quantized.value,
        "backends": {backend.value: reason or "yes" for backend, reason in cell.answers.items()},
    }


def _machine(device: torch.device) -> dict[str, str]:
    import torch

    from baracuda.backends.cpu import threads_in_use

    versions = [f"{name} {version_of(name)}" for name in ("torch", "triton", "numpy")]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "baracuda": f"{version_of('baracuda')}, python {platform.python_version()}, {', '.join(versions)}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": f"{torch.get_num_threads()}; the CPU kernels use {threads_in_use()}",
        "device": f"{device} ({name})",
    }


def _matrix(asked: list[Cell], device: torch.device) -> tuple[Table, list[str], int]:
    """A row per op, or more where scopes differ; a column per backend: yes, or what it declines and why, by number."""
    from baracuda.backends.matrix import SCOPES
    from baracuda.backends.registry import BACKENDS

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
    from baracuda.backends.registry import kernels

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
