"""quantize_checkpoint: a model directory in, a quantized one out, resumable at any moment."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ...plans.plan import resolve_device
from ...schemes import CheckpointScheme
from ..checkpoint.directory import Checkpoint
from ..errors import RESUME, FlowError, os_errors_explained
from ..hf.hub import local_directory
from .data import Data, as_file
from .distributed import team
from .options import Options, Progress
from .recipe_file import read_recipe
from .steps import Run

_log = logging.getLogger(__name__)


def quantize_checkpoint(
    model_dir: str | Path,
    out: str | Path | None,
    *,
    scheme: CheckpointScheme = "w8a8",
    activations: Literal["dynamic", "static"] = "dynamic",
    calibration: Data | None = None,
    evaluation: Data | None = None,
    alpha: float | str | None = None,
    ignore: str | Iterable[str] = (),
    group_size: int | None = None,
    samples: int = 128,
    sequence_length: int = 512,
    device: torch.device | str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
    smooth: bool | str | None = None,
    method: str = "rtn",
    one_shot: bool = False,
    recipe: str | Path | Mapping[str, Any] | None = None,
    budget: float | None = None,
    max_kl: float | None = None,
    allow_float: bool = False,
    quantize_head: bool = False,
    dry_run: bool = False,
    on_plan: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Quantize the checkpoint in `model_dir` into `out`, and return the report (also written there).

    `model_dir` may also be the id of a model on the Hugging Face Hub, from the local cache or downloaded.

    - `scheme`: `"w8a8"`, `"w8a8-static"`, `"w4a8"` or `"w4a16"`; `"w8a8-smoothquant"` is `"w8a8"` with `smooth=True`.
      `activations`: `"dynamic"`, a scale per token at run time, or `"static"`, one per tensor from calibration.
    - `smooth`: move outliers of the activations into the weights first (SmoothQuant). `alpha`: its strength, from 0 to
      1; 0.5 unless given. `smooth="auto"`, the same as `alpha="auto"` beside it, searches rule and strength for each
      fold, SmoothQuant's and, for 4-bit weights, AWQ's.
    - `method`: how weights become integers; `"rtn"` rounds them to nearest, `"gptq"` keeps the outputs of each layer on
      the calibration data. It goes block by block, each calibrated on the outputs of the quantized ones before it;
      `one_shot` calibrates all of them on the float model instead.
    - `calibration`: a file of texts or tokens, or a list of texts, for smoothing, static activations and methods that
      need data. Searched scales, those of w4a8 and w4a16, are weighed by what it tells of each input channel.
      `evaluation`: the same, to measure the result on. Of each, `samples` sequences of `sequence_length` tokens are
      read.
    - `group_size`: columns that share a scale in w4a8 and w4a16; 128 unless given. A layer whose columns it does not
      divide gets the next smaller of 32, 64 and 128 that does; the report says which.
    - `budget`: average bits of the quantized Linears, scales included, such as 4.5: the layers of a 4-bit scheme that
      gain most from it get 8 bits, as many as the budget pays for. `max_kl`: the fewest that keep the KL divergence to
      the float model within this bound; where 8 bits everywhere do not, some layers stay float. Both measure on the
      calibration data what quantizing each layer alone does to the model, and the report has the figures.
    - `quantize_head`: also store the output head as int8, with a scale per row and activations per token, in every
      scheme. A head that is tied to the embedding gets a weight of its own, and the embedding stays float.
    - `allow_float`: accept a checkpoint of which most parameters of the Linears stay in floating point. Without it such
      a run raises before it begins.
    - `recipe`: a TOML file, or the same as a dictionary, with `scheme`, `method`, `group_size` and `ignore` for all
      layers and a list `layers` of tables with a `match` and what is different there; the first match decides.
    - `dry_run`: write nothing, and return what would be done: each layer with its scheme, bits, group size and bytes,
      what stays float and why, the size and average bits of the result, and estimates of time and memory. `out` may be
      None then. `on_plan` is called with the same when a run begins.
    - `ignore`: Linears to leave, a pattern or several: names, shell patterns or `"re:REGEX"`. Each must match some.
    - `device`: where to compute. `resume`: go on with a run that was killed; one that has ended is left as it is.
    - `progress(stage, done, total, label)` is called as work is done: `done` since the last call, of `total` in the
      stage, in bytes or steps; `label` is the tensor or batch.

    Options that the scheme ignores are refused. Under torchrun every rank calls this and the work is shared. The bytes
    are those of one process. Rank 0 returns the report, the other ranks an empty one. Errors spell options as the
    command line does: `--group-size` is `group_size`, `--evaluate` is `evaluation`.
    """
    if out is None and not dry_run:
        raise FlowError("out: expected a directory for the result, got None; pass --output DIR, or --dry-run")
    target = None if out is None else Path(out)
    smooth, alpha = _smoothing(smooth, alpha)
    options = Options(
        scheme,
        activations,
        Options.alpha if alpha is None else alpha,
        (ignore,) if isinstance(ignore, str) else tuple(ignore),
        Options.group_size if group_size is None else group_size,
        samples,
        sequence_length,
        smooth,
        method,
        one_shot,
        budget=budget,
        max_kl=max_kl,
        quantize_head=quantize_head,
    )
    if recipe is not None:
        read = read_recipe(recipe)
        options = replace(options, **read.options, ignore=(*options.ignore, *read.ignore), rules=read.rules)
    plan = options.plan() if calibration is None else options.plan().with_data()
    options.require_used(plan, alpha=alpha, group_size=group_size, calibration=calibration)
    with (
        os_errors_explained(target or Path(), RESUME),
        as_file(calibration, "calibration") as calibrated,
        as_file(evaluation, "evaluation") as evaluated,
        team() as ranks,
        Checkpoint.open(local_directory(model_dir)) as source,
    ):
        run = Run(
            source,
            target,
            options,
            plan,
            ranks,
            _own_device(device),
            progress or (lambda stage, done, total, label: None),
            calibrated,
            evaluated,
            allow_float,
        )
        if dry_run:
            return run.preview()
        _log.info("quantizing %s to %s as %s", source.directory, target, options.scheme)
        content = run.go(resume=resume, on_plan=on_plan)
        if content:
            _log.info("%s: %d Linears quantized, %d left", target, len(content["layers"]), len(content["left"]))
        return content


def _smoothing(smooth: bool | str | None, alpha: float | str | None) -> tuple[bool | None, float | str | None]:
    """`smooth="auto"` is `smooth=True` with `alpha="auto"`."""
    if not isinstance(smooth, str):
        return smooth, alpha
    if smooth != "auto":
        raise FlowError(f"smooth: expected True, False or 'auto', got {smooth!r}; a strength goes into alpha")
    if alpha not in (None, "auto"):
        raise FlowError(f"smooth='auto' searches the strength: expected no alpha beside it, got {alpha!r}; drop one")
    return True, "auto"


def _own_device(device: torch.device | str) -> torch.device:
    """The device of this rank: under torchrun, "cuda" is a GPU each."""
    if str(device) == "cuda" and (rank := os.environ.get("LOCAL_RANK")) is not None and torch.cuda.is_available():
        device = torch.device("cuda", int(rank) % torch.cuda.device_count())
    resolved = resolve_device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise FlowError(f"device {resolved}: expected cpu or cuda, where checkpoints are quantized")
    return resolved
