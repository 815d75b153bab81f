"""The portable weight-only linear from operands to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.problem import Problem
from ....core.types import ElementKind
from ...registry import Launch, Value
from ..launch import Build, Step
from . import tune
from .kernels import Epilogue, Shape, Terms
from .weight_only_kernels import WeightOnly, weight_only


def portable(p: Problem, device: torch.device) -> Launch:
    m, n, k = p.shape
    if not m * n:
        return _nothing
    tile = tune.WEIGHT_ONLY
    epilogue = Epilogue(False, p.nonlinearity.value, scaled=False)
    spec = WeightOnly(epilogue, tile, p.weight.is_packed, p.weight is not ElementKind.U4, p.weight_group)
    programs = -(-m // tile.m) * -(-n // tile.n)
    build = Build(tile.warps, tile.stages)
    step = Step(weight_only, programs, {"shape": Shape(m, n, k)}, {"SPEC": spec}, device, build)
    return step.bound(0, 1, 2, 3, 6, Terms(None, None, 4, 5))


def _nothing(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
    """An empty output asks for no launch."""
