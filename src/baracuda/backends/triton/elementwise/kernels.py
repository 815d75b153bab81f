"""The elementwise kernels: one body for six ops, three ways to walk over a view.

`dense` walks lines that share one scale each, `columns` lines whose every column has its own (strided segments), and
`scattered` the bytes of packed tensors whose pairs do not line up with either.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714, SIM109
from __future__ import annotations

import triton
import triton.language as tl

from ..numerics.conversions import as_offset, load_scale, load_zero_point, loop_bound, narrow, split_index, widen
from ..numerics.division import divide_gradient, exact_divide, invert, prepare
from ..numerics.packing import SIGNED_PAIRS, lanes, nibble, store_quantized, unpack_pairs
from ..numerics.rounding import (
    FAR,
    PLAIN,
    awkward,
    bounds,
    in_range,
    quantize_steps,
    step_bits,
    step_lacks,
    step_rest,
    step_value,
)
from ..pdl import take_over

QUANTIZE = tl.constexpr(0)
DEQUANTIZE = tl.constexpr(1)
FAKE_QUANTIZE = tl.constexpr(2)
QUANTIZE_BACKWARD = tl.constexpr(3)
DEQUANTIZE_BACKWARD = tl.constexpr(4)
FAKE_QUANTIZE_BACKWARD = tl.constexpr(5)
#: When a tile needs its mask: the sizes are multiples of it; only at the edges; no tile is full.
NEVER = tl.constexpr(0)
EDGES = tl.constexpr(1)
ALWAYS = tl.constexpr(2)


@triton.jit
def formula(
    a, dy, scale, zero_point, dtype: tl.constexpr, MAY_BE_NAN: tl.constexpr, HAS_ZP: tl.constexpr, OP: tl.constexpr,
    RECIPROCAL: tl.constexpr, WAY: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, F64: tl.constexpr,
):  # fmt: skip
    """What an op makes of its elements: of a quantization the bits of the step. `a` is x, widened, or an int32 q.

    Scale and zero point have any shape that broadcasts, so that what depends on them alone is done once."""
    if OP == DEQUANTIZE:
        q = a - zero_point if HAS_ZP else a
        return narrow(q.to(tl.float64 if F64 else tl.float32) * scale, dtype, MAY_BE_NAN, True)
    elif OP == DEQUANTIZE_BACKWARD:
        return narrow(dy * scale, dtype, True, True)
    else:
        plain: tl.constexpr = WAY == PLAIN and not RECIPROCAL
        if plain:
            divisor, reciprocal, factor = scale, invert(scale, F64), scale
        else:
            divisor, reciprocal, factor = prepare(scale, RECIPROCAL, F64)
        low, high, shift = bounds(zero_point, HAS_ZP, Q_MIN, Q_MAX, F64)
        if OP == QUANTIZE:
            step = quantize_steps(a, divisor, reciprocal, factor, low, high, shift, RECIPROCAL, WAY, F64)
            return step_bits(step, F64)
        elif OP == FAKE_QUANTIZE:
            step = quantize_steps(a, divisor, reciprocal, factor, low, high, shift, RECIPROCAL, WAY, F64)
            return narrow(step_value(step, shift, F64) * scale, dtype, MAY_BE_NAN and not plain, True)
        else:
            passes = in_range(a, divisor, reciprocal, factor, low, high, shift, RECIPROCAL, WAY, F64)
            if OP == FAKE_QUANTIZE_BACKWARD:
                # The compiler may undo f16's way there and back, and then a NaN would keep sign and payload.
                grad = tl.where(dy == dy, dy, float("nan")) if dtype == tl.float16 else dy
            elif RECIPROCAL:
                grad = dy * reciprocal
            elif plain:
                grad = divide_gradient(dy, divisor, reciprocal, F64)
            else:
                grad = exact_divide(dy, scale, F64)
            return narrow(tl.where(passes, grad, 0.0), dtype, True)


@triton.constexpr_function
def divides(op: int, reciprocal: bool) -> bool:
    """Whether an awkward scale or zero point asks for `quantize_steps`' other way."""
    return not reciprocal and op not in (DEQUANTIZE.value, DEQUANTIZE_BACKWARD.value)


