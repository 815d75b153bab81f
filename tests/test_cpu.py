"""The compiled CPU backend: the bits of the reference on every instruction set, in every schedule, on any threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import baracuda
from baracuda import (
    Arithmetic,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    InvalidProblem,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
)
from baracuda.backends.registry import Value, candidates, kernels
from baracuda.plan import SelectedPlan
from baracuda.problem import OPS, Problem
from baracuda.types import FLOATS, MAX_ZERO_POINT
from cases import CASES, LARGE_LAYOUTS, assert_same_bits, is_linear, operands

_cpu = pytest.importorskip("baracuda._cpu", reason="the compiled module is missing")
CPU = torch.device("cpu")
#: All but the learned backward, whose cases and sums are test_learned's.
OPS_HERE = frozenset[QuantizeKind]().union(*(kernel.ops for kernel in kernels(BackendKind.CPU))) - {
    QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD
}


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    isa, threads = _cpu.isa(), torch.get_num_threads()
    yield
    _cpu.use_isa(isa)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


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


# -- the same bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(OPS_HERE, key=lambda op: op.value), ids=lambda op: op.value)
def test_every_case_has_the_bits_of_the_reference_on_every_instruction_set(op: QuantizeKind) -> None:
    cases = [case for case in CASES if case.problem.op is op]
    assert cases
    for case in cases:
        assert_like_reference(case.problem, operands(case), case, _cpu.isas())


@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.BF16], ids=lambda kind: kind.value)
@pytest.mark.parametrize("arithmetic", list(Arithmetic), ids=lambda arithmetic: arithmetic.value)
def test_every_16_bit_float_quantizes_as_the_reference_does(element: ElementKind, arithmetic: Arithmetic) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(element.dtype)
    exotic = [0.0, -0.5, 2.0**-149, 2.0**-101, 2.0**-100, 2.0**100, 2.0**101, 3e38, float("inf"), float("nan")]
    scales = [0.003, 0.0078125, 1 / 3, 1.0, 1.7, 2.0**-20, 2.0**-24, 40000.0, *exotic]
    zero_points = [0, 3, -128, 255, 2**21 - 1, 2**21, -(2**22), MAX_ZERO_POINT, -MAX_ZERO_POINT]
    dy = x.flip(0)
    for scale, zero_point in itertools.product(scales, zero_points):
        pair = torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32)
        for op in (QuantizeKind.QUANTIZE, QuantizeKind.FAKE_QUANTIZE, QuantizeKind.QUANTIZE_BACKWARD):
            p = Problem(op, (x.numel(),), element, ElementKind.S8, -128, 127, arithmetic=arithmetic)
            out = torch.empty_like(x, dtype=torch.int8 if op is QuantizeKind.QUANTIZE else None)
            values = (x, *([dy] if op is QuantizeKind.QUANTIZE_BACKWARD else []), *pair, out)
            assert_like_reference(p, values, (op, scale, zero_point), _cpu.isas())


@pytest.mark.parametrize("isa", _cpu.isas())
@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.BF16], ids=lambda kind: kind.value)
def test_every_16_bit_float_survives_its_conversions(isa: str, element: ElementKind) -> None:
    """dequantize_backward with scale 1 converts there and back; the scale's own type is read one by one."""
    _cpu.use_isa(isa)
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(element.dtype)
    p = Problem(QuantizeKind.DEQUANTIZE_BACKWARD, (x.numel(),), element, ElementKind.S8, -128, 127)
    expected = x.masked_fill(x.isnan(), float("nan"))
    got = launch(plan_for(p), (None, x, 1.0, None, x))["grad_input"]
    assert_same_bits({"x": got}, {"x": expected}, element)
    # Halfway points of the narrower type, reached from f32 products.
    wide = torch.arange(0, 2**31 - 1, 104729, dtype=torch.int64).to(torch.int32).view(torch.float32)
    q = torch.ones(wide.numel(), dtype=torch.int8)
    p = Problem(QuantizeKind.DEQUANTIZE, (wide.numel(),), element, ElementKind.S8, -128, 127, PerChannel(0))
    assert_like_reference(p, (q, wide, None, torch.empty(wide.numel(), dtype=element.dtype)), "narrowing", [isa])


