"""relu, gelu and silu of a linear's sums on the GPU: the recipe of `backends.activation`, line by line.

Gluon kernels call the same functions. Launch with `enable_fp_fusion=False`: each multiplication and addition rounds.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

import triton
import triton.language as tl

from .. import activation as recipe
from .numerics import MAGIC_F32, MAGIC_F64, exact_divide

LOG2E_F32, LOG2E_F64 = tl.constexpr(recipe.F32.log2e), tl.constexpr(recipe.F64.log2e)
LN2_HIGH_F32, LN2_HIGH_F64 = tl.constexpr(recipe.F32.ln2_high), tl.constexpr(recipe.F64.ln2_high)
LN2_LOW_F32, LN2_LOW_F64 = tl.constexpr(recipe.F32.ln2_low), tl.constexpr(recipe.F64.ln2_low)
EXPONENTIAL_F32, EXPONENTIAL_F64 = tl.constexpr(recipe.F32.exponential), tl.constexpr(recipe.F64.exponential)
UPPER_F32, UPPER_F64 = tl.constexpr(recipe.F32.upper), tl.constexpr(recipe.F64.upper)
LOWER_F32, LOWER_F64 = tl.constexpr(recipe.F32.lower), tl.constexpr(recipe.F64.lower)
HEAD_F32, HEAD_F64 = tl.constexpr(recipe.F32.head), tl.constexpr(recipe.F64.head)
GELU_LIMIT_F32, GELU_LIMIT_F64 = tl.constexpr(recipe.F32.gelu_limit), tl.constexpr(recipe.F64.gelu_limit)
SILU_LIMIT_F32, SILU_LIMIT_F64 = tl.constexpr(recipe.F32.silu_limit), tl.constexpr(recipe.F64.silu_limit)
#: The bits of the magic numbers.
MAGIC_BITS_F32, MAGIC_BITS_F64 = tl.constexpr(0x4B400000), tl.constexpr(0x4338000000000000)


@triton.jit
def polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    total = x * COEFFICIENTS[0] + COEFFICIENTS[1]
    for i in tl.static_range(2, COUNT):
        total = total * x + COEFFICIENTS[i]
    return total


@triton.jit
def power_of_two(exponent, F64: tl.constexpr):
    if F64:
        return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponential(a, rest, F64: tl.constexpr):
    """exp(a - rest) for a <= 0 and a small rest, as a number near 1 and two powers of two to multiply it with."""
    magic: tl.constexpr = MAGIC_F64 if F64 else MAGIC_F32
    shifted = a * (LOG2E_F64 if F64 else LOG2E_F32) + magic
    n = shifted - magic
    r = (a - n * (LN2_HIGH_F64 if F64 else LN2_HIGH_F32)) - n * (LN2_LOW_F64 if F64 else LN2_LOW_F32)
    r = r - rest
    e = ((r * r) * polynomial(r, EXPONENTIAL_F64 if F64 else EXPONENTIAL_F32, 10 if F64 else 5) + r) + 1.0
    # The low bits of the shifted number are n.
    if F64:
        exponent = shifted.to(tl.int64, bitcast=True) - MAGIC_BITS_F64
    else:
        exponent = shifted.to(tl.int32, bitcast=True) - MAGIC_BITS_F32
    half = exponent >> 1
    return e, power_of_two(half, F64), power_of_two(exponent - half, F64)


@triton.jit
def gelu(y, F64: tl.constexpr):
    limit: tl.constexpr = GELU_LIMIT_F64 if F64 else GELU_LIMIT_F32
    z = tl.where(tl.abs(y) < limit, tl.abs(y), limit)
    if F64:
        head = (z.to(tl.int64, bitcast=True) & HEAD_F64).to(tl.float64, bitcast=True)
    else:
        head = (z.to(tl.int32, bitcast=True) & HEAD_F32).to(tl.float32, bitcast=True)
    e, first, second = exponential((head * head) * -0.5, ((z - head) * (z + head)) * 0.5, F64)
    upper = (z * e) * polynomial(z, UPPER_F64 if F64 else UPPER_F32, 11 if F64 else 5)
    lower = polynomial(z, LOWER_F64 if F64 else LOWER_F32, 12 if F64 else 6)
    tail = (exact_divide(upper, lower, F64) * first) * second
    # Triton negates by a subtraction from 0, which loses the sign of a zero.
    return tl.where(y < 0, tail * -1.0, y - tail)


@triton.jit
def silu(y, F64: tl.constexpr):
    limit: tl.constexpr = SILU_LIMIT_F64 if F64 else SILU_LIMIT_F32
    z = tl.where(tl.abs(y) < limit, tl.abs(y), limit)
    e, first, second = exponential(z * -1.0, 0.0, F64)
    quotient = exact_divide(tl.where(y < 0, (z * e) * -1.0, y), (e * first) * second + 1.0, F64)
    return tl.where(y < 0, (quotient * first) * second, quotient)


@triton.jit
def activated(y, KIND: tl.constexpr, F64: tl.constexpr):
    if KIND == "relu":
        return tl.where(y < 0, 0.0, y)
    elif KIND == "gelu":
        return gelu(y, F64)
    elif KIND == "silu":
        return silu(y, F64)
    else:
        return y
