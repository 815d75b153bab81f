"""torch.func and autograd's own batches over every differentiable function: the gradients of plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vjp, vmap

import baracuda
from baracuda import PerToken
from baracuda.autograd import dequantize, quantize
from baracuda.nn import FakeQuantize, QATLinear

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
WEIGHT = torch.arange(-20, 20, dtype=torch.int8).view(5, 8)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fake_quantize": lambda x: baracuda.fake_quantize(x, 0.3),
    "the pair": lambda x: dequantize(quantize(x, 0.3), 0.3),
    "dequantize": lambda s: baracuda.dequantize(WEIGHT[:, :1], s[..., 0], dtype=torch.float64),
    "quantized_linear": lambda x: baracuda.quantized_linear(x.view(-1, 8), WEIGHT, 0.1, activation="silu"),
    "dynamic": FakeQuantize("dynamic", PerToken()),
}


def batch() -> Tensor:
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_find_the_gradients_of_autograd(name: str) -> None:
    x, compute = batch(), FUNCTIONS[name]

    def loss(x: Tensor) -> Tensor:
        return compute(x).square().sum()

    def by_autograd(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(x), x)
        return found

    rows = torch.stack([by_autograd(row) for row in x])
    assert torch.equal(grad(loss)(x[0]), rows[0])
    assert torch.equal(vjp(loss, x[0])[1](torch.ones((), dtype=x.dtype))[0], rows[0])
    assert torch.equal(vmap(grad(loss))(x), rows), "a gradient for each sample"
    assert torch.equal(jacrev(loss)(x[0]), rows[0])
    plain = torch.autograd.functional.jacobian(compute, x[0])
    assert torch.equal(torch.autograd.functional.jacobian(compute, x[0], vectorize=True), plain)


def test_gradients_of_gradients_go_through_transforms() -> None:
    def loss(x: Tensor) -> Tensor:
        return baracuda.fake_quantize(x, 0.3).square().sum()

    assert torch.equal(jacrev(jacrev(loss))(batch()[0]), 2 * torch.eye(8, dtype=torch.float64))


@pytest.mark.parametrize("strategy", ["dynamic", "static", "learned"])
def test_a_qat_linear_is_a_function_of_its_parameters(strategy: Any) -> None:
    x, model = batch(), QATLinear(8, 4, activation_strategy=strategy, mode="asymmetric").double()
    model.train()(x)
    parameters, buffers = dict(model.eval().named_parameters()), dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = functional_call(model, (parameters, buffers), (x,)).square().sum()
        return result

    loss(parameters, x).backward()
    detached = {name: value.detach() for name, value in parameters.items()}
    for name, found in grad(loss)(detached, x).items():
        wanted = parameters[name].grad
        assert wanted is not None and torch.allclose(found, wanted, rtol=1e-12), name
    samples = vmap(grad(loss), (None, 0))(detached, x[:, None])
    assert torch.allclose(samples["weight"].sum(0), grad(loss)(detached, x)["weight"], rtol=1e-9)


def test_a_learned_zero_point_outside_of_a_batch_has_its_gradient() -> None:
    x, zero_point = 200 * batch(), torch.tensor(3.0, dtype=torch.float64)

    def whole(zero_point: Tensor) -> Tensor:
        return baracuda.fake_quantize(x, 0.3, zero_point).square().sum()

    def each(zero_point: Tensor) -> Tensor:
        result: Tensor = vmap(lambda row: baracuda.fake_quantize(row, 0.3, zero_point))(x).square().sum()
        return result

    assert grad(whole)(zero_point) != 0
    assert torch.allclose(grad(each)(zero_point), grad(whole)(zero_point), rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch 2.15's own
def test_forward_mode_is_refused_with_the_way_that_is_there() -> None:
    x = batch()
    with pytest.raises(baracuda.Unsupported, match=r"use reverse mode, such as torch\.func\.vjp"):
        torch.func.jvp(lambda x: baracuda.fake_quantize(x, 0.3), (x,), (x,))