def _sweep_f32(scale: float, zero_point: int, isa: str, step: int) -> None:
    """Every `step`-th of all 2**32 floats, against torch's division and rounding."""
    _cpu.use_isa(isa)
    chunk = 2**22
    quantize = Problem(QuantizeKind.QUANTIZE, (chunk,), ElementKind.F32, ElementKind.S8, -128, 127)
    plan, out = plan_for(quantize), torch.empty(chunk, dtype=torch.int8)
    s = torch.tensor(scale)
    low, high = float(-128 - zero_point), float(127 - zero_point)
    for start in range(-(2**31), 2**31, chunk * step):
        x = torch.arange(start, start + chunk * step, step, dtype=torch.int64).to(torch.int32).view(torch.float32)
        plan.launch((x, s, zero_point, out), None)
        t = torch.fmin(torch.fmax(torch.round(x / s), torch.tensor(low)), torch.tensor(high))
        expected = (t.to(torch.int32) + zero_point).to(torch.int8)
        assert torch.equal(out, expected), (scale, zero_point, start)


@pytest.mark.parametrize("zero_point", [0, -77, 2**21 - 1, MAX_ZERO_POINT])
@pytest.mark.parametrize("scale", [0.0123, 2.0**-100, 0.9999999 * 2.0**100])
def test_a_sample_of_all_f32_quantizes_as_division_does(scale: float, zero_point: int) -> None:
    for isa in _cpu.isas():
        _sweep_f32(scale, zero_point, isa, step=509)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "zero_point"), [(0.0123, 0), (0.3333333, 2**21 - 1), (1.7e-30, -(2**21) + 1)])
def test_all_f32_quantize_as_division_does(scale: float, zero_point: int) -> None:
    _sweep_f32(scale, zero_point, _cpu.isas()[-1], step=1)


