"""Training through the serving kernel: the value is the converted linear's, the gradients the fake-quantized one's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import baracuda
from baracuda.nn import QATLinear

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_element": "s4"},
    {"weight_element": "s4", "q_min": -7, "q_max": 7},
    {"mode": "asymmetric", "activation": "u8"},
    {"weight_strategy": "learned"},
    {"activation_strategy": "static"},
    {"activation_strategy": "static", "weight_strategy": "static", "mode": "asymmetric"},
    {"activation_strategy": "learned", "weight_strategy": "learned"},
]


def pair(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[QATLinear, QATLinear]:
    """The same linear with a fake-quantized and with an integer forward."""
    torch.manual_seed(0)
    fake = QATLinear(100, 24, dtype=dtype, **options)
    integer = QATLinear(100, 24, dtype=dtype, forward="integer", **options)
    integer.load_state_dict(fake.state_dict())
    return fake, integer


def step(module: nn.Module, x: Tensor, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """A forward and a backward: the output, and every gradient by name."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    named = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return y.detach(), {"x": x.grad, **named}


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_converting_changes_no_bit(options: dict[str, Any], dtype: torch.dtype, autocast: bool) -> None:
    if autocast and dtype is torch.float64:
        pytest.skip("autocast leaves f64 alone")
    fake, integer = pair(options, dtype)
    x = torch.randn(3, 7, 100, dtype=dtype)
    expected, gradients = step(fake, x, autocast)
    found, found_gradients = step(integer, x, autocast)
    converted = integer.convert()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
        assert torch.equal(converted(x), found)
        assert torch.equal(integer.eval()(x), found)
    assert found.dtype is expected.dtype and found_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(found_gradients[name], gradient), name


def test_the_fake_quantized_forward_differs_from_the_converted_linear() -> None:
    """Or the test above would show nothing."""
    fake, _ = pair({}, torch.bfloat16)
    x = torch.randn(50, 100, dtype=torch.bfloat16)
    assert not torch.equal(fake(x), fake.convert()(x))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_compiled_step_has_the_values_and_gradients_of_the_eager_one(options: dict[str, Any]) -> None:
    _, integer = pair(options)
    x = torch.randn(5, 100)
    integer(x)  # learned scales start from a batch, which no graph holds
    integer.eval()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(integer), fullgraph=True, backend="aot_eager")
    found, gradients = step(compiled, x)
    expected, eager = step(integer, x)
    assert torch.equal(found, expected) and torch.equal(found, integer.convert()(x))
    for name, gradient in eager.items():
        torch.testing.assert_close(gradients[name if name == "x" else f"_orig_mod.{name}"], gradient)


def test_a_compiled_step_multiplies_floats_in_the_backward_alone() -> None:
    _, integer = pair({})
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(sum("mm" in str(node.target) for node in graph.graph.nodes))
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda g, i: make_boxed_func(count(g, i)),
                           bw_compiler=lambda g, i: make_boxed_func(count(g, i)))  # fmt: skip
    step(torch.compile(integer, fullgraph=True, backend=backend), torch.randn(5, 100))
    assert counts == [0, 2]


def test_a_step_under_autocast_reads_the_weight_twice_and_stores_it_narrow() -> None:
    """Once for its integers, once for the backward: at once in the type of the product, where the kernel can."""
    _, integer = pair({})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = integer(torch.randn(5, 100).requires_grad_())
    y.float().sum().backward()
    prepared = integer.weight_fake_quantize._rounding
    assert prepared is not None and prepared.dtype is torch.bfloat16


def test_a_compiled_step_rounds_the_weight_once() -> None:
    _, integer = pair({})
    found: list[str] = []

    def watch(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if "baracuda" in str(node.target))
        return make_boxed_func(graph)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    step(torch.compile(integer, fullgraph=True, backend=aot_autograd(fw_compiler=watch, bw_compiler=watch)),
         torch.randn(5, 100), autocast=True)  # fmt: skip
    names = sorted(name.split(".")[1] for name in found)
    assert names == ["dequantize", "dynamic_fake_quantize", "dynamic_quantize", "quantized_linear"]


@pytest.mark.parametrize("options", [{}, {"weight_element": "s4"}, {"activation_strategy": "static"}], ids=str)
def test_gradient_checkpointing_recomputes_the_same_step(options: dict[str, Any]) -> None:
    _, integer = pair(options)
    twin = copy.deepcopy(integer)
    x = torch.randn(5, 100, requires_grad=True)
    for module, y in ((integer, integer(x)), (twin, checkpoint(twin, x, use_reentrant=False))):
        y.sum().backward()
        assert module.weight.grad is not None
        assert torch.equal(module.convert()(x), y)
    assert torch.equal(integer.weight.grad, twin.weight.grad)  # type: ignore[arg-type]
    if options.get("activation_strategy") == "static":
        assert torch.equal(integer.activation_fake_quantize.scale, twin.activation_fake_quantize.scale)


def test_second_derivatives_are_those_of_the_fake_quantized_forward() -> None:
    found = []
    for module in pair({}):
        x = torch.randn(4, 100, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
        assert module.weight.grad is not None
        found.append(module.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_what_is_switched_off_is_not_rounded() -> None:
    _, integer = pair({})
    x = torch.randn(4, 100)
    integer.weight_fake_quantize.enabled = integer.activation_fake_quantize.enabled = False
    assert torch.equal(integer(x), nn.functional.linear(x, integer.weight, integer.bias))


def test_a_model_is_prepared_for_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 5))
    baracuda.prepare_qat(model, "w4a8", forward="integer")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, wanted = torch.randn(32, 40), torch.randn(32, 5)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), wanted)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    trained = model(x)
    baracuda.convert(model)
    assert torch.equal(model(x), trained)


def test_a_forward_that_does_not_exist_is_refused() -> None:
    with pytest.raises(baracuda.InvalidProblem, match=r"forward: expected one of fake, integer, got 'float'"):
        QATLinear(4, 4, forward="float")  # type: ignore[arg-type]
