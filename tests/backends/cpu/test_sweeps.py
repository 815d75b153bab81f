"""The compiled kernels over all 16-bit floats, samples of all f32 or all of them, and the neighbours of every tie."""

from __future__ import annotations

import itertools

import pytest
import torch
from compiled import _cpu, assert_like_reference, launch, plan_for

from baracuda import Arithmetic, ElementKind, PerChannel, PerToken, QuantizeKind
from baracuda.core.problem import Problem
from baracuda.core.types import MAX_ZERO_POINT
from cases import assert_same_bits

pytestmark = pytest.mark.usefixtures("restored")


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