def test_random_scales_near_ties_quantize_as_division_does() -> None:
    """x = (k + 1/2) * scale and its neighbours: where a reciprocal alone goes wrong."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.randint(2**23 * 28, 2**23 * 226, (1500,), generator=generator, dtype=torch.int32).view(torch.float32)
    ties = (torch.arange(-130, 130) + 0.5).repeat_interleave(7)
    nudge = torch.arange(-3, 4, dtype=torch.int32).repeat(260)
    x = ((ties * scales[:, None]).view(torch.int32) + nudge).view(torch.float32)
    p = Problem(QuantizeKind.QUANTIZE, tuple(x.shape), ElementKind.F32, ElementKind.S8, -128, 127, PerToken())
    assert_like_reference(p, (x, scales, None, torch.empty(x.shape, dtype=torch.int8)), "ties", _cpu.isas())


# -- threads, flags and memory -----------------------------------------------------------------------------------

MANY = [case for case in CASES if case.problem.shape in dict(LARGE_LAYOUTS) and case.problem.op in OPS_HERE]


def test_the_thread_count_does_not_change_a_bit() -> None:
    for case in MANY[::7]:
        plan, values = plan_for(case.problem), operands(case)
        torch.set_num_threads(1)
        expected = launch(plan, values)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert_same_bits(launch(plan, values), expected, (threads, case))


def test_flushing_denormals_does_not_change_a_bit() -> None:
    tiny = [case for case in CASES if case.data in ("subnormal", "bits") and case.problem.op in OPS_HERE][::5]
    for case in [*tiny, *MANY[::31]]:
        values = operands(case)
        plan = plan_for(case.problem)
        expected = launch(plan, values)
        if not torch.set_flush_denormal(True):
            pytest.skip("this machine cannot flush denormals")
        got = launch(plan, values)
        still_flushes = (torch.tensor([1e-310], dtype=torch.float64) * 1.0).item() == 0.0
        torch.set_flush_denormal(False)
        assert_same_bits(got, expected, case)
        assert still_flushes, "the caller's flag was not put back"


def test_a_run_allocates_nothing_that_grows() -> None:
    x, out = torch.randn(256, 512), torch.empty(256, 512, dtype=torch.int8)
    scale = torch.empty(256)
    p = Problem(QuantizeKind.DYNAMIC_QUANTIZE, (256, 512), ElementKind.F32, ElementKind.S8, -127, 127, PerToken())
    plan = plan_for(p)
    plan.launch((x, scale, None, out), None)
    with torch.profiler.profile(profile_memory=True) as profile:
        plan.launch((x, scale, None, out), None)
    assert all(event.self_cpu_memory_usage == 0 for event in profile.key_averages())
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(100):
        plan.launch((x, scale, None, out), None)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 4096


# -- strides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", FLOATS, ids=lambda kind: kind.value)
@pytest.mark.parametrize("scope", [PerTensor(), PerToken(), PerChannel(1), PerChannel(0), PerGroup(3, axis=1)])
def test_row_strided_inputs_run_in_place(element: ElementKind, scope: baracuda.Scope) -> None:
    wide = torch.randn(4, 6, 29, dtype=torch.float64).to(element.dtype)
    x = wide[..., 2:19]
    for kind in (ElementKind.S8, ElementKind.S4):
        got = baracuda.dynamic_quantize(x, scope=scope, dtype=kind)
        expected = baracuda.dynamic_quantize(x.contiguous(), scope=scope, dtype=kind)
        assert torch.equal(got.q, expected.q)
        assert torch.equal(got.scale, expected.scale)
        p = Problem(QuantizeKind.QUANTIZE, (4, 6, 17), element, kind, kind.q_min, kind.q_max, scope)
        out = torch.empty(expected.q.shape, dtype=kind.dtype)
        values = (x, got.scale, None, out)
        assert not x.is_contiguous()
        assert_like_reference(p, values, "strided", _cpu.isas())


def test_strided_integers_gradients_scales_and_repeated_rows_run_in_place() -> None:
    q = torch.randint(-128, 128, (5, 4, 33), dtype=torch.int8)[..., :20]
    packed = torch.randint(0, 256, (5, 4, 15), dtype=torch.uint8)[..., 1:11]
    scale = torch.rand(5, 9)[:, 2:6] + 0.1
    zero_point = torch.randint(-9, 9, (5, 7), dtype=torch.int32)[:, :4]
    x = torch.randn(5, 4, 24)[..., :20]
    repeated = torch.randn(20).expand(5, 4, 20)
    out = torch.empty(5, 4, 20)
    for kind, stored in ((ElementKind.S8, q), (ElementKind.S4, packed), (ElementKind.U4, packed)):
        p = Problem(QuantizeKind.DEQUANTIZE, (5, 4, 20), ElementKind.F32, kind, kind.q_min, kind.q_max, PerToken())
        assert_like_reference(p, (stored, scale, zero_point, out), kind, _cpu.isas())
    p = Problem(QuantizeKind.FAKE_QUANTIZE_BACKWARD, (5, 4, 20), ElementKind.F32, ElementKind.S8, -128, 127, PerToken())
    assert_like_reference(p, (repeated, x, scale, zero_point, out), "backward", _cpu.isas())


def test_other_strides_are_declined_by_plans_with_a_reason_and_made_contiguous_by_functions() -> None:
    x = torch.randn(8, 6).t()
    p = Problem(QuantizeKind.QUANTIZE, (6, 8), ElementKind.F32, ElementKind.S8, -128, 127)
    with pytest.raises(InvalidProblem, match="contiguous or row-strided"):
        plan_for(p).launch((x, 0.1, None, torch.empty(6, 8, dtype=torch.int8)), None)
    assert torch.equal(baracuda.quantize(x, 0.1), baracuda.quantize(x.contiguous(), 0.1))


def test_an_output_may_be_its_input() -> None:
    for element in FLOATS:
        x = torch.randn(3, 4099, dtype=torch.float64).to(element.dtype)
        expected = baracuda.fake_quantize(x, 0.03)
        baracuda.fake_quantize(x, 0.03, out=x)
        assert torch.equal(x, expected)


# -- linears -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [65793, 65794, 131071, 131072, 140000])
@pytest.mark.parametrize("mode", list(DynamicRangeMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.U8], ids=lambda kind: kind.value)
def test_the_sums_of_a_long_linear_are_exact(k: int, mode: DynamicRangeMode, kind: ElementKind) -> None:
    """The largest products, all of one sign: past these lengths 32 bits are not enough."""
    act = torch.full((2, k), kind.q_max if kind is ElementKind.U8 else kind.q_min).to(kind.dtype)
    weight = torch.full((3, k), -128, dtype=torch.int8)
    weight[1], weight[2, ::2] = 127, 127
    zero_point = (kind.q_min if kind is ElementKind.U8 else kind.q_max) if mode is DynamicRangeMode.ASYMMETRIC else None
    p = Problem(
        QuantizeKind.SMOOTHQUANT_LINEAR, (2, 3, k), ElementKind.F64, kind, kind.q_min, kind.q_max, mode=mode,
        scale_element=ElementKind.F64,
    )  # fmt: skip
    values = (act, 1.0, zero_point, weight, 1.0, None, None, None, torch.empty(2, 3, dtype=torch.float64))
    assert_like_reference(p, values, k, _cpu.isas())


@pytest.mark.parametrize("shape", [(1, 64, 256), (7, 33, 65), (40, 129, 511), (64, 64, 64)])
def test_the_largest_products_do_not_saturate(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    extremes = torch.tensor([-128, -127, 127, 126], dtype=torch.int8)
    generator = torch.Generator().manual_seed(0)
    for kind, weight_kind in itertools.product((ElementKind.S8, ElementKind.U8), (ElementKind.S8, ElementKind.S4)):
        act = extremes[torch.randint(0, 4, (m, k), generator=generator)]
        act[0] = -128
        weight = extremes[torch.randint(0, 4, (n, k), generator=generator)]
        weight[0] = -128
        if weight_kind is ElementKind.S4:
            weight = baracuda.pack_int4(weight // 16, "s4")
        p = Problem(
            QuantizeKind.SMOOTHQUANT_LINEAR, shape, ElementKind.F32, kind, kind.q_min, kind.q_max, weight=weight_kind
        )
        sums = torch.empty(m, n)
        for zero_point in (None, kind.q_min, kind.q_max):
            values = (act.view(kind.dtype), 1.0, zero_point, weight, 1.0, None, None, None, sums)
            assert_like_reference(p, values, (kind, weight_kind, zero_point), _cpu.isas())


def test_a_kept_weight_sum_gives_the_same_linear_as_one_computed_on_the_way() -> None:
    x, weight = torch.randn(9, 130), torch.randint(-127, 128, (21, 130), dtype=torch.int8)
    p = Problem(
        QuantizeKind.QUANTIZED_LINEAR, (9, 21, 130), ElementKind.F32, ElementKind.S8, -128, 127,
        mode=DynamicRangeMode.ASYMMETRIC,
    )  # fmt: skip
    for weight_sum in (None, weight.sum(1, dtype=torch.int32)):
        values = (x, weight, 0.02, None, weight_sum, None, None, None, torch.empty(9, 21))
        assert_like_reference(p, values, weight_sum is None, _cpu.isas())


def test_scratch_that_the_caller_gives_is_filled() -> None:
    for mode, kind in itertools.product(DynamicRangeMode, (ElementKind.S8, ElementKind.U8)):
        p = Problem(
            QuantizeKind.QUANTIZED_LINEAR, (5, 8, 48), ElementKind.BF16, kind, kind.q_min, kind.q_max, mode=mode
        )
        x, weight = torch.randn(5, 48).bfloat16(), torch.randint(-127, 128, (8, 60), dtype=torch.int8)[:, 3:51]
        scratch = torch.empty(5, 48, dtype=kind.dtype), torch.empty(5)
        weights = (weight, torch.rand(8), torch.randn(8), None, None)
        values = (x, *weights, *scratch, torch.empty(5, 8, dtype=torch.bfloat16))
        assert_like_reference(p, values, mode, _cpu.isas())


# -- instruction sets and nonsense -------------------------------------------------------------------------------


def test_the_override_chooses_the_instruction_set_and_refuses_an_unknown_one() -> None:
    command = [sys.executable, "-c", "from baracuda import _cpu; print(_cpu.isa())"]
    for isa in _cpu.isas():
        ran = subprocess.run(
            command, env=os.environ | {"BARACUDA_ISA": isa}, capture_output=True, text=True, check=True
        )
        assert ran.stdout.strip() == isa
    ran = subprocess.run(command, env=os.environ | {"BARACUDA_ISA": "mmx"}, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "BARACUDA_ISA" in ran.stderr
    assert "mmx" in ran.stderr


def test_the_plan_names_the_instruction_set() -> None:
    p = Problem(QuantizeKind.QUANTIZE, (4,), ElementKind.F32, ElementKind.S8, -128, 127)
    sku = plan_for(p).sku()
    assert (sku.backend, sku.arch) == (BackendKind.CPU, _cpu.isa())


def test_without_the_compiled_module_the_reference_serves_and_the_reason_is_told() -> None:
    code = """
