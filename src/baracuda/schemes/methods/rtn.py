"""Round to nearest: each weight becomes the integer nearest to weight / scale. It needs no data."""

from __future__ import annotations

import torch
from torch import Tensor

from ...functional import dynamic_quantize, quantize
from ..calibration import CalibrationData
from ..formats import WeightFormat
from ..method import QuantizedWeight, register_method
from ..scales import choose, choose_scale


def round_with(weight: Tensor, scale: Tensor, format: WeightFormat) -> QuantizedWeight:
    """Round to nearest with these scales."""
    low, high = format.range
    q = quantize(weight, scale, scope=format.scope, dtype=format.element, q_min=low, q_max=high)
    return QuantizedWeight(q, scale)


@register_method("rtn")
def rtn(weight: Tensor, format: WeightFormat, data: CalibrationData | None) -> QuantizedWeight:
    if format.factors and format.group_size is not None:
        chosen = choose(weight, format, data)
        wide = chosen.grouped.repeat_interleave(format.group_size, 1)
        return chosen.pack(chosen.rounding.integers(weight.float(), wide), chosen.grouped, format)
    if format.scales != "absmax" or weight.dtype is torch.float64:  # whose scales would be f64
        return round_with(weight, choose_scale(weight, format, data), format)
    scale_dtype = format.scale_dtype(weight.dtype)
    made = dynamic_quantize(weight, scope=format.scope, dtype=format.element, scale_dtype=scale_dtype)
    return QuantizedWeight(made.q, made.scale)
