"""The compiled CPU backend: the bits of the reference on every instruction set, in every schedule, on any threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from compiled import CPU, OPS_HERE, _cpu, assert_like_reference, plan_for

import baracuda
from baracuda import BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from baracuda.backends.registry import candidates
from baracuda.core.problem import Problem
from cases import CASES, is_linear, operands

pytestmark = pytest.mark.usefixtures("restored")


# -- the same bits -----------------------------------------------------------------------------------------------


def test_sums_are_exact_where_the_library_may_not_use_what_the_processor_can_do() -> None:
    code = "import torch, baracuda as b; w = torch.full((16, 64), 127, dtype=torch.int8);"
    code += "print(b.quantized_linear(torch.ones(16, 64), w, 1 / 127).unique().tolist())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True, timeout=120)
    assert output.strip() == "[64.0]"


#: The weight-only linear, which has sums of its own, is in test_weight_only.py.
EXACT = OPS_HERE - {QuantizeKind.WEIGHT_ONLY_LINEAR}


@pytest.mark.parametrize("op", sorted(EXACT, key=lambda op: op.value), ids=lambda op: op.value)
def test_every_case_has_the_bits_of_the_reference_on_every_instruction_set(op: QuantizeKind) -> None:
    cases = [case for case in CASES if case.problem.op is op]
    assert cases
    for case in cases:
        assert_like_reference(case.problem, operands(case), case, _cpu.isas())


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
    values = (act, 1.0, zero_point, weight, 1.0, None, None, None, None, torch.empty(2, 3, dtype=torch.float64))
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
            values = (act.view(kind.dtype), 1.0, zero_point, weight, 1.0, None, None, None, None, sums)
            assert_like_reference(p, values, (kind, weight_kind, zero_point), _cpu.isas())


def test_a_kept_weight_sum_gives_the_same_linear_as_one_computed_on_the_way() -> None:
    x, weight = torch.randn(9, 130), torch.randint(-127, 128, (21, 130), dtype=torch.int8)
    p = Problem(
        QuantizeKind.QUANTIZED_LINEAR, (9, 21, 130), ElementKind.F32, ElementKind.S8, -128, 127,
        mode=DynamicRangeMode.ASYMMETRIC,
    )  # fmt: skip
    for weight_sum in (None, weight.sum(1, dtype=torch.int32)):
        values = (x, weight, 0.02, None, weight_sum, None, None, None, None, torch.empty(9, 21))
        assert_like_reference(p, values, weight_sum is None, _cpu.isas())


def test_scratch_that_the_caller_gives_is_filled() -> None:
    for mode, kind in itertools.product(DynamicRangeMode, (ElementKind.S8, ElementKind.U8)):
        p = Problem(
            QuantizeKind.QUANTIZED_LINEAR, (5, 8, 48), ElementKind.BF16, kind, kind.q_min, kind.q_max, mode=mode
        )
        x, weight = torch.randn(5, 48).bfloat16(), torch.randint(-127, 128, (8, 60), dtype=torch.int8)[:, 3:51]
        scratch = torch.empty(5, 48, dtype=kind.dtype), torch.empty(5)
        weights = (weight, torch.rand(8), torch.randn(8), None, None, None)
        values = (x, *weights, *scratch, torch.empty(5, 8, dtype=torch.bfloat16))
        assert_like_reference(p, values, mode, _cpu.isas())


# -- instruction sets and nonsense -------------------------------------------------------------------------------


def test_the_override_chooses_the_instruction_set_and_refuses_an_unknown_one() -> None:
    command = [sys.executable, "-c", "import baracuda.backends; from baracuda import _cpu; print(_cpu.isa())"]
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
from baracuda.core.problem import Problem
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


def test_scales_and_zero_points_with_gaps_between_their_rows_are_read_as_they_lie() -> None:
    x = torch.randn(4, 6, 8)
    scale, zero_point = (torch.rand(4, 9) + 0.01)[:, :6], torch.randint(-9, 9, (4, 9), dtype=torch.int32)[:, :6]
    dense = scale.contiguous(), zero_point.contiguous()
    for function in (baracuda.quantize, baracuda.fake_quantize):
        found = function(x, scale, zero_point, scope=baracuda.PerToken())
        assert torch.equal(found, function(x, *dense, scope=baracuda.PerToken()))
