"""The numerical contract as runnable torch code: the oracle every other backend is compared with, bit for bit.

Here operands become tensors that the formulas take, and results are written; `formulas` has the arithmetic. Each tensor
is seen through the problem's view, `[repeat, rows, run, inner]`, and its scales as `[rows, 1, inner]`, so one line of
broadcasting serves every scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..core.packing import pack_int4, unpack_int4
from ..core.problem import Problem, activation_problem, quantization_problem
from ..core.types import MAX_ZERO_POINT, BackendKind, QuantizeKind
from .formulas import (
    as_tensor,
    canonical,
    choose_qparams,
    dequantize,
    divide,
    gated,
    in_range,
    integer_weight,
    learned_slope,
    linear,
    normalized,
    quantize,
    segment_sums,
)
from .nonlinearity import activated
from .registry import Kernel, Launch, Value


class _Seen:
    """The operands of a problem, each in its math type and through the problem's view."""

    def __init__(self, p: Problem, device: torch.device) -> None:
        self.p, self.view, self.device = p, p.view, device
        self.math = p.element.math.dtype

    def float(self, x: Value) -> Tensor:
        return cast(Tensor, x).reshape(self.view.shape).to(self.math)

    def integer(self, q: Value) -> Tensor:
        q = cast(Tensor, q)
        if self.p.quantized.is_packed:
            q = unpack_int4(q, self.p.quantized, self.p.shape[-1] if self.p.shape else None)
        return q.reshape(self.view.shape).to(torch.int32)

    def scale(self, scale: Value) -> Tensor:
        return self._segments(scale, self.math)

    def zero_point(self, zero_point: Value) -> Tensor:
        return self._segments(zero_point, torch.int32).clamp(-MAX_ZERO_POINT, MAX_ZERO_POINT)

    def _segments(self, value: Value, dtype: torch.dtype) -> Tensor:
        tensor = as_tensor(value, dtype, self.device)
        return tensor.reshape(self.view.rows, 1, self.view.inner) if isinstance(value, Tensor) else tensor

    def write_float(self, y: Tensor, out: Value) -> None:
        cast(Tensor, out).copy_(canonical(y.to(self.p.element.dtype)).view(self.p.shape))

    def write_sums(self, total: Tensor, out: Value) -> None:
        cast(Tensor, out).copy_(canonical(total.to(self.math)).view(self.p.segment_shape))

    def write_integer(self, q: Tensor, out: Value) -> None:
        q = q.view(self.p.shape)
        cast(Tensor, out).copy_(pack_int4(q, self.p.quantized) if self.p.quantized.is_packed else q)


Body = Callable[[_Seen, tuple[Value, ...]], None]


def _quantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    x, scale, zero_point, output = operands
    see.write_integer(quantize(see.float(x), see.scale(scale), see.zero_point(zero_point), see.p), output)


def _dequantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    q, scale, zero_point, output = operands
    see.write_float(dequantize(see.integer(q), see.scale(scale), see.zero_point(zero_point)), output)


def _fake_quantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    x, s, zp, output = operands
    scale, zero_point = see.scale(s), see.zero_point(zp)
    see.write_float(dequantize(quantize(see.float(x), scale, zero_point, see.p), scale, zero_point), output)


def _quantize_backward(see: _Seen, operands: tuple[Value, ...]) -> None:
    x, dy, s, zero_point, dx = operands
    scale = see.scale(s)
    mask = in_range(see.float(x), scale, see.zero_point(zero_point), see.p)
    see.write_float(torch.where(mask, divide(see.float(dy), scale, see.p.arithmetic), 0.0), dx)


def _dequantize_backward(see: _Seen, operands: tuple[Value, ...]) -> None:
    _, dy, scale, _, dx = operands
    see.write_float(see.float(dy) * see.scale(scale), dx)


def _fake_quantize_backward(see: _Seen, operands: tuple[Value, ...]) -> None:
    x, dy, scale, zero_point, dx = operands
    mask = in_range(see.float(x), see.scale(scale), see.zero_point(zero_point), see.p)
    see.write_float(torch.where(mask, see.float(dy), 0.0), dx)


def _fake_quantize_learned_backward(see: _Seen, operands: tuple[Value, ...]) -> None:
    """To the scale, the sum of dy * slope; to the zero point, -scale times the sum of the dy that were clamped away."""
    x, dy, s, zp, dx, grad_scale, grad_zero_point = operands
    scale, zero_point, grad = see.scale(s), see.zero_point(zp), see.float(dy).to(torch.float64)
    _fake_quantize_backward(see, (x, dy, s, zp, dx))
    slope = learned_slope(see.float(x), scale, zero_point, see.p).to(torch.float64)
    see.write_sums(segment_sums(torch.where(slope == 0, 0.0, grad * slope), see.view), grad_scale)
    lost = torch.where(in_range(see.float(x), scale, zero_point, see.p), 0.0, grad)
    total = segment_sums(lost, see.view)
    see.write_sums(torch.where(total == 0, 0.0, -scale.to(torch.float64) * total), grad_zero_point)


