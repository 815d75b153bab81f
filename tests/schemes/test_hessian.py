"""Second moments that no order of summation changes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from baracuda.backends.cpu import gram
from baracuda.core.errors import InvalidProblem
from baracuda.schemes.hessian import Moments, chunk_product, lower_factor, panels


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_factor_is_that_of_the_damped_matrix(dtype: torch.dtype) -> None:
    hessian = total(chunks()).mean(dtype)
    lower, added = lower_factor(hessian.clone(), 0.01)
    assert added == pytest.approx(0.01 * float(hessian.diagonal().mean()), rel=1e-5)
    damped = hessian.double() + added * torch.eye(48, dtype=torch.float64)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    assert torch.allclose(lower.double() @ lower.double().T, damped, rtol=tolerance, atol=tolerance)
    assert torch.equal(lower, lower.tril()) and lower.dtype is dtype


@pytest.mark.skipif(not gram.serves(torch.ones(1, dtype=torch.bfloat16)), reason="needs AVX512-BF16")
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (2, 48), (3, 49), (64, 47), (65, 200), (512, 96)])
def test_the_compiled_product_of_bf16_tokens_is_theirs(tokens: int, columns: int) -> None:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    made, exact = chunk_product(x), x.double().T @ x.double()
    for rows, before in panels(columns):
        assert torch.allclose(made[rows, before].tril(rows.start).double(), exact[rows, before].tril(rows.start),
                              rtol=1e-5, atol=1e-5 * tokens**0.5)  # fmt: skip
    assert torch.equal(made, chunk_product(x.clone())) and torch.equal(made, chunk_product(x.t().contiguous().t()))
    plain = chunk_product(x.float())
    assert torch.allclose(plain.tril(), made.tril(), rtol=1e-4, atol=1e-4 * tokens**0.5)


@pytest.mark.parametrize("size", [191, 192, 193, 400])
def test_panels_cover_a_matrix_and_its_mean_is_symmetric(size: int) -> None:
    data = chunks(3, size)
    x = torch.cat(data).double()
    mean, exact = total(data).mean(), x.T @ x / len(x)
    assert torch.equal(mean, mean.T)
    assert float((mean - exact).abs().max() / exact.diagonal().max()) < 1e-6


def test_a_matrix_that_is_not_positive_is_dampened_until_it_is() -> None:
    given = -torch.eye(4, dtype=torch.float64) + 1.5 * torch.ones(4, 4, dtype=torch.float64)
    lower, added = lower_factor(given.clone(), 0.01)
    assert bool(torch.isfinite(lower).all()) and added > 1
    assert torch.allclose(lower @ lower.T, given + added * torch.eye(4, dtype=torch.float64))
    with pytest.raises(InvalidProblem, match="finite"):
        lower_factor(torch.full((2, 2), float("nan")), 0.01)
