"""The application: its commands, each declared in a module of this folder."""

from __future__ import annotations

from typing import Annotated

import typer

from . import chat, checkpoints, demonstrate, info, measure, quantize
from .terminal import App, console, version_of
from .words import EvalCommand, QuantizeCommand, VerifyCommand

app = App(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(asked: bool) -> None:
    if asked:
        console.print(f"baracuda {version_of('baracuda')}", highlight=False)
        raise typer.Exit


@app.callback()
def baracuda(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Quantize PyTorch models: the same bits on CPU, GPU and reference."""


WORK, LOOK, MEASURE, START = "Make and check a checkpoint", "Look into one", "Measure and try it", "Start here"

app.command("demo", rich_help_panel=START)(demonstrate.demo)
app.command("info", rich_help_panel=START)(info.info)
app.command("quantize", cls=QuantizeCommand, rich_help_panel=WORK)(quantize.quantize)
app.command("verify", cls=VerifyCommand, rich_help_panel=WORK)(checkpoints.verify)
app.command("inspect", rich_help_panel=LOOK)(checkpoints.inspect)
app.command("report", rich_help_panel=LOOK)(checkpoints.report)
app.command("compare", rich_help_panel=LOOK)(checkpoints.compare)
app.command("chat", rich_help_panel=MEASURE)(chat.chat)
app.command("eval", cls=EvalCommand, rich_help_panel=MEASURE)(measure.evaluate)
app.command("bench", rich_help_panel=MEASURE)(measure.bench)
