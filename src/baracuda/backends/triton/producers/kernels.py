"""Norms and gated products: a program makes whole rows in registers and quantizes them before it stores anything.

A row is read in parts, pairs of pairs of tiles, as the dynamic ranges do it (`dynamic.extremes`). A norm's part is one
step of its sum over SUM_LANES lanes, in the order of `formulas.row_sums`.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....core import types
from ..dynamic.extremes import Region, columns_of, extremes, further, load_parts, span_of
from ..dynamic.kernels import Dynamic, quantize_parts, settle
from ..elementwise.kernels import NEVER, Elementwise, Segment, divides, finish_tile
from ..numerics.conversions import load_scale, load_zero_point, narrow, widen
from ..numerics.indices import Place, as_offset, loop_bound
from ..numerics.nonlinearity import nonlinear
from ..numerics.norms import count_in_f64, from_f64, in_f64, inverse_root, mean_of
from ..numerics.rounding import FAR, PLAIN, awkward
from ..pdl import wait_for_previous

LANES = tl.constexpr(types.SUM_LANES)
STEPS = tl.constexpr(types.SUM_STEPS)


class Made(NamedTuple):
    """What becomes of the rows: the constant OUT. Without either they are stored as floats."""

    dynamic: Dynamic | None = None
    static: Elementwise | None = None


class Rule(NamedTuple):
    """What a norm computes: the constant RULE."""

    #: "llama", "gemma", "torch" or "layer".
    style: str
    #: The bits of a double: Triton would make a float of a number.
    eps: int
    f64: bool


class Target(NamedTuple):
    """Where results go, and what they are quantized by where that is given. What is not asked for is None."""

    scale_ptr: Any
    zero_point_ptr: Any
    out_ptr: Any


# -- what is done with a row ---------------------------------------------------------------------------------------


@triton.jit
def store_parts(out_ptr, parts, region, MASKED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    if PARTS == 1:
        offsets, mask = columns_of(region, TILE)
        tl.store(out_ptr + offsets, parts, mask=mask if MASKED else None)
    else:
        half: tl.constexpr = PARTS // 2
        store_parts(out_ptr, parts[0], region, MASKED, half, TILE)
        store_parts(out_ptr, parts[1], further(region, half, False, TILE), MASKED, half, TILE)


@triton.jit
def widened(parts, PARTS: tl.constexpr, F64: tl.constexpr):
    """The parts as `elementwise.finish_tile` takes them: pairs of the math type."""
    if PARTS == 1:
        x = widen(parts, F64)
        return x, x
    else:
        near, far = widened(parts[0], PARTS // 2, F64), widened(parts[1], PARTS // 2, F64)
        return near, far


@triton.jit
def hand_over(
    parts, target, region, index, keep, MASKED: tl.constexpr, TILE: tl.constexpr, DYNAMIC: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """Store rows that are made: as they are, by given scales, or by the scales of their own ranges."""
    PARTS: tl.constexpr = TILE.parts
    if DYNAMIC is not None:
        SYMMETRIC: tl.constexpr = DYNAMIC.range.symmetric
        lows, highs = extremes(parts, region, SYMMETRIC, False, MASKED, TILE)
        low, high = span_of(lows, highs, 1, SYMMETRIC)
        prepared = settle(low, high, target.scale_ptr, target.zero_point_ptr, index, keep, 1, DYNAMIC)
        quantize_parts(target.out_ptr, parts, region, prepared, False, MASKED, PARTS, TILE, DYNAMIC)
    elif STATIC is not None:
        F64: tl.constexpr = STATIC.quantizer.f64
        may_be_nan: tl.constexpr = target.scale_ptr.dtype.is_ptr()
        none: tl.constexpr = target.zero_point_ptr is None
        segment = Segment(
            scale=load_scale(target.scale_ptr, 0, None, F64),
            zero_point=None if none else load_zero_point(target.zero_point_ptr, 0, None),
        )
        place = Place(start=region.start, column=0, width=region.width, valid=region.line < region.lines)
        tile = widened(parts, PARTS, F64)
        if divides(STATIC.quantizer.reciprocal, STATIC.op) and awkward(segment.scale, segment.zero_point, F64):
            finish_tile(tile, target.out_ptr, segment, place, may_be_nan, MASKED, FAR, PARTS, STATIC)
        else:
            finish_tile(tile, target.out_ptr, segment, place, may_be_nan, MASKED, PLAIN, PARTS, STATIC)
    else:
        store_parts(target.out_ptr, parts, region, MASKED, PARTS, TILE)


# -- norms ---------------------------------------------------------------------------------------------------------


@triton.jit
def added(x_ptr, addend_ptr, sum_ptr, region, MASKED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """The parts of x, or those of the rounded sum with the addend, which is stored."""
    if addend_ptr is None:
        return load_parts(x_ptr, region, False, MASKED, PARTS, TILE)
    elif PARTS == 1:
        F64: tl.constexpr = x_ptr.dtype.element_ty == tl.float64
        offsets, inside = columns_of(region, TILE)
        mask = inside if MASKED else None
        x = widen(tl.load(x_ptr + offsets, mask=mask, other=0.0 if MASKED else None), F64)
        y = widen(tl.load(addend_ptr + offsets, mask=mask, other=0.0 if MASKED else None), F64)
        total = narrow(x + y, x_ptr.dtype.element_ty, True)
        tl.store(sum_ptr + offsets, total, mask=mask)
        return total
    else:
        half: tl.constexpr = PARTS // 2
        near = added(x_ptr, addend_ptr, sum_ptr, region, MASKED, half, TILE)
        far = added(x_ptr, addend_ptr, sum_ptr, further(region, half, False, TILE), MASKED, half, TILE)
        return near, far


@triton.jit
def summed(
    lanes, parts, mean, region, SQUARES: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr
):
    """The lanes with the values of the parts added, in order, or their squares: of x, or less a mean where one is
    given."""
    if PARTS == 1:
        x = in_f64(parts)
        if mean is not None:
            _, mask = columns_of(region, TILE)
            x = tl.where(mask, x - mean, 0.0) if MASKED else x - mean
        return lanes + (x * x if SQUARES else x)
    else:
        half: tl.constexpr = PARTS // 2
        lanes = summed(lanes, parts[0], mean, region, SQUARES, MASKED, half, TILE)
        return summed(lanes, parts[1], mean, further(region, half, False, TILE), SQUARES, MASKED, half, TILE)


@triton.jit
def neighbours(lanes, COUNT: tl.constexpr):
    """The lanes [1, COUNT] as one sum, [1]: neighbours are added until one is left.

    A thread has neighbours, so the first levels need no other thread. Spelled out, since a reduction over a longer axis
    leaves its order to the layout; two terms have only one.
    """
    for i in tl.static_range(10):
        if (COUNT >> i) > 1:
            lanes = tl.sum(tl.reshape(lanes, [1, COUNT >> (i + 1), 2]), 2)
    return tl.reshape(lanes, [1])


@triton.jit
def block_sums(
    parts, mean, region, SQUARES: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr
):
    """The sum of each block of STEPS parts, as pairs of pairs like the parts themselves."""
    COLS: tl.constexpr = TILE.columns
    if PARTS <= STEPS:
        zeros = tl.zeros([1, COLS], tl.float64)
        return neighbours(summed(zeros, parts, mean, region, SQUARES, MASKED, PARTS, TILE), COLS)
    else:
        half: tl.constexpr = PARTS // 2
        near = block_sums(parts[0], mean, region, SQUARES, MASKED, half, TILE)
        far = block_sums(parts[1], mean, further(region, half, False, TILE), SQUARES, MASKED, half, TILE)
        return near, far


@triton.jit
def total_of(sums, COUNT: tl.constexpr):
    """The sums of COUNT blocks as one: neighbours are added until one is left."""
    if COUNT == 1:
        return sums
    else:
        return total_of(sums[0], COUNT // 2) + total_of(sums[1], COUNT // 2)


@triton.jit
def row_sum(parts, mean, region, SQUARES: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr):
    """The sum of a row, [1]."""
    BLOCKS: tl.constexpr = TILE.parts // STEPS if TILE.parts > STEPS else 1
    return total_of(block_sums(parts, mean, region, SQUARES, MASKED, TILE.parts, TILE), BLOCKS)


@triton.jit
def normalized(
    parts, weight_ptr, bias_ptr, mean, inverse, region, MASKED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    """The parts of a row normed, in their own type; what does not exist is 0."""
    if PARTS == 1:
        F64: tl.constexpr = RULE.f64
        dtype: tl.constexpr = parts.dtype
        columns = region.column + tl.arange(0, TILE.columns)[None, :]
        inside = columns < region.width if MASKED else None
        if mean is None:
            x = widen(parts, F64)
        else:
            x = from_f64(in_f64(parts) - mean, F64)
        y = x * inverse
        if RULE.style == "llama":
            y = widen(narrow(y, dtype, True), F64)
        if weight_ptr is not None:
            weight = widen(tl.load(weight_ptr + columns, mask=inside, other=0.0 if MASKED else None), F64)
            y = y * (weight + 1.0 if RULE.style == "gemma" else weight)
        if bias_ptr is not None:
            y = y + widen(tl.load(bias_ptr + columns, mask=inside, other=0.0 if MASKED else None), F64)
        if MASKED:
            y = tl.where(inside, y, 0.0)
        return narrow(y, dtype, True)
    else:
        half: tl.constexpr = PARTS // 2
        there = further(region, half, False, TILE)
        near = normalized(parts[0], weight_ptr, bias_ptr, mean, inverse, region, MASKED, half, TILE, RULE)
        far = normalized(parts[1], weight_ptr, bias_ptr, mean, inverse, there, MASKED, half, TILE, RULE)
        return near, far


@triton.jit
def norm(
    x_ptr, addend_ptr, weight_ptr, bias_ptr, sum_ptr, target, lines, width, SCAN: tl.constexpr, RULE: tl.constexpr,
    OUT: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """A row of up to a tile's parts times columns in each program."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    MASKED: tl.constexpr = SCAN.mask != NEVER
    EPS: tl.constexpr = RULE.eps
    DYNAMIC: tl.constexpr = OUT.dynamic
    STATIC: tl.constexpr = OUT.static
    index = as_offset(tl.program_id(0), SCAN.wide) + tl.arange(0, 1)
    line = index[:, None]
    region = Region(start=line * width, column=0, line=line, lines=lines, width=width, stride=0)
    parts = added(x_ptr, addend_ptr, sum_ptr, region, MASKED, TILE.parts, TILE)
    size = count_in_f64(width)
    math: tl.constexpr = tl.float64 if RULE.f64 else tl.float32
    if RULE.style == "layer":
        mean = mean_of(row_sum(parts, None, region, False, MASKED, TILE), size)[:, None]
        squares = row_sum(parts, mean, region, True, MASKED, TILE)
        inverse = inverse_root(squares, size, EPS).to(math)[:, None]
        parts = normalized(parts, weight_ptr, bias_ptr, mean, inverse, region, MASKED, TILE.parts, TILE, RULE)
    else:
        squares = row_sum(parts, None, region, True, MASKED, TILE)
        inverse = inverse_root(squares, size, EPS).to(math)[:, None]
        parts = normalized(parts, weight_ptr, bias_ptr, None, inverse, region, MASKED, TILE.parts, TILE, RULE)
    hand_over(parts, target, region, index, None, MASKED, TILE, DYNAMIC, STATIC)


