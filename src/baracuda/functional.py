"""The functions most people call: tensors in, tensors out, a cached plan in between."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from math import prod
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .arrays import as_tensor
from .backends.registry import Value
from .checks import row_stride
from .descriptors import Element, stored_scale_element
from .errors import InvalidProblem
from .plan import SelectedPlan
from .problem import Problem, fake_storage
from .scope import PerTensor, PerToken, Scope, Shape
from .types import MAX_ZERO_POINT, Arithmetic, DynamicRangeMode, ElementKind, QuantizeKind

#: A tensor, or anything that speaks DLPack: NumPy, CuPy and JAX arrays.
Array = Any


class Quantized(NamedTuple):
    """What `dynamic_quantize` returns; `zero_point` is None when symmetric."""

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None


def quantize(
    x: Array,
    scale: Array | float,
    zero_point: Array | int | None = None,
    *,
    scope: Scope = PerTensor(),
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    arithmetic: Arithmetic | str = Arithmetic.DIVIDE,
    out: Tensor | None = None,
) -> Tensor:
    """clamp(rint(x / scale) + zero_point, q_min, q_max) as `dtype`, whose full range is the default."""
    x = as_tensor(x, "x")
    kind = ElementKind.of(dtype)
    plan = _plan(
        x.device,
        QuantizeKind.QUANTIZE,
        x.shape,
        ElementKind.of(x.dtype),
        kind,
        kind.q_min if q_min is None else q_min,
        kind.q_max if q_max is None else q_max,
        scope,
        arithmetic=_member(Arithmetic, arithmetic),
    )
    return _static(plan, x, scale, zero_point, out)


def dequantize(
    q: Array,
    scale: Array | float,
    zero_point: Array | int | None = None,
    *,
    scope: Scope = PerTensor(),
    element: Element | None = None,
    dtype: Element = ElementKind.F32,
    size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(q - zero_point) * scale as `dtype`.

    `element` names what `q` holds where its torch dtype does not: "s4" or "u4" for packed bytes, whose last axis then
    unpacks to `size` elements (twice the bytes unless given: say so when it is odd).
    """
    q = as_tensor(q, "q")
    kind = ElementKind.of(q.dtype if element is None else element)
    if q.dtype is not kind.dtype:
        raise InvalidProblem(f"dequantize: expected a {kind.dtype} tensor for element {kind.value}, got {q.dtype}")
    plan = _plan(
        q.device,
        QuantizeKind.DEQUANTIZE,
        _unpacked_shape(q.shape, kind, size),
        ElementKind.of(dtype),
        kind,
        kind.q_min,
        kind.q_max,
        scope,
    )
    return _static(plan, q, scale, zero_point, out)


def fake_quantize(
    x: Array,
    scale: Array | float,
    zero_point: Array | int | None = None,
    *,
    scope: Scope = PerTensor(),
    q_min: int = -128,
    q_max: int = 127,
    arithmetic: Arithmetic | str = Arithmetic.DIVIDE,
    out: Tensor | None = None,
) -> Tensor:
    """dequantize(quantize(x)) in one pass, to the bit. Gradients pass straight through where x was in range."""
    x = as_tensor(x, "x")
    key = (
        x.shape,
        ElementKind.of(x.dtype),
        fake_storage(q_min, q_max),
        q_min,
        q_max,
        scope,
        DynamicRangeMode.SYMMETRIC,
        _member(Arithmetic, arithmetic),
    )
    plan = _plan(x.device, QuantizeKind.FAKE_QUANTIZE, *key)
    if torch.is_grad_enabled() and x.requires_grad:
        if out is not None:
            raise InvalidProblem("fake_quantize: out= does not record gradients; drop it or use torch.no_grad()")
        backward = _plan(x.device, QuantizeKind.FAKE_QUANTIZE_BACKWARD, *key)
        result: Tensor = _FakeQuantize.apply(x, scale, zero_point, plan, backward)  # type: ignore[no-untyped-call]
        return result
    return _static(plan, x, scale, zero_point, out)