def _dynamic_quantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    x, scale_out, zero_point_out, output = operands
    scale, zero_point = choose_qparams(see.float(x), see.p)
    see.write_integer(quantize(see.float(x), scale.to(see.math), zero_point, see.p), output)
    _write_qparams(see.p, scale, zero_point, scale_out, zero_point_out)


def _choose_qparams(see: _Seen, operands: tuple[Value, ...]) -> None:
    x, scale_out, zero_point_out = operands
    _write_qparams(see.p, *choose_qparams(see.float(x), see.p), scale_out, zero_point_out)


def _dynamic_fake_quantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    x, scale_out, zero_point_out, output = operands
    stored, zero_point = choose_qparams(see.float(x), see.p)
    scale = stored.to(see.math)
    see.write_float(dequantize(quantize(see.float(x), scale, zero_point, see.p), scale, zero_point), output)
    _write_qparams(see.p, stored, zero_point, scale_out, zero_point_out)


def _write_qparams(p: Problem, scale: Tensor, zero_point: Tensor, scale_out: Value, zero_point_out: Value) -> None:
    cast(Tensor, scale_out).copy_(scale.view(p.segment_shape))
    if zero_point_out is not None:
        cast(Tensor, zero_point_out).copy_(zero_point.view(p.segment_shape))


def _quantized_linear(see: _Seen, operands: tuple[Value, ...]) -> None:
    x, weight_q, weight_scale, bias, _, residual, factor, act_q_scratch, act_scale_scratch, output = operands
    activation = activation_problem(see.p)
    rows = _Seen(activation, see.device)
    scale, zero_point = choose_qparams(rows.float(x), activation)
    act_q = quantize(rows.float(x), scale.to(see.math), zero_point, activation)
    if act_q_scratch is not None:
        rows.write_integer(act_q, act_q_scratch)
    if act_scale_scratch is not None:
        _write_qparams(activation, scale, zero_point, act_scale_scratch, None)
    m = see.p.shape[0]
    scale, zero_point = scale.view(m, 1), zero_point.view(m, 1)
    weight = integer_weight(see.p, weight_q, factor)
    _matmul(see, act_q.view(activation.shape), scale, zero_point, weight, weight_scale, bias, residual, output)


def _smoothquant_linear(see: _Seen, operands: tuple[Value, ...]) -> None:
    act_q, act_scale, act_zero_point, weight_q, weight_scale, bias, _, residual, factor, output = operands
    kind = see.p.quantized
    scale = as_tensor(act_scale, see.math, see.device)
    scale = scale[:, None] if scale.ndim else scale
    zero_point = as_tensor(act_zero_point, torch.int32, see.device).clamp(kind.q_min, kind.q_max)
    weight = integer_weight(see.p, weight_q, factor)
    _matmul(see, cast(Tensor, act_q), scale, zero_point, weight, weight_scale, bias, residual, output)


def _weight_only_linear(see: _Seen, operands: tuple[Value, ...]) -> None:
    """In f64, rounded once at the end; other backends come within the distance that their plans state."""
    x, weight_q, weight_scale, weight_zero_point, bias, residual, output = operands
    p = see.p
    q = cast(Tensor, weight_q)
    q = unpack_int4(q, p.weight, p.shape[2]) if p.weight.is_packed else q
    groups = q.reshape(*cast(Tensor, weight_scale).shape, p.weight_group or p.shape[2]).to(torch.float64)
    if weight_zero_point is not None:
        groups = groups - cast(Tensor, weight_zero_point)[:, :, None]
    weight = (groups * cast(Tensor, weight_scale).to(torch.float64)[:, :, None]).reshape(q.shape)
    # Row by row: the bits of a matrix library may depend on how many rows there are and where they lie in memory.
    rows = [(weight * row).sum(dim=1) for row in cast(Tensor, x).to(torch.float64)]
    y = torch.stack(rows) if rows else weight.new_zeros(0, weight.shape[0])
    y = y if bias is None else y + cast(Tensor, bias).to(torch.float64)
    y = activated(y, p.nonlinearity)
    y = y if residual is None else y + cast(Tensor, residual).to(torch.float64)
    cast(Tensor, output).copy_(canonical(y.to(p.element.dtype)))


