"""`baracuda demo`: its options. The demo itself needs torch and is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import device_named, errors_told


def demo(
    device: Annotated[str | None, typer.Option(help="Where to run; torch's default device unless given.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to work; a temporary folder unless given.")
    ] = None,
    scopes: Annotated[
        bool, typer.Option("--scopes", help="What each scope costs and saves on one tensor, instead of a model.")
    ] = False,
) -> None:
    """A first minute: train a small model, quantize it four ways, check each and compare what they say."""
    where = device_named(device)
    with errors_told():
        if scopes:
            from .scopes import run as run_scopes

            run_scopes(where)
        else:
            from .demo import run

            run(where, output)
