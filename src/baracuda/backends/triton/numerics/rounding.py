"""A quotient rounded, clamped and brought to its integer, and what of it passes a gradient."""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

import triton
import triton.language as tl

from .conversions import INTERPRETED, at_least, at_most
from .division import corrected, corrected_twice, ordinary

#: Adding 1.5 * 2**(mantissa bits) pushes the fraction out of the significand: a round to nearest even.
MAGIC_F32 = tl.constexpr(1.5 * 2.0**23)
MAGIC_F64 = tl.constexpr(1.5 * 2.0**52)
#: The bits of the first.
MAGIC_BITS_F32 = tl.constexpr(0x4B400000)
#: The ways of `quantize_steps`.
PLAIN = tl.constexpr(0)
FAR = tl.constexpr(1)
HELD = tl.constexpr(2)
#: Up to here `bound * scale`, rounded, is nearer to its bound than half a step, in f32.
NEAR = tl.constexpr(2**22 - 1024)
#: Larger than any clamp bound.
BEYOND = tl.constexpr(2.0**25)

# A "step" is rint(x / scale), clamped. In f32 it is kept as the sum with a number that pushes the fraction out of the
# significand, whose low bits then are q; in f64, where a maximum takes many instructions, as an int32.


@triton.jit
def bounds(zero_point, HAS_ZP: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, F64: tl.constexpr):
    """(low, high, shift): the clamp's bounds and, in f32, what added to a value between them rounds it.

    The shift contains the zero point, so that the sum is MAGIC plus at most 8 bits however large the zero point is.
    But for an odd zero point's last unit, which would turn ties to even into ties to odd.
    """
    if F64:
        return Q_MIN - zero_point, Q_MAX - zero_point, 0
    elif HAS_ZP:
        shift = (zero_point & -2).to(tl.float32) + MAGIC_F32
        return (Q_MIN - zero_point).to(tl.float32), (Q_MAX - zero_point).to(tl.float32), shift
    else:
        return Q_MIN * 1.0, Q_MAX * 1.0, MAGIC_F32


@triton.jit
def awkward(scale, zero_point, HAS_ZP: tl.constexpr, F64: tl.constexpr):
    """Whether any scale or bound asks for the FAR way of `quantize_steps`."""
    fine = ordinary(scale, F64).to(tl.int32)
    if HAS_ZP and not F64:
        fine &= (tl.abs(zero_point) <= NEAR).to(tl.int32)
    if fine.type.is_block():
        return tl.min(fine) == 0
    else:
        return fine == 0


@triton.jit
def whole(y, low, high):
    """An f64 rounded half to even and clamped to int32 bounds; NaN gives the lower one."""
    if INTERPRETED:
        y = tl.where(y == y, y, low)
        y = tl.where(y < low, low, tl.where(y > high, high, y)).to(tl.float64)
        return ((y + MAGIC_F64) - MAGIC_F64).to(tl.int32)
    else:
        # Of NaN the conversion makes the smallest of all integers.
        t = tl.inline_asm_elementwise("cvt.rni.s32.f64 $0, $1;", "=r,d", [y], tl.int32, is_pure=True, pack=1)
        return tl.minimum(tl.maximum(t, low), high)


