"""The differentiable pair `quantize` and `dequantize`, and `straight_through`.

Torch gives integer tensors no gradient, so the pair's integers travel in a float tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .backends.registry import Value
from .core.arrays import as_tensor, segment_values
from .core.errors import Unsupported
from .core.problem import Spec
from .core.scope import PerTensor, Scope, require_scope
from .core.types import Arithmetic, ArithmeticName, ElementKind, QuantizeKind
from .dispatch.eager import route
from .dispatch.gradients import OpCall, compute, record
from .dispatch.options import static_spec

Gradients = tuple[Tensor | None, ...]


class _StraightThrough:
    keeps_inputs: ClassVar[bool] = False

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)  # a Function must not return its input itself

    def gradients(self, inputs: tuple[Any, ...], needed: Sequence[bool], dy: Tensor) -> Gradients:
        return dy, None


def straight_through(x: Tensor, y: Tensor) -> Tensor:
    """y, with the gradient of x: for a fake-quantization that clips nothing, whose backward would only copy."""
    result: Tensor = record(_StraightThrough(), x, y)
    return result


@dataclass(frozen=True, slots=True)
class _Quantize:
    spec: Spec
    keeps_inputs: ClassVar[bool] = True

    def value(self, x: Tensor, scale: Value, zero_point: Value) -> Tensor:
        return compute(QuantizeKind.QUANTIZE, (x, scale, zero_point), x.shape, self.spec)[0].to(x.dtype)

    def gradients(self, inputs: tuple[Any, ...], needed: Sequence[bool], dy: Tensor) -> Gradients:
        x, scale, zero_point = inputs
        operands = (x, dy, scale, zero_point)
        return compute(QuantizeKind.QUANTIZE_BACKWARD, operands, dy.shape, self.spec)[0], None, None


@dataclass(frozen=True, slots=True)
class _Dequantize:
    """dequantize, with a gradient to the integers beside those of scale and zero point."""

    spec: Spec
    keeps_inputs: ClassVar[bool] = True

    def value(self, q: Tensor, scale: Value, zero_point: Value) -> Tensor:
        operands = (q.to(self.spec.quantized.dtype), scale, zero_point)
        return compute(QuantizeKind.DEQUANTIZE, operands, q.shape, self.spec)[0]

    def gradients(self, inputs: tuple[Any, ...], needed: Sequence[bool], dy: Tensor) -> Gradients:
        q, scale, zero_point = inputs
        dq = compute(QuantizeKind.DEQUANTIZE_BACKWARD, (None, dy, scale, None), dy.shape, self.spec)[0]
        if not (needed[1] or needed[2]):
            return dq, None, None
        call = OpCall(QuantizeKind.DEQUANTIZE, dy.shape, self.spec)
        integers = q.detach().to(self.spec.quantized.dtype)
        _, to_scale, to_zero_point = call.gradients((integers, scale, zero_point), needed, dy)
        return dq, to_scale, to_zero_point


def quantize(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    scope: Scope = PerTensor(),
    dtype: Any = ElementKind.S8,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
) -> Tensor:
    """The integers of `baracuda.quantize` in x's own float type, over the full range of `dtype`, s8 or u8.

    dx = dy / scale where x was in range, else 0. Scale and zero point get no gradient here.
    """
    x, kind = as_tensor(x, "x"), _carried(dtype)
    spec = static_spec(x.dtype, scope, kind, None, None, arithmetic)
    scale, zero_point = segment_values(scope.scale_shape(tuple(x.shape)), scale, zero_point)
    result: Tensor = record(_Quantize(spec), x, scale, zero_point)
    return result


def dequantize(
    q: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    scope: Scope = PerTensor(),
    element: Any = ElementKind.S8,
) -> Tensor:
    """(q - zero_point) * scale for integers in a float tensor, in its type.

    `element` is what they are integers of: the `dtype` that `quantize` was given. Other values are taken as
    `quantize(q, 1.0)` takes them, to the nearest integer within the range of `element`. dq = dy * scale where q was in
    that range, else 0. Scale and zero point have gradients of their own.
    """
    require_scope(scope)
    kind, q = _carried(element), quantize(as_tensor(q, "q"), 1.0, dtype=element)
    spec = static_spec(q.dtype, scope, kind)
    keep = route(q, scale, zero_point) != "plan"
    shape = scope.scale_shape(tuple(q.shape))
    scale, zero_point = segment_values(shape, scale, zero_point, learned=True, keep=keep)
    result: Tensor = record(_Dequantize(spec), q, scale, zero_point)
    return result


def _carried(dtype: Any) -> ElementKind:
    kind = ElementKind.of(dtype)
    if kind.is_packed or kind.is_float:
        raise Unsupported(f"expected s8 or u8, whose integers every float type holds one by one, got {kind.value}")
    return kind