def dynamic_quantize(
    x: Array,
    *,
    scope: Scope = PerToken(),
    mode: DynamicRangeMode | str = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    include_zero: bool = False,
    arithmetic: Arithmetic | str = Arithmetic.DIVIDE,
) -> Quantized:
    """Quantize with the scale of each segment's own range. Symmetric s8 uses [-127, 127] unless told otherwise."""
    x = as_tensor(x, "x")
    plan = _dynamic_plan(
        QuantizeKind.DYNAMIC_QUANTIZE, x, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic
    )
    scale, zero_point, q = _run(plan, (x, *plan.allocate_outputs()))
    return Quantized(q, scale, zero_point)


def choose_qparams(
    x: Array,
    *,
    scope: Scope = PerToken(),
    mode: DynamicRangeMode | str = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    include_zero: bool = False,
    arithmetic: Arithmetic | str = Arithmetic.DIVIDE,
) -> tuple[Tensor, Tensor | None]:
    """The (scale, zero_point) `dynamic_quantize` would use; zero_point is None when symmetric."""
    x = as_tensor(x, "x")
    plan = _dynamic_plan(
        QuantizeKind.CHOOSE_QPARAMS, x, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic
    )
    scale, zero_point = _run(plan, (x, *plan.allocate_outputs()))
    return scale, zero_point


def quantized_linear(
    x: Array,
    weight_q: Array,
    weight_scale: Array | float,
    bias: Array | None = None,
    *,
    mode: DynamicRangeMode | str = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    weight_element: Element | None = None,
    weight_sum: Array | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x @ W.T (+ bias) with int8 weights `[N, K]`, x quantized per token to `dtype` on the way in; x's own type out.

    `weight_sum`, the int32 row sums of the weight, spares an asymmetric call a pass over the weight.
    """
    x, weight_q = as_tensor(x, "x"), as_tensor(weight_q, "weight_q")
    mode, kind, weight = _member(DynamicRangeMode, mode), ElementKind.of(dtype), _weight_kind(weight_q, weight_element)
    low, high = _dynamic_range(kind, mode, None, None)
    m, n, k = _linear_shape(x, weight_q)
    element = ElementKind.of(x.dtype)
    plan = _plan(
        x.device,
        QuantizeKind.QUANTIZED_LINEAR,
        (m, n, k),
        element,
        kind,
        low,
        high,
        mode=mode,
        scale_element=stored_scale_element(None, element),
        weight=weight,
    )
    weights = _weights(n, weight_q, weight_scale, bias, weight_sum)
    return _linear(plan, (x.reshape(m, k), *weights, None, None), (*x.shape[:-1], n), out)


def smoothquant_linear(
    x_q: Array,
    weight_q: Array,
    act_scale: Array | float,
    weight_scale: Array | float,
    bias: Array | None = None,
    *,
    act_zero_point: Array | int | None = None,
    dtype: Element = ElementKind.F32,
    weight_element: Element | None = None,
    weight_sum: Array | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(x_q @ W.T) * act_scale * weight_scale (+ bias) as `dtype`: a linear over activations already quantized."""
    x_q, weight_q = as_tensor(x_q, "x_q"), as_tensor(weight_q, "weight_q")
    m, n, k = _linear_shape(x_q, weight_q)
    kind = ElementKind.of(x_q.dtype)
    symmetric = act_zero_point is None or (not hasattr(act_zero_point, "__dlpack__") and act_zero_point == 0)
    plan = _plan(
        x_q.device,
        QuantizeKind.SMOOTHQUANT_LINEAR,
        (m, n, k),
        ElementKind.of(dtype),
        kind,
        kind.q_min,
        kind.q_max,
        mode=DynamicRangeMode.SYMMETRIC if symmetric else DynamicRangeMode.ASYMMETRIC,
        weight=_weight_kind(weight_q, weight_element),
    )
    qparams = _segment_values((), act_scale, None if symmetric else act_zero_point)
    weights = _weights(n, weight_q, weight_scale, bias, weight_sum)
    return _linear(plan, (x_q.reshape(m, k), *qparams, *weights), (*x_q.shape[:-1], n), out)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Array | float,
        zero_point: Array | int | None,
        plan: SelectedPlan,
        backward: SelectedPlan,
    ) -> Tensor:
        ctx.scale, ctx.zero_point, ctx.plan = scale, zero_point, backward
        ctx.save_for_backward(x)
        return _static(plan, x, scale, zero_point, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        scale, zero_point = _segment_values(ctx.plan.problem.segment_shape, ctx.scale, ctx.zero_point)
        (dx,) = _run(ctx.plan, (x, dy, scale, zero_point, *ctx.plan.allocate_outputs()))
        return dx, None, None, None, None


# -- from what the caller gave to what a plan takes --------------------------------------------------------------


@lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    op: QuantizeKind,
    shape: Shape,
    element: ElementKind,
    quantized: ElementKind,
    q_min: int,
    q_max: int,
    scope: Scope = PerTensor(),
    mode: DynamicRangeMode = DynamicRangeMode.SYMMETRIC,
    arithmetic: Arithmetic = Arithmetic.DIVIDE,
    scale_element: ElementKind = ElementKind.F32,
    include_zero: bool = False,
    weight: ElementKind = ElementKind.S8,
) -> SelectedPlan:
    problem = Problem(
        op,
        tuple(shape),
        element,
        quantized,
        q_min,
        q_max,
        scope,
        mode,
        arithmetic,
        scale_element,
        include_zero,
        weight,
    )
    return SelectedPlan(problem, device)


