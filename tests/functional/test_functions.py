"""The functions: any strides and rank, other people's arrays, out=, gradients, scale shapes, packed sizes, linears."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import baracuda
from baracuda import Activation, PerChannel, PerGroup, PerTensor, PerToken, Scope

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, 8, generator=GENERATOR) * 5
SCOPES: list[Scope] = [
    PerTensor(),
    PerChannel(0),
    PerChannel(1),
    PerChannel(-1),
    PerToken(),
    PerGroup(4),
    PerGroup(3, axis=1),
]


def qparams(scope: Scope, shape: tuple[int, ...] = (4, 6, 8)) -> tuple[Tensor, Tensor]:
    at = scope.scale_shape(shape)
    count = torch.Size(at).numel()
    return torch.linspace(0.02, 0.1, count).view(at), torch.arange(count, dtype=torch.int32).view(at) % 9 - 4


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values in other memory."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), 99, dtype=x.dtype)
    wide[..., 2:-3] = x
    steps = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 99, dtype=x.dtype)
    steps[..., ::2] = x
    by_permutation = {
        f"permuted {order}": x.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())
        for order in itertools.permutations(range(x.ndim))
    }
    return {
        "rows apart": wide[..., 2:-3],
        "every second": steps[..., ::2],
        "offset": torch.cat([x, x])[len(x) :],
        **by_permutation,
    }


@pytest.mark.parametrize("scope", SCOPES, ids=str)
@pytest.mark.parametrize("layout", layouts(X))
def test_strides_change_nothing(layout: str, scope: Scope) -> None:
    x = layouts(X)[layout]
    scale, zero_point = qparams(scope)
    q = baracuda.quantize(X, scale, zero_point, scope=scope)
    assert torch.equal(baracuda.quantize(x, scale, zero_point, scope=scope), q)
    assert torch.equal(
        baracuda.dequantize(layouts(q)[layout], scale, zero_point, scope=scope),
        baracuda.dequantize(q, scale, zero_point, scope=scope),
    )
    fake = baracuda.fake_quantize(X, scale, zero_point, scope=scope)
    assert torch.equal(baracuda.fake_quantize(x, scale, zero_point, scope=scope), fake)
    for ours, want in zip(
        baracuda.dynamic_quantize(x, scope=scope, mode="asymmetric"),
        baracuda.dynamic_quantize(X, scope=scope, mode="asymmetric"),
        strict=True,
    ):
        assert torch.equal(ours, want)


def test_expanded_inputs_scales_and_zero_points_are_read_as_they_look() -> None:
    x = torch.tensor([[1.0], [2.0]]).expand(2, 7)
    scale = torch.tensor([0.5]).expand(2)
    zero_point = torch.tensor([3], dtype=torch.int32).expand(2)
    assert baracuda.quantize(x, scale, zero_point, scope=PerToken()).tolist() == [[5] * 7, [7] * 7]


@pytest.mark.parametrize("rank", range(6))
def test_any_rank_works(rank: int) -> None:
    shape = (2, 3, 2, 4, 2)[:rank]
    x = torch.randn(shape, generator=GENERATOR)
    want = (x / 0.1).round().clamp(-128, 127)
    assert torch.equal(baracuda.quantize(x, 0.1).float(), want)
    for axis in range(-rank, rank):
        scale = torch.linspace(0.05, 0.2, shape[axis])
        along = scale.view([-1 if i == axis % rank else 1 for i in range(rank)])
        q = baracuda.quantize(x, scale, scope=PerChannel(axis))
        assert torch.equal(q.float(), (x / along).round().clamp(-128, 127))


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_scales_have_the_documented_shape(scope: Scope) -> None:
    documented: dict[str, tuple[int, ...]] = {
        "PerTensor()": (),
        "PerChannel(axis=0)": (4,),
        "PerChannel(axis=1)": (6,),
        "PerChannel(axis=-1)": (8,),
        "PerToken()": (4, 6),
        "PerGroup(size=4, axis=-1)": (4, 6, 2),
        "PerGroup(size=3, axis=1)": (4, 2, 8),
    }
    q, scale, zero_point = baracuda.dynamic_quantize(X, scope=scope, mode="asymmetric")
    assert zero_point is not None
    assert scale.shape == zero_point.shape == documented[str(scope)]
    error = (baracuda.dequantize(q, scale, zero_point, scope=scope) - X).abs().max()
    assert error <= 0.51 * scale.max()


@pytest.mark.parametrize(
    ("scope", "kept"),
    [(PerToken(), (4, 6, 1)), (PerChannel(1), (1, 6, 1)), (PerChannel(1), (6, 1)), (PerTensor(), (1, 1, 1))],
    ids=str,
)
def test_scales_may_keep_their_axes_of_length_one(scope: Scope, kept: tuple[int, ...]) -> None:
    scale, zero_point = qparams(scope)
    want = baracuda.quantize(X, scale, zero_point, scope=scope)
    assert torch.equal(baracuda.quantize(X, scale.view(kept), zero_point.view(kept), scope=scope), want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64, torch.uint8])
def test_zero_points_of_any_integer_type_are_taken(dtype: torch.dtype) -> None:
    scale, zero_point = qparams(PerToken())
    zero_point = zero_point.abs()
    want = baracuda.quantize(X, scale, zero_point, scope=PerToken())
    assert torch.equal(baracuda.quantize(X, scale, zero_point.to(dtype), scope=PerToken()), want)


def test_a_zero_point_beyond_32_bits_is_clamped_and_does_not_wrap() -> None:
    got = baracuda.quantize(X, 1.0, torch.tensor(2**40))
    assert torch.equal(got, baracuda.quantize(X, 1.0, torch.tensor(2**31 - 1, dtype=torch.int32)))
    assert got.unique().tolist() == [127]


# -- other people's arrays ---------------------------------------------------------------------------------------


def read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "form",
    [np.ascontiguousarray, np.asfortranarray, read_only, lambda x: x[::-1], lambda x: x[:, ::2], lambda x: x.T],
    ids=range(6),
)
@pytest.mark.filterwarnings("error")
def test_numpy_arrays_come_in(form: Any, dtype: Any) -> None:
    array = form(np.random.default_rng(0).standard_normal((6, 8)).astype(dtype))
    before = array.copy()
    x = torch.from_numpy(before)
    got = baracuda.dynamic_quantize(array)
    for ours, want in zip(got[:2], baracuda.dynamic_quantize(x)[:2], strict=True):
        assert isinstance(ours, Tensor)
        assert torch.equal(ours, want)
    assert torch.equal(
        baracuda.fake_quantize(array, np.float32(0.1), np.int64(3)), baracuda.fake_quantize(x, 0.10000000149011612, 3)
    )
    assert (array == before).all()


def test_numpy_scales_zero_points_and_weights_come_in() -> None:
    scale, zero_point = qparams(PerToken())
    want = baracuda.quantize(X, scale, zero_point, scope=PerToken())
    assert torch.equal(baracuda.quantize(X.numpy(), scale.numpy(), zero_point.numpy(), scope=PerToken()), want)
    weight, weight_scale = torch.ones(3, 8, dtype=torch.int8), torch.rand(3, generator=GENERATOR)
    linear = baracuda.quantized_linear(X, weight, weight_scale, weight_scale)
    assert torch.equal(
        baracuda.quantized_linear(X.numpy(), weight.numpy(), weight_scale.numpy(), weight_scale.numpy()), linear
    )


def test_a_minus_that_torch_has_put_off_is_read() -> None:
    for lazy in (torch.tensor([1 + 2j, 3 - 4j]).conj().imag, torch._neg_view(torch.tensor([2.0, -4.0]))):
        assert lazy.is_neg()
        assert baracuda.quantize(lazy, 1.0).tolist() == [-2, 4]


def test_packing_takes_numpy_arrays() -> None:
    packed = baracuda.pack_int4(np.array([1, -2, 3], dtype=np.int64))
    assert baracuda.unpack_int4(packed.numpy(), size=3).tolist() == [1, -2, 3]


def test_whatever_speaks_dlpack_comes_in() -> None:
    class Foreign:
        def __dlpack__(self, **options: Any) -> Any:
            return X.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return X.__dlpack_device__()

    assert torch.equal(baracuda.quantize(Foreign(), 0.1), baracuda.quantize(X, 0.1))


def test_numbers_are_held_to_the_same_under_torchs_modes() -> None:
    for scale, zero_point in ((True, None), (1.0, 3.0), (1.0, True), (10**400, None)):
        for mode in (nullcontext(), torch.device("cpu")):
            with mode, pytest.raises(baracuda.InvalidProblem, match=r"^(scale|zero_point): expected"):
                baracuda.quantize(X, scale, zero_point)


# -- out= --------------------------------------------------------------------------------------------------------


def outs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Somewhere to write: plain, rows apart, transposed, every second element."""
    wide, steps = (
        torch.zeros((*shape[:-1], shape[-1] + 4), dtype=dtype),
        torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype),
    )
    return [
        torch.zeros(shape, dtype=dtype),
        wide[..., 1:-3],
        torch.zeros(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))),
        steps[..., ::2],
    ]


