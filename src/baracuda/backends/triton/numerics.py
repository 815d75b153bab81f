"""The only GPU spelling of divide, round, clamp, in-range and convert; the contract's bits depend on each line.

Launch with `enable_fp_fusion=False`: nothing here may be contracted but the two `fused` steps of the division.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714
from __future__ import annotations

import triton
import triton.language as tl

#: Triton's interpreter rounds an fma twice, narrows to bf16 by truncation and lets numpy's minimum keep NaN. The few
#: functions that ask for it give the hardware's result there; everything else is one text for both.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

INF = tl.constexpr(float("inf"))
#: Adding 1.5 * 2**(mantissa bits) pushes the fraction out of the significand: a round to nearest even.
MAGIC_F32 = tl.constexpr(1.5 * 2.0**23)
MAGIC_F64 = tl.constexpr(1.5 * 2.0**52)
#: The bits of the first.
MAGIC_BITS_F32 = tl.constexpr(0x4B400000)
MAX_ZERO_POINT = tl.constexpr(2**24 - 256)
#: The ways of `quantize_steps`.
PLAIN = tl.constexpr(0)
FAR = tl.constexpr(1)
HELD = tl.constexpr(2)
#: Up to here `bound * scale`, rounded, is nearer to its bound than half a step, in f32.
NEAR = tl.constexpr(2**22 - 1024)
#: Larger than any clamp bound.
BEYOND = tl.constexpr(2.0**25)


@triton.jit
def loop_bound(n):
    """An integer that `range` takes: the interpreter keeps scalars in arrays of one element, which numpy refuses."""
    if INTERPRETED:
        return n.handle.data.item()
    else:
        return n


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


# -- conversions -------------------------------------------------------------------------------------------------


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


# -- division ----------------------------------------------------------------------------------------------------


@triton.jit
def exact_divide(a, b, F64: tl.constexpr):
    """a / b, correctly rounded over the whole range: f32 `/` is approximate, f64 `/` is not."""
    return a / b if F64 else tl.div_rn(a, b)


@triton.jit
def invert(x, F64: tl.constexpr):
    """1 / x, correctly rounded: half the instructions of a division."""
    if INTERPRETED:
        return exact_divide(1.0, x, F64)
    elif F64:
        return tl.inline_asm_elementwise("rcp.rn.f64 $0, $1;", "=d,d", [x], tl.float64, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def fused(a, b, c):
    """a * b + c, rounded once."""
    if INTERPRETED and c.dtype == tl.float32:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def ordinary(scale, F64: tl.constexpr):
    """Whether quotients by the scale and their remainders neither overflow nor lose bits as they are."""
    tiny: tl.constexpr = 2.0**-900 if F64 else 2.0**-100
    huge: tl.constexpr = 2.0**900 if F64 else 2.0**100
    return (scale >= tiny) & (scale <= huge)


@triton.jit
def prepare(scale, RECIPROCAL: tl.constexpr, F64: tl.constexpr):
    """(divisor, reciprocal, factor) of any scale, once per scale: x / scale is x * factor / divisor.

    The divisor is `ordinary`; the factor brings x there too, with the scale's sign. What has no such divisor is all in
    the factor: of 0 an infinity, of infinity 0, of NaN a NaN.
    """
    if RECIPROCAL:
        return scale, invert(scale, F64), scale
    else:
        magnitude = tl.abs(scale)
        step: tl.constexpr = 2.0**512 if F64 else 2.0**60
        back: tl.constexpr = 2.0**-512 if F64 else 2.0**-60
        factor = tl.where(ordinary(magnitude, F64), 1.0, tl.where(magnitude < 1.0, step, back)).to(scale.dtype)
        divisible = (magnitude > 0) & (magnitude < INF)
        special = tl.where(magnitude == 0, INF, tl.where(magnitude == INF, 0.0, scale)).to(scale.dtype)
        divisor = tl.where(divisible, magnitude * factor, 1.0).to(scale.dtype)
        factor = tl.where(divisible, factor, special)
        negative = scale.to(tl.int64 if F64 else tl.int32, bitcast=True) < 0
        return divisor, invert(divisor, F64), tl.where(negative, -factor, factor)


@triton.jit
def prepare_positive(scale, RECIPROCAL: tl.constexpr, F64: tl.constexpr):
    """The same for a scale that a range gave, a normal number, infinity or NaN, in a handful of instructions: the
    divisor is the scale's significand, in [2, 4), and the factor the rest of it."""
    if RECIPROCAL:
        return scale, invert(scale, F64), scale
    else:
        integer: tl.constexpr = tl.int64 if F64 else tl.int32
        exponents: tl.constexpr = 0x7FF0000000000000 if F64 else 0x7F800000
        two: tl.constexpr = 0x4000000000000000 if F64 else 0x40000000
        bits = scale.to(integer, bitcast=True)
        divisor = ((bits & ~exponents) | two).to(scale.dtype, bitcast=True)
        factor = (exponents - (bits & exponents)).to(scale.dtype, bitcast=True)
        return divisor, invert(divisor, F64), tl.where(scale == scale, factor, scale)