def _matmul(
    see: _Seen,
    act_q: Tensor,
    scale_a: Tensor,
    zero_point: Tensor,
    weight: Tensor,
    weight_scale: Value,
    bias: Value,
    residual: Value,
    output: Value,
) -> None:
    """The integer sums are exact in f64: below 2**53 for every K that fits in memory, and it runs on every device."""
    centred = (act_q.to(torch.int32) - zero_point).to(torch.float64)
    acc = centred @ weight.to(torch.float64).T + 0.0  # integers have no zero that is negative
    scale_w = as_tensor(weight_scale, see.math, see.device)
    y = activated(linear(acc, scale_a, scale_w, cast("Tensor | None", bias), see.math), see.p.nonlinearity)
    if residual is not None:
        y = y + cast(Tensor, residual).to(see.math)
    cast(Tensor, output).copy_(canonical(y.to(see.p.element.dtype)))


# -- norms and gated products ------------------------------------------------------------------------------------


def _normalized(see: _Seen, operands: tuple[Value, ...], sum_out: Value) -> Tensor:
    p = see.p
    x, addend, weight, bias = cast("tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]", operands[:4])
    if p.adds:
        math = p.element.math.dtype
        x = canonical((x.to(math) + cast(Tensor, addend).to(math)).to(p.element.dtype))
        cast(Tensor, sum_out).copy_(x)
    return normalized(x.reshape(-1, p.shape[-1]) if x.numel() else x.reshape(0, p.shape[-1]), weight, bias, p)


def _gated(see: _Seen, operands: tuple[Value, ...]) -> Tensor:
    gate, up = cast("tuple[Tensor, Tensor]", operands[:2])
    if see.p.halves:
        gate, up = gate.narrow(-1, 0, see.p.shape[-1]), gate.narrow(-1, see.p.shape[-1], see.p.shape[-1])
    return gated(gate, up, see.p)


def _norm(see: _Seen, operands: tuple[Value, ...]) -> None:
    cast(Tensor, operands[5]).copy_(_normalized(see, operands, operands[4]).view(see.p.shape))


def _norm_quantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    y = _normalized(see, operands, operands[6])
    _quantize(_Seen(quantization_problem(see.p), see.device), (y, *operands[4:6], operands[7]))


def _norm_dynamic_quantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    y = _normalized(see, operands, operands[4])
    _dynamic_quantize(_Seen(quantization_problem(see.p), see.device), (y, *operands[5:]))


def _gated_product(see: _Seen, operands: tuple[Value, ...]) -> None:
    cast(Tensor, operands[2]).copy_(_gated(see, operands))


def _gated_quantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    _quantize(_Seen(quantization_problem(see.p), see.device), (_gated(see, operands), *operands[2:]))


def _gated_dynamic_quantize(see: _Seen, operands: tuple[Value, ...]) -> None:
    _dynamic_quantize(_Seen(quantization_problem(see.p), see.device), (_gated(see, operands), *operands[2:]))


_BODIES: dict[QuantizeKind, Body] = {
    QuantizeKind.QUANTIZE: _quantize,
    QuantizeKind.DEQUANTIZE: _dequantize,
    QuantizeKind.FAKE_QUANTIZE: _fake_quantize,
    QuantizeKind.QUANTIZE_BACKWARD: _quantize_backward,
    QuantizeKind.DEQUANTIZE_BACKWARD: _dequantize_backward,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD: _fake_quantize_backward,
    QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD: _fake_quantize_learned_backward,
    QuantizeKind.DYNAMIC_QUANTIZE: _dynamic_quantize,
    QuantizeKind.CHOOSE_QPARAMS: _choose_qparams,
    QuantizeKind.DYNAMIC_FAKE_QUANTIZE: _dynamic_fake_quantize,
    QuantizeKind.QUANTIZED_LINEAR: _quantized_linear,
    QuantizeKind.SMOOTHQUANT_LINEAR: _smoothquant_linear,
    QuantizeKind.WEIGHT_ONLY_LINEAR: _weight_only_linear,
    QuantizeKind.NORM: _norm,
    QuantizeKind.NORM_QUANTIZE: _norm_quantize,
    QuantizeKind.NORM_DYNAMIC_QUANTIZE: _norm_dynamic_quantize,
    QuantizeKind.GATED: _gated_product,
    QuantizeKind.GATED_QUANTIZE: _gated_quantize,
    QuantizeKind.GATED_DYNAMIC_QUANTIZE: _gated_dynamic_quantize,
}


def _bind(problem: Problem, device: torch.device) -> Launch:
    body, see = _BODIES[problem.op], _Seen(problem, device)

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        body(see, operands)

    return launch


KERNELS = (
    Kernel(
        name="torch",
        backend=BackendKind.REFERENCE,
        ops=frozenset(_BODIES),
        declines=lambda problem, device: None,
        bind=_bind,
        strides="any",
    ),
)
