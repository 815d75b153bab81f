"""The formulas of the numerical contract as torch code, each written once; `reference` applies them to operands.

Tensors are in the math type and seen through a problem's view, `[repeat, rows, run, inner]`, their scales as
`[rows, 1, inner]`. Nothing here is clever and nothing is fast.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from ..core.packing import unpack_int4
from ..core.problem import Problem
from ..core.scope import View
from ..core.types import (
    MAX_FACTOR,
    MAX_ZERO_POINT,
    SUM_LANES,
    SUM_STEPS,
    Arithmetic,
    DynamicRangeMode,
    NormStyle,
)
from .nonlinearity import activated
from .registry import Value


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


def block_sums(values: Tensor, lanes: int, steps: int, neighbours: bool = False) -> Tensor:
    """The sums of blocks of lanes * steps values along the first axis.

    Each lane adds up every lanes-th value of its block, from zero and in order; then the upper half of the lanes is
    added to the lower half, or each lane to its neighbour, until one is left.
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
        sums = sums[:, ::2] + sums[:, 1::2] if neighbours else sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (q - zero_point).to(scale.dtype) * scale


def choose_qparams(x: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    """The stored scale and the zero point of every segment, as `[rows, 1, inner]`."""
    view = p.view
    shape = (view.rows, 1, view.inner)
    if view.segment_length == 0:
        scale = torch.ones(shape, dtype=p.scale_element.dtype, device=x.device)
        return scale, torch.full_like(scale, empty_zero_point(p), dtype=torch.int32)
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


def normalized(h: Tensor, weight: Tensor | None, bias: Tensor | None, p: Problem) -> Tensor:
    """The norm of the rows of h, `[rows, D]` in the type of the problem's element, and as such.

    Sums are taken in f64 and in one order; so are the quotients and the root, which IEEE 754 rounds alike everywhere.
    All that follows is done in the math type.
    """
    size, dtype = as_tensor(h.shape[1], torch.float64, h.device), p.element.math.dtype
    x = h.to(torch.float64)
    if p.norm is NormStyle.LAYER:
        x = x - row_sums(x) / size
    inverse = 1 / root(row_sums(x * x) / size + p.eps)
    y = x.to(dtype) * inverse.to(dtype)
    if p.norm is NormStyle.LLAMA:
        y = y.to(p.element.dtype).to(dtype)
    if weight is not None:
        factor = weight.to(dtype)
        y = y * (1 + factor if p.norm is NormStyle.GEMMA else factor)
    if bias is not None:
        y = y + bias.to(dtype)
    return canonical(y.to(p.element.dtype))


def root(x: Tensor) -> Tensor:
    """The square root, correctly rounded: torch's own, of f64 on a CPU, is not always."""
    roots = [math.sqrt(value) for value in x.flatten().tolist()]
    return torch.tensor(roots, dtype=x.dtype, device=x.device).view_as(x)


def row_sums(x: Tensor) -> Tensor:
    """The sum of each row, `[rows, 1]`: blocks as in `segment_sums`, in which a GPU's thread has neighbouring lanes."""
    blocks = block_sums(x.T, SUM_LANES, SUM_STEPS, neighbours=True)
    return block_sums(blocks, SUM_LANES, max(1, -(-len(blocks) // SUM_LANES)), neighbours=True)[0].view(-1, 1)


def gated(gate: Tensor, up: Tensor, p: Problem) -> Tensor:
    """act(gate) * up: each rounded to the element's type, as where a model computes one after the other."""
    math, dtype = p.element.math.dtype, p.element.dtype
    factor = activated(gate.to(math), p.nonlinearity).to(dtype).to(math)
    return canonical((factor * up.to(math)).to(dtype))


def canonical(y: Tensor) -> Tensor:
    """Every NaN becomes the one quiet NaN, whatever the hardware made of sign and payload."""
    return y.masked_fill(y.isnan(), float("nan"))


def as_tensor(value: Value, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number becomes a tensor on the device: torch divides by a host scalar through its reciprocal on CUDA."""
    if isinstance(value, Tensor):
        return value.to(dtype)
    # Through f64, since torch.full refuses a number above f32's maximum even where it rounds to it.
    return torch.full((), 0.0 if value is None else float(value), dtype=torch.float64, device=device).to(dtype)


def empty_zero_point(p: Problem) -> int:
    return 0 if p.mode is DynamicRangeMode.SYMMETRIC else p.q_min