#: $0, $1 = the two bf16 of $2 by those of $3, widened; a product is a sum with -0.
TIMES_BF16 = tl.constexpr("""{
    .reg .b32 zero, pair, low, high;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 pair, $2, $3, zero;
    shl.b32 low, pair, 16;
    and.b32 high, pair, 0xffff0000;
    mov.b32 $0, low;
    mov.b32 $1, high;
}""")


@triton.jit
def times(x, factor, F64: tl.constexpr):
    """x by a power of two that brings it near its scale's significand, in the math type.

    bf16 two at a time: what becomes too small for its 8 bits is, to any rounding of the quotient, as good as zero.
    """
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        factors = tl.broadcast_to(factor.to(tl.bfloat16), x.shape)
        return tl.inline_asm_elementwise(TIMES_BF16, "=f,=f,r,r", [x, factors], tl.float32, is_pure=True, pack=2)
    else:
        return widen(x, F64) * factor


@triton.jit
def corrected(quotient, x, divisor, reciprocal):
    """A quotient by the rounded reciprocal, corrected by its exact remainder."""
    return fused(fused(quotient, -divisor, x), reciprocal, quotient)


@triton.jit
def corrected_twice(quotient, x, divisor, reciprocal, F64: tl.constexpr):
    """x / divisor, correctly rounded: the first correction leaves an error below a unit, and from there the second is
    exact by Markstein's theorem. The interpreter has no fma for f64."""
    if F64 and INTERPRETED:
        return x / divisor
    else:
        return corrected(corrected(quotient, x, divisor, reciprocal), x, divisor, reciprocal)


@triton.jit
def divide_by(x, N: tl.constexpr, F64: tl.constexpr):
    """x / N of a positive x, correctly rounded where the result is a normal number."""
    if N == 0 or (F64 and INTERPRETED):
        return exact_divide(x, tl.full(x.shape, N, x.dtype), F64)
    else:
        n, inverse = tl.full(x.shape, N, x.dtype), tl.full(x.shape, 1.0 / N, x.dtype)
        return tl.where(x < INF, corrected_twice(x * inverse, x, n, inverse, F64), x)


def _gradient_division() -> str:
    """PTX for four elements: $0-3 = $4-7 / $8-11, given reciprocals, negated divisors and least safe quotients."""
    quick, slow = "", ""
    for i in range(4):
        y, dy, divisor, reciprocal, negated, least = (f"${i + 4 * j}" for j in range(6))
        quick += f"""
            mul.rn.f32 q, {dy}, {reciprocal};
            fma.rn.f32 r, q, {negated}, {dy};
            fma.rn.f32 s, r, {reciprocal}, q;
            fma.rn.f32 r, s, {negated}, {dy};
            fma.rn.f32 s, r, {reciprocal}, s;
            abs.f32 r, q;
            setp.ge.f32 safe, r, {least};
            setp.le.and.f32 safe, r, 0f7E800000, safe;
            selp.f32 {y}, s, q, safe;
            setp.ne.and.f32 lossy{i}, {dy}, 0f00000000, !safe;"""
        slow += f"@lossy{i} div.rn.f32 {y}, {dy}, {divisor};\n"
    return f"""{{
            .reg .pred safe, any, lossy0, lossy1, lossy2, lossy3;
            .reg .f32 q, r, s;
            {quick}
            or.pred any, lossy0, lossy1;
            or.pred any, any, lossy2;
            or.pred any, any, lossy3;
            @!any bra DONE;
            {slow}
            DONE:
            }}"""


GRADIENT_DIVISION = tl.constexpr(_gradient_division())


@triton.jit
def divide_gradient(dy, divisor, reciprocal, F64: tl.constexpr):
    """dy / divisor, correctly rounded, of an `ordinary` divisor and any dy.

    Two corrections make a product by the reciprocal the quotient; zeros are right before any. Where a correction could
    lose bits, as quotient or remainder come near the ends of the exponents, the slow division is taken.
    """
    if F64 or INTERPRETED:
        return exact_divide(dy, divisor, F64)
    else:
        least = tl.maximum(reciprocal, 1.0) * 2.0**-98
        registers: tl.constexpr = "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f"
        operands = [dy, divisor, reciprocal, -divisor, least]
        return tl.inline_asm_elementwise(GRADIENT_DIVISION, registers, operands, tl.float32, is_pure=True, pack=4)


# -- rounding ----------------------------------------------------------------------------------------------------

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
