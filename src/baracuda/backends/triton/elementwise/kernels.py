"""The elementwise kernels: one formula for six ops, three ways to walk over a view.

`dense` walks lines that share one scale each, `columns` lines whose every column has its own (strided segments), and
`scattered` the bytes of packed tensors whose pairs do not line up with either.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714, SIM109
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..numerics.conversions import load_scale, load_zero_point, narrow, quiet, to_float, widen
from ..numerics.division import divide_gradient, divisor_of, exact_divide, prepare
from ..numerics.indices import Place, as_offset, columns_at, loop_bound, split_index
from ..numerics.packing import Storage, is_signed, load_pairs, nibble_at, nibble_bits, store_quantized
from ..numerics.rounding import (
    FAR,
    PLAIN,
    Quantizer,
    awkward,
    bounds_of,
    in_range,
    quantize_steps,
    step_bits,
    step_lacks,
    step_rest,
    step_value,
)
from ..pdl import wait_for_previous
from ..tune import Tile

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
#: Which scale a line has: the only one; its own; that of the line modulo the number of rows.
ONE_SCALE = tl.constexpr(0)
SCALE_PER_LINE = tl.constexpr(1)
SCALES_REPEAT = tl.constexpr(2)


class Elementwise(NamedTuple):
    """What an elementwise kernel is compiled for: the constant SPEC."""

    op: int
    quantizer: Quantizer
    storage: Storage
    tile: Tile
    #: NEVER, EDGES or ALWAYS.
    mask: int = 0
    #: ONE_SCALE, SCALE_PER_LINE or SCALES_REPEAT.
    segment: int = 0
    #: Programs start at the end of the tensor, which the kernel before has read last and left in the cache.
    backwards: bool = False
    #: Offsets take 64 bits.
    wide: bool = False
    #: Outputs leave the cache first (`st.global.cs`).
    stream: bool = False
    #: Each column has a scale and a zero point of its own.
    per_column: bool = False


class Segment(NamedTuple):
    """Scales and zero points, in any shape that broadcasts; the zero point may be None."""

    scale: Any
    zero_point: Any


@triton.jit
def formula(a, dy, segment, dtype: tl.constexpr, MAY_BE_NAN: tl.constexpr, WAY: tl.constexpr, SPEC: tl.constexpr):
    """What an op makes of its elements; a quantization gives the bits of the step. `a` is x, widened, or an int32 q.

    MAY_BE_NAN is about the scale: one that is a number is not NaN. What depends on the scale and the zero point alone
    is worked out once for all elements that share them.
    """
    OP: tl.constexpr = SPEC.op
    F64: tl.constexpr = SPEC.quantizer.f64
    RECIPROCAL: tl.constexpr = SPEC.quantizer.reciprocal
    scale = segment.scale
    if OP == DEQUANTIZE:
        q = a if segment.zero_point is None else a - segment.zero_point
        return narrow(to_float(q, F64) * scale, dtype, MAY_BE_NAN, True)
    elif OP == DEQUANTIZE_BACKWARD:
        return narrow(dy * scale, dtype, True, True)
    else:
        plain: tl.constexpr = WAY == PLAIN and not RECIPROCAL
        divisor = divisor_of(scale, F64) if plain else prepare(scale, RECIPROCAL, F64)
        QUANTIZER: tl.constexpr = SPEC.quantizer
        bounds = bounds_of(segment.zero_point, QUANTIZER)
        if OP == QUANTIZE:
            return step_bits(quantize_steps(a, divisor, bounds, RECIPROCAL, WAY, F64), F64)
        elif OP == FAKE_QUANTIZE:
            step = quantize_steps(a, divisor, bounds, RECIPROCAL, WAY, F64)
            return narrow(step_value(step, bounds, F64) * scale, dtype, MAY_BE_NAN and not plain, True)
        else:
            passes = in_range(a, divisor, bounds, RECIPROCAL, WAY, F64)
            if OP == FAKE_QUANTIZE_BACKWARD:
                # The compiler may undo f16's way there and back, and then a NaN would keep sign and payload.
                grad = quiet(dy) if dtype == tl.float16 else dy
            elif RECIPROCAL:
                grad = dy * divisor.reciprocal
            elif plain:
                grad = divide_gradient(dy, divisor, F64)
            else:
                grad = exact_divide(dy, scale, F64)
            return narrow(tl.where(passes, grad, 0.0), dtype, True)


@triton.constexpr_function
def divides(reciprocal: bool, op: int) -> bool:
    """Whether an `awkward` scale or zero point asks for `quantize_steps`' FAR way."""
    return not reciprocal and op not in (DEQUANTIZE.value, DEQUANTIZE_BACKWARD.value)


