"""weight_only_linear: within its stated distance of the exact result, and a row's bits its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import baracuda
from baracuda import ElementKind, InvalidProblem, WeightOnlyLinearArgs, WeightOnlyLinearDescriptor, WeightOnlyLinearPlan

SHAPES = [(1, 16, 64, 0), (3, 5, 64, 32), (7, 33, 192, 64), (40, 24, 256, 128), (2, 4, 15, 5)]


def weights(n: int, k: int, group: int, kind: ElementKind, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stored weight, its scales and zero points, and the integers."""
    generator = torch.Generator().manual_seed(n * k)
    q = torch.randint(kind.q_min, kind.q_max + 1, (n, k), generator=generator)
    groups = k // group if group else 1
    scale = (torch.rand(n, groups, generator=generator) * 0.1 + 0.01).to(dtype)
    zero_point = torch.randint(kind.q_min, kind.q_max + 1, (n, groups), generator=generator, dtype=torch.int32)
    return baracuda.pack_int4(q, kind) if kind.is_packed else q.to(kind.dtype), scale, zero_point, q


def exact(x: Tensor, q: Tensor, scale: Tensor, zero_point: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """The result in f64, and the sums of the absolute products."""
    shift = 0 if zero_point is None else zero_point.double().repeat_interleave(size, dim=1)
    weight = (q.double() - shift) * scale.double().repeat_interleave(size, dim=1)
    return x.double() @ weight.T, x.double().abs() @ weight.abs().T


@pytest.mark.parametrize("with_zero_point", [False, True])
@pytest.mark.parametrize("kind", [ElementKind.S4, ElementKind.U4, ElementKind.S8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_is_within_its_stated_distance(
    shape: tuple[int, int, int, int], dtype: torch.dtype, kind: ElementKind, with_zero_point: bool
) -> None:
    m, n, k, group = shape
    stored, scale, zero_point, q = weights(n, k, group, kind, torch.float32)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    given = zero_point if with_zero_point else None
    got = baracuda.weight_only_linear(x, stored, scale, weight_zero_point=given, weight_element=kind)
    expected, size = exact(x, q, scale, given, group or k)
    plan = WeightOnlyLinearPlan.select(WeightOnlyLinearDescriptor(m, n, k, group, dtype, kind), device="cpu")
    promised = plan.precision_guarantee()
    assert promised.batch_invariant and not promised.matches_reference
    rounding = torch.finfo(dtype).eps / 2
    bound = promised.relative_error * size + rounding * expected.abs() * (1 + promised.relative_error)
    assert got.dtype is dtype and bool(((got.double() - expected).abs() <= bound).all())


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    stored, scale, _, _ = weights(48, 256, 64, ElementKind.S4, torch.float32)
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = baracuda.weight_only_linear(x, stored, scale, weight_element="s4")
    for rows in (1, 2, 3, 16, 17, 64, 65, 128, 299):
        part = baracuda.weight_only_linear(x[300 - rows :], stored, scale, weight_element="s4")
        assert torch.equal(part, whole[300 - rows :]), rows


def test_bias_activation_residual_and_gradients() -> None:
    stored, scale, zero_point, q = weights(8, 64, 32, ElementKind.U4, torch.float32)
    x = torch.randn(5, 64, requires_grad=True)
    bias, residual = torch.randn(8, requires_grad=True), torch.randn(5, 8)
    y = baracuda.weight_only_linear(
        x, stored, scale, bias, weight_zero_point=zero_point, weight_element="u4", activation="relu", residual=residual
    )
    weight = ((q - zero_point.repeat_interleave(32, dim=1)) * scale.repeat_interleave(32, dim=1)).float()
    same_x, same_bias = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    expected = torch.relu(torch.nn.functional.linear(same_x, weight, same_bias)) + residual
    assert torch.allclose(y, expected, atol=1e-4)
    y.sum().backward()
    expected.sum().backward()
    assert torch.allclose(x.grad, same_x.grad, atol=1e-4) and torch.allclose(bias.grad, same_bias.grad)  # type: ignore[arg-type]


def test_the_plan_and_the_compiled_function_have_the_bits_of_the_function() -> None:
    stored, scale, _, _ = weights(16, 128, 32, ElementKind.S4, torch.bfloat16)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    expected = baracuda.weight_only_linear(x, stored, scale, weight_element="s4")
    plan = WeightOnlyLinearPlan.select(WeightOnlyLinearDescriptor(4, 16, 128, 32), device="cpu")
    out = torch.empty(4, 16, dtype=torch.bfloat16)
    workspace = torch.empty(plan.workspace_size(), dtype=torch.uint8)
    plan.run(WeightOnlyLinearArgs(activation=x, weight_q=stored, weight_scale=scale, output=out), workspace)
    assert torch.equal(out, expected)
    compiled = torch.compile(baracuda.weight_only_linear, fullgraph=True)
    assert torch.equal(compiled(x, stored, scale, weight_element="s4"), expected)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(16), r"weight_scale: expected shape \[16, K / size\]"),
        (torch.ones(16, 3), r"a size that divides K = 128, got \[16, 3\]"),
        (torch.ones(8, 4), r"weight_scale: expected shape \[16, 4\], got \[8, 4\]"),
    ],
)
def test_scales_of_a_wrong_shape_are_refused(scale: Tensor, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        baracuda.weight_only_linear(
            torch.randn(2, 128), torch.zeros(16, 64, dtype=torch.uint8), scale, weight_element="s4"
        )
