"""The functions most people call: tensors in, tensors out, a cached plan in between."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends.registry import Value
from .core.arrays import Array, as_tensor, segment_value, segment_values
from .core.errors import InvalidProblem
from .core.problem import Spec, fake_storage
from .core.scope import PerTensor, PerToken, Scope, Shape
from .core.types import Activation, Arithmetic, DynamicRangeMode, Element, ElementKind, QuantizeKind
from .dispatch.eager import cached_plan, route, run
from .dispatch.gradients import compute
from .dispatch.operators import OPERATORS, unpacked_shape
from .dispatch.options import dynamic_spec, static_linear_spec, static_spec

__all__ = [
    "Quantized",
    "choose_qparams",
    "dequantize",
    "dynamic_fake_quantize",
    "dynamic_quantize",
    "fake_quantize",
    "quantize",
    "quantized_linear",
    "smoothquant_linear",
]

_WHOLE = PerTensor()


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
    """clamp(rint(x / scale) + zero_point, q_min, q_max) as `dtype`, whose full range is the default.

    The result holds integers, so it has no gradient; `baracuda.autograd.quantize` has one.
    """
    x = as_tensor(x, "x")
    spec = static_spec(x.dtype, scope, dtype, q_min, q_max, arithmetic)
    return _static(QuantizeKind.QUANTIZE, x, x.shape, scale, zero_point, spec, out)


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
    """(q - zero_point) * scale as `dtype`. Differentiable in the scale.

    `element` names what `q` holds where its torch dtype does not: "s4" or "u4" for packed bytes, whose last axis then
    unpacks to `size` elements (twice the bytes unless given: say so when it is odd).
    """
    q = as_tensor(q, "q")
    kind = ElementKind.of_tensor(q.dtype, "q") if element is None else ElementKind.of(element, "element")
    if q.dtype is not kind.dtype:
        raise InvalidProblem(f"dequantize: expected a {kind.dtype} tensor for element {kind.value}, got {q.dtype}")
    if size is not None and not kind.is_packed:
        raise InvalidProblem(f"size: expected None for {kind.value}, which is not packed, got {size}; leave it out")
    shape = unpacked_shape(q.shape, kind, size)
    spec = static_spec(ElementKind.of(dtype, "dtype"), scope, kind)
    return _static(QuantizeKind.DEQUANTIZE, q, shape, scale, zero_point, spec, out, size)


def fake_quantize(
    x: Array,
    scale: Array | float,
    zero_point: Array | int | None = None,
    *,
    scope: Scope = PerTensor(),
    q_min: int = -128,
    q_max: int = 127,
    arithmetic: Arithmetic | str = Arithmetic.DIVIDE,
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
    mode: DynamicRangeMode | str = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    include_zero: bool = False,
    arithmetic: Arithmetic | str = Arithmetic.DIVIDE,
) -> Quantized:
    """Quantize with the scale of each segment's own range.

    Symmetric s8 uses [-127, 127] unless told otherwise. Symmetric u8 and u4 have no place for negative values, which
    become 0: use mode="asymmetric" unless there are none. `include_zero` widens an asymmetric range so that 0 is in it
    and keeps its exact value; `scale_dtype` is what scales are stored as: f32, or x's own type.
    """
    x = as_tensor(x, "x").detach()
    spec = dynamic_spec(x.dtype, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    scale, zero_point, q = _dynamic(QuantizeKind.DYNAMIC_QUANTIZE, x, spec)
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
    """The (scale, zero_point) `dynamic_quantize` would use, by the same options; zero_point is None when symmetric."""
    x = as_tensor(x, "x").detach()
    spec = dynamic_spec(x.dtype, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    scale, zero_point = _dynamic(QuantizeKind.CHOOSE_QPARAMS, x, spec)
    return scale, zero_point


def dynamic_fake_quantize(
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
) -> Tensor:
    """What `dynamic_quantize` would make of x, dequantized, in one pass and x's own type. It records no gradient."""
    x = as_tensor(x, "x").detach()
    spec = dynamic_spec(x.dtype, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    return compute(QuantizeKind.DYNAMIC_FAKE_QUANTIZE, (x,), x.shape, spec)[-1]


def quantized_linear(
    x: Array,
    weight_q: Array,
    weight_scale: Array | float,
    bias: Array | None = None,
    *,
    mode: DynamicRangeMode | str = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    arithmetic: Arithmetic | str = Arithmetic.DIVIDE,
    weight_element: Element | None = None,
    weight_sum: Array | None = None,
    weight_factor: Array | None = None,
    activation: Activation | str = Activation.NONE,
    residual: Array | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """act(x @ W.T + bias) + residual, int8 weights `[N, K]`, x quantized per token to `dtype` on the way in.

    The result has x's own type, as the residual must. `weight_element="s4"` says that `weight_q` holds packed pairs,
    `[N, K / 2]` bytes. `weight_sum`, the int32 row sums of the weight, spares an asymmetric call a pass over the
    weight. `weight_factor`, uint8 `[N, K / size]`, multiplies each group of `size` s4 weights by an integer of 0 to 15.
    For dtype="u8" use mode="asymmetric", unless x has no negative values: a symmetric u8 makes them 0.
    `scale_dtype` is what the scales of x are rounded to, `arithmetic` how x is divided by them.
    Differentiable in x, straight through its rounding, bias and residual.
    """
    x, weight_q = as_tensor(x, "x"), as_tensor(weight_q, "weight_q")
    shape, out_shape = _linear_shape(x, weight_q)
    weight = weight_q.dtype if weight_element is None else weight_element
    factor, group = _factors(weight_factor, shape)
    spec = dynamic_spec(
        x.dtype, _WHOLE, mode, dtype, q_min, q_max, scale_dtype, False, arithmetic, weight, activation, group
    )
    weights = _weights(shape[1], weight_q, weight_scale, bias, weight_sum)
    inputs = (_matrix(x, shape), *weights, _residual(residual, out_shape, shape), factor)
    return _linear(QuantizeKind.QUANTIZED_LINEAR, shape, spec, inputs, out_shape, out)


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
    weight_factor: Array | None = None,
    activation: Activation | str = Activation.NONE,
    residual: Array | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """act((x_q @ W.T) * act_scale * weight_scale + bias) + residual as `dtype`, over x already quantized.

    `act_zero_point` is that of x_q, which is subtracted before the product. `weight_element`, `weight_sum` and
    `weight_factor` are those of `quantized_linear`.
    """
    x_q, weight_q = as_tensor(x_q, "x_q"), as_tensor(weight_q, "weight_q")
    shape, out_shape = _linear_shape(x_q, weight_q)
    symmetric = act_zero_point is None or (isinstance(act_zero_point, int | float) and act_zero_point == 0)
    weight = weight_q.dtype if weight_element is None else weight_element
    factor, group = _factors(weight_factor, shape)
    spec = static_linear_spec(x_q.dtype, dtype, symmetric, weight, activation, group)
    qparams = segment_values((), act_scale, None if symmetric else act_zero_point)
    weights = _weights(shape[1], weight_q, weight_scale, bias, weight_sum)
    inputs = (_matrix(x_q, shape), *qparams, *weights, _residual(residual, out_shape, shape), factor)
    return _linear(QuantizeKind.SMOOTHQUANT_LINEAR, shape, spec, inputs, out_shape, out)


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
    return _into(out, result, op)


def _dynamic(op: QuantizeKind, x: Tensor, spec: Spec) -> tuple[Any, ...]:
    if route(x) == "plan":
        return cached_plan(x.device, op, x.shape, spec).compute((x,))
    scale, zero_point, *rest = OPERATORS[op]((x,), spec)
    return scale, None if spec.mode is DynamicRangeMode.SYMMETRIC else zero_point, *rest


def _linear(
    op: QuantizeKind, shape: Shape, spec: Spec, inputs: tuple[Value, ...], out_shape: Shape, out: Tensor | None
) -> Tensor:
    if out is not None and (not isinstance(out, Tensor) or out.shape != out_shape):
        came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InvalidProblem(f"{op.value}: out: expected shape {list(out_shape)}, got {came}")
    if route(*inputs, out) != "plan":
        return _into(out, compute(op, inputs, shape, spec)[-1].reshape(out_shape), op)
    x = inputs[0]
    assert isinstance(x, Tensor)
    plan = cached_plan(x.device, op, shape, spec)
    if out is not None:
        plan.check_output(-1, out, out_shape)
    if out is None or not out.is_contiguous():
        result: Tensor = plan.compute(inputs)[-1]
        result = result if len(out_shape) == 2 else result.view(out_shape)
        return result if out is None else out.copy_(result)
    scratch = (None,) * (len(plan.output_indices) - 1)
    run(plan, (*inputs, *scratch, out.view(shape[:2])))
    return out


def _into(out: Tensor | None, result: Tensor, op: QuantizeKind) -> Tensor:
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


def _weights(
    n: int, weight_q: Tensor, weight_scale: Array | float, bias: Array | None, weight_sum: Array | None
) -> tuple[Value, ...]:
    scale = segment_value((n,), weight_scale, "weight_scale")
    if isinstance(scale, Tensor) and scale.numel() == 1:
        scale = scale.reshape(1).expand(n)
    return (
        weight_q,
        scale,
        None if bias is None else as_tensor(bias, "bias"),
        None if weight_sum is None else as_tensor(weight_sum, "weight_sum"),
    )


def _factors(weight_factor: Array | None, shape: tuple[int, int, int]) -> tuple[Tensor | None, int]:
    """The factors, and the size of the groups that their shape stands for."""
    if weight_factor is None:
        return None, 0
    factor, (_, n, k) = as_tensor(weight_factor, "weight_factor"), shape
    if factor.ndim != 2 or not factor.shape[1] or k % factor.shape[1]:
        raise InvalidProblem(
            f"weight_factor: expected shape [{n}, K / size], with a size that divides K = {k}, got {list(factor.shape)}"
        )
    return factor, k // factor.shape[1]


def _residual(residual: Array | None, expected: Shape, shape: tuple[int, int, int]) -> Tensor | None:
    if residual is None:
        return None
    tensor = as_tensor(residual, "residual")
    if tensor.shape != expected:
        raise InvalidProblem(f"residual: expected the output's shape {list(expected)}, got {list(tensor.shape)}")
    return tensor if tensor.ndim == 2 else tensor.reshape(shape[:2])


def _linear_shape(x: Tensor, weight_q: Tensor) -> tuple[tuple[int, int, int], Shape]:
    """(m, n, k), and the output's shape."""
    shape, weight = x.shape, weight_q.shape
    if not shape or len(weight) != 2:
        raise InvalidProblem(
            f"linear: expected x of shape [..., K] and a weight of shape [N, K], got {list(shape)} and {list(weight)}"
        )
    n = weight[0]
    if len(shape) == 2:
        return (shape[0], n, shape[1]), (shape[0], n)
    return (prod(shape[:-1]), n, shape[-1]), (*shape[:-1], n)


def _matrix(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return x if x.ndim == 2 else x.reshape(shape[0], shape[2])
