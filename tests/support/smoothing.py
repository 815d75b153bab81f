"""What tests of smoothing measure: the linears of a model, and their inputs over some data."""

from __future__ import annotations

import torch
from torch import nn

from baracuda.flow.run.calibrate import measure
from baracuda.flow.run.measure import InputRecorder, Measured
from baracuda.flow.transforms.folds import Folds


def linears(model: nn.Module) -> set[str]:
    kinds = ("Linear", "Conv1D")
    return {f"{n}.weight" for n, m in model.named_modules() if type(m).__name__ in kinds and n != "lm_head"}


def measured(model: nn.Module, folds: Folds, data: list[torch.Tensor], keep_rows: bool = False) -> Measured:
    recorder = InputRecorder(model, list(folds.inputs.values()), keep_rows=keep_rows)
    return measure(model, recorder, data, torch.device("cpu"), lambda *_: None)
