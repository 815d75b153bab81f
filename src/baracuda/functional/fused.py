"""Norms and gated products, and the same with their results quantized where they are made."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from ..core.arrays import Array, as_tensor, segment_values
from ..core.errors import InvalidProblem
from ..core.problem import Spec
from ..core.scope import Shape
from ..core.types import (
    Activation,
    ActivationName,
    Arithmetic,
    ArithmeticName,
    DynamicRangeMode,
    Element,
    ElementKind,
    ModeName,
    NormStyle,
    QuantizeKind,
)
from ..dispatch.eager import cached_plan, route
from ..dispatch.operators import OPERATORS, halved
from ..dispatch.options import gated_spec, norm_spec, quantized_spec

__all__ = ["ProducedQuantized", "gated", "gated_quantize", "layer_norm", "norm_quantize", "rms_norm"]


class ProducedQuantized(NamedTuple):
    """What `norm_quantize` and `gated_quantize` return.

    `scale` is that of each row, or the given one; `zero_point` is None when symmetric. `sum` is x + residual, where a
    residual was given.
    """

    q: Tensor
    scale: Any
    zero_point: Any
    sum: Tensor | None


def rms_norm(
    x: Array,
    weight: Array | None = None,
    eps: float = 1e-6,
    *,
    style: NormStyle | str = NormStyle.LLAMA,
    bias: Array | None = None,
    residual: Array | None = None,
) -> Any:
    """x over the root mean square of its row, times the weight; with a residual, (that of x + residual, the sum).

    `style` says where it rounds: "llama", "gemma" (times 1 + weight) or "torch", as in `NormStyle`. Its sums have one
    order on every device, so its bits are not those of torch, which has several. It records no gradient.
    """
    return _norm(x, weight, bias, eps, style, residual)


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
) -> Any:
    """(x - mean) over the standard deviation of its row, times the weight, plus the bias; otherwise as `rms_norm`."""
    return _norm(x, weight, bias, eps, NormStyle.LAYER, residual)


def norm_quantize(
    x: Array,
    weight: Array | None = None,
    eps: float = 1e-6,
    scale: Array | float | None = None,
    zero_point: Array | int | None = None,
    *,
    style: NormStyle | str = NormStyle.LLAMA,
    bias: Array | None = None,
    residual: Array | None = None,
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    include_zero: bool = False,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
) -> ProducedQuantized:
    """The norm of x, quantized before it leaves: by `scale` and `zero_point`, or by the range of each row.

    To the bit `quantize` or `dynamic_quantize` of `rms_norm`, or of `layer_norm` with style="layer"; the options are
    theirs.
    """
    x, weight, bias, addend = _norm_inputs(x, weight, bias, residual)
    floats = norm_spec(x.dtype, style, _number(eps), addend is not None)
    _require_no_zero_point_alone(scale, zero_point)
    spec = quantized_spec(floats, scale is not None, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    inputs = (x, addend, weight, bias)
    if scale is not None:
        values = segment_values((), scale, zero_point)
        total, q = _run(QuantizeKind.NORM_QUANTIZE, (*inputs, *values), x.shape, spec)
        return ProducedQuantized(q, scale, zero_point, total if spec.adds else None)
    total, found, zero, q = _run(QuantizeKind.NORM_DYNAMIC_QUANTIZE, inputs, x.shape, spec)
    symmetric = spec.mode is DynamicRangeMode.SYMMETRIC
    return ProducedQuantized(q, found, None if symmetric else zero, total if spec.adds else None)


def gated(gate: Array, up: Array | None = None, *, activation: Activation | ActivationName = Activation.SILU) -> Tensor:
    """act(gate) * up, each rounded to their type; without `up`, gate holds both, side by side along the last axis.

    gelu and silu are those of the linears, the same bits on every device. It records no gradient.
    """
    inputs, shape, spec = _gated_inputs(gate, up, activation)
    result: Tensor = _run(QuantizeKind.GATED, inputs, shape, spec)[0]
    return result


def gated_quantize(
    gate: Array,
    up: Array | None = None,
    scale: Array | float | None = None,
    zero_point: Array | int | None = None,
    *,
    activation: Activation | ActivationName = Activation.SILU,
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
    dtype: Element = ElementKind.S8,
    q_min: int | None = None,
    q_max: int | None = None,
    scale_dtype: Element | None = None,
    include_zero: bool = False,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
) -> ProducedQuantized:
    """act(gate) * up, quantized before it leaves: by `scale` and `zero_point`, or by the range of each row.

    To the bit `quantize` or `dynamic_quantize` of `gated`; the options are theirs.
    """
    inputs, shape, floats = _gated_inputs(gate, up, activation)
    _require_no_zero_point_alone(scale, zero_point)
    spec = quantized_spec(floats, scale is not None, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    if scale is not None:
        values = segment_values((), scale, zero_point)
        return ProducedQuantized(
            _run(QuantizeKind.GATED_QUANTIZE, (*inputs, *values), shape, spec)[0], scale, zero_point, None
        )
    found, zero, q = _run(QuantizeKind.GATED_DYNAMIC_QUANTIZE, inputs, shape, spec)
    return ProducedQuantized(q, found, None if spec.mode is DynamicRangeMode.SYMMETRIC else zero, None)


def _norm(
    x: Array, weight: Array | None, bias: Array | None, eps: float, style: NormStyle | str, residual: Array | None
) -> Any:
    x, weight, bias, addend = _norm_inputs(x, weight, bias, residual)
    spec = norm_spec(x.dtype, style, _number(eps), addend is not None)
    total, y = _run(QuantizeKind.NORM, (x, addend, weight, bias), x.shape, spec)
    return (y, total) if spec.adds else y


def _norm_inputs(
    x: Array, weight: Array | None, bias: Array | None, residual: Array | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    weight = None if weight is None else as_tensor(weight, "weight").detach()
    bias = None if bias is None else as_tensor(bias, "bias").detach()
    residual = None if residual is None else as_tensor(residual, "residual").detach()
    return as_tensor(x, "x").detach(), weight, bias, residual


def _gated_inputs(
    gate: Array, up: Array | None, activation: Activation | ActivationName
) -> tuple[tuple[Tensor, Tensor | None], Shape, Spec]:
    gate, up = as_tensor(gate, "gate").detach(), None if up is None else as_tensor(up, "up").detach()
    spec = gated_spec(gate.dtype, activation, up is None)
    return (gate, up), halved(gate.shape) if up is None else gate.shape, spec


def _number(eps: object) -> float:
    if isinstance(eps, Real) and not isinstance(eps, bool):
        return float(eps)
    raise InvalidProblem(f"eps: expected a number of at least 0, got {eps!r}")


def _require_no_zero_point_alone(scale: object, zero_point: object) -> None:
    if scale is None and zero_point is not None:
        raise InvalidProblem("zero_point: expected a scale beside it; leave both out for those of each row's range")


def _run(op: QuantizeKind, inputs: tuple[Any, ...], shape: Shape, spec: Spec) -> tuple[Any, ...]:
    if route(*inputs) == "plan":
        return cached_plan(inputs[0].device, op, shape, spec).compute(inputs)
    return OPERATORS[op](inputs, spec)
