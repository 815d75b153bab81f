"""The elementwise kernels: one body for six ops, three ways to walk over a view.

`dense` walks lines that share one scale each, `columns` lines whose every column has its own (strided segments), and
`scattered` the bytes of packed tensors whose pairs do not line up with either.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

import triton
import triton.language as tl

from .numerics import (
    bounds,
    exact_divide,
    far_bounds,
    in_range,
    lanes,
    load_scale,
    load_zero_point,
    loop_bound,
    low_bits,
    narrow,
    nibble,
    pack_pairs,
    prepare,
    quantize_steps,
    unpack_pairs,
    widen,
)

QUANTIZE = tl.constexpr(0)
DEQUANTIZE = tl.constexpr(1)
FAKE_QUANTIZE = tl.constexpr(2)
QUANTIZE_BACKWARD = tl.constexpr(3)
DEQUANTIZE_BACKWARD = tl.constexpr(4)
FAKE_QUANTIZE_BACKWARD = tl.constexpr(5)
#: PACKED is 0 for one element a byte; two a byte are unsigned or signed.
UNSIGNED = tl.constexpr(1)
SIGNED = tl.constexpr(2)
#: When a tile needs its mask: the sizes are multiples of it; only at the edges; no tile is full.
NEVER = tl.constexpr(0)
EDGES = tl.constexpr(1)
ALWAYS = tl.constexpr(2)


@triton.jit
def formula(
    a,
    dy,
    scale,
    zero_point,
    dtype: tl.constexpr,
    MAY_BE_NAN: tl.constexpr,
    HAS_ZP: tl.constexpr,
    OP: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    FAR: tl.constexpr,
    Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr,
    F64: tl.constexpr,
):
    """What an op makes of its elements. `a` is x or an int32 q; a quantized result is an int32, to be stored as 8 or
    4 bits. Scale and zero point have any shape that broadcasts, so that what depends on them alone is done once."""
    if OP == DEQUANTIZE:
        q = a - zero_point if HAS_ZP else a
        return narrow(q.to(tl.float64 if F64 else tl.float32) * scale, dtype, MAY_BE_NAN)
    elif OP == DEQUANTIZE_BACKWARD:
        return narrow(widen(dy, F64) * scale, dtype, True)
    else:
        divisor, reciprocal, factor = prepare(scale, RECIPROCAL, F64)
        low, high, shift, odd = bounds(zero_point, HAS_ZP, Q_MIN, Q_MAX, F64)
        x = widen(a, F64)
        if OP == QUANTIZE:
            m = quantize_steps(x, divisor, reciprocal, factor, low, high, shift, RECIPROCAL, FAR, F64)
            return low_bits(m, F64) + odd
        elif OP == FAKE_QUANTIZE:
            m = quantize_steps(x, divisor, reciprocal, factor, low, high, shift, RECIPROCAL, FAR, F64)
            return narrow((m - shift) * scale, dtype, MAY_BE_NAN)
        else:
            passes = in_range(x, divisor, reciprocal, factor, low, high, shift, RECIPROCAL, FAR, F64)
            grad = widen(dy, F64)
            if OP == QUANTIZE_BACKWARD:
                grad = grad * reciprocal if RECIPROCAL else exact_divide(grad, scale, F64)
            else:  # a gradient that only passes is not converted, so its NaN would keep sign and payload
                grad = tl.where(grad == grad, grad, float("nan"))
            return narrow(tl.where(passes, grad, 0.0), dtype, True)


@triton.constexpr_function
def rounds_in_f32(op: int, reciprocal: bool, f64: bool, has_zp: bool) -> bool:
    """Whether a large zero point asks for `quantize_steps`' other way."""
    return has_zp and not reciprocal and not f64 and op not in (DEQUANTIZE.value, DEQUANTIZE_BACKWARD.value)


