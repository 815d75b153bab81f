"""Whether the folds that a checkpoint records change nothing: the model itself is traced, and proves each of them.

A fold divides a norm, or the rows of a linear, and multiplies the columns of whatever reads it. One that leaves out a
reader, or divides something else, is a change of the model under the name of smoothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.check import Check
from ..checkpoint.directory import FOLDS, read_json
from ..checkpoint.folds import FoldRecord, read_folds
from ..errors import CheckpointError
from ..hf.config import alone
from ..hf.forward import float_model
from ..hf.load import require_size
from ..hf.names import match_names
from ..hf.skeleton import skeleton
from ..hf.structure import float_name
from ..transforms.folds import Fold
from .calibrate import analyse

CPU = torch.device("cpu")


def check_folds(check: Check, original: Path) -> None:
    """Add a finding for each recorded fold that the original model does not prove."""
    try:
        records = read_folds(check.out / FOLDS)
    except CheckpointError:  # a finding of those who compare the tensors
        return
    if not records:
        return
    # Weights of zeros need no memory, and are enough to see what reads what. Where their values matter, as for a choice
    # of experts, the original itself is run.
    unproved, why = records, ""
    for build in (lambda: _of_zeros(original), lambda: float_model(original, CPU)):
        try:
            unproved = _unproved(records, check, build)
            why = "the original model does not read these tensors in that way"
        except Exception as error:  # a model can be wrong in any way; transformers then raises anything
            why = f"the original model cannot be run here: {type(error).__name__}: {str(error)[:200]}"
        if not unproved:
            return
    for record in unproved:
        check.add("bad-folds", record.divided, f"{FOLDS} divides it and multiplies {len(record.into)} weights: {why}")


def _unproved(records: list[FoldRecord], check: Check, build: Callable[[], nn.Module]) -> list[FoldRecord]:
    model = build()
    stored = match_names(model, map(float_name, check.entries)).stored
    wanted = {name for name in stored if stored[name].removesuffix(".weight") in check.modules}
    proved = {fold.producer.parameter: fold for fold in analyse(model, wanted, CPU).folds}
    by_name = {stored[name]: fold for name, fold in proved.items() if name in stored}
    return [record for record in records if not _is(record, by_name.get(record.divided), stored)]


def _is(record: FoldRecord, fold: Fold | None, stored: dict[str, str]) -> bool:
    """Whether a record is this fold: the same tensors and channels, and nothing done to channels that others read."""
    if fold is None or len(record.strength) != fold.producer.channels:
        return False
    producer = fold.producer
    into = {stored.get(absorber.parameter): absorber.channels for absorber in fold.absorbers}
    return (
        record.norm == (producer.kind == "norm")
        and record.offset == producer.offset
        and record.bias == (None if producer.bias is None else stored.get(producer.bias))
        and {name: tuple(channels.tolist()) for name, channels in record.into.items()} == into
        and bool((record.strength[sorted(fold.fixed)] == 1).all())
    )


def _of_zeros(directory: Path) -> nn.Module:
    """The model with zeros for weights, which take no memory."""
    require_size(directory)
    model, why = skeleton(read_json(directory / "config.json"))
    if model is None:
        raise CheckpointError("bad-config", why)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_zeros(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _zeros(buffer)
    with alone():
        model.tie_weights()  # type: ignore[operator]
    return model.eval()


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """One element for all; stacks of experts must have strides, so theirs are zeros that the system makes when read."""
    return torch.zeros((), dtype=like.dtype).expand(like.shape) if like.ndim < 3 else torch.zeros_like(like, device=CPU)
