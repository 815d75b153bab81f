"""The smallest and largest of what a program has read: exact, so in any order and as narrow as it was stored.

A program reads PARTS tiles of [LINES, COLS], kept as pairs of pairs of tiles. A thread has the same place in all of
them, so they are compared first: 16-bit floats two at a time, before anything is widened or sent to another thread.
A tile has one vector for each thread, no more, so that loads and stores agree on which thread has what.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714
from __future__ import annotations

import triton
import triton.language as tl

from ..numerics.conversions import INF, INTERPRETED, larger, largest, smaller, smallest, widen


@triton.jit
def two_at_a_time(a, b, BF16: tl.constexpr, F16: tl.constexpr):
    """A PTX instruction on pairs of 16-bit floats, neighbours in a register as they were loaded."""
    asm: tl.constexpr = BF16 if a.dtype == tl.bfloat16 else F16
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)


@triton.jit
def stored(x):
    """x as it is; the interpreter, which knows little of bf16, widens."""
    return widen(x, x.dtype == tl.float64) if INTERPRETED else x


@triton.jit
def comparable(x, SYMMETRIC: tl.constexpr):
    """What is compared across threads: of f64 integers in the same order, NaN outside of all numbers, as a maximum of
    f64 takes many instructions. A symmetric range is one of magnitudes."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        magnitude: tl.constexpr = 0x7FFFFFFFFFFFFFFF
        return bits & magnitude if SYMMETRIC else bits ^ ((bits >> 63) & magnitude)
    elif x.dtype == tl.float32:
        return tl.abs(x) if SYMMETRIC else x
    elif SYMMETRIC:
        return two_at_a_time(x, x, "abs.bf16x2 $0, $1;", "abs.f16x2 $0, $1;")
    else:
        return x


