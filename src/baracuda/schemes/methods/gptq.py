"""GPTQ: integers that keep the output of the layer on the calibration data, not each weight by itself.

Scales are searched first, weighed by the input's second moments. The columns that matter most are rounded first, with
the scales of their groups as they are (act-order, static).
"""

from __future__ import annotations

from torch import Tensor

from .. import gptq as solver
from ..calibration import CalibrationData
from ..formats import WeightFormat
from ..method import QuantizedWeight, register_method
from ..scales import choose


@register_method("gptq", needs="hessian", nearest=False)
def gptq(weight: Tensor, format: WeightFormat, data: CalibrationData | None) -> QuantizedWeight:
    assert data is not None and data.hessian is not None
    hessian, device = data.hessian, weight.device
    factored = data.once(f"gptq on {device}", lambda: solver.FactoredHessian.of(hessian).to(device))
    rows, chosen = weight.float(), choose(weight, format, data)
    group, (low, high), scale = format.group_size or weight.shape[1], format.range, chosen.grouped
    found = solver.gptq(rows, scale, group, low, high, factored)
    return chosen.pack(found.integers, scale, format, {"output_error": float(found.error.sum())})
