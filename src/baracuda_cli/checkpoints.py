"""Commands on a checkpoint that is there: verify, inspect and report."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from .terminal import MODEL, Json, Output, Quiet, errors_told, stderr


def verify(
    out: Annotated[str, typer.Argument(help="A quantized checkpoint: a directory, or an id on the Hub.")],
    against: Annotated[str | None, typer.Option(help="The model it was made from.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check every tensor, scale and setting a server relies on; exits with 1 when something is wrong."""
    output = Output(json=json, quiet=quiet)
    with errors_told():
        from baracuda.flow import verify as check
        from baracuda.flow.hf.hub import local_directory

        made, source = local_directory(out), None if against is None else local_directory(against)
        _require_checkpoints(made, source)
        notes: list[str] = []
        findings = check(made, source, on_note=notes.append)
    output.data([asdict(finding) for finding in findings])
    if findings:
        # A name that was cut short could not be looked for: what does not fit goes on in the next line.
        columns = (Column(name, overflow="fold") for name in ("finding", "where", "what"))
        table = Table(*columns, title=f"{len(findings)} finding{'s' * (len(findings) > 1)}")
        for finding in findings:
            table.add_row(f"[red]{finding.code}[/]", escape(finding.where), escape(finding.message))
        output.show(table)
        raise typer.Exit(1)
    output.show(f"[green]{escape(out)}: nothing is wrong[/]", *(escape(f"Note: {note}.") for note in notes))


def inspect(
    checkpoint: Annotated[str, typer.Argument(help=MODEL)],
    layers: Annotated[bool, typer.Option("--layers", help="List every module, not only each kind of them.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what is in a checkpoint: its scheme, its sizes, and how each module is stored. Reads headers only."""
    output = Output(json=json, quiet=quiet)
    with errors_told():
        from baracuda.flow import inspect_checkpoint

        found = inspect_checkpoint(checkpoint)
    output.data(found)
    output.show(_overview(found), _modules(found["modules"], layers))


def report(
    out: Annotated[Path, typer.Argument(help="A quantized checkpoint.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rebuild baracuda_report.html from baracuda_report.json."""
    output = Output(json=json, quiet=quiet)
    with errors_told():
        from baracuda.flow import report as rebuild

        page = rebuild(out)
    output.show(escape(str(page)))
    output.data({"page": page})


def compare(
    outs: Annotated[list[Path], typer.Argument(help="Quantized checkpoints with their reports, two or more.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write a page with every layer to this .html file.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put the reports of several checkpoints side by side."""
    shown = Output(json=json, quiet=quiet)
    with errors_told():
        from baracuda.flow import compare_reports
        from baracuda.flow.run.comparison import INCOMPARABLE, differ

        (head, *rows), page = compare_reports(list(outs))
        if output is not None:
            output.write_text(page)
    table = Table("", *(escape(row[0]) for row in rows), box=SIMPLE_HEAD)
    for i, title in enumerate(head[1:], 1):
        table.add_row(title, *(escape(row[i]) for row in rows))
    if differ([head, *rows]):
        stderr.print(f"[bold yellow]{INCOMPARABLE}[/]", highlight=False)
    shown.show(table, *([escape(str(output))] if output is not None else []))
    shown.data([dict(zip(head, row, strict=True)) for row in rows])


def _require_checkpoints(out: Path, against: Path | None) -> None:
    """Raise where a directory is missing: that is an error of the call, not a finding about a checkpoint."""
    from baracuda.flow import FlowError
    from baracuda.flow.checkpoint.directory import Checkpoint

    if not out.is_dir():
        what = "a file" if out.exists() else "not there"
        raise FlowError(f"{out}: expected a directory with a quantized checkpoint; it is {what}")
    if not any(out.glob("*.safetensors")) and not (out / "config.json").exists():
        raise FlowError(f"{out}: expected a directory with a quantized checkpoint; it holds no model")
    if against is not None:
        with Checkpoint.open(against):
            pass


# -- drawing -----------------------------------------------------------------------------------------------------


def _overview(found: dict[str, Any]) -> Table:
    table = Table(Column(), Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0))
    architecture = ", ".join(found["architectures"] or []) or str(found["model_type"] or "unknown architecture")
    quantized = [module for module in found["modules"] if module["quantized"]]
    table.add_row("model", escape(f"{found['name']}, {architecture}"))
    if found["note"]:
        table.add_row("", escape(found["note"]))
    else:
        stored = ", ".join(dict.fromkeys(module["stored"] for module in quantized))
        table.add_row("scheme", escape(f"{stored} ({found['quant_method']}, {found['format']})"))
    share = found["quantized_parameters"] / max(1, found["parameters"])
    table.add_row("quantized", f"{len(quantized)} modules, {share:.0%} of {found['parameters'] / 1e6:.1f} M parameters")
    table.add_row("size", f"{_mb(found['bytes'])} in {len(found['files'])} files, {_mb(found['quantized_bytes'])} of "
                          "it quantized")  # fmt: skip
    if found["ignored"]:
        table.add_row("ignored", escape(", ".join(found["ignored"])))
    return table


def _modules(modules: list[dict[str, Any]], each: bool) -> Table:
    """The modules by size; those that differ in their layer's number only are one row, unless `each` is asked for."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for module in modules:
        parts = module["name"].split(".")
        name = module["name"] if each else ".".join("*" if part.isdigit() else part for part in parts)
        groups[name, module["stored"], " x ".join(map(str, module["shape"]))].append(module)
    names = ("module", "count", "shape", "stored as", "size", "share")
    table = Table(*(Column(name, overflow="fold", justify="left" if name in ("module", "stored as") else "right")
                    for name in names), box=SIMPLE_HEAD)  # fmt: skip
    total = sum(module["bytes"] for module in modules)
    for (name, stored, shape), group in sorted(groups.items(), key=lambda item: -sum(m["bytes"] for m in item[1])):
        size = sum(module["bytes"] for module in group)
        style = None if group[0]["quantized"] else "dim"
        row = (escape(name), str(len(group)), shape, escape(stored), _mb(size), f"{size / max(1, total):.1%}")
        table.add_row(*row, style=style)
    return table


def _mb(count: float) -> str:
    return (
        f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
    )