@pytest.mark.parametrize("i", range(4))
def test_out_receives_the_result_and_is_returned(i: int) -> None:
    scale, zero_point = qparams(PerToken())
    q = baracuda.quantize(X, scale, zero_point, scope=PerToken())
    weight, weight_scale = torch.ones(5, 8, dtype=torch.int8), torch.rand(5, generator=GENERATOR)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...], torch.dtype]] = [
        (baracuda.quantize, (X, scale, zero_point), {"scope": PerToken()}, (4, 6, 8), torch.int8),
        (baracuda.quantize, (X, scale, zero_point), {"scope": PerToken(), "dtype": "u4"}, (4, 6, 4), torch.uint8),
        (baracuda.dequantize, (q, scale, zero_point), {"scope": PerToken(), "dtype": "f16"}, (4, 6, 8), torch.float16),
        (baracuda.fake_quantize, (X, scale, zero_point), {"scope": PerToken()}, (4, 6, 8), torch.float32),
        (baracuda.quantized_linear, (X, weight, weight_scale), {}, (4, 6, 5), torch.float32),
        (baracuda.smoothquant_linear, (q, weight, 0.1, weight_scale), {}, (4, 6, 5), torch.float32),
    ]
    for function, args, options, shape, dtype in calls:
        out = outs(shape, dtype)[i]
        assert function(*args, **options, out=out) is out
        assert torch.equal(out, function(*args, **options))