@triton.jit
def load_tile(a_ptr, dy_ptr, place, MASKED: tl.constexpr, PARTS: tl.constexpr, SPEC: tl.constexpr):
    """(x or q, dy) in the math type or as int32; of an op that reads only one of them, that one twice.

    More than one part, each a tile's columns further to the right, come as pairs of pairs.
    """
    OP: tl.constexpr = SPEC.op
    COLS: tl.constexpr = SPEC.tile.columns
    VECTOR: tl.constexpr = SPEC.tile.vector
    F64: tl.constexpr = SPEC.quantizer.f64
    if PARTS > 1:
        half: tl.constexpr = PARTS // 2
        # Not by a function: Triton 3.6 takes no None in what a function returns.
        further = Place(place.start, place.column + half * COLS, place.width, place.valid)
        near = load_tile(a_ptr, dy_ptr, place, MASKED, half, SPEC)
        far = load_tile(a_ptr, dy_ptr, further, MASKED, half, SPEC)
        return near, far
    else:
        columns, inside = columns_at(place, COLS, VECTOR)
        mask = inside if MASKED else None
        if OP == DEQUANTIZE and SPEC.storage.packed:
            a = load_pairs(a_ptr, place, MASKED, is_signed(SPEC.storage.packed), COLS, VECTOR)
        elif OP == DEQUANTIZE:
            a = tl.load(a_ptr + place.start + columns, mask=mask).to(tl.int32)
        elif OP == DEQUANTIZE_BACKWARD:
            a = widen(tl.load(dy_ptr + place.start + columns, mask=mask), F64)
        else:
            a = widen(tl.load(a_ptr + place.start + columns, mask=mask), F64)
        if OP == FAKE_QUANTIZE_BACKWARD or OP == QUANTIZE_BACKWARD:
            return a, widen(tl.load(dy_ptr + place.start + columns, mask=mask), F64)
        else:
            return a, a