def _dynamic_plan(
    op: QuantizeKind,
    x: Tensor,
    scope: Scope,
    mode: DynamicRangeMode | str,
    dtype: Element,
    q_min: int | None,
    q_max: int | None,
    scale_dtype: Element | None,
    include_zero: bool,
    arithmetic: Arithmetic | str,
) -> SelectedPlan:
    element, kind, mode = ElementKind.of(x.dtype), ElementKind.of(dtype), _member(DynamicRangeMode, mode)
    low, high = _dynamic_range(kind, mode, q_min, q_max)
    return _plan(
        x.device,
        op,
        x.shape,
        element,
        kind,
        low,
        high,
        scope,
        mode,
        _member(Arithmetic, arithmetic),
        stored_scale_element(scale_dtype, element),
        include_zero,
    )


def _dynamic_range(kind: ElementKind, mode: DynamicRangeMode, q_min: int | None, q_max: int | None) -> tuple[int, int]:
    """The full storage range, less the one value without a negative when a signed range is symmetric."""
    high = kind.q_max if q_max is None else q_max
    if q_min is not None:
        return q_min, high
    return (-kind.q_max if kind.q_min < 0 and mode is DynamicRangeMode.SYMMETRIC else kind.q_min), high


def _static(
    plan: SelectedPlan, x: Tensor, scale: Array | float, zero_point: Array | int | None, out: Tensor | None
) -> Tensor:
    scale, zero_point = _segment_values(plan.problem.segment_shape, scale, zero_point)
    outputs = plan.allocate_outputs() if out is None else (out,)
    result: Tensor = _run(plan, (x, scale, zero_point, *outputs))[-1]
    return result


def _linear(plan: SelectedPlan, inputs: tuple[Value, ...], shape: Shape, out: Tensor | None) -> Tensor:
    if out is not None and out.shape != shape:
        raise InvalidProblem(f"{plan.problem.op.value}: out: expected shape {list(shape)}, got {list(out.shape)}")
    if out is None or not out.is_contiguous():
        output = plan.allocate_outputs()[-1]
    else:
        output = out.view(plan.problem.shape[:2])
    result: Tensor = _run(plan, (*inputs, output))[-1].view(shape)
    if out is None:
        return result
    return out if out.is_contiguous() else out.copy_(result)


