"""Rules that choose the scales of a weight, by name: a `WeightFormat` says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidProblem
from ..functional import choose_qparams
from .calibration import CalibrationData
from .formats import WeightFormat

Rule = Callable[[Tensor, WeightFormat, CalibrationData | None], Tensor]


def absmax(weight: Tensor, format: WeightFormat, data: CalibrationData | None = None) -> Tensor:
    """The smallest scale that clips nothing: the largest magnitude of each segment over the largest integer."""
    low, high = format.range
    stored = format.scale_dtype(weight.dtype)
    asked = None if weight.dtype is torch.float64 else stored  # f64 weights have f64 scales, rounded below
    options: dict[str, Any] = {
        "scope": format.scope,
        "dtype": format.element,
        "q_min": low,
        "q_max": high,
        "scale_dtype": asked,
    }
    scale, _ = choose_qparams(weight, **options)
    return scale.to(stored)


RULES: dict[str, Rule] = {"absmax": absmax}


def choose_scale(weight: Tensor, format: WeightFormat, data: CalibrationData | None = None) -> Tensor:
    """The scales of a weight, by the rule of its format."""
    if format.scales not in RULES:
        raise InvalidProblem(f"scales: expected one of {', '.join(RULES)}, got {format.scales!r}")
    return RULES[format.scales](weight, format, data)
