"""Quantize, dequantize and fake-quantize, by given scales or by those of the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.arrays import Array, as_tensor, segment_values
from ..core.errors import InvalidProblem
from ..core.problem import Spec, fake_storage
from ..core.scope import PerTensor, PerToken, Scope, Shape
from ..core.types import Arithmetic, ArithmeticName, DynamicRangeMode, Element, ElementKind, ModeName, QuantizeKind
from ..dispatch.eager import cached_plan, route, run
from ..dispatch.gradients import compute
from ..dispatch.operators import OPERATORS, unpacked_shape
from ..dispatch.options import dynamic_spec, static_spec
from .quantized import Quantized

__all__ = [
    "choose_qparams",
    "dequantize",
    "dynamic_fake_quantize",
    "dynamic_quantize",
    "fake_quantize",
    "quantize",
]


def quantize(
    x: Array,
    scale: Array | float,
    zero_point: Array | int | None = None,
    *,
    scope: Scope = PerTensor(),
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
    out: Tensor | None = None,
) -> Tensor:
    """clamp(rint(x / scale) + zero_point, q_min, q_max) as `dtype`, whose full range is the default.

    The result holds integers, so it has no gradient; `baracuda.autograd.quantize` has one.
    """
    x = as_tensor(x, "x")
    spec = static_spec(x.dtype, scope, dtype, q_min, q_max, arithmetic)
    return _static(QuantizeKind.QUANTIZE, x, x.shape, scale, zero_point, spec, out)


def dequantize(
    q: Array | Quantized,
    scale: Array | float | None = None,
    zero_point: Array | int | None = None,
    *,
    scope: Scope = PerTensor(),
    element: Element | None = None,
    dtype: Element | None = None,
    size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(q - zero_point) * scale as `dtype`, f32 unless given. Differentiable in the scale.

    What `dynamic_quantize` returned goes in as it is, `dequantize(quantized)`, and comes back in the type it had.
    `element` names what `q` holds where its torch dtype does not: "s4" or "u4" for packed bytes, whose last axis then
    unpacks to `size` elements (twice the bytes unless given: say so when it is odd).
    """
    if isinstance(q, Quantized):
        if scale is not None or zero_point is not None:
            raise InvalidProblem("dequantize: expected no scale beside a Quantized, which has its own; drop it")
        return q.dequantize(dtype=dtype, out=out)
    q = as_tensor(q, "q")
    kind = ElementKind.of_tensor(q.dtype, "q") if element is None else ElementKind.of(element, "element")
    if q.dtype is not kind.dtype:
        raise InvalidProblem(f"dequantize: expected a {kind.dtype} tensor for element {kind.value}, got {q.dtype}")
    if size is not None and not kind.is_packed:
        raise InvalidProblem(f"size: expected None for {kind.value}, which is not packed, got {size}; leave it out")
    shape = unpacked_shape(q.shape, kind, size)
    spec = static_spec(ElementKind.F32 if dtype is None else ElementKind.of(dtype, "dtype"), scope, kind)
    return _static(QuantizeKind.DEQUANTIZE, q, shape, scale, zero_point, spec, out, size)


