"""What the commands share: the terminal, the options --json and --quiet, progress bars, and errors as sentences."""

from __future__ import annotations

import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment

if TYPE_CHECKING:
    import torch


def shown(text: str) -> str:
    """The text with every character that a terminal would obey instead of showing written as its code."""
    if text.replace("\n", "").isprintable():
        return text
    from baracuda.core.printable import printable  # imports torch, which help and completion do without

    return printable(text)


class PrintableConsole(Console):
    """A console that shows what a terminal would obey: names in files may hold control characters."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else shown(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)


class App(typer.Typer):
    """An application that shows what other libraries log, warn of and raise as it shows its own text."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        with notices_shown():
            try:
                return super().__call__(*args, **options)
            except Exception:  # a bug: its trace may quote what a file holds
                stderr.print(traceback.format_exc(), markup=False, highlight=False, soft_wrap=True)
                raise SystemExit(1) from None


@contextmanager
def notices_shown() -> Iterator[None]:
    """Log messages and warnings come without control characters: libraries quote values of hostile files in them."""
    make, form = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*args: Any, **options: Any) -> logging.LogRecord:
        made = make(*args, **options)
        made.msg, made.args = shown(made.getMessage()), None
        return made

    logging.setLogRecordFactory(record)
    warnings.formatwarning = lambda *args, **options: shown(form(*args, **options))
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.formatwarning = form


#: Results go to stdout, everything else to stderr, so that `--json` can be piped.
console = PrintableConsole()
stderr = PrintableConsole(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str | None, typer.Option(help="The type of what is not quantized, such as float32; the checkpoint's own.")
]
#: How the help says what a model argument may be. Such an argument is a string: a Path would lose that it is an id.
MODEL = "A model directory with safetensors, or the id of a model on the Hugging Face Hub."


class Output:
    """Where a command's result goes: drawn for people, as JSON for programs, or nowhere."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json, self.quiet = json, quiet

    def show(self, *drawn: Any) -> None:
        """Print tables and sentences; paths and names are printed whole."""
        if not self.json and not self.quiet:
            for each in drawn:
                console.print(each, highlight=False, soft_wrap=isinstance(each, str))

    def data(self, content: Any) -> None:
        """Print what the command found, when JSON was asked for."""
        if self.json:
            text = json.dumps(content, indent=1, default=str)
            print(text.replace("\x7f", "\\u007f"))  # the one control character that JSON may hold as it is


@contextmanager
def errors_told() -> Iterator[None]:
    """Print the errors that baracuda raises on purpose as a sentence; anything else is a bug and keeps its trace."""
    from baracuda import BaracudaError

    try:
        yield
    except (BaracudaError, OSError) as error:  # a full disk is no bug either
        message = str(error).replace("device='cpu'", "--device cpu")  # written for Python
        stderr.print(f"[red]{escape(message)}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def interrupted(out: Path | None) -> Iterator[None]:
    """On Ctrl-C, say what is finished and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        from baracuda.flow.checkpoint.directory import JOURNAL

        outcome = "nothing was written"
        if out is not None and (out / JOURNAL).exists():
            outcome = f"what is finished stays in {escape(str(out))}; repeat the command with --resume to go on"
        if first_rank():
            stderr.print(f"[yellow]stopped: {outcome}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


def first_rank() -> bool:
    """Whether this is the process of a torchrun that prints."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def bars(output: Output) -> Iterator[Callable[[str, int, int, str], None]]:
    """A bar for each stage, with the time left. Only the first rank draws."""
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[label]}", style="dim"),
    )
    drawn = Progress(*columns, console=stderr, disable=output.quiet or not first_rank())
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


def device_named(name: str | None) -> torch.device:
    """The device of an option; torch's default device where none was named."""
    from baracuda.plans.plan import resolve_device

    with errors_told():
        return resolve_device(name)


def dtype_named(name: str | None) -> torch.dtype | None:
    """The type of an option; None, for the checkpoint's own, where none was named."""
    import torch

    from baracuda import InvalidProblem

    found = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(found, torch.dtype):
        raise InvalidProblem(f"--dtype: expected float32, bfloat16 or float16, got {name}")
    return found


def given(context: typer.Context, option: str) -> bool:
    """Whether the user gave the option: one that the scheme ignores is refused only then."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def version_of(package: str) -> str:
    """The installed version; the metadata is read, since importing may take seconds."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
