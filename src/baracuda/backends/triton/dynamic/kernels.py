"""Dynamic ranges: kernels that find each segment's scale and, while it is at hand, quantize the segment too.

`rows` and `blocks` hold whole segments in registers: one read, one write. `long_rows` reads a segment twice, the second
time from the cache. The others find ranges in two stages, `partial` and `finish`, and leave the quantization to the
elementwise kernels.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: SIM114
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..elementwise.kernels import NEVER
from ..numerics.comparisons import clamp_down, comparable, higher, lower
from ..numerics.conversions import INF, narrow, widen
from ..numerics.division import Divisor, prepare_positive, times
from ..numerics.indices import Place, as_offset, loop_bound, split_index
from ..numerics.packing import Storage, store_quantized
from ..numerics.qparams import Range, choose_qparams
from ..numerics.rounding import (
    HELD,
    Bounds,
    Quantizer,
    bounds_of,
    quantize_steps,
    step_bits,
    step_lacks,
    step_rest,
    step_value,
)
from ..pdl import wait_for_previous
from ..tune import Tile
from .extremes import Region, columns_of, extremes, further, load_parts, nothing_yet, span_of, wider

#: Which bounds a quotient by its own range's scale is clamped to, and where. Such a quotient is bounded or NaN, and a
#: symmetric one rounds to q_max at most unless its scale was rounded to 16 bits. Where a zero point is added to an
#: integer anyway, the same instruction clamps it.
BOTH, LOW, OF_THE_INTEGER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Scan(NamedTuple):
    """How a kernel reads segments: the constant SCAN."""

    tile: Tile
    #: NEVER, or a tile may reach over the edge.
    mask: int
    #: Offsets take 64 bits.
    wide: bool


class Dynamic(NamedTuple):
    """How ranges become scales and elements integers: the constant SPEC."""

    range: Range
    quantizer: Quantizer
    storage: Storage
    #: BOTH, LOW or OF_THE_INTEGER.
    bounds: int


class Prepared(NamedTuple):
    """What `quantize_parts` needs of segments: their scales, and of their zero points what the bits of a step lack."""

    scale: Any
    divisor: Divisor
    #: With OF_THE_INTEGER, low and high are those of the integer less q_min.
    bounds: Bounds
    rest: Any


@triton.jit
def settle(low, high, scale_ptr, zero_point_ptr, where, keep, AXIS: tl.constexpr, SPEC: tl.constexpr):
    """Scales and zero points of segments that span [low, high]: stored where they are asked for, and prepared along an
    axis of length 1.

    As an integer NaN is above every bound. Its scale knows of it, and nothing of such a segment is above q_min.
    """
    RANGE: tl.constexpr = SPEC.range
    QUANTIZER: tl.constexpr = SPEC.quantizer
    F64: tl.constexpr = QUANTIZER.f64
    SYMMETRIC: tl.constexpr = RANGE.symmetric
    q_min: tl.constexpr = SPEC.quantizer.q_min
    q_max: tl.constexpr = SPEC.quantizer.q_max
    math: tl.constexpr = tl.float64 if F64 else tl.float32
    dtype: tl.constexpr = math if scale_ptr is None else scale_ptr.dtype.element_ty
    stored, scale, zero_point = choose_qparams(low, high, dtype, RANGE, QUANTIZER)
    if scale_ptr is not None:
        tl.store(scale_ptr + where, stored, mask=keep)
    if zero_point_ptr is not None:
        tl.store(zero_point_ptr + where, zero_point, mask=keep)
    scale, zero_point = tl.expand_dims(scale, AXIS), tl.expand_dims(zero_point, AXIS)
    divisor = prepare_positive(scale, SPEC.quantizer.reciprocal, F64)
    bounds = bounds_of(None if SYMMETRIC else zero_point, QUANTIZER)
    rest = 0 if SYMMETRIC else step_rest(zero_point, F64)
    if SPEC.bounds == OF_THE_INTEGER:
        bounds = Bounds(low=0, high=tl.where(scale < INF, q_max - q_min, 0), shift=bounds.shift)
        rest = rest - (q_min - step_lacks(F64))
    return Prepared(scale=scale, divisor=divisor, bounds=bounds, rest=rest)


@triton.jit
def quantize_parts(
    out_ptr, parts, region, prepared, STRIDED: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Quantize what `load_parts` loaded and store it; as floats again where the output holds floats."""
    if PARTS == 1:
        F64: tl.constexpr = SPEC.quantizer.f64
        RECIPROCAL: tl.constexpr = SPEC.quantizer.reciprocal
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        divisor, bounds = prepared.divisor, prepared.bounds
        x = widen(parts, F64) if RECIPROCAL else times(parts, divisor.factor, F64)
        place = Place(start=region.start, column=region.column, width=region.width, valid=region.line < region.lines)
        COLS: tl.constexpr = TILE.columns
        packed: tl.constexpr = SPEC.storage.packed
        each: tl.constexpr = SPEC.storage.each
        if SPEC.bounds == OF_THE_INTEGER:
            anything = Bounds(low=None, high=None, shift=bounds.shift)
            step = quantize_steps(x, divisor, anything, RECIPROCAL, HELD, F64)
            q = clamp_down(step_bits(step, F64) + prepared.rest, bounds.low, bounds.high)
            q_min: tl.constexpr = SPEC.quantizer.q_min
            store_quantized(out_ptr, q, 0, place, MASKED, packed, each, q_min, False, COLS, 0)
        else:
            if SPEC.bounds == LOW:
                bounds = Bounds(low=bounds.low, high=None, shift=bounds.shift)
            step = quantize_steps(x, divisor, bounds, RECIPROCAL, HELD, F64)
            if dtype.is_floating():
                offsets, mask = columns_of(region, TILE)
                y = narrow(step_value(step, bounds, F64) * prepared.scale, dtype, True, True)
                tl.store(out_ptr + offsets, y, mask=mask if MASKED else None)
            else:
                per_column: tl.constexpr = STRIDED and not SPEC.range.symmetric
                lacks: tl.constexpr = step_lacks(F64)
                bits = step_bits(step, F64)
                store_quantized(out_ptr, bits, prepared.rest, place, MASKED, packed, each, lacks, per_column, COLS, 0)
    else:
        half: tl.constexpr = PARTS // 2
        there = further(region, half, STRIDED, TILE)
        quantize_parts(out_ptr, parts[0], region, prepared, STRIDED, MASKED, half, TILE, SPEC)
        quantize_parts(out_ptr, parts[1], there, prepared, STRIDED, MASKED, half, TILE, SPEC)