@triton.jit
def tile(
    a_ptr,
    dy_ptr,
    out_ptr,
    scale,
    zero_point,
    start,
    column,
    width,
    valid,
    MASKED: tl.constexpr,
    FAR: tl.constexpr,
    MAY_BE_NAN: tl.constexpr,
    HAS_ZP: tl.constexpr,
    OP: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr,
    PACKED: tl.constexpr,
    F64: tl.constexpr,
    LINES: tl.constexpr,
    COLS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Load, compute and store [LINES, COLS] elements: lines that begin at `start`, columns from `column` on.

    Packed pairs never straddle lines here, so the packed side has the same lines of half the length.
    """
    columns = column + lanes(COLS, VECTOR)[None, :]
    offsets = start + columns
    mask = valid & (columns < width) if MASKED else None
    if PACKED:
        pairs = column // 2 + tl.arange(0, COLS // 2)[None, :]
        pair_offsets = start // 2 + pairs
        pair_mask = valid & (pairs < width // 2) if MASKED else None
    a, dy = None, None
    if OP == DEQUANTIZE:
        if PACKED:
            a = unpack_pairs(tl.load(a_ptr + pair_offsets, mask=pair_mask), PACKED == SIGNED)
        else:
            a = tl.load(a_ptr + offsets, mask=mask).to(tl.int32)
    elif OP != DEQUANTIZE_BACKWARD:
        a = tl.load(a_ptr + offsets, mask=mask)
    if dy_ptr is not None:
        dy = tl.load(dy_ptr + offsets, mask=mask)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = formula(a, dy, scale, zero_point, dtype, MAY_BE_NAN, HAS_ZP, OP, RECIPROCAL, FAR, Q_MIN, Q_MAX, F64)
    if PACKED and OP == QUANTIZE:
        tl.store(out_ptr + pair_offsets, pack_pairs(y, LINES, COLS), mask=pair_mask)
    else:
        tl.store(out_ptr + offsets, y.to(dtype), mask=mask)


@triton.jit
def dense(
    a_ptr,
    dy_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    lines,
    width,
    blocks,
    rows,
    SEGMENT: tl.constexpr,
    MASK: tl.constexpr,
    BACKWARDS: tl.constexpr,
    OP: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr,
    PACKED: tl.constexpr,
    F64: tl.constexpr,
    WIDE: tl.constexpr,
    LINES: tl.constexpr,
    COLS: tl.constexpr,
):
    """Lines of `width` elements with one scale each: line, line % rows, or the only one."""
    program = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    if BACKWARDS:  # what a pass over the same tensor read last is still in the cache
        program = tl.num_programs(0) - 1 - program
    first, column = program // blocks * LINES, program % blocks * COLS
    if LINES == 1:
        line = first
    else:
        line = first + tl.arange(0, LINES)[:, None]
    valid = line < lines
    segment = 0 if SEGMENT == 0 else (line if SEGMENT == 1 else line % rows)
    keep = None if LINES == 1 or SEGMENT == 0 else valid
    scale = load_scale(scale_ptr, segment, keep, F64)
    zero_point = load_zero_point(zero_point_ptr, segment, keep)
    start = line * width
    may_be_nan: tl.constexpr = scale_ptr.dtype.is_ptr()
    has_zp: tl.constexpr = zero_point_ptr is not None
    args = (a_ptr, dy_ptr, out_ptr, scale, zero_point, start, column, width, valid)
    if rounds_in_f32(OP, RECIPROCAL, F64, has_zp) and far_bounds(zero_point):
        tile(*args, True, True, may_be_nan, has_zp, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, F64, LINES, COLS, 0)
    elif MASK == NEVER:
        tile(*args, False, False, may_be_nan, has_zp, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, F64, LINES, COLS, 0)
    elif MASK == ALWAYS:
        tile(*args, True, False, may_be_nan, has_zp, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, F64, LINES, COLS, 0)
    elif (first + LINES <= lines) & (column + COLS <= width):
        tile(*args, False, False, may_be_nan, has_zp, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, F64, LINES, COLS, 0)
    else:
        tile(*args, True, False, may_be_nan, has_zp, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, F64, LINES, COLS, 0)


@triton.jit
def columns(
    a_ptr,
    dy_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    run,
    inner,
    row_blocks,
    blocks,
    BACKWARDS: tl.constexpr,
    MASK: tl.constexpr,
    OP: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr,
    PACKED: tl.constexpr,
    F64: tl.constexpr,
    WIDE: tl.constexpr,
    LINES: tl.constexpr,
    COLS: tl.constexpr,
    ITERS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """[rows, run, inner] with scales [rows, inner]: a program keeps its columns' scales and walks down the run."""
    program = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    if BACKWARDS:
        program = tl.num_programs(0) - 1 - program
    column, above = program % blocks * COLS, program // blocks
    row, first = above // row_blocks, above % row_blocks * (LINES * ITERS)
    index = column + tl.arange(0, COLS)[None, :]
    keep = None if MASK == NEVER else index < inner
    scale = load_scale(scale_ptr, row * inner + index, keep, F64)
    zero_point = load_zero_point(zero_point_ptr, row * inner + index, keep)
    may_be_nan: tl.constexpr = scale_ptr.dtype.is_ptr()
    has_zp: tl.constexpr = zero_point_ptr is not None
    end = tl.minimum(first + LINES * ITERS, run)
    if rounds_in_f32(OP, RECIPROCAL, F64, has_zp) and far_bounds(zero_point):
        for top in range(loop_bound(first), loop_bound(end), LINES):
            line = top + tl.arange(0, LINES)[:, None]
            start, valid = (row * run + line) * inner, line < run
            args = (a_ptr, dy_ptr, out_ptr, scale, zero_point, start, column, inner, valid)
            tile(*args, True, True, may_be_nan, has_zp, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, F64, LINES, COLS, VECTOR)
    else:
        for top in range(loop_bound(first), loop_bound(end), LINES):
            line = top + tl.arange(0, LINES)[:, None]
            start, valid = (row * run + line) * inner, line < run
            args = (a_ptr, dy_ptr, out_ptr, scale, zero_point, start, column, inner, valid)
            tile(
                *args,
                MASK != NEVER,
                False,
                may_be_nan,
                has_zp,
                OP,
                RECIPROCAL,
                Q_MIN,
                Q_MAX,
                PACKED,
                F64,
                LINES,
                COLS,
                VECTOR,
            )


@triton.jit
def scattered(
    a_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    size,
    axis,
    rows,
    run,
    inner,
    OP: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr,
    PACKED: tl.constexpr,
    F64: tl.constexpr,
    COLS: tl.constexpr,
):
    """Packed quantize and dequantize, a byte a lane, each element finding its own scale: rows of odd length, or
    segments that end inside a byte. `axis` is the length of the last axis, `size` the number of bytes."""
    byte = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    pair_length = (axis + 1) // 2
    first = byte // pair_length * axis + byte % pair_length * 2
    inside = byte < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    may_be_nan: tl.constexpr = scale_ptr.dtype.is_ptr()
    has_zp: tl.constexpr = zero_point_ptr is not None
    packed = tl.zeros([COLS], tl.int32)
    if OP == DEQUANTIZE:
        packed = tl.load(a_ptr + byte, mask=inside, other=0).to(tl.int32)
    for half in tl.static_range(2):
        offset = first + half
        keep = inside & (byte % pair_length * 2 + half < axis)
        segment = offset // inner // run % rows * inner + offset % inner
        scale = load_scale(scale_ptr, segment, keep, F64)
        zero_point = load_zero_point(zero_point_ptr, segment, keep)
        if OP == DEQUANTIZE:
            q = nibble(packed >> (4 * half), PACKED == SIGNED)
            y = formula(
                q, None, scale, zero_point, dtype, may_be_nan, has_zp, OP, RECIPROCAL, has_zp, Q_MIN, Q_MAX, F64
            )
            tl.store(out_ptr + offset, y, mask=keep)
        else:
            x = tl.load(a_ptr + offset, mask=keep, other=0.0)
            q = formula(
                x, None, scale, zero_point, dtype, may_be_nan, has_zp, OP, RECIPROCAL, has_zp, Q_MIN, Q_MAX, F64
            )
            packed |= tl.where(keep, (q & 15) << (4 * half), 0)
    if OP == QUANTIZE:
        tl.store(out_ptr + byte, packed.to(tl.uint8), mask=inside)
