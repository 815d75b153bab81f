"""The portable Triton linears in Triton's interpreter: `make interpreter`."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set: make interpreter", allow_module_level=True)

from baracuda import BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from baracuda.backends.triton.linear import launch as linear
from baracuda.core.packing import unpack_int4
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan
from cases import CASES, assert_same_bits, is_linear, run

LINEARS = [case for case in CASES if is_linear(case)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_the_portable_linear_has_the_bits_of_the_reference(case) -> None:
    assert_same_bits(run(case, BackendKind.TRITON), run(case, BackendKind.REFERENCE), case)


def long_linear(backend, k, kind, weight, zero_point):
    """The largest products, all of one sign."""
    mode = DynamicRangeMode.ASYMMETRIC if zero_point == "number" else DynamicRangeMode.SYMMETRIC
    far, near = (kind.q_max, kind.q_min) if kind is ElementKind.U8 else (kind.q_min, kind.q_max)
    p = Problem(
        QuantizeKind.SMOOTHQUANT_LINEAR, (2, 3, k), ElementKind.F64, kind, kind.q_min, kind.q_max,
        mode=mode, weight=weight, scale_element=ElementKind.F64,
    )  # fmt: skip
    act = torch.full((2, k), far, dtype=kind.dtype)
    stored = torch.full((3, (k + 1) // 2 if weight.is_packed else k), 0x88 if weight.is_packed else -128)
    given = {"none": None, "number": near, "tensor": torch.tensor(near, dtype=torch.int32)}[zero_point]
    plan = SelectedPlan(p, torch.device("cpu"), PlanPreference(prefer_backend=backend))
    out = torch.full((2, 3), 77.0, dtype=torch.float64)
    plan.launch((act, 1.0, given, stored.to(weight.dtype), 1.0, None, None, None, None, out), None)
    return out


@pytest.mark.parametrize("zero_point", ["none", "number", "tensor"])
@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.U8], ids=lambda kind: kind.value)
def test_sums_beyond_int32_are_exact(kind, zero_point) -> None:
    for k in (65_794, 140_001):
        mine = long_linear(BackendKind.TRITON, k, kind, ElementKind.S8, zero_point)
        assert torch.equal(mine, long_linear(BackendKind.REFERENCE, k, kind, ElementKind.S8, zero_point))


def test_a_linear_without_outputs_still_writes_its_scratch() -> None:
    p = Problem(QuantizeKind.QUANTIZED_LINEAR, (2, 0, 4), ElementKind.F32, ElementKind.S8, -127, 127)
    x, weight, found = torch.randn(2, 4), torch.empty(0, 4, dtype=torch.int8), []
    for backend in (BackendKind.TRITON, BackendKind.REFERENCE):
        plan = SelectedPlan(p, torch.device("cpu"), PlanPreference(prefer_backend=backend))
        scratch = torch.full((2, 4), 77, dtype=torch.int8), torch.full((2,), 77.0)
        plan.launch((x, weight, 1.0, None, None, None, None, *scratch, torch.empty(2, 0)), plan.allocate_workspace())
        found.append(scratch)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("zero_point", ["none", "number", "tensor"])
@pytest.mark.parametrize("weight", [ElementKind.S8, ElementKind.S4], ids=lambda kind: kind.value)
def test_a_sum_cut_into_chunks_is_the_same_sum(weight, zero_point, monkeypatch) -> None:
    monkeypatch.setattr(linear, "_chunk", lambda limit, p, step: 2 * step)
    mine = long_linear(BackendKind.TRITON, 1001, ElementKind.U8, weight, zero_point)
    assert torch.equal(mine, long_linear(BackendKind.REFERENCE, 1001, ElementKind.U8, weight, zero_point))


def weight_only_example(m, n, k, group, element, weight, zero_point, scale):
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator).to(element.dtype)
    stored = torch.randint(0, 256, (n, (k + 1) // 2 if weight.is_packed else k), generator=generator)
    segments = (n, k // group if group else 1)
    scales = (torch.rand(segments, generator=generator) + 0.1).to(scale)
    zeros = torch.randint(-20, 20, segments, generator=generator, dtype=torch.int32) if zero_point else None
    bias, residual = torch.randn(n, generator=generator), torch.randn(m, n, generator=generator)
    return x, stored.to(torch.uint8).view(weight.dtype), scales, zeros, bias, residual.to(element.dtype)


def weight_only_plan(m, n, k, group, element, weight, backend=BackendKind.TRITON):
    op = QuantizeKind.WEIGHT_ONLY_LINEAR
    p = Problem(op, (m, n, k), element, ElementKind.S8, -128, 127, weight=weight, weight_group=group)
    return SelectedPlan(p, torch.device("cpu"), PlanPreference(prefer_backend=backend))


#: M, N, K, group, whether there are zero points: parts of tiles, groups within a step and beyond, odd K, no K.
WEIGHT_ONLY = [(3, 5, 64, 32, True), (70, 9, 256, 128, False), (2, 4, 15, 5, True), (1, 70, 96, 0, False)]
WEIGHT_ONLY += [(2, 3, 0, 0, False)]


@pytest.mark.parametrize("shape", WEIGHT_ONLY, ids=str)
@pytest.mark.parametrize("element", [ElementKind.BF16, ElementKind.F16, ElementKind.F32], ids=lambda e: e.value)
def test_the_portable_weight_only_linear_is_within_its_stated_distance(element, shape) -> None:
    m, n, k, group, zero_point = shape
    for weight in (ElementKind.S4, ElementKind.U4, ElementKind.S8):
        plan = weight_only_plan(m, n, k, group, element, weight)
        values = weight_only_example(*shape[:4], element, weight, zero_point, element.math.dtype)
        (got,) = plan.compute(values)
        (exact,) = weight_only_plan(m, n, k, group, element, weight, BackendKind.REFERENCE).compute(values)
        x, stored, scale, zeros, *_ = values
        q = unpack_int4(stored, weight, k) if weight.is_packed else stored
        q = q.reshape(*scale.shape, -1).double() - (0 if zeros is None else zeros[:, :, None])
        size = x.double().abs() @ (q * scale.double()[:, :, None]).reshape(n, k).abs().T
        promised = plan.precision_guarantee()
        assert plan.sku().kernel == "weight_only" and promised.batch_invariant and not promised.matches_reference
        unit = torch.finfo(element.dtype).eps
        bound = promised.relative_error * size + unit * (exact.double().abs() + 1)
        assert bool(((got.double() - exact.double()).abs() <= bound).all())


def test_a_row_of_the_portable_weight_only_linear_has_the_same_bits_in_every_batch() -> None:
    values = weight_only_example(130, 40, 256, 64, ElementKind.BF16, ElementKind.S4, False, torch.bfloat16)
    x, *weights, residual = values
    (whole,) = weight_only_plan(130, 40, 256, 64, ElementKind.BF16, ElementKind.S4).compute(values)
    for rows in (slice(0, 1), slice(3, 19), slice(65, 130)):
        part = weight_only_plan(len(x[rows]), 40, 256, 64, ElementKind.BF16, ElementKind.S4)
        (got,) = part.compute((x[rows], *weights, residual[rows]))
        assert torch.equal(got, whole[rows])
