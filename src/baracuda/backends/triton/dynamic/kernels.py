"""Dynamic ranges: kernels that find each segment's scale and, where it still is at hand, quantize the segment too.

`rows` and `blocks` hold whole segments in registers: one read, one write. `long_rows` reads a segment twice, the second
time from the cache. The others find ranges in two stages, `partial` and `finish`, and leave the quantization to the
elementwise kernels.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: SIM114
from __future__ import annotations

import triton
import triton.language as tl

from ..elementwise.kernels import NEVER
from ..numerics.conversions import INF, as_offset, loop_bound, narrow, split_index, widen
from ..numerics.division import prepare_positive, times
from ..numerics.packing import store_quantized
from ..numerics.qparams import choose_qparams
from ..numerics.rounding import (
    HELD,
    MAGIC_BITS_F32,
    bounds,
    quantize_steps,
    step_bits,
    step_lacks,
    step_rest,
    step_value,
)
from ..pdl import take_over
from .extremes import columns_of, comparable, extremes, further, higher, load_parts, lower, nothing_yet, span_of, wider

#: BOUNDS, which a quotient by its own range's scale can pass, and where that is seen to. Such a quotient is bounded or
#: NaN, and a symmetric one rounds to Q_MAX at most unless its scale was rounded to 16 bits. Where zero points are added
#: to integers anyway, one instruction clamps them too.
BOTH, LOW, OF_THE_INTEGER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def settle(
    low, high, scale_ptr, zero_point_ptr, where, keep, AXIS: tl.constexpr, BOUNDS: tl.constexpr,
    SYMMETRIC: tl.constexpr, INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr, SMALLEST: tl.constexpr, F64: tl.constexpr,
):  # fmt: skip
    """(scales, what `quantize_parts` must know of them and their zero points) of segments that span [low, high], along
    an axis of length 1; both are stored where they are asked for.

    As an integer NaN is above every bound. Its scale knows of it, and nothing of such a segment is above Q_MIN.
    """
    math: tl.constexpr = tl.float64 if F64 else tl.float32
    dtype: tl.constexpr = math if scale_ptr is None else scale_ptr.dtype.element_ty
    stored, scale, zero_point = choose_qparams(
        low, high, dtype, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL, Q_MIN, Q_MAX, SMALLEST, F64
    )
    if scale_ptr is not None:
        tl.store(scale_ptr + where, stored, mask=keep)
    if zero_point_ptr is not None:
        tl.store(zero_point_ptr + where, zero_point, mask=keep)
    scale, zero_point = tl.expand_dims(scale, AXIS), tl.expand_dims(zero_point, AXIS)
    divisor, reciprocal, factor = prepare_positive(scale, RECIPROCAL, F64)
    low, high, shift = bounds(0 if SYMMETRIC else zero_point, not SYMMETRIC, Q_MIN, Q_MAX, F64)
    rest = 0 if SYMMETRIC else step_rest(zero_point, F64)
    if BOUNDS == OF_THE_INTEGER:
        low, high, rest = 0, tl.where(scale < INF, Q_MAX - Q_MIN, 0), rest - (Q_MIN + MAGIC_BITS_F32)
    return scale, (divisor, reciprocal, factor, low, high, shift, rest)


@triton.jit
def quantize_parts(
    out_ptr, parts, place, scale, prepared, ALONG: tl.constexpr, DOWN: tl.constexpr, MASKED: tl.constexpr,
    RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, BOUNDS: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr,
    PER_COLUMN: tl.constexpr, F64: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Quantize what `load_parts` loaded and store it; as floats again where the output holds floats."""
    if PARTS == 1:
        divisor, reciprocal, factor, low, high, shift, rest = prepared
        x = widen(parts, F64) if RECIPROCAL else times(parts, factor, F64)
        if BOUNDS == BOTH:
            m = quantize_steps(x, divisor, reciprocal, factor, low, high, shift, RECIPROCAL, HELD, F64)
        elif BOUNDS == LOW:
            m = quantize_steps(x, divisor, reciprocal, factor, low, None, shift, RECIPROCAL, HELD, F64)
        else:
            m = quantize_steps(x, divisor, reciprocal, factor, None, None, shift, RECIPROCAL, HELD, F64)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        start, column, line, lines, width, _ = place
        if dtype.is_floating():
            offsets, mask = columns_of(place, COLS)
            y = narrow(step_value(m, shift, F64) * scale, dtype, True, True)
            tl.store(out_ptr + offsets, y, mask=mask if MASKED else None)
        elif BOUNDS == OF_THE_INTEGER:
            steps = tl.maximum(tl.minimum(step_bits(m, F64) + rest, high), low)
            args = (out_ptr, steps, 0, start, column, width, line < lines)
            store_quantized(*args, MASKED, PACKED, EACH, Q_MIN, False, COLS, 0)
        else:
            args = (out_ptr, step_bits(m, F64), rest, start, column, width, line < lines)
            store_quantized(*args, MASKED, PACKED, EACH, step_lacks(F64), PER_COLUMN, COLS, 0)
    else:
        half: tl.constexpr = PARTS // 2
        quantize_parts(
            out_ptr, parts[0], place, scale, prepared, ALONG, DOWN, MASKED, RECIPROCAL, Q_MIN, BOUNDS, PACKED, EACH,
            PER_COLUMN, F64, half, COLS,
        )  # fmt: skip
        quantize_parts(
            out_ptr, parts[1], further(place, half, ALONG, DOWN), scale, prepared, ALONG, DOWN, MASKED, RECIPROCAL,
            Q_MIN, BOUNDS, PACKED, EACH, PER_COLUMN, F64, half, COLS,
        )  # fmt: skip


