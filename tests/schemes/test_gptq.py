"""GPTQ and the descent from its result."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from baracuda.backends.cpu import columns
from baracuda.schemes.gptq import FactoredHessian, _descend_block, _round_block, descend, gptq, output_error
from baracuda.schemes.search import Rounding, search_factors, search_scales

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
    found = gptq(weight, scale, 64, -8, 7, FactoredHessian.of(hessian))
    assert error(weight, found, scale, hessian, 64) < 0.6 * error(weight, nearest, scale, hessian, 64)


def test_gptq_rounds_to_nearest_where_channels_do_not_meet() -> None:
    weight, hessian = case()
    scale = search_scales(weight, 64, ROUNDING)
    found = gptq(weight, scale, 64, -8, 7, FactoredHessian.of(torch.diag(hessian.diagonal())))
    assert torch.equal(found, ROUNDING.integers(weight, scale.repeat_interleave(64, 1)))


def test_gptq_is_the_algorithm_of_its_paper() -> None:
    """Round a column, spread its error over the rest by the inverse of what is left of the hessian, in f64."""
    weight, hessian = case(rows=6, width=96)
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
        found = descend(weight, integers, scale, 64, -8, 7, factored, stored, 1)
        integers, scale = found.integers, found.scale
        assert torch.equal(stored(scale[:, 0]), scale[:, 0])
        assert int(integers.min()) >= -8 and int(integers.max()) <= 7
        errors.append(error(weight, integers, scale, factored.hessian, 64))
        assert float(found.error.sum()) == pytest.approx(errors[-1], rel=1e-4)
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.99 * errors[0]


def test_a_descent_that_ends_is_at_a_point_where_no_single_integer_helps() -> None:
    weight, hessian = case(rows=3, width=64)
    factored, scale = FactoredHessian.of(hessian), search_scales(weight, 32, ROUNDING)
    found = descend(weight, gptq(weight, scale, 32, -8, 7, factored), scale, 32, -8, 7, factored, None, 40)
    integers, scale = found.integers, found.scale
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
    found = descend(weight[rows], part, scale[rows], 64, -8, 7, factored, ROUNDING.stored, 2)
    close = (found.integers != whole.integers[rows]).double().mean()
    assert float(close) < 0.01 and float((found.scale != whole.scale[rows]).double().mean()) < 0.05


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


def rounded(rows: int, descends: bool) -> tuple[Tensor, Tensor]:
    """Integers, and what was handed on, by whichever loop serves."""
    given = block(rows)
    values, integers, passed = given["values"], given["integers"], torch.empty_like(given["values"])
    if descends:
        _descend_block(values, given["factor"], given["scale"][0], -8, 7, integers, passed)
    else:
        _round_block(values, given["factor"], given["scale"], given["groups"], -8, 7, integers, passed)
    return integers, passed


@pytest.mark.parametrize("descends", [False, True], ids=["gptq", "descent"])
@pytest.mark.parametrize("rows", [1, 16, 63, 64, 65, 200])
def test_the_compiled_loop_does_what_the_loop_in_torch_does(
    rows: int, descends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cpu = pytest.importorskip("baracuda._cpu")
    used, found = _cpu.isa(), []
    try:
        for isa in _cpu.isas():
            _cpu.use_isa(isa)
            found.append(rounded(rows, descends))
    finally:
        _cpu.use_isa(used)
    assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))
    monkeypatch.setattr(columns, "serves", lambda *tensors: False)
    expected = rounded(rows, descends)
    same = found[0][0] == expected[0]
    assert float(same.double().mean()) > 0.99  # torch may fuse a product and a sum: ties then fall elsewhere
    alike = same.all(0)
    assert torch.allclose(found[0][1][:, alike], expected[1][:, alike], rtol=1e-3, atol=1e-4)


def test_the_compiled_loop_rounds_ties_to_even_clips_and_keeps_nan() -> None:
    pytest.importorskip("baracuda._cpu")
    values = torch.tensor([[0.5, 1.5, -0.5, -2.5, 99.0, -99.0, float("nan"), 1e30]])
    integers, passed = torch.empty_like(values), torch.empty_like(values)
    columns.round_columns(values, torch.ones(1, 1), torch.ones(1, 8), None, -8, 7, integers, passed)
    assert integers[0].tolist()[:6] == [0, 2, 0, -2, 7, -8] and integers[0, 7] == 7
    assert bool(integers[0, 6].isnan()) and passed[0].tolist()[:5] == [0.5, -0.5, -0.5, -0.5, 92.0]
