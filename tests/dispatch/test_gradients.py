"""Gradients: straight-through in every scope, learned scales and zero points, and what torch computes for the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import baracuda
from baracuda import Activation, Arithmetic, PerChannel, PerGroup, PerTensor, PerToken, QuantizeKind, Scope
from baracuda.autograd import dequantize, quantize
from baracuda.core.types import FLOATS, ElementKind
from baracuda.dispatch.gradients import unordered_sums

SCOPES: list[Scope] = [PerTensor(), PerChannel(0), PerChannel(1), PerToken(), PerGroup(4), PerGroup(3, axis=0)]
SHAPE = (6, 8)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def data(seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 60.0) -> Tensor:
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread).to(dtype)


def scales(scope: Scope, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = scope.scale_shape(SHAPE)
    return (torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 0.4 + 0.2).to(dtype)


def whole(value: Tensor, scope: Scope) -> Tensor:
    """Scales spread over the elements they belong to, by plain indexing."""
    match scope:
        case PerTensor():
            return value.expand(SHAPE)
        case PerChannel(axis):
            return value.view([-1 if i == axis else 1 for i in range(2)]).expand(SHAPE)
        case PerToken():
            return value.unsqueeze(-1).expand(SHAPE)
        case PerGroup(size, axis):
            return value.repeat_interleave(size, dim=axis)
    raise AssertionError(scope)


def composed(x: Tensor, scale: Tensor, zero_point: Tensor, scope: Scope, low: int, high: int) -> Tensor:
    """Fake-quantization from torch's own differentiable pieces: round passes the gradient, beyond the limits it stops.

    At a limit it passes, as with torch.fake_quantize; that of torch.clamp depends on torch's version.
    """
    s, zp = whole(scale, scope), whole(zero_point, scope)
    rounded_zp = zp + (zp.round() - zp).detach()
    ratio = x / s
    t = ratio + (ratio.round() - ratio).detach() + rounded_zp
    kept = torch.where((t >= low) & (t <= high), t, t.detach().clamp(low, high))
    return (kept - rounded_zp) * s


@pytest.mark.parametrize("element", FLOATS, ids=str)
@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_the_gradient_passes_where_x_was_in_range_and_nowhere_else(scope: Scope, element: ElementKind) -> None:
    x, scale, dy = leaf(data(1, element.dtype)), scales(scope), data(2, element.dtype)
    baracuda.fake_quantize(x, scale, 2, scope=scope).backward(dy)
    math = element.math.dtype
    t = torch.round(x.detach().to(math) / whole(scale, scope).to(math)) + 2
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where((t >= -128) & (t <= 127), dy, 0))
    assert 0 < int((x.grad == 0).sum()) < x.numel()


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_a_learned_scale_and_zero_point_get_the_gradients_of_the_composed_formula(scope: Scope) -> None:
    given = data(3, torch.float64, 30.0), scales(scope, torch.float64), scales(scope, torch.float64) * 20
    ours, theirs = [leaf(value) for value in given], [leaf(value) for value in given]
    dy = data(4, torch.float64)
    out = baracuda.fake_quantize(*ours, scope=scope, q_min=-40, q_max=50)
    expected = composed(*theirs, scope, -40, 50)  # type: ignore[call-arg, arg-type, misc]
    torch.testing.assert_close(out, expected)
    out.backward(dy)
    expected.backward(dy)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def test_without_a_grad_for_x_the_scale_still_learns() -> None:
    scale = leaf(torch.tensor(0.3))
    baracuda.fake_quantize(data(), scale).sum().backward()
    assert scale.grad is not None and scale.grad.isfinite()


@pytest.mark.parametrize("range_", [(-128, 127), (0, 255), (-8, 7)])
def test_a_learned_scale_per_tensor_is_torchs_learnable_one(range_: tuple[int, int]) -> None:
    """The zero point is positive: torch's per-tensor backward truncates a negative one towards zero."""
    low, high = range_
    x, dy = data(6, spread=25.0), data(7, spread=1.0)
    ours = [leaf(x), leaf(torch.tensor(0.37)), leaf(torch.tensor(3.0))]
    theirs = [leaf(x), leaf(torch.tensor([0.37])), leaf(torch.tensor([3.0]))]
    arithmetic = Arithmetic.RECIPROCAL
    y = baracuda.fake_quantize(*ours, q_min=low, q_max=high, arithmetic=arithmetic, grad_factor=0.25)
    z = torch._fake_quantize_learnable_per_tensor_affine(*theirs, low, high, 0.25)
    assert torch.equal(y, z)
    y.backward(dy)
    z.backward(dy)
    assert ours[0].grad is not None and torch.equal(ours[0].grad, theirs[0].grad)
    for got, expected in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(got.grad, expected.grad.squeeze(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_learned_scale_per_channel_is_torchs_learnable_one(axis: int) -> None:
    x, dy, n = data(8, spread=25.0), data(9, spread=1.0), SHAPE[axis]
    ours = [leaf(x), leaf(scales(PerChannel(axis))), leaf(torch.arange(n).float() - 3)]
    theirs = [leaf(value) for value in ours]
    y = baracuda.fake_quantize(*ours, scope=PerChannel(axis), q_min=-30, q_max=31, arithmetic="reciprocal")
    z = torch._fake_quantize_learnable_per_channel_affine(*theirs, axis, -30, 31, 1.0)
    assert torch.equal(y, z)
    y.backward(dy)
    z.backward(dy)
    assert ours[0].grad is not None and torch.equal(ours[0].grad, theirs[0].grad)
    for got, expected in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("element", FLOATS, ids=str)
def test_sums_are_exact_where_f64_holds_them(element: ElementKind) -> None:
    """A thousand ones and one large value: summing in f32 would lose the ones."""
    x = torch.full((1001,), 1000.0, dtype=element.dtype)
    dy = torch.ones(1001, dtype=element.dtype)
    dy[0] = 2.0**15 if element is ElementKind.F16 else 2.0**30
    scale = leaf(torch.tensor(1.0))
    baracuda.fake_quantize(x, scale, q_min=-1, q_max=1).backward(dy)
    assert scale.grad is not None and scale.grad.item() == torch.tensor(float(dy[0]) + 1000).item()


def test_saturated_and_poisoned_elements_move_the_scale_by_the_bound_they_reach() -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    scale, zero_point = leaf(torch.tensor(0.5)), leaf(torch.tensor(1.0))
    dy = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    baracuda.fake_quantize(x, scale, zero_point, q_min=-8, q_max=7).backward(dy)
    assert scale.grad is not None and scale.grad.item() == 6 - 90 - 900
    assert zero_point.grad is not None and zero_point.grad.item() == -0.5 * 111


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_gradcheck_dequantize_in_its_scale(scope: Scope) -> None:
    q = torch.randint(-128, 128, SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scale = leaf(scales(scope, torch.float64))
    assert torch.autograd.gradcheck(lambda s: baracuda.dequantize(q, s, 3, scope=scope, dtype="f64"), (scale,))


def test_gradcheck_fake_quantize_where_it_is_smooth() -> None:
    """Clamped everywhere it is linear in scale and zero; in x it is flat there, and straight-through elsewhere."""
    x = leaf(torch.tensor([500.0, -700.0, 900.0], dtype=torch.float64))
    scale = leaf(torch.tensor(0.5, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda *a: baracuda.fake_quantize(*a, q_min=-8, q_max=7), (x, scale))


def test_gradcheck_the_linear_in_its_bias_and_its_backward_in_dy() -> None:
    weight = torch.randint(-127, 128, (5, 7), dtype=torch.int8)
    x, bias = torch.randn(3, 7, dtype=torch.float64), leaf(torch.randn(5, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda b: baracuda.quantized_linear(x, weight, 0.1, b), (bias,))
    y = leaf(data(1, torch.float64))
    (dx,) = torch.autograd.grad(baracuda.fake_quantize(y, 0.3).square().sum(), y, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), y)
    in_range = (y / 0.3).round().clamp(-128, 127) == (y / 0.3).round()
    assert torch.equal(second, torch.where(in_range, 2.0, 0.0).double())


def test_the_gradient_of_a_linear_is_that_of_its_dequantized_weight() -> None:
    weight = torch.randint(-127, 128, (5, 8), dtype=torch.int8)
    scale, x, dy = torch.rand(5), leaf(torch.randn(2, 3, 8)), torch.randn(2, 3, 5)
    baracuda.quantized_linear(x, weight, scale).backward(dy)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dy @ (weight * scale[:, None]))


@pytest.mark.parametrize("activation", list(Activation))
def test_gradients_pass_through_the_activation_and_past_it_to_the_residual(activation: Activation) -> None:
    weight, scale, dy = torch.randint(-127, 128, (5, 8), dtype=torch.int8), torch.rand(5) * 0.02, torch.randn(2, 3, 5)
    x, bias, residual = leaf(torch.randn(2, 3, 8)), leaf(torch.randn(5)), leaf(torch.randn(2, 3, 5))
    baracuda.quantized_linear(x, weight, scale, bias, activation=activation, residual=residual).backward(dy)
    sums = leaf(baracuda.quantized_linear(x.detach(), weight, scale, bias.detach()))
    function = getattr(functional, activation.value, lambda y: y)
    function(sums).backward(dy)
    assert sums.grad is not None
    assert torch.equal(residual.grad, dy)
    torch.testing.assert_close(bias.grad, sums.grad.sum(dim=(0, 1)))
    torch.testing.assert_close(x.grad, sums.grad @ (weight * scale[:, None]))


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_the_differentiable_pair_carries_integers_in_floats(scope: Scope) -> None:
    x, scale = leaf(data(3)), leaf(scales(scope))
    q = quantize(x, scale, 2, scope=scope, dtype="u8")
    y = dequantize(q, scale, 2, scope=scope, element="u8")
    assert torch.equal(q, baracuda.quantize(x.detach(), scale.detach(), 2, scope=scope, dtype="u8").float())
    assert torch.equal(y, baracuda.fake_quantize(x.detach(), scale.detach(), 2, scope=scope, q_min=0, q_max=255))
    (dq,) = torch.autograd.grad(y.sum(), q, retain_graph=True)
    assert torch.equal(dq, whole(scale.detach(), scope))
    (dx,) = torch.autograd.grad(q.sum(), x)
    t = torch.round(x.detach() / whole(scale.detach(), scope)) + 2
    assert torch.equal(dx, torch.where((t >= 0) & (t <= 255), 1 / whole(scale.detach(), scope), 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_dequantize_takes_any_float_to_the_nearest_integer_in_range_and_wraps_none(dtype: torch.dtype) -> None:
    q = leaf(torch.tensor([300.0, -300.0, 127.4, 127.6, -0.5, 1.5, float("nan"), float("inf")], dtype=dtype))
    scale = leaf(torch.tensor(0.5, dtype=dtype))
    y = dequantize(q, scale, 3)
    integers = torch.tensor([127, -128, 127, 127, 0, 2, -128, 127], dtype=dtype)
    assert torch.equal(y, (integers - 3) * 0.5)
    y.sum().backward()
    in_range = torch.tensor([0, 0, 1, 0, 1, 1, 0, 0], dtype=dtype)
    assert q.grad is not None and torch.equal(q.grad, in_range * 0.5), (
        "the mask of the contract: rint(q), ends included"
    )
    assert scale.grad is not None and scale.grad.item() == (integers - 3).sum().item()
    unsigned = quantize(torch.tensor([0.5, 2.0], dtype=dtype), 0.01, dtype="u8")
    assert torch.equal(dequantize(unsigned, 1.0), torch.tensor([50, 127], dtype=dtype)), "s8 ends at 127"
    assert torch.equal(dequantize(unsigned, 1.0, element="u8"), torch.tensor([50, 200], dtype=dtype))


def test_the_differentiable_pair_takes_what_the_functions_take() -> None:
    x, scale, zero_point = data(3), scales(PerToken()), torch.arange(SHAPE[0])
    expected = baracuda.quantize(x, scale, zero_point, scope=PerToken(), arithmetic="reciprocal")
    for given in (x, x.numpy()):
        q = quantize(given, scale[:, None], zero_point, scope=PerToken(), arithmetic="reciprocal")
        assert torch.equal(q, expected.float())
        y = baracuda.dequantize(expected, scale, zero_point, scope=PerToken())
        for offset in (zero_point, zero_point[:, None].float()):
            assert torch.equal(dequantize(q, scale[:, None], offset, scope=PerToken()), y)
    learned = leaf(scale[:, None])
    dequantize(leaf(q), learned, zero_point, scope=PerToken()).sum().backward()
    steps = (expected.int() - zero_point[:, None]).sum(dim=1, keepdim=True).float()
    assert learned.grad is not None and torch.equal(learned.grad, steps)


def test_segment_sums_follow_the_scope() -> None:
    x = data(1, torch.float64)
    for scope in SCOPES:
        ones = torch.zeros(scope.scale_shape(SHAPE), dtype=torch.float64)
        for i in itertools.product(*map(range, ones.shape)):
            ones.zero_()[i] = 1
            torch.testing.assert_close(unordered_sums(x, scope)[i], (x * whole(ones, scope)).sum())


def test_checkpointing_and_autocast_change_no_gradient() -> None:
    def block(x: Tensor, scale: Tensor) -> Tensor:
        return torch.relu(baracuda.fake_quantize(x, scale, scope=PerToken())).square()

    grads: list[list[Any]] = []
    for run in (block, lambda *a: checkpoint(block, *a, use_reentrant=False)):
        x, scale = leaf(data(1)), leaf(scales(PerToken()))
        run(x, scale).sum().backward()
        grads.append([x.grad, scale.grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    x = leaf(data(1, torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert baracuda.fake_quantize(x, 0.3).dtype is torch.bfloat16


def test_out_refuses_to_lose_a_gradient() -> None:
    x = leaf(data())
    with pytest.raises(baracuda.InvalidProblem, match="out= does not record gradients"):
        baracuda.fake_quantize(x, 0.1, out=torch.empty(SHAPE))
    with torch.no_grad():
        baracuda.fake_quantize(x, 0.1, out=torch.empty(SHAPE))


def test_a_float_zero_point_that_is_not_learned_is_an_error_where_nothing_learns() -> None:
    with pytest.raises(baracuda.InvalidProblem, match=r"expected an integer tensor, up to int64, got torch\.float32"):
        baracuda.quantize(data(), 0.1, torch.tensor(1.0))


def test_the_guarantee_of_a_learned_backward_covers_its_sums() -> None:
    from baracuda.backends.registry import contract
    from baracuda.core.problem import Problem

    problem = Problem(QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD, SHAPE, ElementKind.F32, ElementKind.S8, -128, 127)
    guarantee = contract(problem)
    assert guarantee.accumulator is ElementKind.F64 and guarantee.matches_reference


def test_quantizing_what_requires_grad_gives_integers_without_one() -> None:
    x, scale = leaf(data()), leaf(torch.tensor(0.3))
    q = baracuda.quantize(x, scale)
    assert not q.requires_grad and torch.equal(q, baracuda.quantize(x.detach(), 0.3))


def test_a_linear_with_silu_has_second_derivatives() -> None:
    x, weight = leaf(data(dtype=torch.float64, spread=2.0)), torch.arange(-20, 20, dtype=torch.int8).view(5, 8)

    def gradient(x: Tensor) -> Tensor:
        y = baracuda.quantized_linear(x, weight, 0.1, activation="silu")
        (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return found

    sums = leaf(baracuda.quantized_linear(x, weight, 0.1).detach())
    (slope,) = torch.autograd.grad(functional.silu(sums).sum(), sums)
    assert torch.allclose(gradient(x), slope @ (weight.double() * 0.1), rtol=1e-6)
    gradient(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.parametrize("learned", ["weight_scale", "act_scale"])
def test_a_linear_of_integers_has_no_gradient_for_its_scales_and_says_so(learned: str) -> None:
    weight, given = torch.ones(5, 8, dtype=torch.int8), {"weight_scale": torch.ones(5), "act_scale": torch.ones(1)}
    given[learned].requires_grad_()
    y = baracuda.smoothquant_linear(weight, weight, given["act_scale"], given["weight_scale"])
    with pytest.raises(baracuda.Unsupported, match=rf"{learned} requires a gradient.*detach it"):
        y.sum().backward()
