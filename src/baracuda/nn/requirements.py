"""What a module must be to be quantized, and what a quantized linear can compute."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.errors import InvalidProblem, Unsupported
from ..core.problem import Problem
from ..core.types import FLOATS, DynamicRangeMode, ElementKind, QuantizeKind


def require_linear(module: nn.Module) -> None:
    """Raise, with the reason a report prints, unless the module is a linear whose weight can be quantized."""
    if not isinstance(module, nn.Linear):
        raise Unsupported(f"expected an nn.Linear, got {type(module).__name__}")
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InvalidProblem(f"expected a weight of shape [N, K], got {type(weight).__name__} of {weight.ndim} axes")
    if weight.dtype not in {kind.dtype for kind in FLOATS}:
        raise Unsupported(f"weight is {weight.dtype}: expected one of {', '.join(kind.value for kind in FLOATS)}")


def require_computable(
    weight: ElementKind,
    activation: ElementKind,
    mode: DynamicRangeMode,
    q_min: int,
    q_max: int,
    weight_group: int = 0,
    k: int = 1,
) -> None:
    """Raise unless a quantized linear takes these types, this range and these groups."""
    Problem(
        QuantizeKind.QUANTIZED_LINEAR, (1, 1, k), ElementKind.F32, activation, q_min, q_max, mode=mode, weight=weight,
        weight_group=weight_group,
    )  # fmt: skip
