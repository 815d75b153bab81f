"""GPTQ and the descent from its result."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from baracuda.schemes.gptq import FactoredHessian, descend, gptq, output_error
from baracuda.schemes.search import Rounding, search_factors, search_scales

ROUNDING = Rounding(-8, 7, torch.bfloat16)


def case(rows: int = 40, columns: int = 256, tokens: int = 900, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and the second moments of inputs whose channels are correlated and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    mix += torch.eye(columns, dtype=torch.float64)
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) @ mix
    x *= torch.rand(columns, generator=generator, dtype=torch.float64) * 3 + 0.05
    return torch.randn(rows, columns, generator=generator), x.T @ x / tokens


def error(weight: Tensor, integers: Tensor, scale: Tensor, hessian: Tensor, group: int) -> float:
    return float(output_error(weight, integers * scale.repeat_interleave(group, 1), hessian).sum())


def test_gptq_moves_the_output_much_less_than_rounding_to_nearest() -> None:
    weight, hessian = case()
    scale = search_scales(weight, 64, ROUNDING)
    nearest = ROUNDING.integers(weight, scale.repeat_interleave(64, 1))
    found = gptq(weight, scale, 64, -8, 7, FactoredHessian.of(hessian))
    assert error(weight, found, scale, hessian, 64) < 0.6 * error(weight, nearest, scale, hessian, 64)


def test_gptq_rounds_to_nearest_where_channels_do_not_meet() -> None:
    weight, hessian = case()
    scale = search_scales(weight, 64, ROUNDING)
    found = gptq(weight, scale, 64, -8, 7, FactoredHessian.of(torch.diag(hessian.diagonal())))
    assert torch.equal(found, ROUNDING.integers(weight, scale.repeat_interleave(64, 1)))


def test_gptq_is_the_algorithm_of_its_paper() -> None:
    """Round a column, spread its error over the rest by the inverse of what is left of the hessian, in f64."""
    weight, hessian = case(rows=6, columns=96)
    scale = search_scales(weight, 32, ROUNDING)
    factored = FactoredHessian.of(hessian)
    left, h = weight.double(), factored.hessian.double()
    expected = torch.empty_like(left)
    remaining = factored.order.tolist()
    while remaining:
        inverse = torch.linalg.inv(h[remaining][:, remaining])
        column = remaining[0]
        s = scale[:, column // 32].double()
        expected[:, column] = (left[:, column] / s).round().clamp(-8, 7)
        miss = (left[:, column] - expected[:, column] * s) / inverse[0, 0]
        left[:, remaining] -= miss[:, None] * inverse[0]
        remaining = remaining[1:]
    found = gptq(weight, scale, 32, -8, 7, factored)
    assert float((found != expected).double().mean()) < 0.01  # ties that f32 and f64 see differently


@pytest.mark.parametrize("factors", [False, True], ids=["scales", "integer factors"])
def test_the_descent_lowers_the_error_with_every_sweep(factors: bool) -> None:
    weight, hessian = case()
    factored = FactoredHessian.of(hessian)
    if factors:
        channel, multiples = search_factors(weight, 64, ROUNDING)
        scale = channel[:, None] * multiples

        def stored(s: Tensor) -> Tensor:
            return channel * (s / channel).round().clamp(1, 15)
    else:
        scale, stored = search_scales(weight, 64, ROUNDING), ROUNDING.stored
    integers = gptq(weight, scale, 64, -8, 7, factored)
    errors = [error(weight, integers, scale, factored.hessian, 64)]
    for _ in range(3):
        integers, scale = descend(weight, integers, scale, 64, -8, 7, factored, stored, 1)
        assert torch.equal(stored(scale[:, 0]), scale[:, 0])
        assert int(integers.min()) >= -8 and int(integers.max()) <= 7
        errors.append(error(weight, integers, scale, factored.hessian, 64))
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.99 * errors[0]


def test_a_descent_that_ends_is_at_a_point_where_no_single_integer_helps() -> None:
    weight, hessian = case(rows=3, columns=64)
    factored, scale = FactoredHessian.of(hessian), search_scales(weight, 32, ROUNDING)
    integers, scale = descend(weight, gptq(weight, scale, 32, -8, 7, factored), scale, 32, -8, 7, factored, None, 40)
    least = output_error(weight, integers * scale.repeat_interleave(32, 1), factored.hessian)
    for column, change in itertools.product(range(64), (-1, 1)):
        other = integers.clone()
        other[:, column] = (other[:, column] + change).clamp(-8, 7)
        moved = output_error(weight, other * scale.repeat_interleave(32, 1), factored.hessian)
        assert bool((moved >= least * (1 - 1e-5)).all())


def test_channels_without_input_and_too_few_tokens_are_no_trouble() -> None:
    weight, hessian = case(tokens=10)
    hessian[7] = hessian[:, 7] = 0
    scale = search_scales(weight, 64, ROUNDING)
    for moments in (hessian, torch.zeros_like(hessian)):
        found = gptq(weight, scale, 64, -8, 7, FactoredHessian.of(moments))
        assert bool(torch.isfinite(found).all())
        assert torch.equal(found[:, 7], ROUNDING.integers(weight[:, 7], scale[:, 0]))


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    weight, hessian = case(rows=96)
    factored, scale = FactoredHessian.of(hessian), search_scales(weight, 64, ROUNDING)
    whole = descend(weight, gptq(weight, scale, 64, -8, 7, factored), scale, 64, -8, 7, factored, ROUNDING.stored, 2)
    rows = slice(32, 64)
    part = gptq(weight[rows], scale[rows], 64, -8, 7, factored)
    part, part_scale = descend(weight[rows], part, scale[rows], 64, -8, 7, factored, ROUNDING.stored, 2)
    close = (part != whole[0][rows]).double().mean()
    assert float(close) < 0.01 and float((part_scale != whole[1][rows]).double().mean()) < 0.05
