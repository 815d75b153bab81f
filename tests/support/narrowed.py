"""Fake-quantized f32 values stored as 16-bit floats, and no scales where nobody reads them: the reference's bits."""

from __future__ import annotations

from itertools import product

import torch

from baracuda import (
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
)
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan
from cases import floats

LAYOUTS = [((6, 256), PerChannel(0)), ((5, 33), PerToken()), ((40, 70), PerChannel(1)), ((5, 4096), PerTensor())]


def assert_kernels_store_16_bits(device: torch.device | str) -> None:
    for shape, scope in LAYOUTS:
        for op in (QuantizeKind.FAKE_QUANTIZE, QuantizeKind.DYNAMIC_FAKE_QUANTIZE):
            p = Problem(op, shape, ElementKind.F32, ElementKind.S8, -127, 127, scope)
            plan, dtypes = plan_for(p, device), (torch.bfloat16, torch.float16, torch.float32)
            assert plan.kernel.narrows
            for dtype in dtypes:
                _assert_alone(plan, dtype)


def assert_scales_nobody_reads_are_not_stored(device: torch.device | str) -> None:
    f32, f64, bf16 = ElementKind.F32, ElementKind.F64, ElementKind.BF16
    for (shape, scope), mode in product(LAYOUTS, DynamicRangeMode):
        for element, stored in ((f32, f32), (f64, f64), (bf16, f32), (bf16, bf16)):
            p = Problem(
                QuantizeKind.DYNAMIC_FAKE_QUANTIZE, shape, element, ElementKind.S8, -127, 127, scope, mode,
                scale_element=stored,
            )  # fmt: skip
            plan = plan_for(p, device)
            _assert_alone(plan, element.dtype)
            *scales, y = plan.only("output").allocate_outputs()
            # Of a long tensor as a whole one kernel finds the scale and another one reads it.
            spared = stored is element.math and not isinstance(scope, PerTensor)
            assert y is not None and (scales == [None, None]) is spared


def plan_for(problem: Problem, device: torch.device | str, backend: str = "triton") -> SelectedPlan:
    return SelectedPlan(problem, torch.device(device), PlanPreference(prefer_backend=BackendKind(backend)))


def _assert_alone(plan: SelectedPlan, dtype: torch.dtype) -> None:
    """The plan's last output alone is that of the reference, as `dtype`."""
    p = plan.problem
    x, scale = floats("edges", p.shape, p.element, 1), torch.full(p.segment_shape, 0.0123)
    inputs = (x, scale, None) if p.op is QuantizeKind.FAKE_QUANTIZE else (x,)
    there = tuple(None if value is None else value.to(plan.device) for value in inputs)
    got = plan.only("output", dtype=dtype).compute(there)[-1].cpu()
    wanted = plan_for(p, "cpu", "reference").compute(inputs)[-1].to(dtype)
    assert got.dtype is dtype
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
