"""Dynamic ranges: kernels that find each segment's scale and, where it still is at hand, quantize the segment too.

`rows` and `blocks` hold whole segments in registers: one read, one write. `long_rows` reads a segment twice, the second
time from the cache. The others find ranges in two stages, `partial` and `finish`, and leave the quantization to the
elementwise kernels.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: PLR5501
from __future__ import annotations

import triton
import triton.language as tl

from .elementwise import NEVER, store_quantized
from .numerics import (
    HELD,
    INF,
    bounds,
    lanes,
    larger,
    largest,
    loop_bound,
    narrow,
    prepare_positive,
    quantize_steps,
    smaller,
    smallest,
    step_bits,
    step_rest,
    step_value,
    widen,
)
from .qparams import choose_qparams, ordered, unordered


@triton.jit
def lowest_of(x, mask, MASKED: tl.constexpr, SYMMETRIC: tl.constexpr):
    """What a minimum is taken of; symmetric ranges have none."""
    return ordered(tl.where(mask, x, INF).to(x.dtype) if MASKED else x, SYMMETRIC)


@triton.jit
def highest_of(x, mask, MASKED: tl.constexpr, SYMMETRIC: tl.constexpr):
    """What a maximum is taken of. Masked elements are loaded as zeros, which change no maximum of magnitudes."""
    return ordered(tl.where(mask, x, -INF).to(x.dtype) if MASKED and not SYMMETRIC else x, SYMMETRIC)


@triton.jit
def nothing_yet(SYMMETRIC: tl.constexpr, F64: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr):
    """(lows, highs) before anything was seen."""
    math: tl.constexpr = tl.float64 if F64 else tl.float32
    highs = tl.full([LINES, COLS], 0.0 if SYMMETRIC else -INF, math)
    return ordered(tl.full([LINES, COLS], INF, math), SYMMETRIC), ordered(highs, SYMMETRIC)


@triton.jit
def wider(lows, highs, x, mask, MASKED: tl.constexpr, SYMMETRIC: tl.constexpr):
    """(lows, highs) with x seen too."""
    highs = larger(highs, highest_of(x, mask, MASKED, SYMMETRIC))
    if not SYMMETRIC:
        lows = smaller(lows, lowest_of(x, mask, MASKED, SYMMETRIC))
    return lows, highs


@triton.jit
def span_of(lows, highs, axis: tl.constexpr, SYMMETRIC: tl.constexpr, F64: tl.constexpr):
    """(low, high) along an axis; symmetric: twice the largest magnitude."""
    high = unordered(largest(highs, axis), SYMMETRIC, F64)
    low = high if SYMMETRIC else unordered(smallest(lows, axis), SYMMETRIC, F64)
    return low, high


@triton.jit
def range_of(x, mask, MASKED: tl.constexpr, axis: tl.constexpr, SYMMETRIC: tl.constexpr, F64: tl.constexpr):
    """(low, high) of a tile along an axis."""
    lows = lowest_of(x, mask, MASKED, SYMMETRIC)
    return span_of(lows, highest_of(x, mask, MASKED, SYMMETRIC), axis, SYMMETRIC, F64)


@triton.jit
def quantize_tile(
    out_ptr, x, scale, zero_point, start, column, width, valid, MASKED: tl.constexpr, SYMMETRIC: tl.constexpr,
    RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, PACKED: tl.constexpr,
    PER_COLUMN: tl.constexpr, F64: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Quantize x, [LINES, COLS] in the math type, and store it; as floats again where the output holds floats."""
    divisor, reciprocal, factor = prepare_positive(scale, RECIPROCAL, F64)
    low, high, shift = bounds(0 if SYMMETRIC else zero_point, not SYMMETRIC, Q_MIN, Q_MAX, F64)
    m = quantize_steps(x, divisor, reciprocal, factor, low, high, shift, RECIPROCAL, HELD, F64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if dtype.is_floating():
        columns = column + lanes(COLS, VECTOR)[None, :]
        mask = valid & (columns < width) if MASKED else None
        tl.store(out_ptr + start + columns, narrow(step_value(m, shift, F64) * scale, dtype, True), mask=mask)
    else:
        rest = 0 if SYMMETRIC else step_rest(zero_point, F64)
        bits = step_bits(m, F64)
        per_column: tl.constexpr = PER_COLUMN and not SYMMETRIC
        store_quantized(
            out_ptr, bits, rest, start, column, width, valid, MASKED, PACKED, per_column, LINES, COLS, VECTOR
        )


@triton.jit
def rows(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, lines, width, MASK: tl.constexpr, SYMMETRIC: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr,
    SMALLEST: tl.constexpr, PACKED: tl.constexpr, F64: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr,
    COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Contiguous segments of up to COLS elements, LINES of them a program."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    start = (line.to(tl.int64) if WIDE else line)[:, None] * width
    valid = (line < lines)[:, None]
    columns = tl.arange(0, COLS)[None, :]
    masked: tl.constexpr = MASK != NEVER
    mask = valid & (columns < width) if masked else None
    x = widen(tl.load(x_ptr + start + columns, mask=mask, other=0.0 if masked else None), F64)
    low, high = range_of(x, mask, masked, 1, SYMMETRIC, F64)
    dtype: tl.constexpr = scale_ptr.dtype.element_ty
    stored, scale, zero_point = choose_qparams(
        low, high, dtype, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL, Q_MIN, Q_MAX, SMALLEST, F64
    )
    keep = line < lines if masked else None
    tl.store(scale_ptr + line, stored, mask=keep)
    if zero_point_ptr is not None:
        tl.store(zero_point_ptr + line, zero_point, mask=keep)
    if out_ptr is not None:
        quantize_tile(
            out_ptr, x, scale[:, None], zero_point[:, None], start, 0, width, valid, masked, SYMMETRIC, RECIPROCAL,
            Q_MIN, Q_MAX, PACKED, False, F64, LINES, COLS, VECTOR,
        )  # fmt: skip


@triton.jit
def blocks(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, run, inner, column_blocks, MASK: tl.constexpr, SYMMETRIC: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr,
    SMALLEST: tl.constexpr, PACKED: tl.constexpr, F64: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr,
    COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Strided segments of up to LINES elements, COLS neighbours a program: [rows, run, inner] as it lies."""
    program = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    row, column = program // column_blocks, program % column_blocks * COLS
    line = tl.arange(0, LINES)[:, None]
    start, valid = (row * run + line) * inner, line < run
    index = column + lanes(COLS, VECTOR)
    masked: tl.constexpr = MASK != NEVER
    mask = valid & (index < inner)[None, :] if masked else None
    x = widen(tl.load(x_ptr + start + index[None, :], mask=mask, other=0.0 if masked else None), F64)
    low, high = range_of(x, mask, masked, 0, SYMMETRIC, F64)
    dtype: tl.constexpr = scale_ptr.dtype.element_ty
    stored, scale, zero_point = choose_qparams(
        low, high, dtype, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL, Q_MIN, Q_MAX, SMALLEST, F64
    )
    keep = index < inner if masked else None
    tl.store(scale_ptr + row * inner + index, stored, mask=keep)
    if zero_point_ptr is not None:
        tl.store(zero_point_ptr + row * inner + index, zero_point, mask=keep)
    if out_ptr is not None:
        quantize_tile(
            out_ptr, x, scale[None, :], zero_point[None, :], start, column, inner, valid, masked, SYMMETRIC,
            RECIPROCAL, Q_MIN, Q_MAX, PACKED, True, F64, LINES, COLS, VECTOR,
        )  # fmt: skip


@triton.jit
def load_span(x_ptr, start, column, width, F64: tl.constexpr, COLS: tl.constexpr, MASK: tl.constexpr):
    """[1, COLS] elements of a line in the math type, zeros where the line has ended."""
    columns = column + tl.arange(0, COLS)[None, :]
    if MASK == NEVER:
        x = tl.load(x_ptr + start + columns)
    else:
        if column + COLS <= width:  # without a mask, so that a line of odd length is read as fast as any
            x = tl.load(x_ptr + start + columns)
        else:
            x = tl.load(x_ptr + start + columns, mask=columns < width, other=0.0)
    return widen(x, F64)


@triton.jit
def long_rows(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, lines, width, MASK: tl.constexpr, SYMMETRIC: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr,
    SMALLEST: tl.constexpr, PACKED: tl.constexpr, F64: tl.constexpr, WIDE: tl.constexpr, COLS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Contiguous segments of any length, one a program, in two passes."""
    line = tl.program_id(0)
    start = (line.to(tl.int64) if WIDE else line) * width
    lows, highs = nothing_yet(SYMMETRIC, F64, 1, COLS)
    for column in range(0, loop_bound(width), COLS):
        x = load_span(x_ptr, start, column, width, F64, COLS, MASK)
        mask = column + tl.arange(0, COLS)[None, :] < width
        lows, highs = wider(lows, highs, x, mask, MASK != NEVER, SYMMETRIC)
    low, high = span_of(lows, highs, 1, SYMMETRIC, F64)
    dtype: tl.constexpr = scale_ptr.dtype.element_ty
    stored, scale, zero_point = choose_qparams(
        low, high, dtype, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL, Q_MIN, Q_MAX, SMALLEST, F64
    )
    one = tl.arange(0, 1)
    tl.store(scale_ptr + line + one, stored)
    if zero_point_ptr is not None:
        tl.store(zero_point_ptr + line + one, zero_point)
    if out_ptr is not None:
        last = (width - 1) // COLS * COLS
        for i in range(0, loop_bound(width), COLS):
            column = last - i  # backwards: what was read last is nearest
            x = load_span(x_ptr, start, column, width, F64, COLS, MASK)
            quantize_tile(
                out_ptr, x, scale[:, None], zero_point[:, None], start, column, width, True, MASK != NEVER, SYMMETRIC,
                RECIPROCAL, Q_MIN, Q_MAX, PACKED, False, F64, 1, COLS, VECTOR,
            )  # fmt: skip


@triton.jit
def partial(
    x_ptr, low_ptr, high_ptr, repeat, rows, run, column_blocks, items, chunks, MASK: tl.constexpr,
    SYMMETRIC: tl.constexpr, F64: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The range of one chunk of a segment made of runs: `items` tiles, taken in turns by `chunks` programs."""
    program = tl.program_id(0)
    row, chunk = program % rows, program // rows
    lows, highs = nothing_yet(SYMMETRIC, F64, LINES, COLS)
    for item in range(loop_bound(chunk), loop_bound(items), loop_bound(chunks)):
        top, left = item // column_blocks, item % column_blocks
        if WIDE:
            top, left = top.to(tl.int64), left.to(tl.int64)
        line = top * LINES + tl.arange(0, LINES)[:, None]
        columns = left * COLS + tl.arange(0, COLS)[None, :]
        mask = (line < repeat) & (columns < run)
        pointers = x_ptr + (line * rows + row) * run + columns
        if MASK == NEVER:
            x = tl.load(pointers)
        else:
            if (top * LINES + LINES <= repeat) & (left * COLS + COLS <= run):
                x = tl.load(pointers)
            else:
                x = tl.load(pointers, mask=mask, other=0.0)
        x = widen(x, F64)
        lows, highs = wider(lows, highs, x, mask, MASK != NEVER, SYMMETRIC)
    where = chunk * rows + row + tl.arange(0, 1)
    lows, highs = tl.reshape(lows, (1, LINES * COLS)), tl.reshape(highs, (1, LINES * COLS))
    low, high = span_of(lows, highs, 1, SYMMETRIC, F64)
    tl.store(high_ptr + where, high)
    if not SYMMETRIC:
        tl.store(low_ptr + where, low)


@triton.jit
def partial_columns(
    x_ptr, low_ptr, high_ptr, rows, run, inner, column_blocks, span, MASK: tl.constexpr, SYMMETRIC: tl.constexpr,
    F64: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The ranges of COLS neighbouring strided segments over `span` lines of their run."""
    program = tl.program_id(0)
    column, above = program % column_blocks * COLS, program // column_blocks
    row, chunk = above % rows, above // rows
    index = column + tl.arange(0, COLS)
    lows, highs = nothing_yet(SYMMETRIC, F64, LINES, COLS)
    end = tl.minimum(chunk * span + span, run)
    for first in range(loop_bound(chunk * span), loop_bound(end), LINES):
        line = first + tl.arange(0, LINES)[:, None]
        mask = (line < run) & (index < inner)[None, :]
        if WIDE:
            line = line.to(tl.int64)
        pointers = x_ptr + (row * run + line) * inner + index[None, :]
        if MASK == NEVER:
            x = tl.load(pointers)
        else:
            x = tl.load(pointers, mask=mask, other=0.0)
        x = widen(x, F64)
        lows, highs = wider(lows, highs, x, mask, MASK != NEVER, SYMMETRIC)
    where = (chunk * rows + row).to(tl.int64) * inner + index
    keep = index < inner
    low, high = span_of(lows, highs, 0, SYMMETRIC, F64)
    tl.store(high_ptr + where, high, mask=keep)
    if not SYMMETRIC:
        tl.store(low_ptr + where, low, mask=keep)


@triton.jit
def finish(
    low_ptr, high_ptr, scale_ptr, zero_point_ptr, chunks, segments, SYMMETRIC: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr,
    SMALLEST: tl.constexpr, F64: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Scales from partial ranges, [chunks, segments]. Without any chunk the segments are empty."""
    index = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    keep = index < segments
    math: tl.constexpr = tl.float64 if F64 else tl.float32
    if high_ptr is None:
        high = tl.full([COLS], 0.0, math)
        low = high
    else:
        lows, highs = nothing_yet(SYMMETRIC, F64, LINES, COLS)
        for first in range(0, loop_bound(chunks), LINES):
            line = first + tl.arange(0, LINES)[:, None]
            mask = (line < chunks) & keep[None, :]
            offsets = line.to(tl.int64) * segments + index[None, :]
            part = tl.load(high_ptr + offsets, mask=mask, other=0.0 if SYMMETRIC else -INF)
            highs = larger(highs, ordered(part, SYMMETRIC))
            if not SYMMETRIC:
                lows = smaller(lows, ordered(tl.load(low_ptr + offsets, mask=mask, other=INF), SYMMETRIC))
        low, high = span_of(lows, highs, 0, SYMMETRIC, F64)
    dtype: tl.constexpr = scale_ptr.dtype.element_ty
    stored, _, zero_point = choose_qparams(
        low, high, dtype, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL, Q_MIN, Q_MAX, SMALLEST, F64
    )
    tl.store(scale_ptr + index, stored, mask=keep)
    if zero_point_ptr is not None:
        tl.store(zero_point_ptr + index, zero_point, mask=keep)
