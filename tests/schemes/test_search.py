"""Scales of least squared error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baracuda.schemes.search import Rounding, search_factors, search_scales, split_factors

TYPES = (torch.float16, torch.bfloat16, torch.float32)


def weights(rows: int = 24, columns: int = 192) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    values[::5] *= 1e-3
    values[2, :64] = 0
    values[3] = 0
    return values


def error(weight: Tensor, scale: Tensor, group: int, importance: Tensor | None = None) -> Tensor:
    """Of each group, in f64."""
    groups = weight.double().reshape(len(weight), -1, group)
    s = scale.double()[..., None]
    squares = ((groups / s).round().clamp(-8, 7) * s - groups).square()
    return (squares if importance is None else squares * importance.double().reshape(1, -1, group)).sum(-1)


@pytest.mark.parametrize("dtype", TYPES)
def test_searched_scales_are_never_worse_than_the_largest_magnitude_over_seven(dtype: torch.dtype) -> None:
    weight = weights().to(dtype).float()
    scale = search_scales(weight, 64, Rounding(-8, 7, dtype))
    assert torch.equal(scale, scale.to(dtype).float())
    largest = weight.reshape(24, -1, 64).abs().amax(-1) / 7
    plain = torch.where(largest > 0, largest.to(dtype).float(), 1.0)
    assert bool((error(weight, scale, 64) <= error(weight, plain, 64) * (1 + 1e-5)).all())
    assert error(weight, scale, 64).sum() < 0.8 * error(weight, plain, 64).sum()


def test_the_search_is_near_the_best_of_two_hundred_scales() -> None:
    weight = weights()
    found = error(weight, search_scales(weight, 64, Rounding(-8, 7, torch.float32)), 64)
    largest = weight.reshape(24, -1, 64).abs().amax(-1)
    best = torch.stack([error(weight, (largest / d).clamp_min(1e-30), 64) for d in torch.linspace(4, 14, 200)]).amin(0)
    assert float(found.sum() / best.sum()) < 1.01


def test_importance_moves_the_error_to_columns_that_matter_less() -> None:
    weight, rounding = weights(), Rounding(-8, 7, torch.bfloat16)
    importance = torch.logspace(-3, 3, 192)[torch.randperm(192, generator=torch.Generator().manual_seed(1))]
    plain, weighed = search_scales(weight, 64, rounding), search_scales(weight, 64, rounding, importance)
    assert error(weight, weighed, 64, importance).sum() < 0.9 * error(weight, plain, 64, importance).sum()


@pytest.mark.parametrize("dtype", TYPES)
def test_factors_are_integers_whose_products_are_exact_in_the_stored_type(dtype: torch.dtype) -> None:
    weight = weights().to(dtype).float()
    rounding = Rounding(-8, 7, dtype)
    scale, factors = search_factors(weight, 64, rounding)
    assert factors.dtype is torch.int8 and int(factors.min()) >= 1 and int(factors.max()) <= 15
    product = scale[:, None].double() * factors
    assert torch.equal(product, product.to(dtype).double())
    searched = error(weight, search_scales(weight, 64, rounding), 64).sum()
    assert float(error(weight, product, 64).sum() / searched) < 1.1


def test_groups_of_zeros_have_a_scale_and_do_not_decide_the_channels() -> None:
    weight = weights()
    scale = search_scales(weight, 64, Rounding(-8, 7, torch.bfloat16))
    assert scale[2, 0] == 1 and bool((scale[3] == 1).all())
    channel, factors = search_factors(weight, 64, Rounding(-8, 7, torch.bfloat16))
    assert channel[2] < 0.5 and channel[3] == 1
    assert bool((channel[2] * factors[2, 1:] < 0.5).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_has_a_scale_that_is_not(value: float) -> None:
    weight = weights()
    weight[4, 70] = value
    scale = search_scales(weight, 64, Rounding(-8, 7, torch.bfloat16))
    assert not bool(torch.isfinite(scale[4, 1]))
    assert bool(torch.isfinite(scale[4, 0]))
    channel, _ = search_factors(weight, 64, Rounding(-8, 7, torch.bfloat16))
    assert not bool(torch.isfinite(channel[4]))


@pytest.mark.parametrize("tiny", [1e-38, 1e-42, 6e-8])
@pytest.mark.parametrize("dtype", TYPES)
def test_scales_of_tiny_weights_are_positive(tiny: float, dtype: torch.dtype) -> None:
    weight = torch.full((2, 64), tiny)
    assert bool((search_scales(weight, 64, Rounding(-8, 7, dtype)) > 0).all())
    assert bool((search_factors(weight, 64, Rounding(-8, 7, dtype))[0] > 0).all())


def test_a_row_has_the_same_scales_whatever_rows_are_beside_it() -> None:
    weight, rounding = weights(700, 256), Rounding(-8, 7, torch.bfloat16)
    importance = torch.rand(256)
    scale, (channel, factors) = search_scales(weight, 32, rounding, importance), search_factors(weight, 32, rounding)
    for rows in (slice(0, 1), slice(3, 10), slice(255, 700)):
        assert torch.equal(search_scales(weight[rows], 32, rounding, importance), scale[rows])
        own = search_factors(weight[rows], 32, rounding)
        assert torch.equal(own[0], channel[rows]) and torch.equal(own[1], factors[rows])


def test_nothing_to_search() -> None:
    rounding = Rounding(-8, 7, torch.bfloat16)
    assert search_scales(torch.empty(0, 128), 64, rounding).shape == (0, 2)
    assert search_factors(torch.empty(0, 128), 64, rounding)[1].shape == (0, 2)


@pytest.mark.parametrize("dtype", TYPES)
def test_factors_are_told_from_the_scales_they_made(dtype: torch.dtype) -> None:
    scale, factors = search_factors(weights().to(dtype).float(), 64, Rounding(-8, 7, dtype))
    stored = (scale[:, None] * factors).to(dtype)
    found = split_factors(stored)
    assert found is not None and int(found[1].max()) <= 15
    assert torch.equal(found[0][:, None] * found[1], stored.float())
    assert split_factors(torch.tensor([[1.0, 2.5, 7.7]])) is None
    assert split_factors(torch.tensor([[1.0, float("nan")]])) is None
