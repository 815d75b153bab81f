"""`baracuda quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from ..schemes import checkpoint_names, method_names
from . import demo
from .terminal import bars, console, errors_told, given, interrupted, one_of


def quantize(
    context: typer.Context,
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face model directory with safetensors.")],
    out: Annotated[
        Path, typer.Option("--output", "-o", help="Output directory; must be empty or not exist, unless resuming.")
    ],
    scheme: Annotated[str, typer.Option(help=f"{one_of(checkpoint_names())}.")] = "w8a8",
    activations: Annotated[
        str, typer.Option(help="dynamic (a scale per token) or static (from calibration).")
    ] = "dynamic",
    calibration: Annotated[Path | None, typer.Option(help="Texts (.txt, .jsonl) or tokens (.safetensors).")] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="Data to evaluate the result on; the figures go into the report.")
    ] = None,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Move outliers of the activations into the weights first (SmoothQuant).")
    ] = False,
    alpha: Annotated[str, typer.Option(help="Strength of smoothing from 0 to 1, or auto: searched per layer.")] = "0.5",
    method: Annotated[
        str, typer.Option(help=f"How weights become integers: {one_of(method_names())}; rtn rounds to nearest.")
    ] = "rtn",
    one_shot: Annotated[
        bool,
        typer.Option("--one-shot", help="Calibrate on the float model, not on the quantized layers before each one."),
    ] = False,
    recipe: Annotated[
        Path | None, typer.Option(help="A TOML file with scheme, method, group_size, ignore, and layers that differ.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Modules to keep in floating point: a name, shell pattern or re:REGEX. Each must match."),
    ] = None,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale in w4a8 and w4a16.")] = 128,
    samples: Annotated[int, typer.Option(help="Sequences to calibrate and evaluate with.")] = 128,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")] = "cpu",
    resume: Annotated[bool, typer.Option(help="Resume an interrupted run.")] = False,
) -> None:
    """Quantize a whole model into a checkpoint that vLLM and transformers load, with a report of what it cost."""
    with errors_told(), interrupted(out):
        from ..flow import FlowError, quantize_checkpoint
        from ..flow.run.steps import is_complete

        for option in ("scheme", "method", "group_size"):
            if recipe is not None and given(context, option):
                raise FlowError(f"--{option.replace('_', '-')}: the recipe says it; drop it, or change {recipe}")
        ended = resume and is_complete(out)
        with bars() as progress:
            content = quantize_checkpoint(
                model_dir,
                out,
                scheme=scheme,
                activations=activations,
                calibration=calibration,
                evaluation=evaluate,
                smooth=smooth or None,
                method=method,
                one_shot=one_shot,
                recipe=recipe,
                alpha=_alpha(alpha) if given(context, "alpha") else None,
                ignore=ignore or (),
                group_size=group_size if given(context, "group_size") else None,
                samples=samples,
                sequence_length=sequence_length,
                device=device,
                resume=resume,
                progress=progress,
            )
        if content and ended:
            said = f"{escape(str(out))} was finished already, from this model with these options"
            console.print(said, highlight=False, soft_wrap=True)
        if content:
            console.print(_summary(content, out))


def _alpha(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _summary(content: dict[str, Any], out: Path) -> Table:
    table = Table(Column(), Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in demo.summary(content):
        table.add_row(name, escape(value))
    table.add_row("report", escape(str(out / "baracuda_report.html")))
    table.add_row("next", escape(f"baracuda verify {out}; in Python, baracuda.load({str(out)!r})"))
    return table