@triton.jit
def finish_tile(
    tile, out_ptr, segment, place, MAY_BE_NAN: tl.constexpr, MASKED: tl.constexpr, WAY: tl.constexpr,
    PARTS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Compute and store what was loaded."""
    COLS: tl.constexpr = SPEC.tile.columns
    VECTOR: tl.constexpr = SPEC.tile.vector
    if PARTS > 1:
        half: tl.constexpr = PARTS // 2
        finish_tile(tile[0], out_ptr, segment, place, MAY_BE_NAN, MASKED, WAY, half, SPEC)
        further = Place(place.start, place.column + half * COLS, place.width, place.valid)
        finish_tile(tile[1], out_ptr, segment, further, MAY_BE_NAN, MASKED, WAY, half, SPEC)
    else:
        a, dy = tile
        y = formula(a, dy, segment, out_ptr.dtype.element_ty, MAY_BE_NAN, WAY, SPEC)
        if SPEC.op == QUANTIZE:
            F64: tl.constexpr = SPEC.quantizer.f64
            has_zp: tl.constexpr = segment.zero_point is not None
            rest = step_rest(segment.zero_point, F64) if has_zp else 0
            per_column: tl.constexpr = SPEC.per_column and has_zp and segment.zero_point.type.is_block()
            # Bytes with no zero point to add are as fast one by one.
            packed: tl.constexpr = SPEC.storage.packed
            each: tl.constexpr = SPEC.storage.each if packed or has_zp else 1
            lacks: tl.constexpr = step_lacks(F64)
            store_quantized(out_ptr, y, rest, place, MASKED, packed, each, lacks, per_column, COLS, VECTOR)
        else:
            columns, inside = columns_at(place, COLS, VECTOR)
            mask = inside if MASKED else None
            tl.store(out_ptr + place.start + columns, y, mask=mask, cache_modifier=".cs" if SPEC.stream else "")


@triton.jit
def one_tile(
    a_ptr, dy_ptr, out_ptr, segment, place, MAY_BE_NAN: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Load a tile, then look at its scales while the elements are under way, then compute and store."""
    tile = load_tile(a_ptr, dy_ptr, place, MASKED, PARTS, SPEC)
    if divides(SPEC.quantizer.reciprocal, SPEC.op) and awkward(segment.scale, segment.zero_point, SPEC.quantizer.f64):
        finish_tile(tile, out_ptr, segment, place, MAY_BE_NAN, MASKED, FAR, PARTS, SPEC)
    else:
        finish_tile(tile, out_ptr, segment, place, MAY_BE_NAN, MASKED, PLAIN, PARTS, SPEC)


@triton.jit
def program_in_order(BACKWARDS: tl.constexpr):
    """This program's place in the order in which the tensor is walked."""
    program = tl.program_id(0)
    if BACKWARDS:
        program = tl.num_programs(0) - 1 - program
    return program


@triton.jit
def dense(
    a_ptr, dy_ptr, scale_ptr, zero_point_ptr, out_ptr, lines, width, rows, blocks, SPEC: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Lines of `width` elements with one scale each: see `Elementwise.segment`. `blocks` is a Split."""
    wait_for_previous(PDL)
    F64: tl.constexpr = SPEC.quantizer.f64
    may_be_nan: tl.constexpr = scale_ptr.dtype.is_ptr()
    LINES: tl.constexpr = SPEC.tile.lines
    PARTS: tl.constexpr = SPEC.tile.parts
    across: tl.constexpr = PARTS * SPEC.tile.columns
    above, block = split_index(program_in_order(SPEC.backwards), blocks, SPEC.wide)
    first, column = above * LINES, block * across
    if LINES == 1:
        line = first
    else:
        line = first + tl.arange(0, LINES)[:, None]
    valid = line < lines
    index = 0 if SPEC.segment == ONE_SCALE else (line if SPEC.segment == SCALE_PER_LINE else line % rows)
    keep = None if LINES == 1 or SPEC.segment == ONE_SCALE else valid
    segment = Segment(
        scale=load_scale(scale_ptr, index, keep, F64),
        zero_point=None if zero_point_ptr is None else load_zero_point(zero_point_ptr, index, keep),
    )
    place = Place(start=line * width, column=column, width=width, valid=valid)
    if SPEC.mask == NEVER:
        one_tile(a_ptr, dy_ptr, out_ptr, segment, place, may_be_nan, False, PARTS, SPEC)
    elif SPEC.mask == ALWAYS:
        one_tile(a_ptr, dy_ptr, out_ptr, segment, place, may_be_nan, True, PARTS, SPEC)
    elif (first + LINES <= lines) & (column + across <= width):
        one_tile(a_ptr, dy_ptr, out_ptr, segment, place, may_be_nan, False, PARTS, SPEC)
    else:
        one_tile(a_ptr, dy_ptr, out_ptr, segment, place, may_be_nan, True, PARTS, SPEC)


@triton.jit
def lines_at(top, row, column, run, inner, LINES: tl.constexpr):
    """The place of a tile's lines from `top` on, in [row, run, inner]."""
    line = top + tl.arange(0, LINES)[:, None]
    return Place(start=(row * run + line) * inner, column=column, width=inner, valid=line < run)


@triton.jit
def columns(
    a_ptr, dy_ptr, scale_ptr, zero_point_ptr, out_ptr, run, inner, blocks, row_blocks, SPEC: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """[rows, run, inner] with scales [rows, inner]: a program keeps its columns' scales and walks down the run."""
    wait_for_previous(PDL)
    F64: tl.constexpr = SPEC.quantizer.f64
    may_be_nan: tl.constexpr = scale_ptr.dtype.is_ptr()
    LINES: tl.constexpr = SPEC.tile.lines
    COLS: tl.constexpr = SPEC.tile.columns
    ITERS: tl.constexpr = SPEC.tile.repeats
    MASKED: tl.constexpr = SPEC.mask != NEVER
    above, block = split_index(program_in_order(SPEC.backwards), blocks, False)
    row, row_block = split_index(above, row_blocks, SPEC.wide)
    column, first = as_offset(block, SPEC.wide) * COLS, row_block * (LINES * ITERS)
    column_index = column + tl.arange(0, COLS)[None, :]
    keep = column_index < inner if MASKED else None
    index = row * inner + column_index
    segment = Segment(
        scale=load_scale(scale_ptr, index, keep, F64),
        zero_point=None if zero_point_ptr is None else load_zero_point(zero_point_ptr, index, keep),
    )
    end = tl.minimum(first + LINES * ITERS, run)
    if ITERS == 1:
        place = lines_at(first, row, column, run, inner, LINES)
        one_tile(a_ptr, dy_ptr, out_ptr, segment, place, may_be_nan, MASKED, 1, SPEC)
    elif divides(SPEC.quantizer.reciprocal, SPEC.op) and awkward(segment.scale, segment.zero_point, SPEC.quantizer.f64):
        for top in range(loop_bound(first), loop_bound(end), LINES):
            place = lines_at(top, row, column, run, inner, LINES)
            tile = load_tile(a_ptr, dy_ptr, place, True, 1, SPEC)
            finish_tile(tile, out_ptr, segment, place, may_be_nan, True, FAR, 1, SPEC)
    else:
        for top in range(loop_bound(first), loop_bound(end), LINES):
            place = lines_at(top, row, column, run, inner, LINES)
            tile = load_tile(a_ptr, dy_ptr, place, MASKED, 1, SPEC)
            finish_tile(tile, out_ptr, segment, place, may_be_nan, MASKED, PLAIN, 1, SPEC)


@triton.jit
def scattered(
    a_ptr, scale_ptr, zero_point_ptr, out_ptr, size, axis, rows, run, inner, SPEC: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Packed quantize and dequantize, one byte in a lane, each element finding its own scale: rows of odd length, or
    segments that end inside a byte. `axis` is the length of the last axis, `size` the number of bytes."""
    wait_for_previous(PDL)
    F64: tl.constexpr = SPEC.quantizer.f64
    may_be_nan: tl.constexpr = scale_ptr.dtype.is_ptr()
    COLS: tl.constexpr = SPEC.tile.columns
    byte = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    pair_length = (axis + 1) // 2
    first = byte // pair_length * axis + byte % pair_length * 2
    inside = byte < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    packed = tl.zeros([COLS], tl.int32)
    if SPEC.op == DEQUANTIZE:
        packed = tl.load(a_ptr + byte, mask=inside, other=0).to(tl.int32)
    for half in tl.static_range(2):
        offset = first + half
        keep = inside & (byte % pair_length * 2 + half < axis)
        index = offset // inner // run % rows * inner + offset % inner
        segment = Segment(
            scale=load_scale(scale_ptr, index, keep, F64),
            zero_point=None if zero_point_ptr is None else load_zero_point(zero_point_ptr, index, keep),
        )
        if SPEC.op == DEQUANTIZE:
            q = nibble_at(packed, half, is_signed(SPEC.storage.packed))
            tl.store(out_ptr + offset, formula(q, None, segment, dtype, may_be_nan, FAR, SPEC), mask=keep)
        else:
            x = widen(tl.load(a_ptr + offset, mask=keep, other=0.0), F64)
            q = formula(x, None, segment, dtype, may_be_nan, FAR, SPEC)
            if segment.zero_point is not None:
                q += step_rest(segment.zero_point, F64)
            packed |= tl.where(keep, nibble_bits(q, half), 0)
    if SPEC.op == QUANTIZE:
        tl.store(out_ptr + byte, packed.to(tl.uint8), mask=inside)
