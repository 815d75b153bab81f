"""GPTQ: the algorithm of its paper, without an inverse of the whole matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baracuda.backends.cpu import columns
from baracuda.schemes.gptq import FactoredHessian, _round_block, gptq, output_error
from baracuda.schemes.search import Rounding, search_scales

ROUNDING = Rounding(-8, 7, torch.bfloat16)


def case(rows: int = 40, width: int = 256, tokens: int = 900, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and the second moments of inputs whose channels are correlated and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
    mix += torch.eye(width, dtype=torch.float64)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64) @ mix
    x *= torch.rand(width, generator=generator, dtype=torch.float64) * 3 + 0.05
    return torch.randn(rows, width, generator=generator), x.T @ x / tokens


def error(weight: Tensor, integers: Tensor, scale: Tensor, hessian: Tensor, group: int) -> float:
    return float(output_error(weight, integers * scale.repeat_interleave(group, 1), hessian).sum())


def test_gptq_moves_the_output_much_less_than_rounding_to_nearest() -> None:
    weight, hessian = case()
    scale = search_scales(weight, 64, ROUNDING)
    nearest = ROUNDING.integers(weight, scale.repeat_interleave(64, 1))
    found = gptq(weight, scale, 64, -8, 7, FactoredHessian.of(hessian.float())).integers
    assert error(weight, found, scale, hessian, 64) < 0.6 * error(weight, nearest, scale, hessian, 64)


def test_gptq_rounds_to_nearest_where_channels_do_not_meet() -> None:
    weight, hessian = case()
    scale = search_scales(weight, 64, ROUNDING)
    found = gptq(weight, scale, 64, -8, 7, FactoredHessian.of(torch.diag(hessian.diagonal()).float())).integers
    assert torch.equal(found, ROUNDING.integers(weight, scale.repeat_interleave(64, 1)))


@pytest.mark.parametrize("width", [32, 96, 160])
def test_gptq_is_the_algorithm_of_its_paper(width: int) -> None:
    """Round a column, spread its error over the rest by the inverse of what is left of the hessian, in f64."""
    weight, hessian = case(rows=6, width=width)
    scale = search_scales(weight, 32, ROUNDING)
    factored = FactoredHessian.of(hessian.float())
    assert factored.damping == pytest.approx(0.01 * float(hessian.diagonal().mean()), rel=1e-6)
    left, h = weight.double(), hessian + factored.damping * torch.eye(width, dtype=torch.float64)
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
    assert float((found.integers != expected).double().mean()) < 0.01  # ties that f32 and f64 see differently
    exact = output_error(weight, found.integers * scale.repeat_interleave(32, 1), h)
    assert torch.allclose(found.error.double(), exact, rtol=1e-3)


def test_columns_that_matter_most_come_first_and_the_diagonal_holds_what_the_later_ones_cannot_predict() -> None:
    _, hessian = case(width=100)
    factored = FactoredHessian.of(hessian)
    assert bool((hessian.diagonal()[factored.order].diff() <= 0).all())
    ordered = (hessian + factored.damping * torch.eye(100, dtype=torch.float64))[factored.order][:, factored.order]
    for i in (0, 50, 63, 64, 99):
        conditional = 1 / torch.linalg.inv(ordered[i:, i:])[0, 0]
        assert float(factored.factor[i, i]) ** -2 == pytest.approx(float(conditional), rel=1e-9)


def test_channels_without_input_and_too_few_tokens_are_no_trouble() -> None:
    weight, hessian = case(tokens=10)
    hessian[7] = hessian[:, 7] = 0
    scale = search_scales(weight, 64, ROUNDING)
    for moments in (hessian, torch.zeros_like(hessian)):
        found = gptq(weight, scale, 64, -8, 7, FactoredHessian.of(moments.float())).integers
        assert bool(torch.isfinite(found).all())
        assert torch.equal(found[:, 7], ROUNDING.integers(weight[:, 7], scale[:, 0]))


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    weight, hessian = case(rows=96)
    factored, scale = FactoredHessian.of(hessian.float()), search_scales(weight, 64, ROUNDING)
    whole, rows = gptq(weight, scale, 64, -8, 7, factored), slice(32, 64)
    part = gptq(weight[rows], scale[rows], 64, -8, 7, factored)
    assert float((part.integers != whole.integers[rows]).double().mean()) < 0.01


def block(rows: int, count: int = 48) -> dict[str, Tensor]:
    """A block of columns for the loop: values, how errors are handed on, scales of three groups."""
    generator = torch.Generator().manual_seed(rows)
    factor = torch.randn(count, 2 * count, generator=generator).mul_(0.1)[:, :count]
    factor.diagonal().abs_().add_(0.5)
    return {
        "values": torch.randn(count, rows, generator=generator) * 4,
        "factor": factor,
        "scale": torch.rand(3, rows, generator=generator) + 0.25,
        "groups": torch.randint(0, 3, (count,), generator=generator),
        "integers": torch.randint(-8, 8, (count, rows), generator=generator).float(),
    }


def rounded(rows: int) -> tuple[Tensor, Tensor]:
    """Integers, and what was handed on, by whichever loop serves."""
    given = block(rows)
    values, integers, passed = given["values"], given["integers"], torch.empty_like(given["values"])
    _round_block(values, given["factor"], given["scale"], given["groups"], -8, 7, integers, passed)
    return integers, passed


@pytest.mark.parametrize("rows", [1, 16, 63, 64, 65, 200])
def test_the_compiled_loop_does_what_the_loop_in_torch_does(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _cpu = pytest.importorskip("baracuda._cpu")
    used, found = _cpu.isa(), []
    try:
        for isa in _cpu.isas():
            _cpu.use_isa(isa)
            found.append(rounded(rows))
    finally:
        _cpu.use_isa(used)
    assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))
    monkeypatch.setattr(columns, "serves", lambda *tensors: False)
    expected = rounded(rows)
    same = found[0][0] == expected[0]
    assert float(same.double().mean()) > 0.99  # torch may fuse a product and a sum: ties then fall elsewhere
    alike = same.all(0)
    assert torch.allclose(found[0][1][:, alike], expected[1][:, alike], rtol=1e-3, atol=1e-4)


def test_the_compiled_loop_rounds_ties_to_even_clips_and_keeps_nan() -> None:
    pytest.importorskip("baracuda._cpu")
    values = torch.tensor([[0.5, 1.5, -0.5, -2.5, 99.0, -99.0, float("nan"), 1e30]])
    integers, passed = torch.empty_like(values), torch.empty_like(values)
    groups = torch.zeros(1, dtype=torch.int64)
    columns.round_columns(values, torch.ones(1, 1), torch.ones(1, 8), groups, -8, 7, integers, passed)
    assert integers[0].tolist()[:6] == [0, 2, 0, -2, 7, -8] and integers[0, 7] == 7
    assert bool(integers[0, 6].isnan()) and passed[0].tolist()[:5] == [0.5, -0.5, -0.5, -0.5, 92.0]
