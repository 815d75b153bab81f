"""Modules: integer linears and their state, observers, fake-quantization, and whole models."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import baracuda
from baracuda import PerChannel
from baracuda.nn import FakeQuantize, MovingAverage, Percentile, QATLinear, QuantizedLinear, SmoothQuantLinear
from baracuda.nn.row_sums import RowSums

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def linear(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 10, bias=bias, dtype=dtype)


def modules(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [
        QuantizedLinear.from_float(linear(dtype)),
        QuantizedLinear.from_float(linear(dtype, bias=False), mode="asymmetric", activation="u8"),
        QuantizedLinear.from_float(linear(dtype), weight_element="s4", q_min=-7, q_max=7),
        SmoothQuantLinear.from_float(linear(dtype), 0.04),
        SmoothQuantLinear.from_float(linear(dtype), 0.04, 9),
    ]


def empty_like(module: nn.Module) -> nn.Module:
    """The same kind of module with nothing in it."""
    options: dict[str, Any] = {
        name: getattr(module, name) for name in ("weight_element", "mode", "activation", "q_min", "q_max")
    }
    return type(module)(module.in_features, module.out_features, module.bias is not None, **options)


def test_row_sums_made_without_data_serve_nobody_else() -> None:
    module = QuantizedLinear.from_float(linear(), mode="asymmetric")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(torch.randn(2, 24)))
    assert type(module(torch.randn(2, 24))) is Tensor


def test_row_sums_made_in_inference_mode_serve_outside_of_it() -> None:
    linear, x = QuantizedLinear.from_float(nn.Linear(16, 8), mode="asymmetric"), torch.randn(2, 16)
    with torch.inference_mode():
        expected = linear(x).clone()
    x.requires_grad_()
    linear(x).sum().backward()
    assert torch.equal(linear(x), expected) and x.grad is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_quantized_linear_is_the_function_on_the_quantized_weight(dtype: torch.dtype) -> None:
    module, x = QuantizedLinear.from_float(linear(dtype)), torch.randn(2, 5, 24, dtype=dtype)
    expected = baracuda.dynamic_quantize(linear(dtype).weight, scope=PerChannel(0))
    assert torch.equal(module.weight, expected.q)
    assert torch.equal(module.weight_scale, expected.scale.float().view(-1, 1))
    y = module(x)
    assert y.dtype is dtype
    assert torch.equal(y, baracuda.quantized_linear(x, module.weight, module.weight_scale, linear(dtype).bias))
    torch.testing.assert_close(y, linear(dtype)(x), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_module_stays_near_the_float_linear(dtype: torch.dtype) -> None:
    x = torch.randn(7, 24, dtype=dtype)
    for module in modules(dtype):
        bits = 4 if module.weight_element.is_packed else 8
        expected = linear(dtype, bias=module.bias is not None)(x)
        error = (module(x) - expected).double().norm() / expected.double().norm()
        assert error < (0.3 if bits == 4 else 0.03), module
        torch.testing.assert_close(module.dequantized_weight(dtype), linear(dtype).weight, atol=0.02, rtol=0.2)


def test_a_smoothquant_linear_takes_integers_as_they_are() -> None:
    module, x = SmoothQuantLinear.from_float(linear(), 0.025), torch.randn(4, 24)
    assert torch.equal(module(module.quantize_input(x)), module(x))


def test_state_has_the_names_types_and_shapes_of_a_checkpoint() -> None:
    state = SmoothQuantLinear.from_float(linear(torch.bfloat16), 0.02, 3).state_dict()
    assert {name: (value.dtype, list(value.shape)) for name, value in state.items()} == {
        "weight": (torch.int8, [10, 24]),
        "weight_scale": (torch.float32, [10, 1]),
        "bias": (torch.bfloat16, [10]),
        "input_scale": (torch.float32, [1]),
        "input_zero_point": (torch.int8, [1]),
    }


def test_state_survives_every_way_of_copying_it(tmp_path: Path) -> None:
    x = torch.randn(3, 24)
    for module in modules():
        expected = module(x)
        torch.save(module.state_dict(), tmp_path / "state.pt")
        save_file(module.state_dict(), tmp_path / "state.safetensors")
        for state in (torch.load(tmp_path / "state.pt"), load_file(tmp_path / "state.safetensors")):
            for assign in (False, True):
                fresh = empty_like(module)
                fresh.load_state_dict(state, assign=assign)
                assert torch.equal(fresh(x), expected)
        assert torch.equal(copy.deepcopy(module)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(module))(x), expected)


def test_row_sums_are_computed_once_and_follow_every_change_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, x = [], torch.randn(3, 24) + 1
    summed = RowSums.__call__

    def watched(self: RowSums, *args: Any) -> Tensor | None:
        sums.append(summed(self, *args))
        return sums[-1]

    monkeypatch.setattr(RowSums, "__call__", watched)
    for module in [*modules()[1:2], SmoothQuantLinear.from_float(linear(), 0.04, 9)]:

        def check(module: nn.Module, expected: int) -> None:
            sums.clear()
            assert torch.equal(module(x), module(x))
            assert sums[0] is sums[1] and sums[0] is not None
            assert torch.equal(sums[0], module.weight.sum(dim=1, dtype=torch.int32))
            assert int(sums[0][0]) == expected

        first = int(module.weight[0].sum())
        check(module, first)
        module.weight[0, 0] += 1
        check(module, first + 1)
        check(copy.deepcopy(module), first + 1)
        check(pickle.loads(pickle.dumps(module)), first + 1)
        state = module.state_dict()
        module.weight = module.weight.roll(1, 0).roll(-1, 0)
        module.weight[0, 0] += 1
        check(module, first + 2)
        for assign in (False, True):
            module.load_state_dict(state, assign=assign)
            check(module, first + 1)
        check(module.double().float(), first + 1)
        with torch.inference_mode():
            module.weight = module.weight + 0
            assert module._weight_sum() is None


def test_scales_follow_the_device_but_no_dtype() -> None:
    for module in modules():
        before = {name: value.clone() for name, value in module.named_buffers()}
        module.half().double().bfloat16()
        for name, value in module.named_buffers():
            assert torch.equal(value, before[name]) and value.dtype is before[name].dtype
        if module.bias is not None:
            assert module.bias.dtype is torch.bfloat16
        assert module(torch.randn(2, 24, dtype=torch.bfloat16)).dtype is torch.bfloat16
        assert module(torch.randn(2, 24)).dtype is torch.float32
        assert module.to("meta").weight_scale.is_meta


def test_scales_load_from_any_float_type_and_shape_they_are_stored_in() -> None:
    module = QuantizedLinear.from_float(linear())
    state = module.state_dict()
    for stored in (state["weight_scale"].bfloat16(), state["weight_scale"].view(-1), torch.tensor([0.125])):
        fresh = empty_like(module)
        fresh.load_state_dict({**state, "weight_scale": stored})
        assert fresh.weight_scale.dtype is torch.float32
        assert torch.equal(fresh.weight_scale, stored.float().reshape(-1, 1).expand(10, 1))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", torch.zeros(10, 24), r"fc.weight: expected torch.int8 of shape \[10, 24\] .* got torch.float32"),
        ("weight", torch.zeros(10, 12, dtype=torch.int8), r"fc.weight: .*got torch.int8 of shape \[10, 12\]"),
        ("weight_scale", torch.zeros(7, 1), r"fc.weight_scale: .*got torch.float32 of shape \[7, 1\]"),
        ("weight_scale", torch.zeros(10, 1, dtype=torch.int8), r"fc.weight_scale: .*got torch.int8"),
        ("bias", torch.zeros(9), r"fc.bias"),
        ("weight", None, r"[Mm]issing key.*fc.weight\b"),
        ("input_scale", torch.ones(1), r"[Uu]nexpected key.*fc.input_scale"),
    ],
)
def test_state_that_does_not_match_names_the_tensor(name: str, value: Tensor | None, message: str) -> None:
    model = nn.ModuleDict({"fc": QuantizedLinear.from_float(linear())})
    state = model.state_dict()
    if value is None:
        del state[f"fc.{name}"]
    else:
        state[f"fc.{name}"] = value
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)


def test_under_autocast_linears_compute_in_its_type() -> None:
    x = torch.randn(4, 24)
    for module in modules():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x)
        assert y.dtype is torch.bfloat16
        assert torch.equal(y, module(x.bfloat16()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_point", [None, 9])
def test_a_smoothquant_linear_passes_gradients_straight_through_its_rounding(
    zero_point: int | None, dtype: torch.dtype
) -> None:
    module, x = SmoothQuantLinear.from_float(linear(dtype), 0.02, zero_point), torch.randn(5, 24).mul(2).to(dtype)
    with torch.no_grad():
        expected = module(x)
    x.requires_grad_()
    y = module(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    rounded = baracuda.fake_quantize(x, 0.02, zero_point)
    (wanted,) = torch.autograd.grad((rounded @ module.dequantized_weight(dtype).T).sum(), x)
    assert torch.equal(x.grad, wanted) and bool((wanted == 0).any()) and bool((wanted != 0).any())
    assert torch.equal(module.bias.grad, torch.full_like(module.bias, 5))


@pytest.mark.parametrize("change", [baracuda.quantize_model, baracuda.prepare_qat])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_calls_its_linears_in_inference_too(change: Any, padded: bool) -> None:
    """By itself it multiplies by their weights instead, floats or not."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 32)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    with torch.no_grad():
        floats = encoder(x, src_key_padding_mask=mask)
    change(encoder)
    with torch.no_grad():
        rounded = encoder(x, src_key_padding_mask=mask)
    seen = slice(0, 3 if padded else 5)
    torch.testing.assert_close(rounded[:, seen], floats[:, seen], atol=0.2, rtol=0.2)
    assert not torch.equal(rounded[:, seen], floats[:, seen])