def fake_quantize(
    x: Array,
    scale: Array | float,
    zero_point: Array | int | None = None,
    *,
    scope: Scope = PerTensor(),
    q_min: int = -128,
    q_max: int = 127,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
    grad_factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """dequantize(quantize(x)) in one pass, to the bit. Gradients pass straight through where x was in range.

    A scale that requires grad is learned (LSQ), and so is a zero point, which then is a float tensor and is rounded;
    both gradients are multiplied by `grad_factor`.
    """
    x = as_tensor(x, "x")
    if not isinstance(grad_factor, float | int):
        raise InvalidProblem(f"grad_factor: expected a number, got {grad_factor!r}")
    spec = static_spec(x.dtype, scope, fake_storage(q_min, q_max), q_min, q_max, arithmetic)
    return _static(QuantizeKind.FAKE_QUANTIZE, x, x.shape, scale, zero_point, spec, out, None, grad_factor)


def dynamic_quantize(
    x: Array,
    *,
    scope: Scope = PerToken(),
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    include_zero: bool = False,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
) -> Quantized:
    """Quantize with the scale of each segment's own range; `.dequantize()` of the result is the way back.

    Symmetric s8 uses [-127, 127] unless told otherwise. Symmetric u8 and u4 have no place for negative values, which
    become 0: use mode="asymmetric" unless there are none. `include_zero` widens an asymmetric range so that 0 is in it
    and keeps its exact value; `scale_dtype` is what scales are stored as: f32, or x's own type.
    """
    x = as_tensor(x, "x").detach()
    spec = dynamic_spec(x.dtype, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    scale, zero_point, q = _dynamic(QuantizeKind.DYNAMIC_QUANTIZE, x, spec)
    size = x.shape[-1] if spec.quantized.is_packed and x.ndim else None
    return Quantized(q, scale, zero_point, scope=scope, element=spec.quantized, dtype=x.dtype, size=size)


def choose_qparams(
    x: Array,
    *,
    scope: Scope = PerToken(),
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    include_zero: bool = False,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
) -> tuple[Tensor, Tensor | None]:
    """The (scale, zero_point) `dynamic_quantize` would use, by the same options; zero_point is None when symmetric."""
    x = as_tensor(x, "x").detach()
    spec = dynamic_spec(x.dtype, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    scale, zero_point = _dynamic(QuantizeKind.CHOOSE_QPARAMS, x, spec)
    return scale, zero_point


def dynamic_fake_quantize(
    x: Array,
    *,
    scope: Scope = PerToken(),
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    include_zero: bool = False,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
) -> Tensor:
    """What `dynamic_quantize` would make of x, dequantized, in one pass and x's own type. It records no gradient."""
    x = as_tensor(x, "x").detach()
    spec = dynamic_spec(x.dtype, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    return compute(QuantizeKind.DYNAMIC_FAKE_QUANTIZE, (x,), x.shape, spec)[-1]


# -- by the call's dispatch route: to a plan, or to torch's operator --------------------------------------------


def _static(
    op: QuantizeKind,
    x: Tensor,
    shape: Shape,
    scale: Array | float,
    zero_point: Array | int | None,
    spec: Spec,
    out: Tensor | None,
    size: int | None = None,
    grad_factor: float = 1.0,
) -> Tensor:
    learned = op is not QuantizeKind.QUANTIZE
    if route(x, scale, zero_point, out) == "plan":
        plan = cached_plan(x.device, op, shape, spec)
        scale, zero_point = segment_values(plan.segment_shape, scale, zero_point, learned=learned)
        inputs = (x, scale, zero_point)
        result: Tensor = plan.compute(inputs)[0] if out is None else run(plan, (*inputs, out))[0]
        return result
    scale, zero_point = segment_values(
        spec.scope.scale_shape(tuple(shape)), scale, zero_point, learned=learned, keep=True
    )
    (result,) = compute(op, (x, scale, zero_point), shape, spec, size, grad_factor)
    return into(out, result, op)


def _dynamic(op: QuantizeKind, x: Tensor, spec: Spec) -> tuple[Any, ...]:
    if route(x) == "plan":
        return cached_plan(x.device, op, x.shape, spec).compute((x,))
    scale, zero_point, *rest = OPERATORS[op]((x,), spec)
    return scale, None if spec.mode is DynamicRangeMode.SYMMETRIC else zero_point, *rest


def into(out: Tensor | None, result: Tensor, op: QuantizeKind) -> Tensor:
    if out is None:
        return result
    if not isinstance(out, Tensor):
        raise InvalidProblem(f"{op.value}: out: expected a {result.dtype} tensor, got {type(out).__name__}")
    if result.requires_grad or (out.requires_grad and torch.is_grad_enabled()):
        raise InvalidProblem(f"{op.value}: out= does not record gradients; drop it or use torch.no_grad()")
    if out.shape != result.shape or out.dtype != result.dtype or out.device != result.device:
        raise InvalidProblem(
            f"{op.value}: out: expected {result.dtype} of shape {list(result.shape)} on {result.device}, "
            f"got {out.dtype} of shape {list(out.shape)} on {out.device}"
        )
    return out.copy_(result)
