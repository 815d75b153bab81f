"""The Triton kernels in Triton's interpreter, on CPU tensors, against the reference: every case, bit for bit.

`triton.jit` decides when a module is imported whether it interprets, so this file needs a process of its own:
TRITON_INTERPRET=1 pytest tests/test_triton.py
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
import torch
from narrowed import assert_kernels_store_16_bits, assert_scales_nobody_reads_are_not_stored

from baracuda import (
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
    Scope,
)
from baracuda.backends.triton import tune
from baracuda.plan import SelectedPlan
from baracuda.problem import Problem
from cases import CASES, Case, assert_same_bits, is_linear, run

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="interprets kernels: TRITON_INTERPRET=1 pytest tests/test_triton.py",
    ),
    # numpy, which the interpreter computes with, remarks on every 0/0 and overflow of the edge cases.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def _groups() -> dict[str, list[Case]]:
    """Cases by op, layout and element: one test each, so that a failure names its place and the run stays short.

    The interpreter takes seconds for a large tensor, so of the large layouts every twelfth case runs here; the device
    tests run them all.
    """
    groups: dict[str, list[Case]] = defaultdict(list)
    for i, case in enumerate(CASES):
        p = case.problem
        if is_linear(case) or (p.view.numel > 10_000 and i % 12 != i // 96 % 12):
            continue
        shape = "x".join(map(str, p.shape)) or "scalar"
        groups[f"{p.op.value}-{shape}-{p.scope}-{p.element.value}"].append(case)
    return groups


GROUPS = _groups()


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted_kernels_have_the_bits_of_the_reference(group: str) -> None:
    for case in GROUPS[group]:
        assert_same_bits(run(case, BackendKind.TRITON), run(case, BackendKind.REFERENCE), case)


@pytest.mark.parametrize("mode", list(DynamicRangeMode))
@pytest.mark.parametrize("element", [ElementKind.BF16, ElementKind.F64])
@pytest.mark.parametrize(
    ("shape", "scope", "schedule"),
    [
        ((5, 9001), PerToken(), "long_rows"),
        ((3, 2, 4100), PerChannel(1), "partial"),
        ((700, 33), PerChannel(1), "partial_columns"),
        ((40000,), PerTensor(), "partial"),
    ],
)
def test_segments_too_long_for_registers_have_the_bits_of_the_reference(
    shape: tuple[int, ...],
    scope: Scope,
    schedule: str,
    element: ElementKind,
    mode: DynamicRangeMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tune, "IN_REGISTERS", 2**12)
    low = -127 if mode is DynamicRangeMode.SYMMETRIC else -128
    op, kind = QuantizeKind.DYNAMIC_QUANTIZE, ElementKind.S8
    problem = Problem(op, shape, element, kind, low, 127, scope, mode, scale_element=element.math)
    assert tune.dynamic(problem.view, element.dtype.itemsize, 4).schedule.value == schedule
    case = Case(problem, "poison")
    assert_same_bits(run(case, BackendKind.TRITON), run(case, BackendKind.REFERENCE), case)


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.U8, ElementKind.S4])
@pytest.mark.parametrize("mode", list(DynamicRangeMode))
@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.BF16])
def test_quotients_reach_their_bounds_and_no_further(
    element: ElementKind, mode: DynamicRangeMode, kind: ElementKind
) -> None:
    """Small f16 scales are rounded so coarsely that x / scale is half as large again as q may be; odd zero points."""
    low = kind.q_min + (mode is DynamicRangeMode.SYMMETRIC and kind.q_min < 0)
    shape, op = (64, 16), QuantizeKind.DYNAMIC_QUANTIZE
    p = Problem(op, shape, element, kind, low, kind.q_max, PerToken(), mode, scale_element=element)
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(1, 400, (2, 64, 1), generator=generator)
    x = torch.rand(shape, generator=generator) * ends.sum(0) - ends[1]
    x[:, 0], x[:, 1] = ends[0, :, 0], -ends[1, :, 0]
    outputs = []
    for backend in (BackendKind.TRITON, BackendKind.REFERENCE):
        plan = SelectedPlan(p, torch.device("cpu"), PlanPreference(prefer_backend=backend))
        outputs.append(plan.compute(((x.round() * 2.0**-24).to(element.dtype),)))
    for got, wanted in zip(*outputs, strict=True):
        assert (got is None and wanted is None) or torch.equal(got, wanted)


def test_fake_quantized_values_are_stored_as_16_bits_where_asked() -> None:
    assert_kernels_store_16_bits("cpu")


def test_scales_that_nobody_reads_are_not_stored() -> None:
    assert_scales_nobody_reads_are_not_stored("cpu")