def test_fake_quantize_may_write_over_its_input() -> None:
    x = X.clone()
    want = baracuda.fake_quantize(X, 0.1)
    assert baracuda.fake_quantize(x, 0.1, out=x) is x
    assert torch.equal(x, want)


def test_elements_between_those_of_out_stay_as_they_were() -> None:
    memory = torch.full((4, 6, 16), 77, dtype=torch.int8)
    baracuda.quantize(X, 0.1, out=memory[..., ::2])
    assert (memory[..., 1::2] == 77).all()


# -- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_the_gradient_passes_straight_through_where_x_was_in_range(scope: Scope, dtype: torch.dtype) -> None:
    scale, zero_point = qparams(scope)
    x = X.to(dtype, copy=True).requires_grad_()
    dy = torch.randn(X.shape, generator=GENERATOR).to(dtype)
    y = baracuda.fake_quantize(x, scale, zero_point, scope=scope, q_min=-30, q_max=30)
    y.backward(dy)
    wide = baracuda.quantize(x.detach(), scale, zero_point, scope=scope, q_min=-31, q_max=31)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(wide.abs() <= 30, dy, torch.zeros_like(dy)))
    assert (x.grad == 0).any()
    assert (x.grad != 0).any()


def test_a_strided_gradient_is_fine() -> None:
    x = X.clone().requires_grad_()
    baracuda.fake_quantize(x.transpose(0, 2), 0.1).transpose(0, 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, (X / 0.1).round().clamp(-128, 127) == (X / 0.1).round())


def test_without_gradients_nothing_is_recorded() -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not baracuda.fake_quantize(x, 0.1).requires_grad
    assert baracuda.fake_quantize(x, 0.1).requires_grad
    assert not baracuda.fake_quantize(X, 0.1).requires_grad


