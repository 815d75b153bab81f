"""The compiled kernels and memory: threads and flags change no bit, nothing is allocated, strided rows run in place."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from compiled import OPS_HERE, _cpu, assert_like_reference, launch, plan_for

import baracuda
from baracuda import ElementKind, InvalidProblem, PerChannel, PerGroup, PerTensor, PerToken, QuantizeKind
from baracuda.core.problem import Problem
from baracuda.core.types import FLOATS
from cases import CASES, LARGE_LAYOUTS, assert_same_bits, operands

pytestmark = pytest.mark.usefixtures("restored")


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
