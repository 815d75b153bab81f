"""What the commands share: the console, errors as sentences, and bars of progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..core.errors import BaracudaError

console = Console()


def one_of(names: list[str]) -> str:
    """a, b or c"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


@contextmanager
def errors_told() -> Iterator[None]:
    """Print the errors that baracuda raises on purpose as a sentence; anything else is a bug and keeps its trace."""
    try:
        yield
    except (BaracudaError, OSError) as error:  # a full disk is no bug either
        message = str(error).replace("device='cpu'", "--device cpu")  # written for Python
        console.print(f"[red]{escape(message)}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def interrupted(out: Path) -> Iterator[None]:
    """On Ctrl-C, say what is finished and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        from ..flow.checkpoint.directory import JOURNAL

        outcome = "nothing was written"
        if (out / JOURNAL).exists():
            outcome = f"what is finished stays in {escape(str(out))}; repeat the command with --resume to go on"
        if first_rank():
            console.print(f"[yellow]stopped: {outcome}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


def first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def given(context: typer.Context, option: str) -> bool:
    """Whether the user gave the option: one that the scheme ignores is refused only then."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


@contextmanager
def bars() -> Iterator[Callable[[str, int, int, str], None]]:
    """A bar for each stage, with the time left. Only the first rank draws."""
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[label]}", style="dim"),
    )
    drawn = Progress(*columns, console=console, disable=not first_rank())
    tasks: dict[str, TaskID] = {}

    def progress(stage: str, done: int, total: int, label: str) -> None:
        drawn.start()  # not earlier: an error before the first step is printed without bars
        if stage not in tasks:
            tasks[stage] = drawn.add_task(stage, total=total, label="")
        drawn.update(tasks[stage], advance=done, label=escape(label[-48:]))

    try:
        yield progress
    finally:
        if tasks:
            drawn.stop()
