"""Maxima, minima and clamps, with what each makes of NaN: floats one or two at a time, and integers in their order."""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714
from __future__ import annotations

import triton
import triton.language as tl

from .conversions import INF, INTERPRETED, nan_where, widen


@triton.jit
def clamp(n, low, high):
    """An integer brought between two bounds."""
    return tl.minimum(tl.maximum(n, low), high)


@triton.jit
def clamp_down(n, low, high):
    """An integer brought between two bounds, first below the upper one."""
    return tl.maximum(tl.minimum(n, high), low)


@triton.jit
def at_least(y, low):
    """The larger of both; `low` where y is NaN."""
    if INTERPRETED:
        return tl.where(y >= low, y, low)
    else:
        return tl.maximum(y, low)


@triton.jit
def at_most(y, high):
    """The smaller of both; `high` where y is NaN."""
    if INTERPRETED:
        return tl.where(y <= high, y, high)
    else:
        return tl.minimum(y, high)


@triton.jit
def larger(a, b):
    """The larger of both, or NaN; of floats or of integers in their order."""
    if a.dtype == tl.bfloat16:  # which `tl.maximum` would widen
        return tl.inline_asm_elementwise("max.NaN.bf16 $0, $1, $2;", "=h,h,h", [a, b], a.dtype, is_pure=True, pack=1)
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """The smaller of both, or NaN."""
    if a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("min.NaN.bf16 $0, $1, $2;", "=h,h,h", [a, b], a.dtype, is_pure=True, pack=1)
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr):
    """The maximum along an axis, or NaN: `tl.max` alone drops NaN."""
    if x.dtype.is_int():
        return tl.max(x, axis)
    elif INTERPRETED:  # where any other combination is evaluated one element at a time
        poison = tl.max((x != x).to(tl.int32), axis)
        return nan_where(poison > 0, tl.max(tl.where(x == x, x, -INF), axis)).to(x.dtype)
    else:
        return tl.reduce(x, axis, larger)


@triton.jit
def smallest(x, axis: tl.constexpr):
    """The minimum along an axis, or NaN."""
    if x.dtype.is_int():
        return tl.min(x, axis)
    else:
        return -largest(-x, axis) if INTERPRETED else tl.reduce(x, axis, smaller)


# -- in the order of the bits ------------------------------------------------------------------------------------


@triton.jit
def magnitude_bits(x):
    """|x| of an f32 as an integer in the same order, NaN above all numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def from_magnitude_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def comparable(x, SYMMETRIC: tl.constexpr):
    """What is compared across threads: for f64, whose maximum takes many instructions, integers in the same order with
    NaN outside of all numbers; otherwise the float itself. A symmetric range is one of magnitudes."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        magnitude: tl.constexpr = 0x7FFFFFFFFFFFFFFF
        return bits & magnitude if SYMMETRIC else bits ^ ((bits >> 63) & magnitude)
    elif x.dtype == tl.float32:
        return tl.abs(x) if SYMMETRIC else x
    elif SYMMETRIC:
        return two_at_a_time(x, x, "abs.bf16x2 $0, $1;", "abs.f16x2 $0, $1;")
    else:
        return x


@triton.jit
def compared(x, SYMMETRIC: tl.constexpr):
    """The number behind what `comparable` gave, in the math type."""
    if x.dtype == tl.int64:
        return (x if SYMMETRIC else x ^ ((x >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        return widen(x, False)


@triton.jit
def two_at_a_time(a, b, BF16: tl.constexpr, F16: tl.constexpr):
    """A PTX instruction on pairs of 16-bit floats, neighbours in a register as they were loaded."""
    asm: tl.constexpr = BF16 if a.dtype == tl.bfloat16 else F16
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)


@triton.jit
def higher(a, b):
    """The larger of what `comparable` gave, or NaN; of f64 that are not yet integers, NaN is not kept."""
    if a.dtype == tl.bfloat16 or a.dtype == tl.float16:
        return two_at_a_time(a, b, "max.NaN.bf16x2 $0, $1, $2;", "max.NaN.f16x2 $0, $1, $2;")
    elif a.dtype == tl.float64:
        return tl.where(a > b, a, b)
    else:
        return larger(a, b)


@triton.jit
def lower(a, b):
    """The smaller of what `comparable` gave, or NaN; of f64 that are not yet integers, NaN is not kept."""
    if a.dtype == tl.bfloat16 or a.dtype == tl.float16:
        return two_at_a_time(a, b, "min.NaN.bf16x2 $0, $1, $2;", "min.NaN.f16x2 $0, $1, $2;")
    elif a.dtype == tl.float64:
        return tl.where(a < b, a, b)
    else:
        return smaller(a, b)
