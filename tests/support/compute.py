"""One op on one backend without the functional layer: operands by name in, outputs by name out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baracuda import BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from baracuda.backends.registry import Value
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem, fake_storage
from baracuda.plans.plan import SelectedPlan

#: The reference, and whatever `select` would choose on this machine.
BACKENDS = [pytest.param(BackendKind.REFERENCE, id="reference"), pytest.param(None, id="chosen")]


def compute(
    op: QuantizeKind,
    shape: tuple[int, ...],
    element: ElementKind,
    quantized: ElementKind = ElementKind.S8,
    *,
    q_min: int | None = None,
    q_max: int | None = None,
    backend: BackendKind | None = BackendKind.REFERENCE,
    operands: dict[str, Value],
    **fields: Any,
) -> dict[str, Tensor]:
    """Run `op`; operands left out are None, and outputs start poisoned, so that an unwritten element shows."""
    low = quantized.q_min if q_min is None else q_min
    high = quantized.q_max if q_max is None else q_max
    if op in (QuantizeKind.FAKE_QUANTIZE, QuantizeKind.FAKE_QUANTIZE_BACKWARD):
        quantized = fake_storage(low, high)
    problem = Problem(op, shape, element, quantized, low, high, **fields)
    plan = SelectedPlan(problem, torch.device("cpu"), PlanPreference(prefer_backend=backend))
    outputs = {
        row.name: torch.full(row.shape(problem), 77, dtype=row.elements(problem)[0].dtype)
        for row in OPS[op].operands
        if row.output and (not row.optional or _wanted(row.name, problem))
    }
    values = {**operands, **outputs}
    workspace = torch.full((plan.workspace_size(),), 0xA5, dtype=torch.uint8)
    plan.launch(tuple(values.get(row.name) for row in OPS[op].operands), workspace)
    return outputs


def _wanted(name: str, problem: Problem) -> bool:
    return name == "zero_point_out" and problem.mode is DynamicRangeMode.ASYMMETRIC