import sys; sys.modules["baracuda._cpu"] = None
import torch, baracuda
from baracuda import BackendKind, ElementKind, PlanPreference, QuantizeKind
from baracuda.backends.registry import candidates, choose
from baracuda.problem import Problem
for op, shape in ((QuantizeKind.QUANTIZE, (4,)), (QuantizeKind.QUANTIZED_LINEAR, (2, 3, 4))):
    p = Problem(op, shape, ElementKind.F32, ElementKind.S8, -127, 127)
    offered = candidates(p, torch.device("cpu"), PlanPreference())
    reasons = [why for kernel, why in offered if kernel.backend is BackendKind.CPU]
    assert reasons and all("pip install" in why for why in reasons), reasons
    assert choose(p, torch.device("cpu")).backend is BackendKind.REFERENCE
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_problem_is_declined_on_the_cpu() -> None:
    for case in [case for case in CASES if case.problem.op in OPS_HERE][::17]:
        reasons = [
            why for kernel, why in candidates(case.problem, CPU, PlanPreference()) if kernel.backend is BackendKind.CPU
        ]
        assert reasons == [None], case
    assert any(is_linear(case) for case in CASES[::17])


GOOD_PLAN = {
    "op": 0, "element": 2, "quantized": 4, "scale_element": 2, "q_min": -128, "q_max": 127, "asymmetric": False,
    "include_zero": False, "reciprocal": False, "repeat": 1, "rows": 1, "run": 8, "inner": 1, "last": 8,
    "scale_length": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": -1}, {"op": 10}, {"element": 4}, {"element": -1}, {"quantized": 2}, {"quantized": 8},
        {"scale_element": 9}, {"scale_element": 3}, {"q_min": -129}, {"q_max": 128}, {"q_min": 9, "q_max": 8},
        {"op": 7, "q_max": 0}, {"op": 7, "asymmetric": True, "q_min": 5, "q_max": 5}, {"rows": -1}, {"run": -8},
        {"repeat": 2, "inner": 3}, {"run": 2**62}, {"rows": 2**40, "run": 2**40}, {"last": 3}, {"last": 0},
        {"inner": 4, "last": 8}, {"scale_length": -1}, {"rows": 2, "scale_length": 5}, {"run": 2**64},
        {"run": "8"}, {"run": 8.5}, {"op": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_nonsense_native_plan_is_refused(wrong: dict[str, object]) -> None:
    _cpu.Plan(**GOOD_PLAN)
    with pytest.raises((ValueError, TypeError)):
        _cpu.Plan(**GOOD_PLAN | wrong)


def test_a_native_call_with_a_wrong_address_pitch_number_or_thread_count_is_refused() -> None:
    x, out = torch.randn(8), torch.empty(8, dtype=torch.int8)
    plan, dynamic = _cpu.Plan(**GOOD_PLAN), _cpu.Plan(**GOOD_PLAN | {"op": 7, "asymmetric": True})
    good = [x.data_ptr(), -1, 0, -1, 0, 2, -1, 0.1, 0, -1, 0, out.data_ptr(), 1]
    plan.run(*good)
    assert torch.equal(out, baracuda.quantize(x, 0.1))
    nonsense = [(0, 0), (0, -5), (1, -2), (4, -1), (7, 0.0), (7, -1.0), (7, float("nan")), (7, float("inf"))]
    nonsense += [(10, 2**24), (10, -(2**24)), (11, 0), (12, 0), (12, -1), (12, 2**40), (12, 1025), (12, 1.5)]
    for position, value in nonsense:
        call = list(good)
        call[position] = value
        with pytest.raises((ValueError, TypeError)):
            plan.run(*call)
    with pytest.raises(ValueError, match="given scales"):
        dynamic.run(*good)
    with pytest.raises(ValueError, match="finds its scales"):
        plan.run_dynamic(x.data_ptr(), -1, out.data_ptr(), 0, out.data_ptr(), 0, 1)
    scale, zero_point = torch.empty(1), torch.empty(1, dtype=torch.int32)
    good = [x.data_ptr(), -1, scale.data_ptr(), zero_point.data_ptr(), out.data_ptr(), 0, 1]
    dynamic.run_dynamic(*good)
    for position, value in [(0, 0), (1, -2), (2, 0), (3, 0), (4, 0), (6, 0)]:
        call = list(good)
        call[position] = value
        with pytest.raises((ValueError, TypeError)):
            dynamic.run_dynamic(*call)


def test_a_native_learned_call_with_a_wrong_address_is_refused() -> None:
    x, dy, dx, sums = torch.randn(8), torch.randn(8), torch.empty(8), torch.empty(2)
    plan = _cpu.Plan(**GOOD_PLAN | {"op": 6})
    good = [x.data_ptr(), -1, dy.data_ptr(), -1, 0, 2, -1, 0.1, 0, -1, 0, dx.data_ptr()]
    good += [sums.data_ptr(), sums.data_ptr() + 4, 0, 1]
    plan.run_learned(*good)
    for position in (0, 2, 11, 12, 13):
        with pytest.raises(ValueError, match="expected an address"):
            plan.run_learned(*good[:position], 0, *good[position + 1 :])
    with pytest.raises(ValueError, match="one output"):
        plan.run(*good[:12], 1)
    with pytest.raises(ValueError, match="learned"):
        _cpu.Plan(**GOOD_PLAN).run_learned(*good)
    several = _cpu.Plan(**GOOD_PLAN | {"op": 6, "run": 9000, "last": 9000})
    assert several.workspace() == 2 * 16
    with pytest.raises(ValueError, match="workspace"):
        several.run_learned(*good)


def test_a_native_linear_with_nonsense_is_refused() -> None:
    for wrong in [
        (-1, 1, 1, 2, 4, 4, 0),
        (1, 1, 1, 4, 4, 4, 0),
        (1, 1, 1, 2, 6, 4, 0),
        (1, 1, 1, 2, 4, 5, 0),
        (1, 1, 1, 2, 4, 4, 4),
        (2**40, 2**40, 1, 2, 4, 4, 0),
    ]:
        with pytest.raises((ValueError, TypeError)):
            _cpu.Linear(*wrong)
    linear = _cpu.Linear(2, 3, 4, 2, 4, 4, 0)
    act, weight, out = torch.ones(2, 4, dtype=torch.int8), torch.ones(3, 4, dtype=torch.int8), torch.empty(2, 3)
    scales = (0, 2, 1.0, 0, 0, 0, 2, 1.0, 0, 2, 0, -1)
    good = [act.data_ptr(), -1, weight.data_ptr(), -1, scales, out.data_ptr(), 1]
    linear.small(*good)
    assert torch.equal(out, torch.full((2, 3), 4.0))
    for position, value in [
        (0, 0),
        (1, -2),
        (2, 0),
        (3, -2),
        (4, scales[:9]),
        (4, (0, 7, *scales[2:])),
        (4, (*scales[:11], -2)),
        (5, 0),
        (6, 0),
    ]:
        call = list(good)
        call[position] = value
        with pytest.raises((ValueError, TypeError)):
            linear.small(*call)
    with pytest.raises(ValueError, match="address"):
        linear.epilogue(0, scales, 0, 0, out.data_ptr(), 1)
    with pytest.raises(ValueError, match="weight_sum"):
        linear.epilogue(out.data_ptr(), scales, 0, 128, out.data_ptr(), 1)
    with pytest.raises(ValueError, match="address"):
        linear.weight_sums(0, -1, out.data_ptr(), 1)