@triton.jit
def rows(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, lines, width, MASK: tl.constexpr, SYMMETRIC: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr,
    SMALLEST: tl.constexpr, BOUNDS: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr, F64: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Contiguous segments of up to PARTS times COLS elements, LINES of them a program."""
    take_over(EARLY)
    index = as_offset(tl.program_id(0), WIDE) * LINES + tl.arange(0, LINES)
    line = index[:, None]
    start = line * width
    masked: tl.constexpr = MASK != NEVER
    place = (start, 0, line, lines, width, 0)
    parts = load_parts(x_ptr, place, COLS, 0, masked, PARTS, COLS)
    lows, highs = extremes(parts, place, SYMMETRIC, COLS, 0, masked, PARTS, COLS)
    low, high = span_of(lows, highs, 1, SYMMETRIC)
    keep = index < lines if masked else None
    scale, prepared = settle(
        low, high, scale_ptr, zero_point_ptr, index, keep, 1, BOUNDS, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL, Q_MIN, Q_MAX,
        SMALLEST, F64,
    )  # fmt: skip
    if out_ptr is not None:
        quantize_parts(
            out_ptr, parts, place, scale, prepared, COLS, 0, masked, RECIPROCAL, Q_MIN, BOUNDS, PACKED, EACH, False,
            F64, PARTS, COLS,
        )  # fmt: skip


@triton.jit
def blocks(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, run, inner, blocks, factor, shift, MASK: tl.constexpr,
    SYMMETRIC: tl.constexpr, INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr, SMALLEST: tl.constexpr, BOUNDS: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr,
    F64: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Strided segments of up to PARTS times LINES elements, COLS of them a program: [rows, run, inner] as it lies."""
    take_over(EARLY)
    row, block = split_index(tl.program_id(0), blocks, factor, shift, WIDE)
    column = block * COLS
    line = tl.arange(0, LINES)[:, None]
    masked: tl.constexpr = MASK != NEVER
    place = ((row * run + line) * inner, column, line, run, inner, LINES * as_offset(inner, WIDE))
    parts = load_parts(x_ptr, place, 0, LINES, masked, PARTS, COLS)
    lows, highs = extremes(parts, place, SYMMETRIC, 0, LINES, masked, PARTS, COLS)
    low, high = span_of(lows, highs, 0, SYMMETRIC)
    index = column + tl.arange(0, COLS)
    keep = index < inner if masked else None
    scale, prepared = settle(
        low, high, scale_ptr, zero_point_ptr, row * inner + index, keep, 0, BOUNDS, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL,
        Q_MIN, Q_MAX, SMALLEST, F64,
    )  # fmt: skip
    if out_ptr is not None:
        quantize_parts(
            out_ptr, parts, place, scale, prepared, 0, LINES, masked, RECIPROCAL, Q_MIN, BOUNDS, PACKED, EACH,
            not SYMMETRIC, F64, PARTS, COLS,
        )  # fmt: skip


@triton.jit
def wider_at(
    x_ptr, lows, highs, place, inside, SYMMETRIC: tl.constexpr, MASK: tl.constexpr, PARTS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """(lows, highs) with the tiles along a place seen too, without a mask where they are inside."""
    if MASK == NEVER:
        parts = load_parts(x_ptr, place, COLS, 0, False, PARTS, COLS)
        lows, highs = wider(lows, highs, parts, place, SYMMETRIC, COLS, 0, False, PARTS, COLS)
    elif inside:
        parts = load_parts(x_ptr, place, COLS, 0, False, PARTS, COLS)
        lows, highs = wider(lows, highs, parts, place, SYMMETRIC, COLS, 0, False, PARTS, COLS)
    else:
        parts = load_parts(x_ptr, place, COLS, 0, True, PARTS, COLS)
        lows, highs = wider(lows, highs, parts, place, SYMMETRIC, COLS, 0, True, PARTS, COLS)
    return lows, highs


@triton.jit
def quantize_along(
    x_ptr, out_ptr, place, scale, prepared, MASKED: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr,
    BOUNDS: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr, F64: tl.constexpr, PARTS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Load the tiles along a place again, and quantize them."""
    parts = load_parts(x_ptr, place, COLS, 0, MASKED, PARTS, COLS)
    quantize_parts(
        out_ptr, parts, place, scale, prepared, COLS, 0, MASKED, RECIPROCAL, Q_MIN, BOUNDS, PACKED, EACH, False, F64,
        PARTS, COLS,
    )  # fmt: skip


@triton.jit
def long_rows(
    x_ptr, scale_ptr, zero_point_ptr, out_ptr, lines, width, MASK: tl.constexpr, SYMMETRIC: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr,
    SMALLEST: tl.constexpr, BOUNDS: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr, F64: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Contiguous segments of any length, one a program, in two passes. LINES is 1."""
    take_over(EARLY)
    index = tl.program_id(0) + tl.arange(0, LINES)
    line = index[:, None]
    start = as_offset(line, WIDE) * width
    across: tl.constexpr = PARTS * COLS
    lows, highs = nothing_yet(x_ptr.dtype.element_ty, SYMMETRIC, LINES, COLS)
    for column in range(0, loop_bound(width), across):
        place = (start, column, line, lines, width, 0)
        lows, highs = wider_at(x_ptr, lows, highs, place, column + across <= width, SYMMETRIC, MASK, PARTS, COLS)
    low, high = span_of(lows, highs, 1, SYMMETRIC)
    scale, prepared = settle(
        low, high, scale_ptr, zero_point_ptr, index, None, 1, BOUNDS, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL, Q_MIN, Q_MAX,
        SMALLEST, F64,
    )  # fmt: skip
    if out_ptr is not None:
        last = (width - 1) // across * across
        for i in range(0, loop_bound(width), across):
            column = last - i  # backwards: what was read last is nearest
            place = (start, column, line, lines, width, 0)
            args = (x_ptr, out_ptr, place, scale, prepared)
            if MASK == NEVER:
                quantize_along(*args, False, RECIPROCAL, Q_MIN, BOUNDS, PACKED, EACH, F64, PARTS, COLS)
            elif column + across <= width:  # without a mask, so that a line of odd length is read as fast as any
                quantize_along(*args, False, RECIPROCAL, Q_MIN, BOUNDS, PACKED, EACH, F64, PARTS, COLS)
            else:
                quantize_along(*args, True, RECIPROCAL, Q_MIN, BOUNDS, PACKED, EACH, F64, PARTS, COLS)


@triton.jit
def partial(
    x_ptr, low_ptr, high_ptr, repeat, rows, run, column_blocks, items, chunks, MASK: tl.constexpr,
    SYMMETRIC: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """The range of one chunk of a segment made of runs: `items` tiles, taken in turns by `chunks` programs."""
    take_over(EARLY)
    program = as_offset(tl.program_id(0), WIDE)
    row, chunk = program % rows, program // rows
    lows, highs = nothing_yet(x_ptr.dtype.element_ty, SYMMETRIC, LINES, COLS)
    across: tl.constexpr = PARTS * COLS
    for item in range(loop_bound(chunk), loop_bound(items), loop_bound(chunks)):
        top, left = item // column_blocks * LINES, item % column_blocks * across
        line = top + tl.arange(0, LINES)[:, None]
        place = ((line * rows + row) * run, left, line, repeat, run, 0)
        inside = (top + LINES <= repeat) & (left + across <= run)
        lows, highs = wider_at(x_ptr, lows, highs, place, inside, SYMMETRIC, MASK, PARTS, COLS)
    where = chunk * rows + row + tl.arange(0, 1)
    lows, highs = tl.reshape(lows, (1, LINES * COLS)), tl.reshape(highs, (1, LINES * COLS))
    low, high = span_of(lows, highs, 1, SYMMETRIC)
    tl.store(high_ptr + where, high)
    if not SYMMETRIC:
        tl.store(low_ptr + where, low)


@triton.jit
def partial_columns(
    x_ptr, low_ptr, high_ptr, rows, run, inner, column_blocks, span, MASK: tl.constexpr, SYMMETRIC: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """The ranges of COLS neighbouring strided segments over `span` lines of their run."""
    take_over(EARLY)
    program = as_offset(tl.program_id(0), WIDE)
    column, above = program % column_blocks * COLS, program // column_blocks
    row, chunk = above % rows, above // rows
    lows, highs = nothing_yet(x_ptr.dtype.element_ty, SYMMETRIC, LINES, COLS)
    end = tl.minimum(chunk * span + span, run)
    for first in range(loop_bound(chunk * span), loop_bound(end), PARTS * LINES):
        line = as_offset(first + tl.arange(0, LINES)[:, None], WIDE)
        place = ((row * run + line) * inner, column, line, run, inner, LINES * as_offset(inner, WIDE))
        parts = load_parts(x_ptr, place, 0, LINES, MASK != NEVER, PARTS, COLS)
        lows, highs = wider(lows, highs, parts, place, SYMMETRIC, 0, LINES, MASK != NEVER, PARTS, COLS)
    index = column + tl.arange(0, COLS)
    where = (chunk * rows + row).to(tl.int64) * inner + index
    keep = index < inner
    low, high = span_of(lows, highs, 0, SYMMETRIC)
    tl.store(high_ptr + where, high, mask=keep)
    if not SYMMETRIC:
        tl.store(low_ptr + where, low, mask=keep)


@triton.jit
def finish(
    low_ptr, high_ptr, scale_ptr, zero_point_ptr, chunks, segments, SYMMETRIC: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr,
    SMALLEST: tl.constexpr, F64: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Scales from partial ranges, [chunks, segments]. Without any chunk the segments are empty."""
    take_over(EARLY)
    index = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    keep = index < segments
    math: tl.constexpr = tl.float64 if F64 else tl.float32
    if high_ptr is None:
        high = tl.full([COLS], 0.0, math)
        low = high
    else:
        lows, highs = nothing_yet(math, SYMMETRIC, LINES, COLS)
        for first in range(0, loop_bound(chunks), LINES):
            line = first + tl.arange(0, LINES)[:, None]
            mask = (line < chunks) & keep[None, :]
            offsets = line.to(tl.int64) * segments + index[None, :]
            part = tl.load(high_ptr + offsets, mask=mask, other=0.0 if SYMMETRIC else -INF)
            highs = higher(highs, comparable(part, SYMMETRIC))
            if not SYMMETRIC:
                lows = lower(lows, comparable(tl.load(low_ptr + offsets, mask=mask, other=INF), SYMMETRIC))
        low, high = span_of(lows, highs, 0, SYMMETRIC)
    dtype: tl.constexpr = scale_ptr.dtype.element_ty
    stored, _, zero_point = choose_qparams(
        low, high, dtype, SYMMETRIC, INCLUDE_ZERO, RECIPROCAL, Q_MIN, Q_MAX, SMALLEST, F64
    )
    tl.store(scale_ptr + index, stored, mask=keep)
    if zero_point_ptr is not None:
        tl.store(zero_point_ptr + index, zero_point, mask=keep)
