"""The Triton kernels in Triton's interpreter, on CPU tensors, against the reference: every case, bit for bit.

`triton.jit` decides when a module is imported whether it interprets, so this file needs a process of its own:
TRITON_INTERPRET=1 pytest tests/backends/triton/test_interpreter.py
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
import torch
from index_split import assert_indices_are_split_as_python_divides
from narrowed import assert_kernels_store_16_bits, assert_scales_nobody_reads_are_not_stored

from baracuda import (
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
    Scope,
)
from baracuda.backends.triton.dynamic import tune as dynamic_tune
from baracuda.backends.triton.elementwise import tune as elementwise_tune
from baracuda.backends.triton.tune import Tile
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan
from cases import CASES, Case, assert_same_bits, is_linear, run

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="interprets kernels: TRITON_INTERPRET=1 pytest tests/backends/triton/test_interpreter.py",
    ),
    # numpy, which the interpreter computes with, remarks on every 0/0 and overflow of the edge cases.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def _groups() -> dict[str, list[Case]]:
    """Cases by op, layout and element: one test each, so that a failure names its place and the run stays short.

    The interpreter takes seconds for a large tensor, so of the large layouts every sixteenth case runs here; the device
    tests run them all.
    """
    groups: dict[str, list[Case]] = defaultdict(list)
    for i, case in enumerate(CASES):
        p = case.problem
        if is_linear(case) or (p.view.numel > 10_000 and i % 16 != i // 128 % 16):
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
    monkeypatch.setattr(dynamic_tune, "IN_REGISTERS", 2**12)
    low = -127 if mode is DynamicRangeMode.SYMMETRIC else -128
    op, kind = QuantizeKind.DYNAMIC_QUANTIZE, ElementKind.S8
    problem = Problem(op, shape, element, kind, low, 127, scope, mode, scale_element=element.math)
    assert dynamic_tune.dynamic(problem.view, element.dtype.itemsize, 4).schedule.value == schedule
    case = Case(problem, "poison")
    assert_same_bits(run(case, BackendKind.TRITON), run(case, BackendKind.REFERENCE), case)


WALKING = [(op, ElementKind.S8) for op in OPS if OPS[op].elementwise]
WALKING += [(QuantizeKind.QUANTIZE, ElementKind.S4), (QuantizeKind.DEQUANTIZE, ElementKind.S4)]


@pytest.mark.parametrize("data", ["ordinary", "bits"])
@pytest.mark.parametrize(("shape", "scope"), [((32, 16), PerChannel(1)), ((2, 25, 18), PerGroup(25, axis=1))], ids=str)
@pytest.mark.parametrize("element", [ElementKind.BF16, ElementKind.F32])
@pytest.mark.parametrize(("op", "kind"), WALKING)
def test_programs_that_walk_down_their_columns_have_the_bits_of_the_reference(
    op: QuantizeKind,
    kind: ElementKind,
    element: ElementKind,
    shape: tuple[int, ...],
    scope: Scope,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop that only large tensors need; of random bits there are scales that take the other way in it."""
    monkeypatch.setattr(elementwise_tune, "columns", lambda *args, **options: Tile(4, 16, 1, repeats=4, vector=4))
    case = Case(Problem(op, shape, element, kind, kind.q_min, kind.q_max, scope), data)
    assert_same_bits(run(case, BackendKind.TRITON), run(case, BackendKind.REFERENCE), case)


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.U8, ElementKind.S4])
@pytest.mark.parametrize(
    ("mode", "include_zero"),
    [(DynamicRangeMode.SYMMETRIC, False), (DynamicRangeMode.ASYMMETRIC, False), (DynamicRangeMode.ASYMMETRIC, True)],
)
@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.BF16])
def test_quotients_reach_their_bounds_and_no_further(
    element: ElementKind, mode: DynamicRangeMode, include_zero: bool, kind: ElementKind
) -> None:
    """Small f16 scales are rounded so coarsely that x / scale is half as large again as q may be; odd zero points."""
    low = kind.q_min + (mode is DynamicRangeMode.SYMMETRIC and kind.q_min < 0)
    shape, op = (64, 16), QuantizeKind.DYNAMIC_QUANTIZE
    options = {"scale_element": element, "include_zero": include_zero}
    p = Problem(op, shape, element, kind, low, kind.q_max, PerToken(), mode, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(1, 400, (2, 64, 1), generator=generator)
    x = torch.rand(shape, generator=generator) * ends.sum(0) - ends[1]
    x[:, 0], x[:, 1] = ends[0, :, 0], -ends[1, :, 0]
    x = -x.abs() if include_zero else x
    outputs = []
    for backend in (BackendKind.TRITON, BackendKind.REFERENCE):
        plan = SelectedPlan(p, torch.device("cpu"), PlanPreference(prefer_backend=backend))
        outputs.append(plan.compute(((x.round() * 2.0**-24).to(element.dtype),)))
    for got, wanted in zip(*outputs, strict=True):
        assert (got is None and wanted is None) or torch.equal(got, wanted)
    if include_zero:
        assert kind.q_min <= outputs[0][1].min() and outputs[0][1].max() == kind.q_max


@pytest.mark.parametrize("op", [QuantizeKind.FAKE_QUANTIZE_BACKWARD, QuantizeKind.QUANTIZE_BACKWARD])
@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.BF16, ElementKind.F32])
@pytest.mark.parametrize("ends", [(0, 255), (1, 254), (3, 3)])
def test_a_gradient_passes_up_to_the_last_element_in_range(
    ends: tuple[int, int], element: ElementKind, op: QuantizeKind
) -> None:
    """The elements beside (bound +- 1/2) * scale, whose quotient is a tie or the one before or behind it."""
    generator, rows = torch.Generator().manual_seed(0), 512
    scale = torch.rand(rows, 1, generator=generator) + 0.5
    scale *= torch.exp2(torch.randint(-99, 99, (rows, 1), generator=generator))
    scale[:8] = torch.exp2(torch.arange(-100.0, 101, 28.5).round())[:, None]
    zero_point = torch.randint(-300, 300, (rows, 1), generator=generator)
    zero_point[::4] = torch.randint(-(2**22), 2**22, (rows // 4, 1), generator=generator)
    lows, highs = ends[0] - zero_point - 0.5, ends[1] - zero_point + 0.5
    if element is ElementKind.F16:
        scale = scale.frexp().mantissa * torch.where(lows.abs() + highs.abs() > 2048, 2.0**-9, 1.0)
    x = torch.cat([(lows * scale).expand(-1, 24), (highs * scale).expand(-1, 24)], 1).to(element.dtype)
    bits = x.view(torch.int32 if element is ElementKind.F32 else torch.int16)
    bits += torch.arange(-12, 12, dtype=bits.dtype).repeat(2)
    p = Problem(op, tuple(x.shape), element, ElementKind.U8, *ends, PerToken())
    given = (x, torch.ones_like(x), scale[:, 0].clone(), zero_point[:, 0].to(torch.int32))
    outputs = []
    for backend in (BackendKind.TRITON, BackendKind.REFERENCE):
        plan = SelectedPlan(p, torch.device("cpu"), PlanPreference(prefer_backend=backend))
        outputs.append(plan.compute(given)[0])
    assert torch.equal(*outputs)
    assert 0.02 < (outputs[0] != 0).float().mean() < 0.98


def test_fake_quantized_values_are_stored_as_16_bits_where_asked() -> None:
    assert_kernels_store_16_bits("cpu")


def test_scales_that_nobody_reads_are_not_stored() -> None:
    assert_scales_nobody_reads_are_not_stored("cpu")


def test_indices_are_split_as_python_divides() -> None:
    assert_indices_are_split_as_python_divides("cpu")
