"""`baracuda quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from . import plans
from .terminal import MODEL, Device, Json, Output, Quiet, bars, errors_told, given, interrupted

#: Spelled here because the registry of schemes imports torch; a test compares them.
SCHEMES = ("w8a8", "w8a8-static", "w4a8", "w4a16", "w8a8-smoothquant")
METHODS = ("rtn", "gptq")


def one_of(names: tuple[str, ...]) -> str:
    """a, b or c"""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _scheme_names() -> list[str]:
    return list(SCHEMES)


def _method_names() -> list[str]:
    return list(METHODS)


def quantize(
    context: typer.Context,
    model_dir: Annotated[str, typer.Argument(help=MODEL)],
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output directory; must be empty or not exist, unless resuming."),
    ] = None,
    scheme: Annotated[str, typer.Option(help=f"{one_of(SCHEMES)}.", autocompletion=_scheme_names)] = "w8a8",
    activations: Annotated[
        str, typer.Option(help="dynamic (a scale per token) or static (from calibration).")
    ] = "dynamic",
    calibration: Annotated[
        Path | None, typer.Option(help="Texts (.txt, .jsonl, .parquet), tokens, or builtin: a short text of ours.")
    ] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="Data to evaluate the result on, or builtin; the figures go into the report.")
    ] = None,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Scale channels first (SmoothQuant); --smooth auto searches how (AWQ too).")
    ] = False,
    alpha: Annotated[str, typer.Option(help="Strength of smoothing from 0 to 1, or auto: searched per layer.")] = "0.5",
    method: Annotated[
        str,
        typer.Option(
            help=f"How weights become integers: {one_of(METHODS)}; rtn rounds to nearest.",
            autocompletion=_method_names,
        ),
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
    group_size: Annotated[
        int,
        typer.Option(help="Columns that share a scale in w4a8 and w4a16; a smaller size where it divides no columns."),
    ] = 128,
    budget: Annotated[
        float | None,
        typer.Option(help="Average bits, such as 4.5: the layers of a 4-bit scheme that gain most get 8 bits."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="KL divergence to keep: as few layers as it takes get 8 bits, or stay float."),
    ] = None,
    quantize_head: Annotated[
        bool,
        typer.Option("--quantize-head", help="Store the output head as int8, too; a tied one gets its own weight."),
    ] = False,
    allow_float: Annotated[
        bool, typer.Option("--allow-float", help="Go on although most of the model's Linears stay in floating point.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; show what would be quantized, sizes, time and memory.")
    ] = False,
    samples: Annotated[int, typer.Option(help="Sequences to calibrate and evaluate with.")] = 128,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    device: Device = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Quantize a whole model into a checkpoint that vLLM and transformers load, with a report of what it cost."""
    output = Output(json=json, quiet=quiet)
    with errors_told(), interrupted(out):
        from baracuda.flow import FlowError, quantize_checkpoint
        from baracuda.flow.hf.coverage import MOST
        from baracuda.flow.run.steps import is_complete

        for option in ("scheme", "method", "group_size"):
            if recipe is not None and given(context, option):
                raise FlowError(f"--{option.replace('_', '-')}: the recipe says it; drop it, or change {recipe}")
        ended = resume and not dry_run and out is not None and is_complete(out)
        with bars(output) as progress:
            content = quantize_checkpoint(
                model_dir,
                out,
                scheme=scheme,  # type: ignore[arg-type]  # the library says what is wrong with it
                activations=activations,  # type: ignore[arg-type]
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
                budget=budget,
                max_kl=max_kl,
                quantize_head=quantize_head,
                allow_float=allow_float,
                dry_run=dry_run,
                on_plan=(lambda plan: output.show(*plans.drawn(plan))) if budget or max_kl else None,
            )
        if dry_run:
            output.show(*plans.drawn(content))
            output.data(content)
            return
        assert out is not None, "quantize_checkpoint refuses a run without one"
        if content and ended:
            output.show(f"{escape(str(out))} was finished already, from this model with these options")
        if content:
            output.show(_drawn(content, out))
            output.data(content)
        if content and (share := content.get("float_share", 0)) > MOST:
            output.show(
                f"[bold]{share:.0%} of the parameters of the Linears are still in floating point, which --allow-float "
                "accepted; the report names them with the reasons[/]"
            )


def _alpha(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _drawn(content: dict[str, Any], out: Path) -> Table:
    table = Table(Column(), Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in summary(content):
        table.add_row(name, escape(value))
    table.add_row("report", escape(str(out / "baracuda_report.html")))
    talks = "inputs" not in (content["evaluation"] or {})
    chat = f"baracuda chat {out}; " if talks else ""
    table.add_row("next", escape(f"baracuda verify {out}; {chat}in Python, baracuda.load({str(out)!r})"))
    return table


def summary(content: dict[str, Any]) -> list[tuple[str, str]]:
    """A report in a few lines."""
    from baracuda.flow.run.page import number
    from baracuda.flow.run.verdict import verdict

    size, run, layers = content["size"], content["run"], content["layers"]
    known = [layer["sqnr_db"] for layer in layers if layer["sqnr_db"] is not None]
    lines = [
        ("verdict", str(verdict(content))),
        ("quantized", f"{len(layers)} Linears; {len(content['left'])} left in floating point, named in the report"),
        ("size", f"{size['before'] / 1e6:.1f} MB to {size['after'] / 1e6:.1f} MB, {size['ratio']:.0%}"),
        ("time", f"{run['seconds']:.1f} s, {run['megabytes_per_second']:.3g} MB/s"),
    ]
    if known:
        lines.append(("weights", f"SQNR {min(known):.1f} to {max(known):.1f} dB"))
    smoothing = content["smoothing"]
    if smoothing and "folded" in smoothing:
        left = f"{len(smoothing['not_folded'])} layers not smoothed, with reasons in the report"
        lines.append(("smoothing", f"{len(smoothing['folded'])} folds, {left}"))
    evaluation = content["evaluation"] or {}
    if "kl" in evaluation:
        perplexity = evaluation["perplexity"]
        before, after = (number(perplexity[which], ".4g") for which in ("float", "quantized"))
        lines.append(("perplexity", f"{before} before, {after} after"))
        kl, agreement = number(evaluation["kl"], ".2e"), number(evaluation["top1_agreement"], ".1%")
        lines.append(("logits", f"KL {kl}, the same top token in {agreement}"))
    if "cosine" in evaluation:
        cosine = evaluation["cosine"]
        mean, least = (number(cosine[which], ".4f") for which in ("mean", "min"))
        lines.append(("embeddings", f"cosine {mean} on average, {least} at least"))
    lines += [("note", note) for note in content.get("notes", [])]
    return lines