def _run(plan: SelectedPlan, operands: tuple[Value, ...]) -> tuple[Any, ...]:
    """Run, and return the outputs. Tensors whose strides the kernel does not take go through contiguous copies."""
    arranged = operands
    if plan.kernel.strides != "any":
        for value in operands:
            if isinstance(value, Tensor) and not value.is_contiguous():
                arranged = _arrange(plan, operands)
                break
    plan.launch(arranged, plan.allocate_workspace())
    outputs = plan.output_indices
    if arranged is not operands:
        for i in outputs:
            if arranged[i] is not operands[i]:
                operands[i].copy_(arranged[i])  # type: ignore[union-attr, arg-type]
    return tuple([operands[i] for i in outputs])


def _arrange(plan: SelectedPlan, operands: tuple[Value, ...]) -> tuple[Value, ...]:
    rows = plan.kernel.strides == "rows"
    return tuple(
        value.contiguous()
        if isinstance(value, Tensor) and not (rows and i not in plan.output_indices and row_stride(value) is not None)
        else value
        for i, value in enumerate(operands)
    )


def _segment_values(shape: Shape, scale: Array | float, zero_point: Array | int | None) -> tuple[Value, Value]:
    zero_point = _segment_value(shape, zero_point, "zero_point")
    if isinstance(zero_point, Tensor) and zero_point.dtype is not torch.int32:
        if zero_point.dtype.is_floating_point or zero_point.dtype is torch.bool:
            raise InvalidProblem(f"zero_point: expected an integer tensor, got {zero_point.dtype}")
        zero_point = zero_point.clamp(-MAX_ZERO_POINT, MAX_ZERO_POINT).to(torch.int32)
    return _segment_value(shape, scale, "scale"), zero_point


def _segment_value(shape: Shape, value: Array | float | None, name: str) -> Any:
    """A number, or a tensor of the scales' shape: axes of length 1 may be kept or left out."""
    if value is None or isinstance(value, Real):
        return value
    tensor = as_tensor(value, name)
    if tensor.shape != shape and [n for n in tensor.shape if n != 1] == [n for n in shape if n != 1]:
        return tensor.reshape(shape)
    return tensor


def _weights(
    n: int, weight_q: Tensor, weight_scale: Array | float, bias: Array | None, weight_sum: Array | None
) -> tuple[Value, ...]:
    scale = _segment_value((n,), weight_scale, "weight_scale")
    if isinstance(scale, Tensor) and scale.numel() == 1:
        scale = scale.reshape(1).expand(n)
    return (
        weight_q,
        scale,
        None if bias is None else as_tensor(bias, "bias"),
        None if weight_sum is None else as_tensor(weight_sum, "weight_sum"),
    )


def _weight_kind(weight_q: Tensor, element: Element | None) -> ElementKind:
    return ElementKind.of(weight_q.dtype if element is None else element)


def _linear_shape(x: Tensor, weight_q: Tensor) -> tuple[int, int, int]:
    if x.ndim < 1 or weight_q.ndim != 2:
        raise InvalidProblem(
            f"linear: expected x of shape [..., K] and a weight of shape [N, K], "
            f"got {list(x.shape)} and {list(weight_q.shape)}"
        )
    return prod(x.shape[:-1]), weight_q.shape[0], x.shape[-1]


def _unpacked_shape(shape: Shape, kind: ElementKind, size: int | None) -> Shape:
    if not kind.is_packed or not shape:
        return shape
    full = 2 * shape[-1]
    if size is not None and size not in (full, full - 1):
        raise InvalidProblem(f"size: expected {full} or {full - 1} for a last axis of {shape[-1]} bytes, got {size}")
    return (*shape[:-1], full if size is None else size)


_Choice = TypeVar("_Choice", bound=Enum)


def _member(choices: type[_Choice], value: _Choice | str) -> _Choice:
    if isinstance(value, choices):
        return value
    try:
        return choices(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in choices)
        raise InvalidProblem(f"expected one of {names}, got {value!r}") from None