@triton.jit
def load_tile(
    a_ptr, dy_ptr, start, column, width, valid, MASKED: tl.constexpr, OP: tl.constexpr, PACKED: tl.constexpr,
    F64: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(x or q, dy): lines that begin at `start`, columns from `column` on; of an op that reads one, that one twice.

    In the math type or as int32; more than one part, COLS columns from the next, as pairs of pairs. Packed pairs never
    straddle lines here, so the packed side has the same lines of half the length.
    """
    if PARTS > 1:
        half: tl.constexpr = PARTS // 2
        further = column + half * COLS
        near = load_tile(a_ptr, dy_ptr, start, column, width, valid, MASKED, OP, PACKED, F64, half, COLS, VECTOR)
        far = load_tile(a_ptr, dy_ptr, start, further, width, valid, MASKED, OP, PACKED, F64, half, COLS, VECTOR)
        return near, far
    else:
        columns = column + lanes(COLS, VECTOR)[None, :]
        mask = valid & (columns < width) if MASKED else None
        if OP == DEQUANTIZE and PACKED:
            pairs = column // 2 + lanes(COLS // 2, VECTOR // 2)[None, :]
            pair_mask = valid & (pairs < width // 2) if MASKED else None
            a = unpack_pairs(tl.load(a_ptr + start // 2 + pairs, mask=pair_mask), PACKED == SIGNED_PAIRS)
        elif OP == DEQUANTIZE:
            a = tl.load(a_ptr + start + columns, mask=mask).to(tl.int32)
        elif OP == DEQUANTIZE_BACKWARD:
            a = widen(tl.load(dy_ptr + start + columns, mask=mask), F64)
        else:
            a = widen(tl.load(a_ptr + start + columns, mask=mask), F64)
        if OP == FAKE_QUANTIZE_BACKWARD or OP == QUANTIZE_BACKWARD:
            return a, widen(tl.load(dy_ptr + start + columns, mask=mask), F64)
        else:
            return a, a


@triton.jit
def finish_tile(
    tile, out_ptr, scale, zero_point, start, column, width, valid, MASKED: tl.constexpr, WAY: tl.constexpr,
    MAY_BE_NAN: tl.constexpr, HAS_ZP: tl.constexpr, PER_COLUMN: tl.constexpr, OP: tl.constexpr,
    RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr,
    STREAM: tl.constexpr, F64: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute and store what was loaded."""
    if PARTS > 1:
        half: tl.constexpr = PARTS // 2
        finish_tile(
            tile[0], out_ptr, scale, zero_point, start, column, width, valid, MASKED, WAY, MAY_BE_NAN, HAS_ZP,
            PER_COLUMN, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64, half, COLS, VECTOR,
        )  # fmt: skip
        finish_tile(
            tile[1], out_ptr, scale, zero_point, start, column + half * COLS, width, valid, MASKED, WAY, MAY_BE_NAN,
            HAS_ZP, PER_COLUMN, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64, half, COLS, VECTOR,
        )  # fmt: skip
    else:
        a, dy = tile
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        y = formula(a, dy, scale, zero_point, dtype, MAY_BE_NAN, HAS_ZP, OP, RECIPROCAL, WAY, Q_MIN, Q_MAX, F64)
        if OP == QUANTIZE:
            rest = step_rest(zero_point, F64) if HAS_ZP else 0
            per_column: tl.constexpr = PER_COLUMN and HAS_ZP and zero_point.type.is_block()
            each: tl.constexpr = EACH if PACKED or HAS_ZP else 1
            args = (out_ptr, y, rest, start, column, width, valid)
            store_quantized(*args, MASKED, PACKED, each, step_lacks(F64), per_column, COLS, VECTOR)
        else:
            columns = column + lanes(COLS, VECTOR)[None, :]
            mask = valid & (columns < width) if MASKED else None
            tl.store(out_ptr + start + columns, y, mask=mask, cache_modifier=".cs" if STREAM else "")


@triton.jit
def one_tile(
    a_ptr, dy_ptr, out_ptr, scale, zero_point, start, column, width, valid, MASKED: tl.constexpr,
    MAY_BE_NAN: tl.constexpr, HAS_ZP: tl.constexpr, PER_COLUMN: tl.constexpr, OP: tl.constexpr,
    RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr,
    STREAM: tl.constexpr, F64: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A tile with one scale a line, or a column. Loaded first: elements are under way while scales are looked at."""
    tile = load_tile(a_ptr, dy_ptr, start, column, width, valid, MASKED, OP, PACKED, F64, PARTS, COLS, VECTOR)
    args = (tile, out_ptr, scale, zero_point, start, column, width, valid)
    if divides(OP, RECIPROCAL) and awkward(scale, zero_point, HAS_ZP, F64):
        finish_tile(
            *args, MASKED, FAR, MAY_BE_NAN, HAS_ZP, PER_COLUMN, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64,
            PARTS, COLS, VECTOR,
        )  # fmt: skip
    else:
        finish_tile(
            *args, MASKED, PLAIN, MAY_BE_NAN, HAS_ZP, PER_COLUMN, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM,
            F64, PARTS, COLS, VECTOR,
        )  # fmt: skip


@triton.jit
def dense(
    a_ptr, dy_ptr, scale_ptr, zero_point_ptr, out_ptr, lines, width, rows, blocks, factor, shift, SEGMENT: tl.constexpr,
    MASK: tl.constexpr, BACKWARDS: tl.constexpr, OP: tl.constexpr, RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr, STREAM: tl.constexpr, F64: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Lines of `width` elements with one scale each: line, line % rows, or the only one."""
    take_over(EARLY)
    program = tl.program_id(0)
    if BACKWARDS:  # what a pass over the same tensor read last is still in the cache
        program = tl.num_programs(0) - 1 - program
    above, block = split_index(program, blocks, factor, shift, WIDE)
    first, column = above * LINES, block * (PARTS * COLS)
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
    if MASK == NEVER:
        one_tile(
            *args, False, may_be_nan, has_zp, False, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64, PARTS,
            COLS, VECTOR,
        )  # fmt: skip
    elif MASK == ALWAYS:
        one_tile(
            *args, True, may_be_nan, has_zp, False, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64, PARTS,
            COLS, VECTOR,
        )  # fmt: skip
    elif (first + LINES <= lines) & (column + PARTS * COLS <= width):
        one_tile(
            *args, False, may_be_nan, has_zp, False, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64, PARTS,
            COLS, VECTOR,
        )  # fmt: skip
    else:
        one_tile(
            *args, True, may_be_nan, has_zp, False, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64, PARTS,
            COLS, VECTOR,
        )  # fmt: skip


@triton.jit
def columns(
    a_ptr, dy_ptr, scale_ptr, zero_point_ptr, out_ptr, run, inner, blocks, factor, shift, row_blocks, row_factor,
    row_shift, BACKWARDS: tl.constexpr, MASK: tl.constexpr, OP: tl.constexpr, RECIPROCAL: tl.constexpr,
    Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr, STREAM: tl.constexpr,
    F64: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, ITERS: tl.constexpr,
    VECTOR: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """[rows, run, inner] with scales [rows, inner]: a program keeps its columns' scales and walks down the run."""
    take_over(EARLY)
    program = tl.program_id(0)
    if BACKWARDS:
        program = tl.num_programs(0) - 1 - program
    above, block = split_index(program, blocks, factor, shift, False)
    row, row_block = split_index(above, row_blocks, row_factor, row_shift, WIDE)
    column, first = as_offset(block, WIDE) * COLS, row_block * (LINES * ITERS)
    index = column + tl.arange(0, COLS)[None, :]
    keep = None if MASK == NEVER else index < inner
    scale = load_scale(scale_ptr, row * inner + index, keep, F64)
    zero_point = load_zero_point(zero_point_ptr, row * inner + index, keep)
    may_be_nan: tl.constexpr = scale_ptr.dtype.is_ptr()
    has_zp: tl.constexpr = zero_point_ptr is not None
    end = tl.minimum(first + LINES * ITERS, run)
    if ITERS == 1:
        line = first + tl.arange(0, LINES)[:, None]
        start, valid = (row * run + line) * inner, line < run
        one_tile(
            a_ptr, dy_ptr, out_ptr, scale, zero_point, start, column, inner, valid, MASK != NEVER, may_be_nan, has_zp,
            True, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64, 1, COLS, VECTOR,
        )  # fmt: skip
    elif divides(OP, RECIPROCAL) and awkward(scale, zero_point, has_zp, F64):
        for top in range(loop_bound(first), loop_bound(end), LINES):
            line = top + tl.arange(0, LINES)[:, None]
            start, valid = (row * run + line) * inner, line < run
            tile = load_tile(a_ptr, dy_ptr, start, column, inner, valid, True, OP, PACKED, F64, 1, COLS, VECTOR)
            args = (tile, out_ptr, scale, zero_point, start, column, inner, valid)
            finish_tile(
                *args, True, FAR, may_be_nan, has_zp, True, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH, STREAM, F64, 1,
                COLS, VECTOR,
            )  # fmt: skip
    else:
        for top in range(loop_bound(first), loop_bound(end), LINES):
            line = top + tl.arange(0, LINES)[:, None]
            start, valid = (row * run + line) * inner, line < run
            tile = load_tile(
                a_ptr, dy_ptr, start, column, inner, valid, MASK != NEVER, OP, PACKED, F64, 1, COLS, VECTOR
            )
            args = (tile, out_ptr, scale, zero_point, start, column, inner, valid)
            finish_tile(
                *args, MASK != NEVER, PLAIN, may_be_nan, has_zp, True, OP, RECIPROCAL, Q_MIN, Q_MAX, PACKED, EACH,
                STREAM, F64, 1, COLS, VECTOR,
            )  # fmt: skip


@triton.jit
def scattered(
    a_ptr, scale_ptr, zero_point_ptr, out_ptr, size, axis, rows, run, inner, OP: tl.constexpr,
    RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, PACKED: tl.constexpr, F64: tl.constexpr,
    COLS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Packed quantize and dequantize, a byte a lane, each element finding its own scale: rows of odd length, or
    segments that end inside a byte. `axis` is the length of the last axis, `size` the number of bytes."""
    take_over(EARLY)
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
            q = nibble(packed >> (4 * half), PACKED == SIGNED_PAIRS)
            y = formula(q, None, scale, zero_point, dtype, may_be_nan, has_zp, OP, RECIPROCAL, FAR, Q_MIN, Q_MAX, F64)
            tl.store(out_ptr + offset, y, mask=keep)
        else:
            x = widen(tl.load(a_ptr + offset, mask=keep, other=0.0), F64)
            q = formula(x, None, scale, zero_point, dtype, may_be_nan, has_zp, OP, RECIPROCAL, FAR, Q_MIN, Q_MAX, F64)
            if has_zp:
                q += step_rest(zero_point, F64)
            packed |= tl.where(keep, (q & 15) << (4 * half), 0)
    if OP == QUANTIZE:
        tl.store(out_ptr + byte, packed.to(tl.uint8), mask=inside)