# -- packed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["s4", "u4"])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_packed_results_are_half_as_long_and_dequantize_at_their_size(size: int, kind: str) -> None:
    x = torch.randn(3, size, generator=GENERATOR) * 4
    scale, zero_point = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0, 3, 1], dtype=torch.int32)
    q = baracuda.quantize(x, scale, zero_point, scope=PerToken(), dtype=kind)
    assert (q.dtype, q.shape) == (torch.uint8, (3, (size + 1) // 2))
    low, high = (-8, 7) if kind == "s4" else (0, 15)
    want = ((x / scale[:, None]).round() + zero_point[:, None]).clamp(low, high)
    assert torch.equal(baracuda.unpack_int4(q, kind, size).float(), want)
    back = baracuda.dequantize(q, scale, zero_point, scope=PerToken(), element=kind, size=size)
    assert torch.equal(back, (want - zero_point[:, None]) * scale[:, None])
    whole = baracuda.dequantize(q, scale, zero_point, scope=PerToken(), element=kind)
    assert whole.shape == (3, 2 * q.shape[1])
    assert torch.equal(whole[:, :size], back)


def test_packed_weights_give_the_linear_of_their_integers() -> None:
    weight = torch.randint(-8, 8, (5, 7), generator=GENERATOR)
    x, scale = torch.randn(3, 7, generator=GENERATOR), torch.rand(5, generator=GENERATOR)
    packed = baracuda.pack_int4(weight, "s4")
    want = baracuda.quantized_linear(x, weight.to(torch.int8), scale)
    assert torch.equal(baracuda.quantized_linear(x, packed, scale, weight_element="s4"), want)


# -- linears -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
def test_a_linear_keeps_leading_axes_and_comes_close_to_the_float_one(mode: str) -> None:
    weight = torch.randn(16, 64, generator=GENERATOR)
    x, bias = torch.randn(2, 3, 64, generator=GENERATOR) + 0.5, torch.randn(16, generator=GENERATOR)
    q, scale, _ = baracuda.dynamic_quantize(weight)
    y = baracuda.quantized_linear(x, q, scale, bias, mode=mode)
    exact = x @ weight.T + bias
    assert y.shape == (2, 3, 16)
    assert (y - exact).norm() < 0.02 * exact.norm()
    sums = q.sum(1, dtype=torch.int32)
    assert torch.equal(baracuda.quantized_linear(x, q, scale, bias, mode=mode, weight_sum=sums), y)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_the_activation_comes_after_the_bias_and_the_residual_after_the_activation(activation: str) -> None:
    weight = torch.randint(-128, 128, (5, 8), generator=GENERATOR).to(torch.int8)
    x, bias = torch.randn(2, 3, 8, generator=GENERATOR), torch.randn(5, generator=GENERATOR)
    residual = torch.randn(2, 3, 5, generator=GENERATOR)
    y = baracuda.quantized_linear(x, weight, 0.01, bias)
    act = {"none": lambda y: y}.get(activation) or getattr(torch.nn.functional, activation)
    got = baracuda.quantized_linear(x, weight, 0.01, bias, activation=activation, residual=residual)
    torch.testing.assert_close(got, act(y) + residual, rtol=1e-5, atol=1e-6)
    q = baracuda.dynamic_quantize(x[0, :1])
    given = {"activation": activation, "residual": residual[0, :1]}
    one = baracuda.smoothquant_linear(q.q, weight, q.scale[0], 0.01, bias, **given)
    assert torch.equal(one, got[0, :1])
    out = torch.empty(2, 3, 5)
    baracuda.quantized_linear(x, weight, 0.01, bias, activation=Activation(activation), residual=residual, out=out)
    assert torch.equal(out, got)


def test_one_weight_scale_serves_every_row() -> None:
    weight = torch.randint(-128, 128, (5, 8), generator=GENERATOR).to(torch.int8)
    want = baracuda.quantized_linear(X, weight, torch.full((5,), 0.25))
    for scale in (0.25, torch.tensor(0.25), torch.tensor([0.25]), torch.full((5, 1), 0.25)):
        assert torch.equal(baracuda.quantized_linear(X, weight, scale), want)


@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
def test_smoothquant_is_the_quantized_linear_of_activations_already_quantized(mode: str) -> None:
    weight, scale = (
        torch.randint(-128, 128, (5, 8), generator=GENERATOR).to(torch.int8),
        torch.rand(5, generator=GENERATOR),
    )
    x = torch.randn(1, 8, generator=GENERATOR)
    q, act_scale, zero_point = baracuda.dynamic_quantize(x, mode=mode, include_zero=mode == "asymmetric")
    given = None if zero_point is None else zero_point[0]
    got = baracuda.smoothquant_linear(q, weight, act_scale[0], scale, act_zero_point=given)
    assert torch.equal(got, baracuda.quantized_linear(x, weight, scale, mode=mode))


@pytest.mark.parametrize("options", [{"scale_dtype": "bf16"}, {"arithmetic": "reciprocal"}], ids=str)
def test_a_linear_quantizes_its_activations_as_it_is_told(options: dict[str, Any]) -> None:
    weight = torch.randint(-128, 128, (64, 96), generator=GENERATOR).to(torch.int8)
    x = torch.randn(1, 96, generator=GENERATOR).bfloat16()
    q, act_scale, _ = baracuda.dynamic_quantize(x, **options)
    got = baracuda.quantized_linear(x, weight, 0.25, **options)
    assert torch.equal(got, baracuda.smoothquant_linear(q, weight, act_scale[0].float(), 0.25, dtype="bf16"))
    if "scale_dtype" in options:
        assert not torch.equal(got, baracuda.quantized_linear(x, weight, 0.25))
