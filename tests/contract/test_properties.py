"""What holds for any bits at all: hypothesis over raw bit patterns, the same examples on every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from compute import compute
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import baracuda
from baracuda import (
    Arithmetic,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantizeKind,
    Scope,
)
from baracuda.core.problem import scale_elements
from baracuda.core.types import FLOATS, INTEGERS, MAX_ZERO_POINT

SIGNED = {16: torch.int16, 32: torch.int32, 64: torch.int64}
elements = st.sampled_from(FLOATS)
kinds = st.sampled_from(INTEGERS)
arithmetics = st.sampled_from(Arithmetic)
scopes: st.SearchStrategy[Scope] = st.sampled_from(
    [PerTensor(), PerChannel(0), PerChannel(-1), PerToken(), PerGroup(2), PerGroup(2, axis=0)]
)
shapes = st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 6]))
zero_points = st.one_of(st.integers(-300, 300), st.integers(-MAX_ZERO_POINT, MAX_ZERO_POINT))


@st.composite
def ranges(draw: st.DrawFn, kind: ElementKind) -> tuple[int, int]:
    low = draw(st.integers(kind.q_min, kind.q_max))
    return low, draw(st.integers(low, kind.q_max))


def bits(draw: st.DrawFn, element: ElementKind, shape: tuple[int, ...]) -> Tensor:
    """Any bit pattern; shrinking favours zeros and subnormals, drawing finds NaN and infinities."""
    count = int(np.prod(shape))
    patterns = draw(st.lists(st.integers(0, 2**element.bits - 1), min_size=count, max_size=count))
    words = np.array(patterns, dtype=np.uint64).astype(f"u{element.bits // 8}").view(f"i{element.bits // 8}")
    return torch.from_numpy(words).view(element.dtype).view(shape)


def moderate(draw: st.DrawFn, element: ElementKind, shape: tuple[int, ...]) -> Tensor:
    values = st.floats(-1000, 1000, width=16 if element.bits == 16 else 32)
    count = int(np.prod(shape))
    return torch.tensor(draw(st.lists(values, min_size=count, max_size=count))).to(element.dtype).view(shape)


def scales(draw: st.DrawFn, scope: Scope, shape: tuple[int, ...], element: ElementKind, sane: bool) -> Tensor:
    at = scope.scale_shape(shape)
    if not sane:
        return bits(draw, element.math, at)
    count = int(np.prod(at))
    values = draw(st.lists(st.floats(2.0**-10, 2.0**10), min_size=count, max_size=count))
    return torch.tensor(values, dtype=element.math.dtype).view(at)


def unpacked(q: Tensor, kind: ElementKind, size: int) -> Tensor:
    return (baracuda.unpack_int4(q, kind, size) if kind.is_packed else q).int()


def same_bits(a: Tensor, b: Tensor) -> bool:
    signed = SIGNED[a.dtype.itemsize * 8]
    return torch.equal(a.view(signed), b.view(signed))


@given(st.data(), elements, kinds, shapes, scopes, zero_points, arithmetics)
def test_a_quantized_value_is_in_range_whatever_the_bits(
    data: Any,
    element: ElementKind,
    kind: ElementKind,
    shape: Any,
    scope: Scope,
    zero_point: int,
    arithmetic: Arithmetic,
) -> None:
    low, high = data.draw(ranges(kind))
    x, scale = bits(data.draw, element, shape), scales(data.draw, scope, shape, element, sane=False)
    q = baracuda.quantize(x, scale, zero_point, scope=scope, dtype=kind, q_min=low, q_max=high, arithmetic=arithmetic)
    values = unpacked(q, kind, shape[1])
    assert low <= values.min()
    assert values.max() <= high


@given(st.data(), elements, shapes, scopes, zero_points, arithmetics)
def test_fake_quantize_is_dequantize_of_quantize_whatever_the_bits(
    data: Any, element: ElementKind, shape: Any, scope: Scope, zero_point: int, arithmetic: Arithmetic
) -> None:
    low, high = data.draw(ranges(ElementKind.S8))
    x, scale = bits(data.draw, element, shape), scales(data.draw, scope, shape, element, sane=False)
    fake = baracuda.fake_quantize(x, scale, zero_point, scope=scope, q_min=low, q_max=high, arithmetic=arithmetic)
    q = baracuda.quantize(x, scale, zero_point, scope=scope, q_min=low, q_max=high, arithmetic=arithmetic)
    assert same_bits(fake, baracuda.dequantize(q, scale, zero_point, scope=scope, dtype=element))


@given(st.data(), kinds, shapes, scopes, st.integers(-300, 300), arithmetics)
def test_quantize_undoes_dequantize_for_ordinary_scales(
    data: Any, kind: ElementKind, shape: Any, scope: Scope, zero_point: int, arithmetic: Arithmetic
) -> None:
    """In f32: a 16-bit float has fewer digits than an 8-bit integer with a zero point has steps."""
    count = shape[0] * shape[1]
    values = torch.tensor(data.draw(st.lists(st.integers(kind.q_min, kind.q_max), min_size=count, max_size=count)))
    q = baracuda.pack_int4(values.view(shape), kind) if kind.is_packed else values.view(shape).to(kind.dtype)
    scale = scales(data.draw, scope, shape, ElementKind.F32, sane=True)
    y = baracuda.dequantize(q, scale, zero_point, scope=scope, element=kind)
    back = baracuda.quantize(y, scale, zero_point, scope=scope, dtype=kind, arithmetic=arithmetic)
    assert torch.equal(back, q)


@given(st.data(), st.sampled_from([ElementKind.F32, ElementKind.F64]), shapes, scopes, st.integers(-128, 127))
def test_fake_quantize_is_idempotent_for_ordinary_scales(
    data: Any, element: ElementKind, shape: Any, scope: Scope, zero_point: int
) -> None:
    x, scale = bits(data.draw, element, shape), scales(data.draw, scope, shape, element, sane=True)
    once = baracuda.fake_quantize(x, scale, zero_point, scope=scope)
    assert same_bits(baracuda.fake_quantize(once, scale, zero_point, scope=scope), once)


@given(st.data(), elements, shapes, scopes, zero_points, arithmetics)
def test_a_gradient_passes_unchanged_or_becomes_plus_zero(
    data: Any, element: ElementKind, shape: Any, scope: Scope, zero_point: int, arithmetic: Arithmetic
) -> None:
    """It passes exactly where widening the range by one step at each end leaves the forward result alone."""
    x, scale = bits(data.draw, element, shape), scales(data.draw, scope, shape, element, sane=False)
    dy = bits(data.draw, element, shape).nan_to_num(nan=float("inf"))
    fields = {"scope": scope, "arithmetic": arithmetic}
    given_ = {"input": x, "scale": scale, "zero_point": zero_point, "grad_output": dy}
    dx = compute(QuantizeKind.FAKE_QUANTIZE_BACKWARD, shape, element, q_min=-100, q_max=100, operands=given_, **fields)[
        "grad_input"
    ]
    narrow = baracuda.quantize(x, scale, zero_point, q_min=-100, q_max=100, **fields)
    wide = baracuda.quantize(x, scale, zero_point, q_min=-101, q_max=101, **fields)
    assert same_bits(dx, torch.where(narrow == wide, dy, torch.zeros_like(dy)))


@given(st.data(), elements, kinds, shapes, scopes)
def test_symmetric_extremes_land_on_the_ends(
    data: Any, element: ElementKind, kind: ElementKind, shape: Any, scope: Scope
) -> None:
    x = moderate(data.draw, element, shape)
    q, scale, zero_point = baracuda.dynamic_quantize(x, scope=scope, dtype=kind)
    assert zero_point is None
    assert scale.shape == scope.scale_shape(shape)
    assert (scale > 0).all()
    for segment, values in zip(segments(x, scope), segments(unpacked(q, kind, shape[1]), scope), strict=True):
        if kind.q_min < 0 and segment.abs().max() > 2.0**-10:
            assert values.abs().max() == kind.q_max
        assert ((values == 0) | (values.sign() == segment.sign())).all()


@given(st.data(), st.sampled_from([ElementKind.F32, ElementKind.F64]), kinds, shapes, scopes, st.booleans())
def test_asymmetric_extremes_land_within_a_step_of_the_ends(
    data: Any, element: ElementKind, kind: ElementKind, shape: Any, scope: Scope, include_zero: bool
) -> None:
    x = moderate(data.draw, element, shape)
    q, scale, zero_point = baracuda.dynamic_quantize(
        x, scope=scope, mode="asymmetric", dtype=kind, include_zero=include_zero
    )
    assert zero_point is not None
    assert zero_point.dtype is torch.int32
    assert zero_point.shape == scale.shape == scope.scale_shape(shape)
    if include_zero:
        assert kind.q_min <= zero_point.min()
        assert zero_point.max() <= kind.q_max
    for segment, values in zip(segments(x, scope), segments(unpacked(q, kind, shape[1]), scope), strict=True):
        low, high = segment.min(), segment.max()
        if low < 0 < high and high - low > 2.0**-10:
            assert values[segment == low].max() <= kind.q_min + 1
            assert values[segment == high].min() >= kind.q_max - 1


def segments(x: Tensor, scope: Scope) -> list[Tensor]:
    """The elements that share a scale, each group flat: by splitting and stacking, not by a view."""
    match scope:
        case PerTensor():
            return [x.flatten()]
        case PerChannel(axis):
            return list(x.unbind(axis))
        case PerToken():
            return list(x.unbind(0))
        case PerGroup(size, axis):
            return [v for part in x.split(size, axis) for v in part.unbind(1 + axis if axis < 0 else 1 - axis)]
    raise AssertionError(scope)


@given(st.data(), elements, shapes, scopes, st.sampled_from(DynamicRangeMode), st.booleans())
def test_dynamic_quantize_is_quantize_with_the_qparams_it_chose(
    data: Any, element: ElementKind, shape: Any, scope: Scope, mode: DynamicRangeMode, own_type: bool
) -> None:
    x = bits(data.draw, element, shape)
    stored = scale_elements(element)[-1 if own_type else 0]
    q, scale, zero_point = baracuda.dynamic_quantize(x, scope=scope, mode=mode, scale_dtype=stored)
    assert scale.dtype is stored.dtype
    low = -127 if mode is DynamicRangeMode.SYMMETRIC else -128
    assert torch.equal(q, baracuda.quantize(x, scale, zero_point, scope=scope, q_min=low))
    chosen = baracuda.choose_qparams(x, scope=scope, mode=mode, scale_dtype=stored)
    assert same_bits(chosen[0], scale)
    assert (zero_point is None and chosen[1] is None) or torch.equal(chosen[1], zero_point)


@given(st.data(), elements, shapes, scopes)
def test_negating_the_data_negates_a_symmetric_result(
    data: Any, element: ElementKind, shape: Any, scope: Scope
) -> None:
    x = moderate(data.draw, element, shape)
    q, scale, _ = baracuda.dynamic_quantize(x, scope=scope)
    negated, same_scale, _ = baracuda.dynamic_quantize(-x, scope=scope)
    assert torch.equal(negated, -q)
    assert torch.equal(same_scale, scale)


@given(st.lists(st.integers(-8, 7), max_size=33), st.sampled_from(["s4", "u4"]), st.integers(1, 3))
def test_unpacking_undoes_packing(values: list[int], element: str, rows: int) -> None:
    q = torch.tensor([values] * rows, dtype=torch.int64).view(rows, len(values)) + (8 if element == "u4" else 0)
    packed = baracuda.pack_int4(q, element)
    assert packed.dtype is torch.uint8
    assert packed.shape == (rows, (len(values) + 1) // 2)
    assert torch.equal(baracuda.unpack_int4(packed, element, len(values)).long(), q)


@given(st.binary(min_size=1, max_size=32), st.sampled_from(["s4", "u4"]))
def test_packing_undoes_unpacking(raw: bytes, element: str) -> None:
    packed = torch.tensor(list(raw), dtype=torch.uint8)
    assert torch.equal(baracuda.pack_int4(baracuda.unpack_int4(packed, element), element), packed)