@triton.jit
def number(x, SYMMETRIC: tl.constexpr):
    """The number behind what was compared, in the math type."""
    if x.dtype == tl.int64:
        return (x if SYMMETRIC else x ^ ((x >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        return widen(x, False)


@triton.jit
def higher(a, b):
    """The larger of what `comparable` gave, or NaN; of f64 as they are any number in its place."""
    if a.dtype == tl.bfloat16 or a.dtype == tl.float16:
        return two_at_a_time(a, b, "max.NaN.bf16x2 $0, $1, $2;", "max.NaN.f16x2 $0, $1, $2;")
    elif a.dtype == tl.float64:
        return tl.where(a > b, a, b)
    else:
        return larger(a, b)


@triton.jit
def lower(a, b):
    """The smaller of what `comparable` gave, or NaN; of f64 as they are any number in its place."""
    if a.dtype == tl.bfloat16 or a.dtype == tl.float16:
        return two_at_a_time(a, b, "min.NaN.bf16x2 $0, $1, $2;", "min.NaN.f16x2 $0, $1, $2;")
    elif a.dtype == tl.float64:
        return tl.where(a < b, a, b)
    else:
        return smaller(a, b)


@triton.jit
def further(place, STEPS: tl.constexpr, ALONG: tl.constexpr, DOWN: tl.constexpr):
    """The place of the tile so many steps of ALONG columns and DOWN lines, `stride` elements, away.

    A place is where a tile's lines start, its first column, its lines, how many of them there are and how wide, and
    that stride.
    """
    start, column, line, lines, width, stride = place
    return start + STEPS * stride, column + STEPS * ALONG, line + STEPS * DOWN, lines, width, stride


@triton.jit
def columns_of(place, COLS: tl.constexpr):
    """(offsets of its elements, which are there)."""
    start, column, line, lines, width, _ = place
    columns = column + tl.arange(0, COLS)[None, :]
    return start + columns, (line < lines) & (columns < width)


@triton.jit
def load_parts(
    x_ptr, place, ALONG: tl.constexpr, DOWN: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """PARTS tiles from a place on; what is not there is 0."""
    if PARTS == 1:
        offsets, mask = columns_of(place, COLS)
        return tl.load(x_ptr + offsets, mask=mask if MASKED else None, other=0.0 if MASKED else None)
    else:
        half: tl.constexpr = PARTS // 2
        near = load_parts(x_ptr, place, ALONG, DOWN, MASKED, half, COLS)
        far = load_parts(x_ptr, further(place, half, ALONG, DOWN), ALONG, DOWN, MASKED, half, COLS)
        return near, far


@triton.jit
def extreme(
    parts, place, HIGH: tl.constexpr, SYMMETRIC: tl.constexpr, ALONG: tl.constexpr, DOWN: tl.constexpr,
    MASKED: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The highest or lowest of all parts, [LINES, COLS]. What is not there changes no maximum of magnitudes."""
    if PARTS == 1:
        x = stored(parts)
        if MASKED and not SYMMETRIC:
            _, mask = columns_of(place, COLS)
            x = tl.where(mask, x, -INF if HIGH else INF).to(x.dtype)
        # Signed f64 are compared as they are, which is short where NaN need not be kept: `extremes` sees to it.
        return x if x.dtype == tl.float64 and not SYMMETRIC else comparable(x, SYMMETRIC)
    else:
        half: tl.constexpr = PARTS // 2
        there = further(place, half, ALONG, DOWN)
        a = extreme(parts[0], place, HIGH, SYMMETRIC, ALONG, DOWN, MASKED, half, COLS)
        b = extreme(parts[1], there, HIGH, SYMMETRIC, ALONG, DOWN, MASKED, half, COLS)
        return higher(a, b) if HIGH else lower(a, b)


@triton.jit
def any_nan(parts, PARTS: tl.constexpr):
    """Where one of the parts has a NaN, [LINES, COLS]."""
    if PARTS == 1:
        return parts != parts
    else:
        return any_nan(parts[0], PARTS // 2) | any_nan(parts[1], PARTS // 2)


@triton.jit
def nothing_yet(dtype: tl.constexpr, SYMMETRIC: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr):
    """(lows, highs) before anything was seen."""
    kept: tl.constexpr = tl.float32 if INTERPRETED and dtype != tl.float64 else dtype
    lows, highs = tl.full([LINES, COLS], INF, kept), tl.full([LINES, COLS], 0.0 if SYMMETRIC else -INF, kept)
    return comparable(lows, SYMMETRIC), comparable(highs, SYMMETRIC)


@triton.jit
def extremes(
    parts, place, SYMMETRIC: tl.constexpr, ALONG: tl.constexpr, DOWN: tl.constexpr, MASKED: tl.constexpr,
    PARTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """(lows, highs) of all parts; symmetric ranges have no low end."""
    highs = extreme(parts, place, True, SYMMETRIC, ALONG, DOWN, MASKED, PARTS, COLS)
    lows = highs
    if not SYMMETRIC:
        lows = extreme(parts, place, False, SYMMETRIC, ALONG, DOWN, MASKED, PARTS, COLS)
        if lows.dtype == tl.float64:
            highs = tl.where(any_nan(parts, PARTS), float("nan"), highs)
            lows, highs = comparable(lows, SYMMETRIC), comparable(highs, SYMMETRIC)
    return lows, highs


@triton.jit
def wider(
    lows, highs, parts, place, SYMMETRIC: tl.constexpr, ALONG: tl.constexpr, DOWN: tl.constexpr, MASKED: tl.constexpr,
    PARTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """(lows, highs) with the parts seen too."""
    low, high = extremes(parts, place, SYMMETRIC, ALONG, DOWN, MASKED, PARTS, COLS)
    return lows if SYMMETRIC else lower(lows, low), higher(highs, high)


@triton.jit
def span_of(lows, highs, axis: tl.constexpr, SYMMETRIC: tl.constexpr):
    """(low, high) along an axis, in the math type; symmetric: twice the largest magnitude."""
    if highs.dtype == tl.float16:  # its maximum with NaN takes more instructions than to widen it
        lows, highs = widen(lows, False), widen(highs, False)
    high = number(largest(highs, axis), SYMMETRIC)
    low = high if SYMMETRIC else number(smallest(lows, axis), SYMMETRIC)
    return low, high
