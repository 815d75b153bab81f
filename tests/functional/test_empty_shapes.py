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
