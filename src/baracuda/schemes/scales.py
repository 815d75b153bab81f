"""Rules that choose the scales of a weight, by name: a `WeightFormat` says which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidProblem
from ..functional import choose_qparams
from .calibration import CalibrationData
from .formats import WeightFormat
from .method import QuantizedWeight
from .search import LARGEST_FACTOR, Rounding, search_factors, search_scales


@dataclass(frozen=True)
class Chosen:
    """The scales of a weight in f32, as they are once stored, and how others are stored in their place."""

    grouped: Tensor
    """`[N, K / group_size]`; `[N, 1]` without groups."""
    rounding: Rounding
    channel: Tensor | None = None
    """`[N]`, where the scale of a group is an integer times this."""

    def stored(self, scale: Tensor) -> Tensor:
        """The nearest scales `[N]` that can be stored for one group of each row."""
        if self.channel is None:
            return self.rounding.stored(scale)
        return self.channel * (scale / self.channel).round_().clamp_(1, LARGEST_FACTOR)

    def pack(
        self, integers: Tensor, scale: Tensor, format: WeightFormat, report: Mapping[str, float] | None = None
    ) -> QuantizedWeight:
        """Integers `[N, K]` and scales like `grouped` as the format stores them."""
        dtype = self.rounding.dtype
        if self.channel is None:
            shape = format.scale_shape(*integers.shape)
            return QuantizedWeight.pack(integers, scale.to(dtype).reshape(shape), format, report)
        made = QuantizedWeight.pack(integers, self.channel.to(dtype), format, report)
        return replace(made, factors=(scale / self.channel[:, None]).round_().to(torch.int8))


def choose(weight: Tensor, format: WeightFormat, data: CalibrationData | None = None) -> Chosen:
    """The scales of a weight by the rule of its format, with integer factors where it asks for them."""
    low, high = format.range
    rounding = Rounding(low, high, format.scale_dtype(weight.dtype))
    group = format.group_size or weight.shape[1]
    if format.scales == "absmax":
        return Chosen(absmax(weight, format).float().reshape(weight.shape[0], -1), rounding)
    # A channel that no token used would leave the search without a measure.
    importance = None if data is None or not bool(data.moments.any()) else data.moments
    if not format.factors or format.group_size is None:
        return Chosen(search_scales(weight.float(), group, rounding, importance), rounding)
    channel, factors = search_factors(weight.float(), group, rounding, importance)
    return Chosen(channel[:, None] * factors, rounding, channel)


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


def search(weight: Tensor, format: WeightFormat, data: CalibrationData | None = None) -> Tensor:
    """The scale of least squared error, weighed by the second moments of the input where there are any."""
    found = choose(weight, format, data).grouped
    return found.to(format.scale_dtype(weight.dtype)).reshape(format.scale_shape(*weight.shape))


RULES: dict[str, Rule] = {"absmax": absmax, "search": search}


def choose_scale(weight: Tensor, format: WeightFormat, data: CalibrationData | None = None) -> Tensor:
    """The scales of a weight, by the rule of its format."""
    if format.scales not in RULES:
        raise InvalidProblem(f"scales: expected one of {', '.join(RULES)}, got {format.scales!r}")
    return RULES[format.scales](weight, format, data)