def test_a_quantized_linear_passes_gradients_to_what_came_before_it() -> None:
    model = nn.Sequential(nn.Linear(24, 24), QuantizedLinear.from_float(linear()))
    model(torch.randn(4, 24)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: QuantizedLinear(4, 4, weight_element="u8"),
            baracuda.Unsupported,
            "the weight: expected one of s8, s4, got u8",
        ),
        (
            lambda: QuantizedLinear.from_float(nn.Conv1d(2, 2, 1)),
            baracuda.Unsupported,
            "expected an nn.Linear, got Conv1d",
        ),  # type: ignore[arg-type]
        (lambda: SmoothQuantLinear.from_float(linear(), torch.ones(3)), baracuda.InvalidProblem, "expected one value"),
        (lambda: SmoothQuantLinear.from_float(linear(), 0.0), baracuda.InvalidProblem, "input_scale: .*> 0.*got 0.0"),
        (lambda: SmoothQuantLinear.from_float(linear(), -1.0), baracuda.InvalidProblem, "input_scale: .*> 0.*got -1.0"),
        (
            lambda: SmoothQuantLinear.from_float(linear(), 0.1, 300),
            baracuda.InvalidProblem,
            r"input_zero_point: expected an integer in \[-128, 127\], .*got 300",
        ),
        (
            lambda: SmoothQuantLinear.from_float(linear(), 0.1, -1, activation="u8"),
            baracuda.InvalidProblem,
            r"input_zero_point: expected an integer in \[0, 255\], .*got -1",
        ),
        (lambda: FakeQuantize("sometimes"), baracuda.InvalidProblem, "expected one of static, dynamic, learned"),  # type: ignore[arg-type]
        (lambda: Percentile(percentile=20), baracuda.InvalidProblem, r"expected a number in \(50, 100\]"),
        (lambda: MovingAverage(momentum=0), baracuda.InvalidProblem, r"expected a number in \(0, 1\]"),
    ],
)
def test_a_module_refuses(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(("activation", "given", "stored"), [("s8", 300, 127), ("u8", -1, 0), ("u8", 254.6, 255)])
def test_a_zero_point_in_a_tensor_is_clamped_and_does_not_wrap(activation: str, given: float, stored: int) -> None:
    module = SmoothQuantLinear.from_float(linear(), 0.1, torch.tensor(given), activation=activation)  # type: ignore[arg-type]
    assert module.input_zero_point is not None and module.input_zero_point.item() == stored


def test_an_output_written_from_outside_is_seen_by_the_row_sums() -> None:
    module = QuantizedLinear.from_float(linear(), mode="asymmetric")
    x = torch.randn(4, module.in_features)
    module(x)
    other = torch.randn(module.out_features, module.in_features)
    baracuda.quantize(other, module.weight_scale, scope=PerChannel(0), out=module.weight)
    assert torch.equal(module(x), copy.deepcopy(module)(x))


@pytest.mark.parametrize("kind", [QuantizedLinear, SmoothQuantLinear, QATLinear])
def test_shapes_are_inferred_on_meta_and_from_fake_tensors(kind: Any) -> None:
    assert kind(8, 4, device="meta")(torch.empty(2, 8, device="meta")).shape == (2, 4)
    with FakeTensorMode():
        assert kind(8, 4)(torch.empty(2, 8)).shape == (2, 4)
