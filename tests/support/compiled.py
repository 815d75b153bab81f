"""What the tests of the compiled backend share: a plan, a run, and the reference's bits on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baracuda import BackendKind, PlanPreference, QuantizeKind
from baracuda.backends.registry import Value, kernels
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan
from cases import assert_same_bits

_cpu = pytest.importorskip("baracuda._cpu", reason="the compiled module is missing")
CPU = torch.device("cpu")
#: All but the learned backward, whose cases and sums are test_learned's.
OPS_HERE = frozenset[QuantizeKind]().union(*(kernel.ops for kernel in kernels(BackendKind.CPU))) - {
    QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD
}


def plan_for(problem: Problem, backend: BackendKind = BackendKind.CPU) -> SelectedPlan:
    return SelectedPlan(problem, CPU, PlanPreference(prefer_backend=backend))


def launch(plan: SelectedPlan, values: tuple[Value, ...]) -> dict[str, Tensor]:
    """The outputs of a run over fresh, poisoned outputs and workspace."""
    rows = OPS[plan.problem.op].operands
    fresh = tuple(
        torch.full_like(v, 77) if o.output and isinstance(v, Tensor) else v for o, v in zip(rows, values, strict=True)
    )
    plan.launch(fresh, torch.full((plan.workspace_size(),), 0xA5, dtype=torch.uint8))
    return {o.name: v for o, v in zip(rows, fresh, strict=True) if o.output and isinstance(v, Tensor)}


def assert_like_reference(problem: Problem, values: tuple[Value, ...], what: object, isas: list[str]) -> None:
    expected = launch(plan_for(problem, BackendKind.REFERENCE), values)
    plan = plan_for(problem)
    for isa in isas:
        _cpu.use_isa(isa)
        assert_same_bits(launch(plan, values), expected, f"{isa}: {what}")
