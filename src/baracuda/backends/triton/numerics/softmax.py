"""Sums of values whose weights are exponentials of scores, taken together part by part."""

from __future__ import annotations

import triton
import triton.language as tl

from .conversions import INF
from .nonlinearity import LOG2E_F32


@triton.jit
def exponent(score, SCALE: tl.constexpr):
    """The power of two that weighs a score, before the greatest one is known."""
    return score * (SCALE * LOG2E_F32)


@triton.jit
def unseen(shape: tl.constexpr):
    """The greatest exponent of no keys."""
    return tl.full(shape, -INF, tl.float32)


@triton.jit
def hidden(exponents, seen):
    """Without the weight of keys that are not seen."""
    return tl.where(seen, exponents, -INF)


@triton.jit
def raised(greatest, further):
    """The greater of two greatest exponents, and what to subtract from exponents: not minus infinity."""
    both = tl.maximum(greatest, further)
    return both, tl.where(both == -INF, 0.0, both)


@triton.jit
def weight(exponents, base):
    """Of a score, or of all that was summed up under a smaller greatest exponent."""
    return tl.exp2(exponents - base)


@triton.jit
def average(total, weights):
    """The weighted sum over the sum of the weights; zeros where there is no weight. NaN stays NaN."""
    return tl.where(weights == 0, 0.0, total / weights)
