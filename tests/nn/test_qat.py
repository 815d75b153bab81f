"""Training for quantization: prepare, train, convert; reports; and the examples, which are run as they stand."""

from __future__ import annotations

import copy
import runpy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import baracuda
from baracuda import PerToken, QuantizeKind
from baracuda.functional import dynamic_fake_quantize
from baracuda.nn import FakeQuantize, QATLinear, QuantizedLinear, SmoothQuantLinear
from baracuda.nn.fake_quantize import Strategy
from baracuda.plans.plan import SelectedPlan

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "asymmetric", "activation": "u8"},
    {"weight_element": "s4", "q_min": -7, "q_max": 7},
    {"weight_strategy": "learned"},
    {"activation_strategy": "static"},
    {"activation_strategy": "static", "mode": "asymmetric"},
    {"activation_strategy": "learned", "weight_strategy": "learned"},
    {"activation_strategy": "learned", "mode": "asymmetric", "activation": "u8"},
]


def trained(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> QATLinear:
    torch.manual_seed(0)
    module = QATLinear.from_float(nn.Linear(300, 40, dtype=dtype), **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(16, 300, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return module.eval()


def test_a_training_step_computes_each_fake_quantization_once_and_nothing_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[QuantizeKind] = []
    compute = SelectedPlan.compute

    def watched(self: SelectedPlan, inputs: Any) -> Any:
        computed.append(self.problem.op)
        return compute(self, inputs)

    monkeypatch.setattr(SelectedPlan, "compute", watched)
    module, x = QATLinear.from_float(nn.Linear(24, 10)), torch.randn(3, 24, requires_grad=True)
    module(x).sum().backward()
    assert computed == [QuantizeKind.DYNAMIC_FAKE_QUANTIZE] * 2
    with torch.no_grad():
        scale, _ = baracuda.choose_qparams(x)
        expected = baracuda.fake_quantize(x, scale, scope=baracuda.PerToken(), q_min=-127)
    assert torch.equal(module.activation_fake_quantize(x), expected)
    torch.testing.assert_close(x.grad, module.weight_fake_quantize(module.weight).detach().sum(0).expand(3, 24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_converted_linear_is_its_own_fake_quantized_forward_within_the_bound(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    module, x = trained(options, dtype), torch.randn(64, 300, dtype=dtype) * 2
    converted = module.convert()
    static = options.get("activation_strategy", "dynamic") != "dynamic"
    assert type(converted) is (SmoothQuantLinear if static else QuantizedLinear)
    difference = (converted(x).double() - module(x).double()).abs()
    assert (difference <= module.conversion_bound(x)).all()
    assert difference.max() > 0 or dtype is not torch.float32, "a bound that nothing approaches says nothing"


def test_the_bound_is_broken_by_one_wrong_step_of_one_weight() -> None:
    module, x = trained({}), torch.randn(64, 300)
    converted = module.convert()
    converted.weight[0, 0] += 1
    assert ((converted(x).double() - module(x).double()).abs() > module.conversion_bound(x)).any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_parameter_of_a_qat_linear_learns(options: dict[str, Any]) -> None:
    module = QATLinear.from_float(nn.Linear(30, 8), **options)
    module(torch.randn(4, 30)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_under_autocast_the_converted_linear_still_agrees() -> None:
    module, x = trained({}), torch.randn(64, 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs, bound = module(x), module.convert()(x), module.conversion_bound(x)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    assert ((ours.double() - theirs.double()).abs() <= bound).all()


def test_converting_leaves_the_training_as_it_was() -> None:
    linear = QATLinear.from_float(nn.Linear(8, 4), weight_strategy="static").train()
    linear(torch.randn(2, 8))
    linear.convert()
    assert all(module.training for module in linear.modules())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_qat_linear_made_from_sizes_is_the_one_made_from_a_float_linear(options: dict[str, Any]) -> None:
    module, x = QATLinear(12, 6, bias=False, dtype=torch.float64, **options), torch.randn(3, 12, dtype=torch.float64)
    assert module.weight.dtype is torch.float64 and module.bias is None
    taken = QATLinear.from_float(nn.Linear(12, 6, bias=False, dtype=torch.float64), **options)
    taken.load_state_dict(module.state_dict())
    assert torch.equal(module(x), taken(x)) and torch.equal(module.convert()(x), taken.convert()(x))


def test_a_qat_model_saves_and_loads_its_state() -> None:
    for options in OPTIONS:
        model, x = nn.Sequential(nn.Linear(12, 6)), torch.randn(3, 12)
        baracuda.prepare_qat(model, **options)
        model(x)
        other = nn.Sequential(nn.Linear(12, 6))
        baracuda.prepare_qat(other, **options)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.eval()(x), model.eval()(x))


def test_the_digits_example_shows_qat_ahead_of_ptq(capsys: pytest.CaptureFixture[str]) -> None:
    results = runpy.run_path(str(EXAMPLES / "qat_digits.py"))["main"]([])
    assert results["float"] > 0.95
    assert results["ptq"] < results["qat"] - 0.02
    assert results["qat"] > results["float"] - 0.03
    assert results["converted"] == pytest.approx(results["qat"], abs=0.005)
    assert "QAT" in capsys.readouterr().out


def test_the_compiled_mlp_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    results = runpy.run_path(str(EXAMPLES / "compiled_mlp.py"))["main"](["--hidden", "128", "--repeats", "2"])
    assert results["graph_breaks"] == 0 and results["agrees"]
    assert "ms" in capsys.readouterr().out


# -- plain tensors go a shorter way than torch's operators -------------------------------------------------------


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watched(module: QATLinear) -> QATLinear:
    """The same linear by the operators that modes, tracers and subclasses see."""
    made = copy.deepcopy(module)

    def forward(x: Tensor) -> Tensor:
        with Watching():
            return QATLinear.forward(made, x)

    made.forward = forward  # type: ignore[method-assign]
    return made


def step(module: nn.Module, x: Tensor, autocast: bool) -> list[Tensor | None]:
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = module(leaf)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_short_way_has_the_bits_and_gradients_of_the_operators(options: dict[str, Any], autocast: bool) -> None:
    for bias, shape, frozen in ((True, (5, 30), ""), (False, (2, 3, 30), ""), (True, (2, 3, 30), "weight")):
        module = QATLinear.from_float(nn.Linear(30, 8, bias=bias), **options)
        module(torch.randn(16, 30))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name != frozen)
        x, other = torch.randn(shape) * 1.5, watched(module)
        got, expected = step(module, x, autocast), step(other, x, autocast)
        assert len(got) == len(expected) > 2
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or (ours.dtype is theirs.dtype and torch.equal(ours, theirs))
        assert module.weight_fake_quantize._rounding is not None
        assert other.weight_fake_quantize._rounding is None, "both went the same way"


@pytest.mark.parametrize("options", [{}, {"activation_strategy": "static", "mode": "asymmetric"}], ids=str)
def test_the_short_way_has_the_second_derivatives_of_the_operators(options: dict[str, Any]) -> None:
    module, x = trained(options), torch.randn(4, 300)
    found = []
    for each in (module, watched(module)):
        leaf = x.clone().requires_grad_()
        first = torch.autograd.grad(each(leaf).pow(3).sum(), [leaf, each.weight], create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        found.append([*first, *torch.autograd.grad(penalty, [leaf, each.weight, each.bias])])
    for ours, theirs in zip(*found, strict=True):
        assert ours.abs().sum() > 0
        torch.testing.assert_close(ours, theirs)


def test_the_short_way_follows_settings_hooks_and_copies() -> None:
    module, x = QATLinear.from_float(nn.Linear(30, 8)), torch.randn(4, 30)
    act, before = module.activation_fake_quantize, module(x)
    act.q_min, act.q_max = -7, 7
    coarse = module(x)
    assert torch.equal(coarse, watched(module)(x)) and not torch.equal(coarse, before)
    assert torch.equal(copy.deepcopy(module)(x), coarse)
    assert torch.equal(module(x.double().float()[:2]), watched(module)(x[:2]))
    act.enabled = False
    assert torch.equal(module(x), nn.functional.linear(x, module.weight_fake_quantize(module.weight), module.bias))
    act.enabled, seen = True, []
    act.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(module(x), coarse) and seen == [1]
    with pytest.raises(RuntimeError, match="same dtype"):
        QATLinear.from_float(nn.Linear(30, 8, dtype=torch.bfloat16))(x)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_weights_and_inputs_may_change_between_a_dynamic_forward_and_its_backward(autocast: bool) -> None:
    found = []
    for change in (0.0, 1.0):
        torch.manual_seed(0)
        module, x = QATLinear.from_float(nn.Linear(30, 8)), torch.randn(4, 30).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            inner = x * 1.0
            y = module(inner)
        with torch.no_grad():
            module.weight += change
            inner += change
        y.float().square().sum().backward()
        found.append((x.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


STRIDED = {
    "contiguous": lambda x: x, "transposed": lambda x: x.T, "every other": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1), "empty": lambda x: x[:0], "one axis": lambda x: x[0],
}  # fmt: skip


@pytest.mark.parametrize("name", STRIDED)
def test_a_gradient_goes_straight_through_to_an_input_of_any_strides_which_is_neither_written_nor_kept(
    name: str,
) -> None:
    leaf, fake = torch.randn(6, 8, requires_grad=True), FakeQuantize("dynamic", PerToken())
    x = STRIDED[name](leaf * 1.0)
    before, alive = x.detach().clone(), weakref.ref(x)
    y = fake(x)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(first, 2 * y) and torch.equal(x, before) and x._version == 0
    assert torch.equal(y, dynamic_fake_quantize(before))
    del first, x
    assert alive() is None
    y.sum().backward()
    expected = torch.autograd.grad(STRIDED[name](leaf).sum(), leaf)[0]
    assert leaf.grad is not None and torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("strategy", ["dynamic", "learned", "static"])
def test_under_autocast_a_weight_comes_in_the_type_it_is_multiplied_in_and_other_tensors_in_their_own(
    strategy: Strategy, frozen: bool
) -> None:
    module = QATLinear.from_float(nn.Linear(30, 8), weight_strategy=strategy)
    module.weight.requires_grad_(not frozen)
    alone, whole = copy.deepcopy(module.weight_fake_quantize), module.weight_fake_quantize(module.weight)
    alone.as_operand = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight, other = module.weight_fake_quantize(module.weight), alone(module.weight)
    assert torch.equal(weight, whole.bfloat16()) and torch.equal(other, whole)
    assert module.weight_fake_quantize(module.weight.bfloat16()).dtype is torch.bfloat16


def test_scales_that_keep_axes_of_length_one_are_taken_both_ways() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    for strategy in ("static", "learned"):
        fake = FakeQuantize(strategy, PerToken(), (4,)).eval()
        fake.scale.data = torch.rand(4, 1) * 0.01
        y = fake(x)
        with Watching():
            assert torch.equal(y, fake(x))
        y.sum().backward()
        assert fake.scale.grad is None or fake.scale.grad.shape == (4, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_compiled_linear_is_one_graph_with_the_gradients_of_the_eager_one(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    module, x = trained(options).train(), torch.randn(4, 300)
    module.zero_grad()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x), eager(x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_not_observed_again(reentrant: bool) -> None:
    """What is computed twice is one batch, and the backward needs the scale that the forward had."""

    def gradient(checkpointed: bool) -> Tensor:
        torch.manual_seed(0)
        layer = QATLinear(64, 8, activation_strategy="static").train()
        for i in range(3):
            x = (torch.randn(32, 64) * (1 + i)).requires_grad_()
            y = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))