@triton.jit
def long_sum(x_ptr, start, mean, lines, line, width, SQUARES: tl.constexpr, TILE: tl.constexpr):
    """The sum of a row of any length, [1]; a tile's parts are one block of the sum."""
    lane = tl.arange(0, LANES)[None, :]
    totals = tl.zeros([1, LANES], tl.float64)
    across: tl.constexpr = STEPS * LANES
    for column in range(0, loop_bound(width), across):
        region = Region(start=start, column=column, line=line, lines=lines, width=width, stride=0)
        parts = load_parts(x_ptr, region, False, True, TILE.parts, TILE)
        block = block_sums(parts, mean, region, SQUARES, True, TILE.parts, TILE)
        totals += tl.where(lane == column // across % LANES, block[:, None], 0.0)
    return neighbours(totals, LANES)


@triton.jit
def long_norm(
    x_ptr, addend_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, lines, width, SCAN: tl.constexpr, RULE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """A row of any length in each program, read again for every sum and for the result, as floats."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    EPS: tl.constexpr = RULE.eps
    line = (tl.program_id(0) + tl.arange(0, 1))[:, None]
    start = as_offset(line, SCAN.wide) * width
    across: tl.constexpr = TILE.parts * TILE.columns
    from_ptr = x_ptr
    if addend_ptr is not None:
        from_ptr = sum_ptr
        for column in range(0, loop_bound(width), across):
            region = Region(start=start, column=column, line=line, lines=lines, width=width, stride=0)
            added(x_ptr, addend_ptr, sum_ptr, region, True, TILE.parts, TILE)
        tl.debug_barrier()  # what other threads have stored is read from here on
    size = count_in_f64(width)
    math: tl.constexpr = tl.float64 if RULE.f64 else tl.float32
    mean = size[:, None]
    if RULE.style == "layer":
        mean = mean_of(long_sum(from_ptr, start, None, lines, line, width, False, TILE), size)[:, None]
        squares = long_sum(from_ptr, start, mean, lines, line, width, True, TILE)
    else:
        squares = long_sum(from_ptr, start, None, lines, line, width, True, TILE)
    inverse = inverse_root(squares, size, EPS).to(math)[:, None]
    for column in range(0, loop_bound(width), across):
        region = Region(start=start, column=column, line=line, lines=lines, width=width, stride=0)
        parts = load_parts(from_ptr, region, False, True, TILE.parts, TILE)
        if RULE.style == "layer":
            y = normalized(parts, weight_ptr, bias_ptr, mean, inverse, region, True, TILE.parts, TILE, RULE)
            store_parts(out_ptr, y, region, True, TILE.parts, TILE)
        else:
            y = normalized(parts, weight_ptr, bias_ptr, None, inverse, region, True, TILE.parts, TILE, RULE)
            store_parts(out_ptr, y, region, True, TILE.parts, TILE)


# -- gated products ------------------------------------------------------------------------------------------------


@triton.jit
def products(gate, up, KIND: tl.constexpr, PARTS: tl.constexpr):
    """nonlinearity(gate), rounded, times up, rounded."""
    if PARTS == 1:
        F64: tl.constexpr = gate.dtype == tl.float64
        dtype: tl.constexpr = gate.dtype
        factor = narrow(nonlinear(widen(gate, F64), KIND, F64), dtype, True)
        return narrow(widen(factor, F64) * widen(up, F64), dtype, True)
    else:
        near = products(gate[0], up[0], KIND, PARTS // 2)
        far = products(gate[1], up[1], KIND, PARTS // 2)
        return near, far


@triton.jit
def gated(
    gate_ptr, up_ptr, target, lines, width, SCAN: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Rows of up to a tile's parts times columns, one a line. Without `up_ptr` both halves lie in the gate's rows."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    MASKED: tl.constexpr = SCAN.mask != NEVER
    DYNAMIC: tl.constexpr = OUT.dynamic
    STATIC: tl.constexpr = OUT.static
    index = as_offset(tl.program_id(0), SCAN.wide) * TILE.lines + tl.arange(0, TILE.lines)
    line = index[:, None]
    region = Region(start=line * width, column=0, line=line, lines=lines, width=width, stride=0)
    if up_ptr is None:
        first = Region(start=line * (2 * width), column=0, line=line, lines=lines, width=width, stride=0)
        gate = load_parts(gate_ptr, first, False, MASKED, TILE.parts, TILE)
        up = load_parts(gate_ptr + width, first, False, MASKED, TILE.parts, TILE)
        parts = products(gate, up, KIND, TILE.parts)
    else:
        gate = load_parts(gate_ptr, region, False, MASKED, TILE.parts, TILE)
        up = load_parts(up_ptr, region, False, MASKED, TILE.parts, TILE)
        parts = products(gate, up, KIND, TILE.parts)
    keep = index < lines if MASKED else None
    hand_over(parts, target, region, index, keep, MASKED, TILE, DYNAMIC, STATIC)


@triton.jit
def long_gated(
    gate_ptr, up_ptr, out_ptr, lines, width, blocks, SCAN: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr = False
):
    """Pieces of rows of any length, as floats, `blocks` of them in a row."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    program = as_offset(tl.program_id(0), SCAN.wide)
    line = (program // blocks + tl.arange(0, 1))[:, None]
    column = program % blocks * (TILE.parts * TILE.columns)
    region = Region(start=line * width, column=column, line=line, lines=lines, width=width, stride=0)
    if up_ptr is None:
        first = Region(start=line * (2 * width), column=column, line=line, lines=lines, width=width, stride=0)
        gate = load_parts(gate_ptr, first, False, True, TILE.parts, TILE)
        up = load_parts(gate_ptr + width, first, False, True, TILE.parts, TILE)
        store_parts(out_ptr, products(gate, up, KIND, TILE.parts), region, True, TILE.parts, TILE)
    else:
        gate = load_parts(gate_ptr, region, False, True, TILE.parts, TILE)
        up = load_parts(up_ptr, region, False, True, TILE.parts, TILE)
        store_parts(out_ptr, products(gate, up, KIND, TILE.parts), region, True, TILE.parts, TILE)
