"""From the range of a segment to its scale and zero point."""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714
from __future__ import annotations

import triton
import triton.language as tl

from .conversions import INF, larger, narrow, widen
from .division import corrected_twice, divide_by, fused, prepare_positive
from .rounding import MAGIC_F32, MAGIC_F64


@triton.jit
def stored_scale(scale, all_zero, dtype: tl.constexpr, SMALLEST: tl.constexpr, F64: tl.constexpr):
    """(as stored, as used): rounded to its storage type, kept away from zero; an all-zero segment gets 1."""
    used = widen(narrow(scale, dtype, dtype == tl.bfloat16 or dtype == tl.float16), F64)
    used = tl.where(all_zero, 1.0, tl.where(used < SMALLEST, SMALLEST, used)).to(used.dtype)
    return narrow(used, dtype, True), used


@triton.jit
def far_from_zero(low, scale, F64: tl.constexpr):
    """low / scale, rounded, is beyond 2**22 in magnitude: by more than half a unit in the last place of 2**22. Where
    that is close the fma is exact."""
    per_half_unit: tl.constexpr = 2.0**31 if F64 else 4.0
    beyond = fused(tl.full(scale.shape, -4194304.0, scale.dtype), scale, tl.abs(low))
    return beyond * per_half_unit > scale


@triton.jit
def choose_qparams(
    low, high, dtype: tl.constexpr, SYMMETRIC: tl.constexpr, INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr,
    Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, SMALLEST: tl.constexpr, F64: tl.constexpr,
):  # fmt: skip
    """(scale as stored, scale as used, zero point) of segments that span [low, high]; symmetric: high is max abs.

    Threads that share a segment all work this out, so it counts as if per element: one reciprocal, no division.
    """
    if SYMMETRIC:
        stored, used = stored_scale(divide_by(high, Q_MAX, F64), high == 0, dtype, SMALLEST, F64)
        return stored, used, tl.zeros(high.shape, tl.int32)
    else:
        levels: tl.constexpr = Q_MAX - Q_MIN
        if INCLUDE_ZERO:
            low, high = tl.where(low > 0, 0.0, low), tl.where(high < 0, 0.0, high)
        width = high - low
        overflows = tl.abs(width) == INF
        half = tl.where(overflows, high * 0.5 - low * 0.5, width)
        scale = divide_by(half, levels, F64)
        scale = tl.where(overflows, scale + scale, scale)
        scale = tl.where(low == high, tl.abs(low), scale)  # a constant segment's own magnitude
        stored, used = stored_scale(scale, (low == 0) & (high == 0), dtype, SMALLEST, F64)
        if not INCLUDE_ZERO:
            # Far from zero the literal formula's zero point would swallow the data: such a segment includes zero.
            far = far_from_zero(low, used, F64)
            scale = tl.where(far, divide_by(larger(tl.abs(low), tl.abs(high)), levels, F64), scale)
            stored, used = stored_scale(scale, (low == 0) & (high == 0), dtype, SMALLEST, F64)
            low = tl.where(far & (low > 0), 0.0, low)
        divisor, reciprocal, factor = prepare_positive(used, RECIPROCAL, F64)
        if RECIPROCAL:
            t = low * reciprocal
        else:
            low *= factor
            t = corrected_twice(low * reciprocal, low, divisor, reciprocal, F64)
        magic: tl.constexpr = MAGIC_F64 if F64 else MAGIC_F32
        t = (tl.where(t == t, t, 0.0) + magic) - magic  # rounds up to 2**22, which is as far as t goes
        zero_point = Q_MIN - t.to(tl.int32)
        # By a scale that was rounded down to 16 bits, the range may reach a step beyond Q_MAX; zero stays inside.
        inside = tl.minimum(zero_point, Q_MAX)
        if INCLUDE_ZERO:
            return stored, used, inside
        else:
            return stored, used, tl.where(far, inside, zero_point)
