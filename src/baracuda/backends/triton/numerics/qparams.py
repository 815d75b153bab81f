"""From the range of a segment to its scale and zero point."""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .comparisons import larger
from .conversions import INF, narrow, widen
from .division import corrected_twice, divide_by, exact_divide, fused, prepare_positive
from .rounding import nearest


class Range(NamedTuple):
    """How a range becomes a scale and a zero point, known when a kernel is compiled: the constant RANGE."""

    symmetric: bool
    include_zero: bool
    #: The scale floor: no scale is smaller.
    smallest: float


@triton.jit
def stored_scale(scale, all_zero, dtype: tl.constexpr, SMALLEST: tl.constexpr, F64: tl.constexpr):
    """(as stored, as used): rounded to its storage type and not below the floor; an all-zero segment gets 1."""
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
def symmetric_scale(high, dtype: tl.constexpr, RANGE: tl.constexpr, QUANTIZER: tl.constexpr):
    """(scale as stored, as used) of segments with these largest magnitudes, in f32: what `choose_qparams` gives, for
    Gluon kernels, which create no blocks."""
    q_max: tl.constexpr = QUANTIZER.q_max * 1.0
    return stored_scale(exact_divide(high, q_max, False), high == 0, dtype, RANGE.smallest, False)


@triton.jit
def choose_qparams(low, high, dtype: tl.constexpr, RANGE: tl.constexpr, QUANTIZER: tl.constexpr):
    """(scale as stored, scale as used, zero point) of segments that span [low, high]; symmetric: high is max abs.

    Threads that share a segment all work this out, so it counts as if per element: one reciprocal, no division.
    """
    F64: tl.constexpr = QUANTIZER.f64
    q_min: tl.constexpr = QUANTIZER.q_min
    q_max: tl.constexpr = QUANTIZER.q_max
    if RANGE.symmetric:
        stored, used = stored_scale(divide_by(high, q_max, F64), high == 0, dtype, RANGE.smallest, F64)
        return stored, used, tl.zeros(high.shape, tl.int32)
    else:
        levels: tl.constexpr = q_max - q_min
        if RANGE.include_zero:
            low, high = tl.where(low > 0, 0.0, low), tl.where(high < 0, 0.0, high)
        width = high - low
        overflows = tl.abs(width) == INF
        half = tl.where(overflows, high * 0.5 - low * 0.5, width)
        scale = divide_by(half, levels, F64)
        scale = tl.where(overflows, scale + scale, scale)
        scale = tl.where(low == high, tl.abs(low), scale)  # a constant segment's own magnitude
        stored, used = stored_scale(scale, (low == 0) & (high == 0), dtype, RANGE.smallest, F64)
        if not RANGE.include_zero:
            # Far from zero the literal formula's zero point would swallow the data: such a segment includes zero.
            far = far_from_zero(low, used, F64)
            scale = tl.where(far, divide_by(larger(tl.abs(low), tl.abs(high)), levels, F64), scale)
            stored, used = stored_scale(scale, (low == 0) & (high == 0), dtype, RANGE.smallest, F64)
            low = tl.where(far & (low > 0), 0.0, low)
        divisor = prepare_positive(used, QUANTIZER.reciprocal, F64)
        if QUANTIZER.reciprocal:
            t = low * divisor.reciprocal
        else:
            low *= divisor.factor
            t = corrected_twice(low * divisor.reciprocal, low, divisor, F64)
        zero_point = q_min - nearest(tl.where(t == t, t, 0.0), True, F64).to(tl.int32)
        # By a scale that was rounded down to 16 bits, the range may reach a step beyond Q_MAX; zero stays inside.
        inside = tl.minimum(zero_point, q_max)
        if RANGE.include_zero:
            return stored, used, inside
        else:
            return stored, used, tl.where(far, inside, zero_point)
