"""The short way of QuantizedLinear: the bits, errors and gradients of the long one, its plan found once per shape."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import baracuda
from baracuda.nn import QuantizedLinear
from baracuda.nn.launches import KEPT, Launches
from baracuda.nn.tokens import QuantizedTokens

OPTIONS: dict[str, dict[str, Any]] = {
    "w8a8": {},
    "asymmetric": {"mode": "asymmetric"},
    "u8": {"mode": "asymmetric", "activation": "u8"},
    "w4a8": {"weight_element": "s4"},
    "narrow": {"q_min": -7, "q_max": 7},
}


def module(bias: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> QuantizedLinear:
    torch.manual_seed(5)
    return QuantizedLinear.from_float(nn.Linear(24, 10, bias, dtype=dtype), **options).requires_grad_(False)


def long_way(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """The function that the module stands for, with all its arguments."""
    return baracuda.quantized_linear(
        x,
        linear.weight,
        linear.weight_scale,
        linear.bias,
        mode=linear.mode,
        dtype=linear.activation,
        weight_element=linear.weight_element,
        q_min=linear.q_min,
        q_max=linear.q_max,
    )


def took_it(linear: QuantizedLinear, x: Tensor) -> bool:
    return linear._launches(linear, x) is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_both_ways_give_the_same_bits(mode: Any, name: str, bias: bool, dtype: torch.dtype) -> None:
    linear = module(bias, dtype, **OPTIONS[name])
    with mode():
        for shape in ((24,), (1, 24), (3, 24), (2, 5, 24), (0, 24), (2, 1, 1, 24), (40, 24), (2, 20, 24)):
            x = torch.randn(shape).to(dtype)
            assert took_it(linear, x) and torch.equal(linear(x), long_way(linear, x))
        strided = torch.randn(4, 48).to(dtype)[:, ::2], torch.randn(2, 3, 48).to(dtype)[..., ::2]
        for x in (*strided, torch.randn(2, 3, 26).to(dtype)[..., :24], torch.randn(3, 2, 24).to(dtype).transpose(0, 1)):
            for _ in range(2):
                assert torch.equal(linear(x), long_way(linear, x))


def test_a_known_call_is_found_by_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = module(), torch.randn(2, 3, 24)
    expected = long_way(linear, x)
    with torch.no_grad():
        linear(x)
        monkeypatch.setattr(Launches, "_plan", lambda *args: pytest.fail(f"Python was asked: {args}"))
        assert torch.equal(linear(x), expected) and linear(x)._base is None
    with torch.inference_mode():
        assert torch.equal(linear(x), expected)


def test_the_plan_is_looked_up_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, asked = module(), []
    found = Launches._find
    monkeypatch.setattr(Launches, "_find", lambda self, *args: asked.append(args[1].shape) or found(self, *args))
    for rows in (1, 2, 1, 2, 1):
        linear(torch.randn(rows, 24))
    assert asked == [(1, 24), (2, 24)]
    for rows in range(KEPT + 5):
        linear(torch.randn(rows, 24))
    assert len(linear._launches._plans) <= KEPT


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "weight", m.weight.flip(0)),
        lambda m: m.weight.neg_(),
        lambda m: setattr(m, "weight_scale", m.weight_scale * 2),
        lambda m: setattr(m.weight_scale, "data", m.weight_scale * 2),
        lambda m: m.weight_scale.mul_(2),
        lambda m: setattr(m, "bias", nn.Parameter(m.bias * 2, requires_grad=False)),
        lambda m: setattr(m, "bias", None),
        lambda m: setattr(m.bias, "data", m.bias * 2),
        lambda m: m.load_state_dict({k: v.flip(0) for k, v in m.state_dict().items()}),
        lambda m: m._apply(lambda t: t.clone()),
        lambda m: m.double(),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_every_change_of_a_tensor_is_seen(mode: Any, change: Callable[[Any], Any]) -> None:
    linear, x = module(bias=True), torch.randn(3, 24)
    with mode():
        before = linear(x)
        assert torch.equal(linear(x), before)
        change(linear)
        bias = linear.bias
        linear.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)
        expected = long_way(linear, x)
        linear.bias = bias
        assert torch.equal(linear(x), expected)
    assert before.shape == expected.shape


def test_gradients_autocast_modes_and_transforms_take_the_long_way() -> None:
    linear = module(bias=True)
    x = torch.randn(3, 24)
    assert took_it(linear, x)
    leaf = x.clone().requires_grad_()
    assert not took_it(linear, leaf)
    linear(leaf).sum().backward()
    assert leaf.grad is not None
    linear.bias.requires_grad_()
    assert not took_it(linear, x) and linear(x).requires_grad
    with torch.no_grad():
        assert took_it(linear, x) and took_it(linear, leaf)
    linear.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not took_it(linear, x) and linear(x).dtype is torch.bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert not took_it(linear, mode.from_tensor(x))
    assert not took_it(linear, x.to("meta")) and linear(x.to("meta")).is_meta
    assert not took_it(linear, torch._neg_view(x)) and torch.equal(linear(torch._neg_view(x)), linear(-x))
    assert torch.equal(torch.func.vmap(linear)(x), linear(x))


def test_what_is_wrong_with_an_input_is_said_as_ever() -> None:
    linear = module()
    for wrong in (torch.randn(3, 25), torch.zeros(3, 24, dtype=torch.int32), torch.tensor(1.0)):
        with pytest.raises(baracuda.BaracudaError) as long:
            long_way(linear, wrong)
        with pytest.raises(type(long.value)) as short:
            linear(wrong)
        assert str(short.value) == str(long.value)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_start_empty(duplicate: Callable[[Any], Any]) -> None:
    linear, x = module(), torch.randn(3, 24)
    linear(x)
    other = duplicate(linear)
    assert linear._launches._plans and not other._launches._plans
    other.weight.neg_()
    assert torch.equal(other(x), long_way(other, x)) and not torch.equal(other(x), linear(x))


def test_tokens_of_two_float_types_have_two_plans() -> None:
    linear, q = module(), torch.randint(-127, 128, (2, 3, 24), dtype=torch.int8)
    with torch.no_grad():
        for _ in range(2):
            for dtype in (torch.float32, torch.bfloat16):
                y = linear(QuantizedTokens(q, torch.full((6,), 0.5), None, dtype, True))  # type: ignore[arg-type]
                expected = baracuda.smoothquant_linear(q, linear.weight, 0.5, linear.weight_scale, dtype=dtype)
                assert y.dtype is dtype and torch.equal(y, expected)


# -- the host's time ---------------------------------------------------------------------------------------------


def microseconds(call: Callable[[], object]) -> float:
    """The least CPU time of a call on this thread: what runs beside it does not count."""
    best = float("inf")
    for _ in range(60):
        start = time.thread_time_ns()
        for _ in range(100):
            call()
        best = min(best, (time.thread_time_ns() - start) / 1e5)
    return best


@pytest.mark.alone
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_costs_the_host_hardly_more_than_a_float_linear(mode: Any) -> None:
    linear = nn.Linear(64, 64, bias=False)
    ours, x = QuantizedLinear.from_float(linear), torch.randn(1, 1, 64)
    with mode():
        spent = {"ours": microseconds(lambda: ours(x)), "float": microseconds(lambda: linear(x))}
    assert spent["ours"] <= 1.25 * spent["float"], spent  # measured: 0.95 to 1.03
