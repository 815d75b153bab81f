"""Second moments that no order of summation changes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from baracuda.core.errors import InvalidProblem
from baracuda.schemes.hessian import Moments, chunk_product, dampen, inverse_factor


def chunks(count: int = 12, columns: int = 48) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(20, columns, generator=generator) * 10 ** random.Random(i).uniform(-2, 2) for i in range(count)]


def total(data: list[Tensor], grid: int | None = None) -> Moments:
    made = Moments(data[0].shape[1], grid)
    for x in data:
        made.add(chunk_product(x), len(x))
    return made


def test_the_mean_is_that_of_f64() -> None:
    data = chunks()
    x = torch.cat(data).double()
    exact = x.T @ x / len(x)
    assert float((total(data).mean() - exact).abs().max() / exact.diagonal().max()) < 1e-6


def test_any_order_and_any_division_into_processes_gives_the_same_bits() -> None:
    data = chunks()
    expected = total(data)
    shuffled = random.Random(0).sample(data, len(data))
    assert torch.equal(total(shuffled, expected.grid).mean(), expected.mean())
    for processes in (2, 3, 5):
        merged = Moments(48, expected.grid)
        for rank in reversed(range(processes)):
            merged.merge(total(data[rank::processes], expected.grid))
        assert merged.count == expected.count and torch.equal(merged.mean(), expected.mean())


def test_a_float_sum_would_depend_on_the_order() -> None:
    data = [chunk_product(x) for x in chunks()]
    assert not torch.equal(sum(data[1:], data[0]), sum(data[-2::-1], data[-1]))


def test_what_does_not_fit_is_refused() -> None:
    made = total(chunks(2))
    with pytest.raises(InvalidProblem, match="shuffle the data"):
        made.add(chunk_product(torch.full((4, 48), 1e8)), 4)
    with pytest.raises(InvalidProblem, match="finite"):
        made.add(chunk_product(torch.full((4, 48), float("nan"))), 4)
    with pytest.raises(InvalidProblem, match="one grid"):
        made.merge(total(chunks(2), 3))


def test_the_factor_is_that_of_the_inverse() -> None:
    hessian = dampen(total(chunks()).mean(), 0.01)
    upper = inverse_factor(hessian)
    assert torch.allclose(upper.T @ upper @ hessian, torch.eye(48, dtype=torch.float64), atol=1e-8)
    assert torch.equal(upper, upper.triu())


@pytest.mark.parametrize("size", [1, 192, 193, 500])
def test_the_factor_is_that_of_the_inverse_at_any_size(size: int) -> None:
    x = torch.randn(600, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    hessian = dampen(x.T @ x / 600, 0.01)
    upper, inverse = inverse_factor(hessian), torch.linalg.inv(hessian)
    assert torch.allclose(upper, torch.linalg.cholesky(inverse, upper=True), rtol=1e-8, atol=1e-10)
    assert torch.equal(upper, upper.triu())


@pytest.mark.parametrize("size", [191, 192, 193, 400])
def test_panels_cover_a_matrix_and_its_mean_is_symmetric(size: int) -> None:
    data = chunks(3, size)
    x = torch.cat(data).double()
    mean, exact = total(data).mean(), x.T @ x / len(x)
    assert torch.equal(mean, mean.T)
    assert float((mean - exact).abs().max() / exact.diagonal().max()) < 1e-6


def test_a_matrix_that_is_not_positive_is_dampened_until_it_is() -> None:
    upper = inverse_factor(-torch.eye(4, dtype=torch.float64) + 1.5 * torch.ones(4, 4, dtype=torch.float64))
    assert bool(torch.isfinite(upper).all())
