"""A quotient rounded, clamped and brought to its integer, and whether it passes a gradient.

A "step" is rint(x / scale), clamped. In f32 it is kept as the sum with a number that pushes the fraction out of the
significand, whose low bits then are q; in f64, where a maximum takes many instructions, as an int32.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .comparisons import at_least, at_most, clamp
from .conversions import INTERPRETED
from .division import Divisor, corrected, corrected_twice, exact_divide, ordinary

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


class Quantizer(NamedTuple):
    """How a quotient becomes an integer, known when a kernel is compiled: the constant QUANTIZER."""

    #: x * (1 / scale), both rounded, instead of x / scale.
    reciprocal: bool
    q_min: int
    q_max: int
    #: The math type is f64, not f32.
    f64: bool


class Bounds(NamedTuple):
    """The clamp's bounds, less the zero point, and in f32 the `shift` that rounds when added to a value between them.

    A bound that no value can pass may be None.
    """

    low: Any
    high: Any
    shift: Any


@triton.jit
def bounds_of(zero_point, QUANTIZER: tl.constexpr):
    """The bounds with a zero point, or with None.

    The shift contains the zero point, so that the sum is MAGIC plus at most 8 bits however large the zero point is,
    except for an odd zero point's last unit, which would turn ties to even into ties to odd.
    """
    q_min: tl.constexpr = QUANTIZER.q_min
    q_max: tl.constexpr = QUANTIZER.q_max
    if zero_point is None:
        if QUANTIZER.f64:
            return Bounds(low=q_min, high=q_max, shift=0)
        else:
            return Bounds(low=q_min * 1.0, high=q_max * 1.0, shift=MAGIC_F32)
    elif QUANTIZER.f64:
        return Bounds(low=q_min - zero_point, high=q_max - zero_point, shift=0)
    else:
        shift = (zero_point & -2).to(tl.float32) + MAGIC_F32
        low, high = (q_min - zero_point).to(tl.float32), (q_max - zero_point).to(tl.float32)
        return Bounds(low=low, high=high, shift=shift)


@triton.jit
def awkward(scale, zero_point, F64: tl.constexpr):
    """Whether any scale or bound asks for the FAR way of `quantize_steps`."""
    fine = ordinary(scale, F64).to(tl.int32)
    if zero_point is not None and not F64:
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
        return clamp(t, low, high)


@triton.jit
def quantize_steps(x, divisor, bounds, RECIPROCAL: tl.constexpr, WAY: tl.constexpr, F64: tl.constexpr):
    """rint(x / scale) clamped to the bounds, as a step. NaN gives the lower bound.

    PLAIN, with an `ordinary` scale and bounds that are not far, clamps x before it is divided: nothing can overflow
    any more, and the bounds come back exact. FAR takes any scale and bound: a quotient beyond every bound need only
    stay there, so +inf is held finite, as its remainder would be NaN; what does become NaN is -inf or NaN already, the
    lower bound to any clamp. HELD is for an x whose quotient is bounded or NaN, since the scale comes from its range;
    a bound that it cannot pass, or that is kept elsewhere, is None. In f32 one correction is enough, checked for all x.
    """
    if not RECIPROCAL and WAY == FAR:
        x = x * divisor.factor
    if F64:
        y = x * divisor.reciprocal
        if not RECIPROCAL:
            q = corrected_twice(y, x, divisor, F64)
            y = q if WAY == HELD else tl.where(tl.abs(y) < BEYOND, q, y)
        return whole(y, bounds.low, bounds.high)
    elif not RECIPROCAL and WAY == PLAIN:
        x = at_most(at_least(x, bounds.low * divisor.value), bounds.high * divisor.value)
        return step_of(corrected(x * divisor.reciprocal, x, divisor), bounds)
    else:
        y = x * divisor.reciprocal
        if not RECIPROCAL:
            if WAY == FAR:
                y = at_most(y, BEYOND)
            y = corrected(y, x, divisor)
        return step_of(between(y, bounds), bounds)


@triton.jit
def between(y, bounds):
    """An f32 clamped to the bounds that there are; NaN gives the lower one."""
    if bounds.low is not None:
        y = at_least(y, bounds.low)
    if bounds.high is not None:
        y = at_most(y, bounds.high)
    return y


@triton.jit
def step_of(y, bounds):
    """The step of a clamped f32 quotient: this sum is what rounds half to even."""
    return y + bounds.shift


@triton.jit
def quantize_to_int8(x, scale, reciprocal, is_ordinary, q_min, q_max):
    """clamp(rint(x / scale)) of an f32 x that gave the scale by its range, bounds in f32; for Gluon kernels.

    `is_ordinary` says of all scales at once that they are, and so that the corrected product is the exact quotient.
    """
    bounds = Bounds(low=q_min, high=q_max, shift=MAGIC_F32)
    if is_ordinary:
        divisor = Divisor(value=scale, reciprocal=reciprocal, factor=scale)
        step = quantize_steps(x, divisor, bounds, False, HELD, False)
    else:
        step = step_of(between(exact_divide(x, tl.broadcast_to(scale, x.shape), False), bounds), bounds)
    return step_bits(step, False).to(tl.int8)


@triton.jit
def nearest(x, NEAR_ZERO: tl.constexpr, F64: tl.constexpr):
    """x rounded half to even. NEAR_ZERO where a result beyond 2**22 need only stay as large."""
    if NEAR_ZERO:
        magic: tl.constexpr = MAGIC_F64 if F64 else MAGIC_F32
        return (x + magic) - magic
    else:
        whole: tl.constexpr = 2.0**52 if F64 else 2.0**23  # from here on it is an integer already
        size = tl.abs(x)
        rounded = tl.where(size < whole, (size + whole) - whole, size)
        return tl.where(x < 0, -rounded, rounded)


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
def step_value(step, bounds, F64: tl.constexpr):
    """q - zero point, in the math type."""
    return step.to(tl.float64) if F64 else step - bounds.shift


@triton.jit
def in_range(x, divisor, bounds, RECIPROCAL: tl.constexpr, WAY: tl.constexpr, F64: tl.constexpr):
    """low <= rint(x / scale) <= high; NaN is not.

    PLAIN compares x itself with the ends of what passes, found once per scale. Otherwise the step is clamped one
    further out, which rounds the same and says the same.
    """
    if WAY == PLAIN and not RECIPROCAL and not F64:
        # One end after the other: both at once cost odd widths 32 registers.
        above = x >= least_above(half_way(bounds.low, -0.5, divisor.value))
        return above & (x <= most_below(half_way(bounds.high, 0.5, divisor.value)))
    else:
        one: tl.constexpr = 1 if F64 else 1.0
        further = Bounds(low=bounds.low - one, high=bounds.high + one, shift=bounds.shift)
        step = quantize_steps(x, divisor, further, RECIPROCAL, WAY, F64)
        return (step >= bounds.low + bounds.shift) & (step <= bounds.high + bounds.shift)


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
