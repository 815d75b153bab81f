"""The numerical contract as runnable torch code: the oracle every other backend is compared with, bit for bit.

Each tensor is seen through the problem's view, `[repeat, rows, run, inner]`, and its scales as `[rows, 1, inner]`, so
one line of broadcasting serves every scope. Nothing here is clever and nothing is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..core.packing import pack_int4, unpack_int4
from ..core.problem import Problem, activation_problem
from ..core.scope import View
from ..core.types import (
    MAX_FACTOR,
    MAX_ZERO_POINT,
    SUM_LANES,
    SUM_STEPS,
    Arithmetic,
    BackendKind,
    DynamicRangeMode,
    QuantizeKind,
)
from .nonlinearity import activated
from .registry import Kernel, Launch, Value

# -- the formulas ------------------------------------------------------------------------------------------------


def divide(x: Tensor, scale: Tensor, arithmetic: Arithmetic) -> Tensor:
    """x / scale, correctly rounded, or x * (1/scale) on request."""
    return x * (1 / scale) if arithmetic is Arithmetic.RECIPROCAL else x / scale


def steps(x: Tensor, scale: Tensor, arithmetic: Arithmetic) -> Tensor:
    """t = rint(x / scale): the distance from zero in whole steps, ties to even, not yet clamped."""
    return torch.round(divide(x, scale, arithmetic))


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, p: Problem) -> Tensor:
    """Clamped as a float, so nothing overflows; fmax takes the bound when t is NaN, so NaN becomes q_min."""
    low, high = bounds(zero_point, p)
    t = torch.fmin(torch.fmax(steps(x, scale, p.arithmetic), low), high)
    return t.to(torch.int32) + zero_point


def bounds(zero_point: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    math = p.element.math.dtype
    return (p.q_min - zero_point).to(math), (p.q_max - zero_point).to(math)


def in_range(x: Tensor, scale: Tensor, zero_point: Tensor, p: Problem) -> Tensor:
    """Where the gradient passes: the same t as forward, both ends included, NaN outside."""
    low, high = bounds(zero_point, p)
    t = steps(x, scale, p.arithmetic)
    return (low <= t) & (t <= high)


def learned_slope(x: Tensor, scale: Tensor, zero_point: Tensor, p: Problem) -> Tensor:
    """How y = (q - zero_point) * scale moves with the scale, where rounding passes straight through.

    In range that is t - x / scale; clamped, it is the bound reached.
    """
    low, high = bounds(zero_point, p)
    ratio = divide(x, scale, p.arithmetic)
    t = torch.round(ratio)
    return torch.where(in_range(x, scale, zero_point, p), t - ratio, torch.where(t > high, high, low))


def segment_sums(values: Tensor, view: View) -> Tensor:
    """The sum of each segment, as `[rows, 1, inner]`, in the one order that every backend keeps.

    Each run is cut into blocks, and the sums of all blocks of a segment, in memory order, are added up as one more.
    """
    blocks = block_sums(values.movedim(2, 0), view.sum_lanes, SUM_STEPS)
    units = blocks.movedim(0, 1).reshape(view.repeat * len(blocks), view.rows, 1, view.inner)
    return block_sums(units, SUM_LANES, max(1, -(-len(units) // SUM_LANES)))[0]


def block_sums(values: Tensor, lanes: int, steps: int) -> Tensor:
    """The sums of blocks of lanes * steps values along the first axis.

    Each lane adds up every lanes-th value of its block, from zero and in order; then the upper half of the lanes is
    added to the lower half until one is left.
    """
    blocks = max(1, -(-len(values) // (lanes * steps)))
    padded = values.new_zeros(blocks * lanes * steps, *values.shape[1:])
    padded[: len(values)] = values
    padded = padded.view(blocks, steps, lanes, *values.shape[1:])
    sums = torch.zeros_like(padded[:, 0])
    for step in range(steps):
        sums = sums + padded[:, step]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (q - zero_point).to(scale.dtype) * scale


def choose_qparams(x: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    """The stored scale and the zero point of every segment, as `[rows, 1, inner]`."""
    view = p.view
    shape = (view.rows, 1, view.inner)
    if view.segment_length == 0:
        scale = torch.ones(shape, dtype=p.scale_element.dtype, device=x.device)
        return scale, torch.full_like(scale, _empty_zero_point(p), dtype=torch.int32)
    low = x.amin(dim=(0, 2)).view(shape)
    high = x.amax(dim=(0, 2)).view(shape)
    if p.mode is DynamicRangeMode.SYMMETRIC:
        amax = torch.maximum(low.abs(), high.abs())
        scale = stored_scale(amax / as_tensor(p.q_max, x.dtype, x.device), amax == 0, p)
        return scale, torch.zeros(shape, dtype=torch.int32, device=x.device)

    with_zero = (low.clamp(max=0), high.clamp(min=0))
    if p.include_zero:
        low, high = with_zero
    scale = asymmetric_scale(low, high, p)
    # Far from zero the literal formula's zero point would swallow the data: such a segment includes zero.
    far = (low / scale.to(low.dtype)).abs() > 2.0**22
    low, high = torch.where(far, with_zero[0], low), torch.where(far, with_zero[1], high)
    scale = asymmetric_scale(low, high, p)
    t = steps(low, scale.to(low.dtype), p.arithmetic).nan_to_num(nan=0.0)
    zero_point = (p.q_min - t).clamp(-MAX_ZERO_POINT, MAX_ZERO_POINT)
    # By a scale that was rounded down to 16 bits, the range may reach a step beyond q_max; zero stays inside.
    zero_point = torch.where(far | p.include_zero, zero_point.clamp(max=p.q_max), zero_point)
    return scale, zero_point.to(torch.int32)


def asymmetric_scale(low: Tensor, high: Tensor, p: Problem) -> Tensor:
    width, levels = high - low, p.q_max - p.q_min
    halved = (high * 0.5 - low * 0.5) / as_tensor(levels / 2, low.dtype, low.device)
    scale = torch.where(width.isinf(), halved, width / as_tensor(levels, low.dtype, low.device))
    return stored_scale(torch.where(low == high, low.abs(), scale), (low == 0) & (high == 0), p)


def stored_scale(scale: Tensor, all_zero: Tensor, p: Problem) -> Tensor:
    """Rounded to its storage type first, then kept away from zero; an all-zero segment gets 1."""
    kind = p.scale_element
    floored = scale.to(kind.dtype).clamp(min=kind.smallest_scale)
    return canonical(floored.masked_fill(all_zero, 1.0))


def integer_weight(p: Problem, weight_q: Value, factor: Value) -> Tensor:
    """The integers a linear multiplies by: as stored, or an s4 group times its integer factor, which fits s8."""
    weight = cast(Tensor, weight_q)
    if p.weight.is_packed:
        weight = unpack_int4(weight, p.weight, p.shape[2])
    if not p.weight_group:
        return weight
    groups = weight.reshape(weight.shape[0], -1, p.weight_group)
    factors = cast(Tensor, factor).view(torch.int8) & MAX_FACTOR
    return (groups * factors[:, :, None]).reshape(weight.shape)


def linear(acc: Tensor, scale_a: Tensor, scale_w: Tensor, bias: Tensor | None, math: torch.dtype) -> Tensor:
    """((acc * scale_a) * scale_w) + bias, left to right, each step rounded."""
    y = (acc.to(math) * scale_a.to(math)) * scale_w.to(math)
    return y if bias is None else y + bias.to(math)


def canonical(y: Tensor) -> Tensor:
    """Every NaN becomes the one quiet NaN, whatever the hardware made of sign and payload."""
    return y.masked_fill(y.isnan(), float("nan"))


def as_tensor(value: Value, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number becomes a tensor on the device: torch divides by a host scalar through its reciprocal on CUDA."""
    if isinstance(value, Tensor):
        return value.to(dtype)
    # Through f64, since torch.full refuses a number above f32's maximum even where it rounds to it.
    return torch.full((), 0.0 if value is None else float(value), dtype=torch.float64, device=device).to(dtype)


def _empty_zero_point(p: Problem) -> int:
    return 0 if p.mode is DynamicRangeMode.SYMMETRIC else p.q_min


# -- from operands to formulas and back --------------------------------------------------------------------------


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