@triton.jit
def rows(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, lines, width, SCAN: tl.constexpr, SPEC: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Contiguous segments of up to a tile's parts times columns, one a line."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    MASKED: tl.constexpr = SCAN.mask != NEVER
    SYMMETRIC: tl.constexpr = SPEC.range.symmetric
    index = as_offset(tl.program_id(0), SCAN.wide) * TILE.lines + tl.arange(0, TILE.lines)
    line = index[:, None]
    region = Region(start=line * width, column=0, line=line, lines=lines, width=width, stride=0)
    parts = load_parts(x_ptr, region, False, MASKED, TILE.parts, TILE)
    lows, highs = extremes(parts, region, SYMMETRIC, False, MASKED, TILE)
    low, high = span_of(lows, highs, 1, SYMMETRIC)
    keep = index < lines if MASKED else None
    prepared = settle(low, high, scale_ptr, zero_point_ptr, index, keep, 1, SPEC)
    if out_ptr is not None:
        quantize_parts(out_ptr, parts, region, prepared, False, MASKED, TILE.parts, TILE, SPEC)


@triton.jit
def strided_region(row, column, line, run, inner, SCAN: tl.constexpr):
    """Lines of [row, run, inner] as they lie; parts lie below each other."""
    start = (row * run + line) * inner
    stride = SCAN.tile.lines * as_offset(inner, SCAN.wide)
    return Region(start=start, column=column, line=line, lines=run, width=inner, stride=stride)


@triton.jit
def blocks(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, run, inner, blocks, SCAN: tl.constexpr, SPEC: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Strided segments of up to a tile's parts times lines, one a column. `blocks` is a Split."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    MASKED: tl.constexpr = SCAN.mask != NEVER
    SYMMETRIC: tl.constexpr = SPEC.range.symmetric
    row, block = split_index(tl.program_id(0), blocks, SCAN.wide)
    column = block * TILE.columns
    region = strided_region(row, column, tl.arange(0, TILE.lines)[:, None], run, inner, SCAN)
    parts = load_parts(x_ptr, region, True, MASKED, TILE.parts, TILE)
    lows, highs = extremes(parts, region, SYMMETRIC, True, MASKED, TILE)
    low, high = span_of(lows, highs, 0, SYMMETRIC)
    index = column + tl.arange(0, TILE.columns)
    keep = index < inner if MASKED else None
    prepared = settle(low, high, scale_ptr, zero_point_ptr, row * inner + index, keep, 0, SPEC)
    if out_ptr is not None:
        quantize_parts(out_ptr, parts, region, prepared, True, MASKED, TILE.parts, TILE, SPEC)


@triton.jit
def wider_at(x_ptr, lows, highs, region, inside, SYMMETRIC: tl.constexpr, SCAN: tl.constexpr):
    """(lows, highs) with the parts from a region on seen too, read without a mask where they are `inside`."""
    TILE: tl.constexpr = SCAN.tile
    if SCAN.mask == NEVER:
        parts = load_parts(x_ptr, region, False, False, TILE.parts, TILE)
        lows, highs = wider(lows, highs, parts, region, SYMMETRIC, False, False, TILE)
    elif inside:
        parts = load_parts(x_ptr, region, False, False, TILE.parts, TILE)
        lows, highs = wider(lows, highs, parts, region, SYMMETRIC, False, False, TILE)
    else:
        parts = load_parts(x_ptr, region, False, True, TILE.parts, TILE)
        lows, highs = wider(lows, highs, parts, region, SYMMETRIC, False, True, TILE)
    return lows, highs


@triton.jit
def quantize_again(x_ptr, out_ptr, region, prepared, MASKED: tl.constexpr, TILE: tl.constexpr, SPEC: tl.constexpr):
    """Load the parts from a region on a second time, and quantize them."""
    parts = load_parts(x_ptr, region, False, MASKED, TILE.parts, TILE)
    quantize_parts(out_ptr, parts, region, prepared, False, MASKED, TILE.parts, TILE, SPEC)


@triton.jit
def long_rows(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, lines, width, SCAN: tl.constexpr, SPEC: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Contiguous segments of any length, one a program, in two passes. A tile has one line."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    SYMMETRIC: tl.constexpr = SPEC.range.symmetric
    index = tl.program_id(0) + tl.arange(0, TILE.lines)
    line = index[:, None]
    start = as_offset(line, SCAN.wide) * width
    across: tl.constexpr = TILE.parts * TILE.columns
    lows, highs = nothing_yet(x_ptr.dtype.element_ty, SYMMETRIC, TILE)
    for column in range(0, loop_bound(width), across):
        region = Region(start=start, column=column, line=line, lines=lines, width=width, stride=0)
        lows, highs = wider_at(x_ptr, lows, highs, region, column + across <= width, SYMMETRIC, SCAN)
    low, high = span_of(lows, highs, 1, SYMMETRIC)
    prepared = settle(low, high, scale_ptr, zero_point_ptr, index, None, 1, SPEC)
    if out_ptr is not None:
        last = (width - 1) // across * across
        for i in range(0, loop_bound(width), across):
            column = last - i  # backwards: what was read last is nearest
            region = Region(start=start, column=column, line=line, lines=lines, width=width, stride=0)
            if SCAN.mask == NEVER:
                quantize_again(x_ptr, out_ptr, region, prepared, False, TILE, SPEC)
            elif column + across <= width:  # without a mask, so that a line of odd length is read as fast as any
                quantize_again(x_ptr, out_ptr, region, prepared, False, TILE, SPEC)
            else:
                quantize_again(x_ptr, out_ptr, region, prepared, True, TILE, SPEC)


@triton.jit
def partial(
    x_ptr, low_ptr, high_ptr, repeat, rows, run, column_blocks, items, chunks, SYMMETRIC: tl.constexpr,
    SCAN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """The range of one chunk of a segment made of runs: `items` tiles, taken in turns by `chunks` programs."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    program = as_offset(tl.program_id(0), SCAN.wide)
    row, chunk = program % rows, program // rows
    lows, highs = nothing_yet(x_ptr.dtype.element_ty, SYMMETRIC, TILE)
    across: tl.constexpr = TILE.parts * TILE.columns
    for item in range(loop_bound(chunk), loop_bound(items), loop_bound(chunks)):
        top, left = item // column_blocks * TILE.lines, item % column_blocks * across
        line = top + tl.arange(0, TILE.lines)[:, None]
        region = Region(start=(line * rows + row) * run, column=left, line=line, lines=repeat, width=run, stride=0)
        inside = (top + TILE.lines <= repeat) & (left + across <= run)
        lows, highs = wider_at(x_ptr, lows, highs, region, inside, SYMMETRIC, SCAN)
    where = chunk * rows + row + tl.arange(0, 1)
    elements: tl.constexpr = TILE.lines * TILE.columns
    lows, highs = tl.reshape(lows, (1, elements)), tl.reshape(highs, (1, elements))
    low, high = span_of(lows, highs, 1, SYMMETRIC)
    tl.store(high_ptr + where, high)
    if not SYMMETRIC:
        tl.store(low_ptr + where, low)


@triton.jit
def partial_columns(
    x_ptr, low_ptr, high_ptr, rows, run, inner, column_blocks, span, SYMMETRIC: tl.constexpr, SCAN: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """The ranges of neighbouring strided segments, a tile's columns, over `span` lines of their run."""
    wait_for_previous(PDL)
    TILE: tl.constexpr = SCAN.tile
    MASKED: tl.constexpr = SCAN.mask != NEVER
    program = as_offset(tl.program_id(0), SCAN.wide)
    column, above = program % column_blocks * TILE.columns, program // column_blocks
    row, chunk = above % rows, above // rows
    lows, highs = nothing_yet(x_ptr.dtype.element_ty, SYMMETRIC, TILE)
    end = tl.minimum(chunk * span + span, run)
    for first in range(loop_bound(chunk * span), loop_bound(end), TILE.parts * TILE.lines):
        line = as_offset(first + tl.arange(0, TILE.lines)[:, None], SCAN.wide)
        region = strided_region(row, column, line, run, inner, SCAN)
        parts = load_parts(x_ptr, region, True, MASKED, TILE.parts, TILE)
        lows, highs = wider(lows, highs, parts, region, SYMMETRIC, True, MASKED, TILE)
    index = column + tl.arange(0, TILE.columns)
    where = (chunk * rows + row).to(tl.int64) * inner + index
    keep = index < inner
    low, high = span_of(lows, highs, 0, SYMMETRIC)
    tl.store(high_ptr + where, high, mask=keep)
    if not SYMMETRIC:
        tl.store(low_ptr + where, low, mask=keep)


@triton.jit
def finish(
    low_ptr, high_ptr, scale_ptr, zero_point_ptr, chunks, segments, RANGE: tl.constexpr, QUANTIZER: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Scales from partial ranges, [chunks, segments]. Without any chunk the segments are empty."""
    wait_for_previous(PDL)
    SYMMETRIC: tl.constexpr = RANGE.symmetric
    COLS: tl.constexpr = TILE.columns
    index = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    keep = index < segments
    math: tl.constexpr = tl.float64 if QUANTIZER.f64 else tl.float32
    if high_ptr is None:
        high = tl.full([COLS], 0.0, math)
        low = high
    else:
        lows, highs = nothing_yet(math, SYMMETRIC, TILE)
        for first in range(0, loop_bound(chunks), TILE.lines):
            line = first + tl.arange(0, TILE.lines)[:, None]
            mask = (line < chunks) & keep[None, :]
            offsets = line.to(tl.int64) * segments + index[None, :]
            part = tl.load(high_ptr + offsets, mask=mask, other=0.0 if SYMMETRIC else -INF)
            highs = higher(highs, comparable(part, SYMMETRIC))
            if not SYMMETRIC:
                lows = lower(lows, comparable(tl.load(low_ptr + offsets, mask=mask, other=INF), SYMMETRIC))
        low, high = span_of(lows, highs, 0, SYMMETRIC)
    stored, _, zero_point = choose_qparams(low, high, scale_ptr.dtype.element_ty, RANGE, QUANTIZER)
    tl.store(scale_ptr + index, stored, mask=keep)
    if zero_point_ptr is not None:
        tl.store(zero_point_ptr + index, zero_point, mask=keep)