@triton.jit
def quantize_steps(
    x, divisor, reciprocal, factor, low, high, shift, RECIPROCAL: tl.constexpr, WAY: tl.constexpr, F64: tl.constexpr
):
    """rint(x / scale) clamped to the bounds, as a step. NaN gives the lower bound.

    PLAIN, with an `ordinary` scale and bounds that are not far, clamps x before it is divided: nothing can overflow
    any more, and the bounds come back exact. FAR takes any scale and bound: a quotient beyond every bound need only
    stay there, so +inf is held finite, as its remainder would be NaN; what does become NaN is -inf or NaN already, the
    lower bound to any clamp. HELD is for an x that its scale's range contains, already brought near by `times`, whose
    quotient is bounded or NaN; a bound that it cannot pass, or that is kept elsewhere, is None. In f32 one correction
    is enough: checked over all x.
    """
    if not RECIPROCAL and WAY == FAR:
        x = x * factor
    if F64:
        y = x * reciprocal
        if not RECIPROCAL:
            q = corrected_twice(y, x, divisor, reciprocal, F64)
            y = q if WAY == HELD else tl.where(tl.abs(y) < BEYOND, q, y)
        return whole(y, low, high)
    elif not RECIPROCAL and WAY == PLAIN:
        x = at_most(at_least(x, low * divisor), high * divisor)
        return corrected(x * reciprocal, x, divisor, reciprocal) + shift
    else:
        y = x * reciprocal
        if not RECIPROCAL:
            if WAY == FAR:
                y = at_most(y, BEYOND)
            y = corrected(y, x, divisor, reciprocal)
        if low is not None:
            y = at_least(y, low)
        if high is not None:
            y = at_most(y, high)
        return y + shift


@triton.jit
def step_bits(step, F64: tl.constexpr):
    """An integer whose low 16 bits, with `step_rest` added, are q's."""
    return step if F64 else step.to(tl.int32, bitcast=True)


@triton.constexpr_function
def step_lacks(f64: bool) -> int:
    """What must be added to the bits of a step, besides the rest, for q in all 32 of them."""
    return 0 if f64 else -MAGIC_BITS_F32.value


@triton.jit
def step_rest(zero_point, F64: tl.constexpr):
    """What the bits of a step lack of q."""
    return zero_point if F64 else zero_point & 1


@triton.jit
def step_value(step, shift, F64: tl.constexpr):
    """q - zero point, in the math type."""
    return step.to(tl.float64) if F64 else step - shift


@triton.jit
def in_range(
    x, divisor, reciprocal, factor, low, high, shift, RECIPROCAL: tl.constexpr, WAY: tl.constexpr, F64: tl.constexpr
):
    """low <= rint(x / scale) <= high; NaN is not.

    PLAIN compares x itself with the ends of what passes, found once per scale. Otherwise clamped one step further out:
    that rounds the same and says the same.
    """
    if WAY == PLAIN and not RECIPROCAL and not F64:
        return (x >= least_above(half_way(low, -0.5, divisor))) & (x <= most_below(half_way(high, 0.5, divisor)))
    else:
        one: tl.constexpr = 1 if F64 else 1.0
        step = quantize_steps(x, divisor, reciprocal, factor, low - one, high + one, shift, RECIPROCAL, WAY, F64)
        return (step >= low + shift) & (step <= high + shift)


@triton.jit
def half_way(bound, HALF: tl.constexpr, divisor):
    """The f64 that an f32 x must pass for rint(x / divisor), divided in f32, to be beyond an integral bound.

    The tie, half a step out, is in if the bound is even. What divides into it or not is what lies on either side of the
    middle between it and its neighbour, outward or inward: 25 bits, so that no f32 divides into it exactly and its
    product by the divisor is an exact f64.
    """
    bound = tl.cast(bound, tl.float32)  # which a number is not yet
    tie = bound + HALF
    outward = (bound.to(tl.int32) & 1) == 0
    away = outward == ((tie < 0) == (HALF < 0))
    neighbour = (tie.to(tl.int32, bitcast=True) + tl.where(away, 1, -1)).to(tl.float32, bitcast=True)
    return (tie.to(tl.float64) + neighbour.to(tl.float64)) * 0.5 * divisor.to(tl.float64)


@triton.jit
def least_above(y):
    """The least f32 above an f64 that is none."""
    if INTERPRETED:
        near = y.to(tl.float32)
        bits = near.to(tl.int32, bitcast=True)
        return tl.where(near.to(tl.float64) > y, bits, bits + tl.where(bits < 0, -1, 1)).to(tl.float32, bitcast=True)
    else:
        return tl.inline_asm_elementwise("cvt.rp.f32.f64 $0, $1;", "=f,d", [y], tl.float32, is_pure=True, pack=1)


@triton.jit
def most_below(y):
    """The largest f32 below an f64 that is none."""
    return -least_above(-y)
