"""Float activations times integer weights: sums in one order, spelled out in NumPy, whatever the batch or the CPU."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from compiled import _cpu, launch, plan_for
from torch import Tensor

import baracuda
from baracuda import Activation, BackendKind, ElementKind, PerGroup, QuantizeKind
from baracuda.backends.registry import Value
from baracuda.core.problem import Problem
from baracuda.core.types import FLOATS
from cases import assert_same_bits

pytestmark = pytest.mark.usefixtures("restored")

S8, S4, U4 = ElementKind.S8, ElementKind.S4, ElementKind.U4


def sums_in_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """[m, n] sums of products of [m, k] and [n, k], both in the math type: 32 lanes, neighbours, then halves."""
    k = x.shape[1]
    blocks = -(-k // 32)
    x, w = (np.pad(v, ((0, 0), (0, blocks * 32 - k))) for v in (x, w))
    lanes = np.zeros((len(x), len(w), 32), dtype=x.dtype)
    for b in range(0, blocks * 32, 32):
        lanes = lanes + x[:, None, b : b + 32] * w[None, :, b : b + 32]
    lanes = lanes[..., 0::2] + lanes[..., 1::2]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def example(m: int, n: int, k: int, group: int, element: ElementKind, weight: ElementKind, seed: int) -> list[Value]:
    """activation, weight_q, weight_scale, weight_zero_point, bias, residual."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(element.dtype)
    stored = (n, (k + 1) // 2 if weight.is_packed else k)
    w = torch.randint(0, 256, stored, generator=generator).to(torch.uint8).view(weight.dtype)
    segments = (n, k // group if group else 1)
    scale = (torch.rand(segments, generator=generator) + 0.01).to(element.math.dtype)
    zero_point = torch.randint(-20, 20, segments, generator=generator, dtype=torch.int32)
    bias = torch.randn(n, generator=generator).to(element.math.dtype)
    return [
        x,
        w,
        scale,
        zero_point if seed % 2 else None,
        bias,
        torch.randn(m, n, generator=generator).to(element.dtype),
    ]


def expected(p: Problem, values: list[Value]) -> Tensor:
    x, w, scale, zero_point, bias, residual = values
    assert isinstance(x, Tensor) and isinstance(w, Tensor) and isinstance(scale, Tensor)
    n, k, math = p.shape[1], p.shape[2], p.element.math.dtype
    q = baracuda.unpack_int4(w, p.weight, k) if p.weight.is_packed else w
    each = q.reshape(n, scale.shape[1], -1).to(math)
    zeros = torch.zeros_like(scale) if zero_point is None else zero_point
    dequantized = (each - zeros[:, :, None].to(math)) * scale[:, :, None]
    y = torch.from_numpy(sums_in_order(x.to(math).numpy(), dequantized.reshape(n, k).numpy()))
    return ((y + bias) + residual.to(math)).to(p.element.dtype)


@pytest.mark.parametrize("weight", [S8, S4, U4], ids=lambda kind: kind.value)
@pytest.mark.parametrize(
    ("k", "group"), [(64, 32), (576, 64), (512, 128), (96, 0), (1, 0), (33, 0), (45, 5), (96, 48), (200, 1), (257, 0)]
)
def test_the_sums_have_the_bits_of_their_definition(k: int, group: int, weight: ElementKind) -> None:
    pick = random.Random(k).choice
    for i, (m, element) in enumerate(itertools.product((1, 3, 17), FLOATS)):
        p = problem(m, pick([1, 5, 70]), k, group, element, weight)
        values = example(*p.shape, group, element, weight, i)
        wanted = expected(p, values)
        for isa in _cpu.isas():
            _cpu.use_isa(isa)
            torch.set_num_threads(pick([1, 2, 5]))
            (got,) = plan_for(p).compute(tuple(values))
            assert_same_bits({"y": got}, {"y": wanted}, (isa, p))


def problem(
    m: int, n: int, k: int, group: int, element: ElementKind, weight: ElementKind, **options: object
) -> Problem:
    return Problem(
        QuantizeKind.WEIGHT_ONLY_LINEAR, (m, n, k), element, S8, -128, 127, weight=weight, weight_group=group, **options
    )


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    whole = example(40, 130, 320, 64, ElementKind.BF16, S4, 1)
    (all_rows,) = plan_for(problem(40, 130, 320, 64, ElementKind.BF16, S4)).compute(tuple(whole))
    for rows in (slice(0, 1), slice(3, 6), slice(5, 12), slice(11, 40)):
        some = [whole[0][rows], *whole[1:5], whole[5][rows]]
        (got,) = plan_for(problem(len(some[0]), 130, 320, 64, ElementKind.BF16, S4)).compute(tuple(some))
        assert torch.equal(got, all_rows[rows])


@pytest.mark.parametrize("nonlinearity", Activation)
def test_the_result_is_within_the_stated_distance_of_the_reference(nonlinearity: Activation) -> None:
    for element, weight in itertools.product(FLOATS, (S8, S4)):
        p = problem(5, 33, 384, 96, element, weight, nonlinearity=nonlinearity)
        values = example(5, 33, 384, 96, element, weight, 1)
        (exact,) = plan_for(p, BackendKind.REFERENCE).compute(tuple(values))
        (got,) = plan_for(p).compute(tuple(values))
        x, q, scale, zero_point = values[:4]
        q = baracuda.unpack_int4(q, weight, 384) if weight.is_packed else q
        w = baracuda.dequantize(q.to(torch.int8), scale, zero_point, scope=PerGroup(96), dtype=torch.float64)
        terms = x.double().abs() @ w.abs().T
        unit = torch.finfo(element.dtype).eps
        bound = plan_for(p).precision_guarantee().relative_error * terms * 2 + unit * (exact.abs().double() + 1)
        assert ((got.double() - exact.double()).abs() <= bound).all()


def test_rows_with_gaps_are_read_as_they_lie() -> None:
    values = example(3, 7, 64, 32, ElementKind.F32, S4, 1)
    p = problem(3, 7, 64, 32, ElementKind.F32, S4)
    wide = [torch.cat([v, torch.full_like(v[:, :1], 99)], 1)[:, :-1] if v.ndim == 2 else v for v in values]
    assert not any(v.is_contiguous() for v in wide if v.ndim == 2)
    outputs = [launch(plan_for(p), (*v, torch.empty(3, 7))) for v in (values, wide)]
    assert_same_bits(outputs[1], outputs[0], "rows")


def test_empty_weight_only_linears_are_the_bias() -> None:
    for m, n, k in [(0, 3, 4), (3, 0, 4), (3, 4, 0)]:
        p = problem(m, n, k, 0, ElementKind.F32, S8)
        values = example(m, n, k, 0, ElementKind.F32, S8, 0)
        (got,) = plan_for(p).compute(tuple(values))
        (wanted,) = plan_for(p, BackendKind.REFERENCE).compute(tuple(values))
        assert torch.equal(got, wanted)


def test_a_native_weight_only_linear_with_nonsense_is_refused() -> None:
    for wrong in [
        (-1, 1, 1, 2, 4, 0), (1, 1, 1, 4, 4, 0), (1, 1, 1, 2, 5, 0), (1, 1, 1, 2, 4, 4), (1, 1, 4, 2, 4, 0, 3),
        (1, 1, 4, 2, 4, 0, -1), (2**40, 2**40, 1, 2, 4, 0),
    ]:  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            _cpu.WeightOnlyLinear(*wrong)
    linear = _cpu.WeightOnlyLinear(2, 3, 4, 2, 4, 0)
    x, weight, scale, out = torch.ones(2, 4), torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1), torch.empty(2, 3)
    workspace = torch.empty(linear.workspace() + 8, dtype=torch.uint8)
    good = (x, weight, scale, None, None, None, out)
    for room in (workspace, None):
        linear.launch(good, room)
        assert torch.equal(out, torch.full((2, 3), 4.0))
        out.zero_()
    for position, value in [(0, None), (0, "x"), (1, None), (2, None), (2, 1.0), (2, weight), (4, weight), (6, None)]:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            linear.launch((*good[:position], value, *good[position + 1 :]), workspace)
    for operands, room in [(good[:6], workspace), (list(good), workspace), (good, workspace[8:]), (good, "room")]:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            linear.launch(operands, room)
