"""The linears: float activations quantized on the way in, integers, or floats that stay floats."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ..backends.registry import Value
from ..core.arrays import Array, as_tensor, segment_value, segment_values
from ..core.errors import InvalidProblem
from ..core.problem import Spec
from ..core.scope import PerChannel, PerGroup, PerTensor, PerToken, Shape
from ..core.types import (
    Activation,
    ActivationName,
    Arithmetic,
    ArithmeticName,
    DynamicRangeMode,
    Element,
    ElementKind,
    ModeName,
    QuantizeKind,
)
from ..dispatch.eager import cached_plan, route, run
from ..dispatch.gradients import compute
from ..dispatch.options import dynamic_spec, static_linear_spec, weight_only_spec
from .elementwise import into
from .quantized import Quantized

__all__ = ["quantized_linear", "smoothquant_linear", "weight_only_linear"]


_WHOLE = PerTensor()


def quantized_linear(
    x: Array,
    weight_q: Array | Quantized,
    weight_scale: Array | float | None = None,
    bias: Array | None = None,
    *,
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
    weight_element: Element | None = None,
    weight_sum: Array | None = None,
    weight_factor: Array | None = None,
    activation: Activation | ActivationName = Activation.NONE,
    residual: Array | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """act(x @ W.T + bias) + residual, int8 weights `[N, K]`, x quantized per token to `dtype` on the way in.

    The weight is integers and their scales, or what `dynamic_quantize(w, scope=PerChannel(0))` returned, as it is:
    `quantized_linear(x, quantized)`.
    The result has x's own type, as the residual must. `weight_element="s4"` says that `weight_q` holds packed pairs,
    `[N, K / 2]` bytes. `weight_sum`, the int32 row sums of the weight, spares an asymmetric call a pass over the
    weight. `weight_factor`, uint8 `[N, K / size]`, multiplies each group of `size` s4 weights by an integer of 0 to 15.
    For dtype="u8" use mode="asymmetric", unless x has no negative values: a symmetric u8 makes them 0.
    `scale_dtype` is what the scales of x are rounded to, `arithmetic` how x is divided by them.
    Differentiable in x, straight through its rounding, bias and residual.
    """
    if isinstance(weight_q, Quantized):
        weight_q, weight_scale, weight_element = _taken_apart(weight_q, weight_scale, "quantized_linear")
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
    activation: Activation | ActivationName = Activation.NONE,
    residual: Array | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """act((x_q @ W.T) * act_scale * weight_scale + bias) + residual as `dtype`, over x already quantized.

    `act_scale` is one scale, or one for each row: a tensor of x_q's shape without its last axis. `act_zero_point` is
    that of x_q, which is subtracted before the product. `weight_element`, `weight_sum` and `weight_factor` are those of
    `quantized_linear`.
    """
    x_q, weight_q = as_tensor(x_q, "x_q"), as_tensor(weight_q, "weight_q")
    shape, out_shape = _linear_shape(x_q, weight_q)
    symmetric = act_zero_point is None or (isinstance(act_zero_point, int | float) and act_zero_point == 0)
    weight = weight_q.dtype if weight_element is None else weight_element
    factor, group = _factors(weight_factor, shape)
    tokens = (
        act_scale if isinstance(act_scale, Tensor) and act_scale.ndim and act_scale.shape == x_q.shape[:-1] else None
    )
    per_token = tokens is not None
    spec = static_linear_spec(x_q.dtype, dtype, symmetric, weight, activation, group, per_token)
    _, zero_point = segment_values((), 1.0, None if symmetric else act_zero_point)
    rows: Shape = (shape[0],) if per_token else ()
    scale = tokens.reshape(rows) if tokens is not None else segment_value(rows, act_scale, "scale")
    qparams = (scale, zero_point)
    weights = _weights(shape[1], weight_q, weight_scale, bias, weight_sum)
    inputs = (_matrix(x_q, shape), *qparams, *weights, _residual(residual, out_shape, shape), factor)
    return _linear(QuantizeKind.SMOOTHQUANT_LINEAR, shape, spec, inputs, out_shape, out)


def weight_only_linear(
    x: Array,
    weight_q: Array | Quantized,
    weight_scale: Array | None = None,
    bias: Array | None = None,
    *,
    weight_zero_point: Array | None = None,
    weight_element: Element | None = None,
    activation: Activation | ActivationName = Activation.NONE,
    residual: Array | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """act(x @ dequantize(W).T + bias) + residual as x's own type: integer weights, float activations.

    The weight is also taken as `dynamic_quantize(w, scope=PerGroup(128), dtype="s4")` returned it, for any size of
    groups and for `PerChannel(0)`: `weight_only_linear(x, quantized)`.
    `weight_q` is s8 `[N, K]`, or `[N, K / 2]` bytes with `weight_element` "s4" or "u4". `weight_scale` and
    `weight_zero_point` are `[N, K / size]` for groups of `size` elements, `[N, 1]` for one group a row. A row's result
    does not depend on the other rows; its distance from the exact one is in `precision_guarantee()` of the plan.
    Differentiable in x, bias and residual.
    """
    if isinstance(weight_q, Quantized):
        zeros = weight_q.zero_point
        weight_q, rows, weight_element = _taken_apart(weight_q, weight_scale, "weight_only_linear")
        weight_scale = rows.reshape(rows.shape[0], -1)
        weight_zero_point = None if zeros is None else zeros.reshape(rows.shape[0], -1)
    x, weight_q = as_tensor(x, "x"), as_tensor(weight_q, "weight_q")
    shape, out_shape = _linear_shape(x, weight_q)
    scale = as_tensor(weight_scale, "weight_scale")
    if scale.ndim != 2 or not scale.shape[1] or shape[2] % scale.shape[1]:
        raise InvalidProblem(
            f"weight_scale: expected shape [{shape[1]}, K / size], with a size that divides K = {shape[2]}, "
            f"got {list(scale.shape)}"
        )
    group = shape[2] // scale.shape[1] if scale.shape[1] > 1 else 0
    _, zero_point = segment_values(tuple(scale.shape), 1.0, weight_zero_point)
    spec = weight_only_spec(x.dtype, weight_q.dtype if weight_element is None else weight_element, activation, group)
    bias = None if bias is None else as_tensor(bias, "bias")
    inputs = (_matrix(x, shape), weight_q, scale, zero_point, bias, _residual(residual, out_shape, shape))
    return _linear(QuantizeKind.WEIGHT_ONLY_LINEAR, shape, spec, inputs, out_shape, out)


def _linear(
    op: QuantizeKind, shape: Shape, spec: Spec, inputs: tuple[Value, ...], out_shape: Shape, out: Tensor | None
) -> Tensor:
    if out is not None and (not isinstance(out, Tensor) or out.shape != out_shape):
        came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InvalidProblem(f"{op.value}: out: expected shape {list(out_shape)}, got {came}")
    if route(*inputs, out) != "plan":
        return into(out, compute(op, inputs, shape, spec)[-1].reshape(out_shape), op)
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


def _taken_apart(weight: Quantized, scale: object, op: str) -> tuple[Tensor, Tensor, ElementKind]:
    """The integers, scales and element of a weight that `dynamic_quantize` returned; raises where they do not fit."""
    if scale is not None:
        raise InvalidProblem(f"{op}: expected no weight_scale beside a Quantized, which has its own; is it the bias=?")
    rows = weight.scope in (PerChannel(0), PerToken())
    if op == "quantized_linear" and (not rows or weight.zero_point is not None):
        raise InvalidProblem(
            f"{op}: expected a symmetric weight quantized with scope=PerChannel(0), got {weight.scope}"
            f"{'' if weight.zero_point is None else ' with zero points'}; quantize it so, or use weight_only_linear"
        )
    if not rows and not (isinstance(weight.scope, PerGroup) and weight.scope.axis in (-1, 1)):
        raise InvalidProblem(
            f"{op}: expected a weight quantized with PerGroup(size) or PerChannel(0), got {weight.scope}"
        )
    return weight.q, weight.scale, weight.element


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
