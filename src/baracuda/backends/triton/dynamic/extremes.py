"""The smallest and largest of what a program has read: exact, so in any order and as narrow as it was stored.

A program reads parts, tiles of [lines, columns], kept as pairs of pairs of tiles. A thread has the same place in all of
them, so they are compared first: 16-bit floats two at a time, before anything is widened or sent to another thread.
A tile has one vector for each thread, no more, so that loads and stores agree on which thread has what.

The constant TILE is the `tune.Tile` of a kernel. The next part lies to the right of a tile, or with STRIDED below it.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..numerics.comparisons import comparable, compared, higher, largest, lower, smallest
from ..numerics.conversions import INF, INTERPRETED, nan_where, widen


class Region(NamedTuple):
    """Where a tile lies: the offsets at which its lines start, its first column, its lines, how many of them exist and
    how wide they are, and the offset of the part below it."""

    start: Any
    column: Any
    line: Any
    lines: Any
    width: Any
    stride: Any


@triton.jit
def stored(x):
    """x as it is; the interpreter, which knows little of bf16, widens."""
    return widen(x, x.dtype == tl.float64) if INTERPRETED else x


@triton.jit
def further(region, STEPS: tl.constexpr, STRIDED: tl.constexpr, TILE: tl.constexpr):
    """The region of the part so many steps on."""
    along: tl.constexpr = 0 if STRIDED else TILE.columns
    down: tl.constexpr = TILE.lines if STRIDED else 0
    return Region(
        start=region.start + STEPS * region.stride,
        column=region.column + STEPS * along,
        line=region.line + STEPS * down,
        lines=region.lines,
        width=region.width,
        stride=region.stride,
    )


@triton.jit
def columns_of(region, TILE: tl.constexpr):
    """(offsets of its elements, which of them exist)."""
    columns = region.column + tl.arange(0, TILE.columns)[None, :]
    return region.start + columns, (region.line < region.lines) & (columns < region.width)


@triton.jit
def load_parts(x_ptr, region, STRIDED: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """PARTS tiles from a region on; what does not exist is 0."""
    if PARTS == 1:
        offsets, mask = columns_of(region, TILE)
        return tl.load(x_ptr + offsets, mask=mask if MASKED else None, other=0.0 if MASKED else None)
    else:
        half: tl.constexpr = PARTS // 2
        near = load_parts(x_ptr, region, STRIDED, MASKED, half, TILE)
        far = load_parts(x_ptr, further(region, half, STRIDED, TILE), STRIDED, MASKED, half, TILE)
        return near, far


@triton.jit
def extreme(
    parts, region, HIGH: tl.constexpr, SYMMETRIC: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The highest or lowest of all parts, [lines, columns]. What does not exist changes no maximum of magnitudes."""
    if PARTS == 1:
        x = stored(parts)
        if MASKED and not SYMMETRIC:
            _, mask = columns_of(region, TILE)
            x = tl.where(mask, x, -INF if HIGH else INF).to(x.dtype)
        # Signed f64 are compared as they are, which is short where NaN need not be kept: `extremes` sees to it.
        return x if x.dtype == tl.float64 and not SYMMETRIC else comparable(x, SYMMETRIC)
    else:
        half: tl.constexpr = PARTS // 2
        there = further(region, half, STRIDED, TILE)
        a = extreme(parts[0], region, HIGH, SYMMETRIC, STRIDED, MASKED, half, TILE)
        b = extreme(parts[1], there, HIGH, SYMMETRIC, STRIDED, MASKED, half, TILE)
        return higher(a, b) if HIGH else lower(a, b)


@triton.jit
def any_nan(parts, PARTS: tl.constexpr):
    """Where one of the parts has a NaN, [lines, columns]."""
    if PARTS == 1:
        return parts != parts
    else:
        return any_nan(parts[0], PARTS // 2) | any_nan(parts[1], PARTS // 2)


@triton.jit
def nothing_yet(dtype: tl.constexpr, SYMMETRIC: tl.constexpr, TILE: tl.constexpr):
    """(lows, highs) before anything was seen."""
    LINES: tl.constexpr = TILE.lines
    COLS: tl.constexpr = TILE.columns
    kept: tl.constexpr = tl.float32 if INTERPRETED and dtype != tl.float64 else dtype
    lows, highs = tl.full([LINES, COLS], INF, kept), tl.full([LINES, COLS], 0.0 if SYMMETRIC else -INF, kept)
    return comparable(lows, SYMMETRIC), comparable(highs, SYMMETRIC)


@triton.jit
def extremes(parts, region, SYMMETRIC: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr):
    """(lows, highs) of all parts; symmetric ranges have no low end."""
    PARTS: tl.constexpr = TILE.parts
    highs = extreme(parts, region, True, SYMMETRIC, STRIDED, MASKED, PARTS, TILE)
    lows = highs
    if not SYMMETRIC:
        lows = extreme(parts, region, False, SYMMETRIC, STRIDED, MASKED, PARTS, TILE)
        if lows.dtype == tl.float64:
            highs = nan_where(any_nan(parts, PARTS), highs)
            lows, highs = comparable(lows, SYMMETRIC), comparable(highs, SYMMETRIC)
    return lows, highs


@triton.jit
def wider(
    lows, highs, parts, region, SYMMETRIC: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """(lows, highs) with the parts seen too."""
    low, high = extremes(parts, region, SYMMETRIC, STRIDED, MASKED, TILE)
    return lows if SYMMETRIC else lower(lows, low), higher(highs, high)


@triton.jit
def span_of(lows, highs, axis: tl.constexpr, SYMMETRIC: tl.constexpr):
    """(low, high) along an axis, in the math type; symmetric: twice the largest magnitude."""
    if highs.dtype == tl.float16:  # its maximum with NaN takes more instructions than to widen it
        lows, highs = widen(lows, False), widen(highs, False)
    high = compared(largest(highs, axis), SYMMETRIC)
    low = high if SYMMETRIC else compared(smallest(lows, axis), SYMMETRIC)
    return low, high
