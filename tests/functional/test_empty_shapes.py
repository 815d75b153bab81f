"""The public functions over every rank from 0 to 5, with axes of length 0 and 1: a right answer, or a sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import baracuda
from baracuda import BaracudaError, PerChannel, PerGroup, PerTensor, PerToken, Scope

SHAPES = st.lists(st.sampled_from([0, 0, 1, 2, 3, 6]), min_size=0, max_size=5).map(tuple)
AXES = st.integers(-6, 5)
SCOPES: st.SearchStrategy[Scope] = st.one_of(
    st.just(PerTensor()),
    st.just(PerToken()),
    AXES.map(PerChannel),
    st.tuples(st.sampled_from([1, 2, 3, 6]), AXES).map(lambda pair: PerGroup(*pair)),
)
ELEMENTS = st.sampled_from(["s8", "u8", "s4", "u4"])
MODES = st.sampled_from(["symmetric", "asymmetric"])
FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@settings(max_examples=250, deadline=None, derandomize=True)
@given(shape=SHAPES, scope=SCOPES, element=ELEMENTS, mode=MODES, dtype=FLOATS)
def test_every_function_answers_or_refuses_every_shape(
    shape: tuple[int, ...], scope: Scope, element: str, mode: str, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(dtype)
    options: dict[str, Any] = {"scope": scope, "mode": mode, "dtype": element}
    try:
        made = baracuda.dynamic_quantize(x, **options)
    except BaracudaError as error:
        assert len(str(error)) > 20
        for refuse in (baracuda.choose_qparams, baracuda.dynamic_fake_quantize):
            with pytest.raises(BaracudaError):
                refuse(x, **options)
        return
    chosen = baracuda.choose_qparams(x, **options)
    scale, zero_point = chosen[0], chosen[1] if len(chosen) > 1 else None
    assert torch.equal(made.scale, scale) and bool((scale > 0).all()) and bool(scale.isfinite().all())
    again = baracuda.quantize(x, scale, zero_point, scope=scope, dtype=element, q_min=_low(element, mode))
    assert torch.equal(again, made.q) and again.shape == made.q.shape
    if shape:
        back: dict[str, Any] = {"size": shape[-1]} if element.endswith("4") else {}
        back |= {"dtype": "f64"} if dtype is torch.float64 else {}
        y = baracuda.dequantize(made.q, scale, zero_point, scope=scope, element=element, **back)
        assert y.shape == x.shape and bool(y.isfinite().all())
        if x.numel() and not (element.startswith("u") and mode == "symmetric"):
            error = (y.double() - x.double()).abs().max()
            assert float(error) <= 0.51 * float(scale.double().max()) + 1e-6
    fake = baracuda.dynamic_fake_quantize(x, **options)
    fake = fake[0] if isinstance(fake, tuple) else fake
    assert fake.shape == x.shape and fake.dtype == x.dtype


def _low(element: str, mode: str) -> int | None:
    return {"s8": -127, "s4": -7}.get(element) if mode == "symmetric" else None


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    lead=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=0, max_size=4).map(tuple),
    n=st.sampled_from([0, 1, 3, 16]),
    k=st.sampled_from([0, 1, 4, 16]),
    bias=st.booleans(),
    dtype=FLOATS,
)
def test_linears_of_every_shape_compute_the_product_or_refuse(
    lead: tuple[int, ...], n: int, k: int, bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(n * 31 + k)
    x = torch.randn(*lead, k, generator=generator).to(dtype)
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    scale = torch.rand(n, generator=generator) + 0.1
    added = torch.randn(n, generator=generator).to(dtype) if bias else None
    try:
        y = baracuda.quantized_linear(x, weight, scale, added)
    except BaracudaError as error:
        assert len(str(error)) > 20
        return
    assert y.shape == (*lead, n) and bool(y.isfinite().all())
    exact = x.double() @ (weight.double() * scale.double()[:, None]).T + (0 if added is None else added.double())
    if exact.numel():
        size = float(x.double().abs().max()) * 127 * float(scale.max()) * max(k, 1) if k else 1.0
        assert float((y.double() - exact).abs().max()) <= 0.02 * size + 0.02 * float(exact.abs().max()) + 1e-6


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shape=SHAPES, scope=SCOPES, dtype=FLOATS, zero_point=st.booleans())
def test_fake_quantization_of_every_shape_is_the_round_trip(
    shape: tuple[int, ...], scope: Scope, dtype: torch.dtype, zero_point: bool
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    try:
        scale, _ = baracuda.choose_qparams(x, scope=scope)
    except BaracudaError:
        with pytest.raises(BaracudaError):
            baracuda.fake_quantize(x, torch.ones(2, 2, 2, 2, 2, 2), scope=scope)
        return
    points = torch.full(scale.shape, 3, dtype=torch.int32) if zero_point else None
    fake = baracuda.fake_quantize(x, scale, points, scope=scope)
    q = baracuda.quantize(x, scale, points, scope=scope)
    back = baracuda.dequantize(q, scale, points, scope=scope, dtype=str(dtype).removeprefix("torch."))
    assert fake.shape == x.shape and torch.equal(fake, back)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    shape=SHAPES,
    dtype=FLOATS,
    style=st.sampled_from(["llama", "gemma", "torch", "layer"]),
    residual=st.booleans(),
    weight=st.booleans(),
)
def test_norms_of_every_shape_are_quantized_as_their_result_is(
    shape: tuple[int, ...], dtype: torch.dtype, style: str, residual: bool, weight: bool
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x, added = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    gain = torch.rand(shape[-1:], generator=generator).to(dtype) if weight else None
    given_residual: dict[str, Any] = {"residual": added} if residual else {}
    try:
        if style == "layer":
            made = baracuda.layer_norm(x, gain, eps=1e-5, **given_residual)
        else:
            made = baracuda.rms_norm(x, gain, 1e-5, style=style, **given_residual)
    except BaracudaError as error:
        assert len(str(error)) > 20
        with pytest.raises(BaracudaError):
            baracuda.norm_quantize(x, gain, 1e-5, style=style, **given_residual)
        return
    normed = made[0] if isinstance(made, tuple) else made
    assert normed.shape == x.shape and normed.dtype == x.dtype and bool(normed.isfinite().all())
    whole = x.double() + added.double() if residual else x.double()
    if x.numel():
        wide = whole.to(dtype).double() if residual else whole
        centred = wide - wide.mean(-1, keepdim=True) if style == "layer" else wide
        exact = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        exact = exact * (1 if gain is None else gain.double() + (1 if style == "gemma" else 0))
        assert float((normed.double() - exact).abs().max()) <= 0.05 * max(1.0, float(exact.abs().max()))
    found = baracuda.norm_quantize(x, gain, 1e-5, style=style, **given_residual)
    again = baracuda.dynamic_quantize(normed, scope=PerToken())
    assert torch.equal(found[0], again.q) and torch.equal(found[1], again.scale)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shape=SHAPES, dtype=FLOATS, activation=st.sampled_from(["silu", "gelu"]), both=st.booleans())
def test_gated_products_of_every_shape_are_quantized_as_their_result_is(
    shape: tuple[int, ...], dtype: torch.dtype, activation: str, both: bool
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    gate, up = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    operands = (gate,) if both else (gate, up)
    try:
        made = baracuda.gated(*operands, activation=activation)
    except BaracudaError as error:
        assert len(str(error)) > 20
        with pytest.raises(BaracudaError):
            baracuda.gated_quantize(*operands, activation=activation)
        return
    left, right = gate.chunk(2, -1) if both else (gate, up)
    assert made.shape == left.shape and bool(made.isfinite().all())
    if made.numel():
        function = torch.nn.functional.silu if activation == "silu" else torch.nn.functional.gelu
        exact = function(left.double()) * right.double()
        assert float((made.double() - exact).abs().max()) <= 0.02 * max(1.0, float(exact.abs().max()))
    found = baracuda.gated_quantize(*operands, activation=activation)
    again = baracuda.dynamic_quantize(made, scope=PerToken())
    assert torch.equal(found[0], again.q) and torch.equal(found[1], again.scale)


LEADS = st.lists(st.sampled_from([0, 1, 2, 3]), min_size=0, max_size=4).map(tuple)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    lead=LEADS,
    n=st.sampled_from([0, 1, 3, 8]),
    k=st.sampled_from([0, 1, 2, 8, 32]),
    groups=st.sampled_from([0, 1, 2, 4]),
    element=st.sampled_from(["s8", "s4", "u4"]),
    zero_point=st.booleans(),
    dtype=FLOATS,
)
def test_weight_only_linears_of_every_shape_compute_the_product_or_refuse(
    lead: tuple[int, ...], n: int, k: int, groups: int, element: str, zero_point: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(n * 31 + k)
    x = torch.randn(*lead, k, generator=generator).to(dtype)
    low, high = {"s8": (-127, 128), "s4": (-7, 8), "u4": (0, 16)}[element]
    q = torch.randint(low, high, (n, k), generator=generator).to(torch.int8 if element == "s8" else torch.int32)
    scale = torch.rand((n, groups) if groups else (n,), generator=generator) + 0.1
    points = torch.full(scale.shape, 5, dtype=torch.int32) if zero_point else None
    try:
        stored = q if element == "s8" else baracuda.pack_int4(q, element)
        y = baracuda.weight_only_linear(x, stored, scale, weight_zero_point=points, weight_element=element)
    except BaracudaError as error:
        assert len(str(error)) > 20
        return
    assert y.shape == (*lead, n) and bool(y.isfinite().all())
    each = scale.double() if groups else scale.double()[:, None]
    each = each.repeat_interleave(max(1, k // max(1, groups)), 1)[:, :k]
    weight = (q.double() - (5 if zero_point else 0)) * each
    exact = x.double() @ weight.T
    if exact.numel():
        size = float((x.double().abs() @ weight.abs().T).max()) if k else 1.0
        assert float((y.double() - exact).abs().max()) <= 0.02 * size + 1e-6


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    lead=LEADS,
    n=st.sampled_from([0, 1, 3, 16]),
    k=st.sampled_from([0, 1, 4, 64]),
    each_row=st.booleans(),
    groups=st.sampled_from([0, 1, 2]),
    residual=st.booleans(),
    dtype=st.sampled_from(["f32", "bf16", "f16"]),
)
def test_integer_linears_of_every_shape_compute_the_product_or_refuse(
    lead: tuple[int, ...], n: int, k: int, each_row: bool, groups: int, residual: bool, dtype: str
) -> None:
    generator = torch.Generator().manual_seed(n * 31 + k)
    x = torch.randint(-127, 128, (*lead, k), generator=generator).to(torch.int8)
    bound = 7 if groups else 127
    q = torch.randint(-bound, bound + 1, (n, k), generator=generator).to(torch.int32 if groups else torch.int8)
    scale = torch.rand(n, generator=generator) + 0.1
    rows = torch.rand(lead, generator=generator) + 0.1 if each_row else torch.tensor(0.5)
    factors = torch.randint(1, 16, (n, groups), generator=generator).to(torch.uint8) if groups else None
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    added = torch.randn(*lead, n, generator=generator).to(kind) if residual else None
    options: dict[str, Any] = {"weight_element": "s4", "weight_factor": factors} if groups else {}
    try:
        stored = baracuda.pack_int4(q, "s4") if groups else q
        y = baracuda.smoothquant_linear(x, stored, rows * 1e-4, scale, dtype=dtype, residual=added, **options)
    except BaracudaError as error:
        assert len(str(error)) > 20
        return
    assert y.shape == (*lead, n) and bool(y.isfinite().all())
    weight = q.double() * scale.double()[:, None]
    if factors is not None and k:
        weight = weight * factors.double().repeat_interleave(k // groups, 1)
    exact = (x.double() @ weight.T) * (rows.double()[..., None] if each_row else 0.5) * 1e-4
    exact = exact + (0 if added is None else added.double())
    if exact.numel():
        assert float((y.double() - exact).abs().max()) <= 0.02 * max(1.0, float(exact.abs().max()))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shape=SHAPES, element=st.sampled_from(["s4", "u4"]))
def test_nibbles_of_every_shape_come_back(shape: tuple[int, ...], element: str) -> None:
    low = -8 if element == "s4" else 0
    q = torch.randint(low, low + 16, shape, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    size = shape[-1] if shape else 1  # a number is a row of one
    back = baracuda.unpack_int4(baracuda.pack_int4(q, element), element, size)
    assert torch.equal(back.to(torch.int32).reshape(shape), q)
