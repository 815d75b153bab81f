"""Indices, conversions, and comparisons that decide what NaN becomes."""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714
from __future__ import annotations

import triton
import triton.language as tl

#: Triton's interpreter rounds an fma twice, narrows to bf16 by truncation and lets numpy's minimum keep NaN. The few
#: functions that ask for it give the hardware's result there; everything else is one text for both.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

INF = tl.constexpr(float("inf"))
MAX_ZERO_POINT = tl.constexpr(2**24 - 256)


@triton.jit
def loop_bound(n):
    """An integer that `range` takes: the interpreter keeps scalars in arrays of one element, which numpy refuses."""
    if INTERPRETED:
        return n.handle.data.item()
    else:
        return n


@triton.jit
def as_offset(n, WIDE: tl.constexpr):
    """An index or a size in the bits that offsets into the tensor take: before it is multiplied, not after."""
    return n.to(tl.int64) if WIDE else n


@triton.jit
def split_index(n, by, factor, shift, WIDE: tl.constexpr):
    """(n // by, n % by) of an index of 31 bits, by what `static.division` says of a number known at the launch alone.

    Such a division takes thirty instructions, and a program's first load waits for them.
    """
    quotient = (tl.umulhi(n.to(tl.uint32) * 2, factor.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)
    rest = n - quotient * by
    if WIDE:
        return quotient.to(tl.int64), rest.to(tl.int64)
    else:
        return quotient, rest


@triton.jit
def widen(x, F64: tl.constexpr):
    """A stored float in the math type, exactly; from bf16 by integers, so that no compiler undoes it with `narrow`."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif F64:
        return x.to(tl.float64)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(y, dtype: tl.constexpr, MAY_BE_NAN: tl.constexpr, COMPUTED: tl.constexpr = False):
    """y rounded to `dtype`; a NaN becomes the one quiet NaN. COMPUTED: y is what arithmetic gave, nothing loaded."""
    if dtype == tl.bfloat16 or dtype == tl.float16:
        nan: tl.constexpr = 0x7FC0 if dtype == tl.bfloat16 else 0x7E00
        if INTERPRETED:
            bits = y.to(tl.uint32, bitcast=True)
            half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
            if dtype == tl.float16:
                half = y.to(tl.float16).to(tl.int16, bitcast=True)
            half = tl.where(y == y, half, nan).to(tl.int16)
        else:
            half = y.to(dtype).to(tl.int16, bitcast=True)
            if MAY_BE_NAN:  # the conversion makes every NaN 0x7FFF, the largest of all patterns
                half = tl.minimum(half, tl.full([], nan, tl.int16))
        return half.to(dtype, bitcast=True)
    elif MAY_BE_NAN and COMPUTED and dtype == tl.float32 and not INTERPRETED:
        # Arithmetic's NaN is 0x7FFFFFFF, the largest of all integers.
        quiet = tl.minimum(y.to(tl.int32, bitcast=True), tl.full([], 0x7FC00000, tl.int32))
        return quiet.to(tl.float32, bitcast=True)
    elif MAY_BE_NAN:
        return tl.where(y == y, y, float("nan")).to(dtype)
    else:
        return y.to(dtype)


@triton.jit
def load_scale(scale, index, mask, F64: tl.constexpr):
    """The scale at `index`; a number arrives as the bits of a double."""
    if scale.dtype.is_ptr():
        return widen(tl.load(scale + index, mask=mask), F64)
    else:
        return scale.to(tl.int64).to(tl.float64, bitcast=True).to(tl.float64 if F64 else tl.float32)


@triton.jit
def load_zero_point(zero_point, index, mask):
    """The zero point at `index`, kept where `q - zero_point` is an exact f32."""
    if zero_point is None:
        return 0
    elif zero_point.dtype.is_ptr():
        loaded = tl.load(zero_point + index, mask=mask)
        return tl.minimum(tl.maximum(loaded, -MAX_ZERO_POINT), MAX_ZERO_POINT)
    else:
        return zero_point


# -- comparisons that decide what NaN becomes --------------------------------------------------------------------


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
        return tl.where(poison > 0, float("nan"), tl.max(tl.where(x == x, x, -INF), axis)).to(x.dtype)
    else:
        return tl.reduce(x, axis, larger)


@triton.jit
def smallest(x, axis: tl.constexpr):
    """The minimum along an axis, or NaN."""
    if x.dtype.is_int():
        return tl.min(x, axis)
    else:
        return -largest(-x, axis) if INTERPRETED else tl.reduce(x, axis, smaller)
