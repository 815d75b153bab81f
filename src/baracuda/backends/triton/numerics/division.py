"""Correctly rounded quotients, by a reciprocal and its correction where that is enough."""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .conversions import INF, INTERPRETED, widen


class Divisor(NamedTuple):
    """A scale, ready to divide by: x / scale is (x * factor) / value, and `reciprocal` is 1 / value, rounded."""

    value: Any
    reciprocal: Any
    factor: Any


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
def divisor_of(scale, F64: tl.constexpr):
    """The divisor of an `ordinary` scale, whose factor is not used."""
    return Divisor(value=scale, reciprocal=invert(scale, F64), factor=scale)


@triton.jit
def prepare(scale, RECIPROCAL: tl.constexpr, F64: tl.constexpr):
    """The divisor of any scale, worked out once per scale.

    Its value is `ordinary`; the factor brings x there too, with the scale's sign. What has no such value is all in the
    factor: for 0 an infinity, for infinity 0, for NaN a NaN.
    """
    if RECIPROCAL:
        return divisor_of(scale, F64)
    else:
        magnitude = tl.abs(scale)
        step: tl.constexpr = 2.0**512 if F64 else 2.0**60
        back: tl.constexpr = 2.0**-512 if F64 else 2.0**-60
        factor = tl.where(ordinary(magnitude, F64), 1.0, tl.where(magnitude < 1.0, step, back)).to(scale.dtype)
        divisible = (magnitude > 0) & (magnitude < INF)
        special = tl.where(magnitude == 0, INF, tl.where(magnitude == INF, 0.0, scale)).to(scale.dtype)
        value = tl.where(divisible, magnitude * factor, 1.0).to(scale.dtype)
        factor = tl.where(divisible, factor, special)
        negative = scale.to(tl.int64 if F64 else tl.int32, bitcast=True) < 0
        return Divisor(value=value, reciprocal=invert(value, F64), factor=tl.where(negative, -factor, factor))


@triton.jit
def prepare_positive(scale, RECIPROCAL: tl.constexpr, F64: tl.constexpr):
    """The divisor of a scale that a range gave, a normal number, infinity or NaN, in a handful of instructions: its
    value is the scale's significand, in [2, 4), and the factor the rest of it."""
    if RECIPROCAL:
        return divisor_of(scale, F64)
    else:
        integer: tl.constexpr = tl.int64 if F64 else tl.int32
        exponents: tl.constexpr = 0x7FF0000000000000 if F64 else 0x7F800000
        two: tl.constexpr = 0x4000000000000000 if F64 else 0x40000000
        bits = scale.to(integer, bitcast=True)
        value = ((bits & ~exponents) | two).to(scale.dtype, bitcast=True)
        factor = (exponents - (bits & exponents)).to(scale.dtype, bitcast=True)
        return Divisor(value=value, reciprocal=invert(value, F64), factor=tl.where(scale == scale, factor, scale))


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
def corrected(quotient, x, divisor):
    """A quotient by the rounded reciprocal, corrected by its exact remainder."""
    return fused(fused(quotient, -divisor.value, x), divisor.reciprocal, quotient)


@triton.jit
def corrected_twice(quotient, x, divisor, F64: tl.constexpr):
    """x / divisor.value, correctly rounded: the first correction leaves an error below a unit, and from there the
    second is exact by Markstein's theorem. The interpreter has no fma for f64."""
    if F64 and INTERPRETED:
        return x / divisor.value
    else:
        return corrected(corrected(quotient, x, divisor), x, divisor)


@triton.jit
def divide_by(x, N: tl.constexpr, F64: tl.constexpr):
    """x / N of a positive x, correctly rounded where the result is a normal number."""
    if N == 0 or (F64 and INTERPRETED):
        return exact_divide(x, tl.full(x.shape, N, x.dtype), F64)
    else:
        n, inverse = tl.full(x.shape, N, x.dtype), tl.full(x.shape, 1.0 / N, x.dtype)
        divisor = Divisor(value=n, reciprocal=inverse, factor=n)
        return tl.where(x < INF, corrected_twice(x * inverse, x, divisor, F64), x)


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
def divide_gradient(dy, divisor, F64: tl.constexpr):
    """dy / divisor.value, correctly rounded, of an `ordinary` scale's divisor and any dy.

    Two corrections make a product by the reciprocal the quotient; zeros are right before any. Where a correction could
    lose bits, as quotient or remainder come near the ends of the exponents, the slow division is taken.
    """
    if F64 or INTERPRETED:
        return exact_divide(dy, divisor.value, F64)
    else:
        least = tl.maximum(divisor.reciprocal, 1.0) * 2.0**-98
        registers: tl.constexpr = "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f"
        operands = [dy, divisor.value, divisor.reciprocal, -divisor.value, least]
        return tl.inline_asm_elementwise(GRADIENT_DIVISION, registers, operands, tl.float32, is_pure=True, pack=4)


@triton.jit
def quotient(x, scale, inverse, slow, RECIPROCAL: tl.constexpr, F64: tl.constexpr):
    """x / scale, correctly rounded, or x * inverse with RECIPROCAL; `slow` is true where a scale is not `ordinary`."""
    if RECIPROCAL:
        return x * inverse
    elif F64:
        return exact_divide(x, tl.broadcast_to(scale, x.shape), F64)
    else:
        if slow:
            ratio = exact_divide(x, tl.broadcast_to(scale, x.shape), F64)
        else:
            value, reciprocal = tl.broadcast_to(scale, x.shape), tl.broadcast_to(inverse, x.shape)
            ratio = divide_gradient(x, Divisor(value=value, reciprocal=reciprocal, factor=value), F64)
        return ratio


#: $0 = $1 / $2: a reciprocal within a unit, refined, then a quotient corrected by its exact remainder. The remainder is
#: taken the other way round, which keeps the sign of a zero.
IN_PLACE = tl.constexpr("""{
    .reg .f32 reciprocal, error, remainder, quotient, opposite;
    rcp.approx.ftz.f32 reciprocal, $2;
    neg.f32 opposite, $2;
    fma.rn.f32 error, reciprocal, opposite, 0f3F800000;
    fma.rn.f32 reciprocal, error, reciprocal, reciprocal;
    mul.rn.f32 quotient, $1, reciprocal;
    neg.f32 opposite, $1;
    fma.rn.f32 remainder, quotient, $2, opposite;
    neg.f32 remainder, remainder;
    fma.rn.f32 $0, remainder, reciprocal, quotient;
}""")


@triton.jit
def divide_in_place(a, b, F64: tl.constexpr):
    """a / b, correctly rounded for the pairs that gelu and silu make of any f32: all of them are checked on the device.

    b is 1 or more, and a power of two where a is so small that the remainder would lose bits; a is not infinite.
    """
    if F64 or INTERPRETED:
        return exact_divide(a, b, F64)
    else:
        return tl.inline_asm_elementwise(IN_PLACE, "=&f,f,f", [a, b], tl.float32, is_pure=True, pack=1)
