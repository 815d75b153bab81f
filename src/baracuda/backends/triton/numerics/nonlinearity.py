"""relu, gelu and silu of a linear's sums on the GPU: the bits of `backends.nonlinearity` in fewer instructions.

Where a line differs from the recipe's it is exact: signs, powers of two, products without rounding, and a division in
place, as `div.rn` is a subroutine with branches.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

import triton
import triton.language as tl

from ... import nonlinearity as recipe
from .comparisons import at_most
from .conversions import INF, INTERPRETED
from .division import divide_in_place


def _exponential_terms(terms: recipe.Terms, times: int) -> tuple[float, ...]:
    """Of exp's polynomial at -x / times, in powers of x; its value times x**2 is as many times larger."""
    powers = range(len(terms.exponential) - 1, -1, -1)
    return tuple(value * (-1) ** i / times ** (i + 1) for i, value in zip(powers, terms.exponential, strict=True))


#: The powers of two of `exponential` are larger by this exponent, which keeps them normal numbers.
LIFT_F32, LIFT_F64 = 65, 513
#: Adding it rounds to an integer and leaves that, lifted and biased, in the low bits; it is even, for ties.
MAGIC_F32, MAGIC_F64 = tl.constexpr(recipe.F32.magic + 127 + LIFT_F32), tl.constexpr(recipe.F64.magic + 1023 + LIFT_F64)
LOWER_BY_F32, LOWER_BY_F64 = tl.constexpr(2.0**-LIFT_F32), tl.constexpr(2.0**-LIFT_F64)
LOG2E_F32, LOG2E_F64 = tl.constexpr(recipe.F32.log2e), tl.constexpr(recipe.F64.log2e)
LN2_HIGH_F32, LN2_HIGH_F64 = tl.constexpr(recipe.F32.ln2_high), tl.constexpr(recipe.F64.ln2_high)
LN2_LOW_F32, LN2_LOW_F64 = tl.constexpr(recipe.F32.ln2_low), tl.constexpr(recipe.F64.ln2_low)
EXPONENTIAL_F32 = tl.constexpr(tuple(_exponential_terms(recipe.F32, times) for times in (1, 2)))
EXPONENTIAL_F64 = tl.constexpr(tuple(_exponential_terms(recipe.F64, times) for times in (1, 2)))
UPPER_F32, UPPER_F64 = tl.constexpr(recipe.F32.upper), tl.constexpr(recipe.F64.upper)
LOWER_F32, LOWER_F64 = tl.constexpr(recipe.F32.lower), tl.constexpr(recipe.F64.lower)
HEAD_F32, HEAD_F64 = tl.constexpr(recipe.F32.head), tl.constexpr(recipe.F64.head)
GELU_LIMIT_F32, GELU_LIMIT_F64 = tl.constexpr(recipe.F32.gelu_limit), tl.constexpr(recipe.F64.gelu_limit)
SILU_LIMIT_F32, SILU_LIMIT_F64 = tl.constexpr(recipe.F32.silu_limit), tl.constexpr(recipe.F64.silu_limit)

#: -0 for what is negative; -0 and NaN as they are.
AT_LEAST_ZERO = tl.constexpr("max.NaN.f32 $0, $1, 0f80000000;")


@triton.jit
def multiply_add(a, b, c, F64: tl.constexpr):
    """a * b + c of operands for which one rounding is as good as two, as when the product is exact."""
    if F64 or INTERPRETED:
        return a * b + c
    else:
        return tl.fma(a, b, c)


@triton.jit
def polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    total = x * COEFFICIENTS[0] + COEFFICIENTS[1]
    for i in tl.static_range(2, COUNT):
        total = total * x + COEFFICIENTS[i]
    return total


@triton.jit
def exponential(a, rest, TIMES: tl.constexpr, F64: tl.constexpr):
    """exp(-(a + rest) / TIMES) for a >= 0 and a small rest: a number near TIMES, and a power of two, lifted."""
    MAGIC: tl.constexpr = MAGIC_F64 if F64 else MAGIC_F32
    LOG2E: tl.constexpr = (LOG2E_F64 if F64 else LOG2E_F32) / -TIMES
    if TIMES == 2:  # a is the square of 12 bits: checked for all of them
        shifted = multiply_add(a, LOG2E, MAGIC, F64)
    else:
        shifted = a * LOG2E + MAGIC
    n = shifted - MAGIC
    r = multiply_add(n, (LN2_HIGH_F64 if F64 else LN2_HIGH_F32) * TIMES, a, F64)
    r = (r + n * ((LN2_LOW_F64 if F64 else LN2_LOW_F32) * TIMES)) + rest
    TERMS: tl.constexpr = (EXPONENTIAL_F64 if F64 else EXPONENTIAL_F32)[TIMES - 1]
    e = ((r * r) * polynomial(r, TERMS, 10 if F64 else 5) - r) + TIMES
    if F64:
        power = (shifted.to(tl.int64, bitcast=True) << 52).to(tl.float64, bitcast=True)
    else:
        power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return e, power


@triton.jit
def minus_tail(y, tail, F64: tl.constexpr):
    """-tail where y is negative, else y - tail. In Triton neither a negation nor a literal -0.0 has a zero's sign."""
    if F64 or INTERPRETED:
        return tl.where(y < 0, tail * -1.0, y - tail)
    else:
        start = tl.inline_asm_elementwise(AT_LEAST_ZERO, "=f,f", [y], tl.float32, is_pure=True, pack=1)
        return start - tail


@triton.jit
def gelu(y, F64: tl.constexpr):
    z = at_most(tl.abs(y), GELU_LIMIT_F64 if F64 else GELU_LIMIT_F32)
    if F64:
        head = (z.to(tl.int64, bitcast=True) & HEAD_F64).to(tl.float64, bitcast=True)
    else:
        head = (z.to(tl.int32, bitcast=True) & HEAD_F32).to(tl.float32, bitcast=True)
    e, power = exponential(head * head, (z - head) * (z + head), 2, F64)
    upper = (z * e) * polynomial(z, UPPER_F64 if F64 else UPPER_F32, 11 if F64 else 5)
    lower = polynomial(z, LOWER_F64 if F64 else LOWER_F32, 12 if F64 else 6)
    tail = (divide_in_place(upper, lower, F64) * power) * ((LOWER_BY_F64 if F64 else LOWER_BY_F32) / 2)
    return minus_tail(y, tail, F64)


@triton.jit
def silu(y, F64: tl.constexpr):
    LOWER_BY: tl.constexpr = LOWER_BY_F64 if F64 else LOWER_BY_F32
    z = at_most(tl.abs(y), SILU_LIMIT_F64 if F64 else SILU_LIMIT_F32)
    e, power = exponential(z, 0.0, 1, F64)
    whole = multiply_add(e * power, LOWER_BY, 1.0, F64)
    quotient = divide_in_place(tl.where(y < 0, z * e, y), whole, F64)
    result = tl.where(y < 0, (quotient * power) * -LOWER_BY, quotient)
    return tl.where(y < INF, result, y)


@triton.jit
def nonlinear(y, KIND: tl.constexpr, F64: tl.constexpr):
    """The nonlinearity of that name; "none" leaves y as it is."""
    if KIND == "relu":
        return tl.where(y < 0, 0.0, y)
    elif KIND == "gelu":
        return gelu(y, F64)
    elif KIND == "silu":
        return silu(y, F64)
    else:
        return y
