"""What a thread of the weight-only GEMM for the fewest tokens loads, and the operands that it makes of it.

A chunk is 128 weights of a row: of each of its rows, a thread loads 16 bytes, which are two blocks of what an
instruction adds up.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...numerics.decode import bits_of_scale, decode_apart, decode_apart_exactly, halves, shift_of
from ...numerics.fragments import exchanged
from .tokens import appended

#: Rows of a tile, and weights of a row in a chunk.
ROWS = gl.constexpr(16)
CHUNK = gl.constexpr(128)


class FloatWork(NamedTuple):
    """The sizes of the problem, and what a program has of it: its rows [row, end) and the first chunk of K."""

    M: Any
    N: Any
    K: Any
    row: Any
    end: Any
    chunk: Any


@triton.constexpr_function
def bits(count: int) -> int:
    return count.bit_length() - 1


@triton.constexpr_function
def words_layout(warps: int) -> gl.DistributedLinearLayout:
    """[warps, rows, thread of four, words]: of every eighth row, a thread has four words side by side."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    of_warps = [[1 << i, 0, 0, 0] for i in range(bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, 16, 4, 4])


@triton.constexpr_function
def values_layout(warps: int, count: int) -> gl.DistributedLinearLayout:
    """[warps, rows, values]: a thread has all of a row's, as the other three of the row have."""
    registers = [*([0, 0, 1 << i] for i in range(bits(count))), [0, 8, 0]]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    of_warps = [[1 << i, 0, 0] for i in range(bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, 16, count])


@triton.constexpr_function
def units_layout(warps: int, chunks: int, parts: int, tokens: int) -> gl.DistributedLinearLayout:
    """[chunks, parts, sources, tokens, thread of four, blocks]: units of four activations as they lie in memory."""
    shape = [chunks, parts, 4, tokens, 4, 2]
    bases = [[0] * axis + [1 << i] + [0] * (5 - axis) for axis in (5, 4, 3, 2, 1, 0) for i in range(bits(shape[axis]))]
    threads = 5 + bits(warps)
    bases = bases[:threads] + [[0] * 6] * max(0, threads - len(bases)) + bases[threads:]
    return gl.DistributedLinearLayout(bases[threads:], bases[:5], bases[5:threads], [], shape)


@triton.constexpr_function
def operand_layout(parts: int, groups: int, tokens: int) -> gl.DistributedLinearLayout:
    """[parts, groups of rows, sources, copies, tokens, words]: the right operand as it is read. Fewer tokens than the
    eight of an instruction are there several times."""
    copies = 8 // tokens if tokens < 8 else 1
    shape = [parts, groups, 4, copies, tokens, 16]
    unit = [[[0] * axis + [1 << i] + [0] * (5 - axis) for i in range(bits(shape[axis]))] for axis in range(6)]
    token = (unit[4] + unit[3])[:3]
    registers = unit[5][:2] + unit[4][3:] + unit[2]
    return gl.DistributedLinearLayout(registers, unit[5][2:] + token, unit[1] + unit[0], [], shape)


@triton.constexpr_function
def without(layout: Any, axis: int) -> Any:
    """The layout of one axis alone."""
    for other in reversed(range(len(layout.shape))):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(AXIS: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, ... along one axis, to broadcast along the others."""
    values = gl.arange(0, LAYOUT.shape[AXIS], without(LAYOUT, AXIS))
    for axis in gl.static_range(len(LAYOUT.shape)):
        if axis != AXIS:
            values = gl.expand_dims(values, axis)
    return values


@gluon.jit
def apart(values):
    """The values along the last axis, as a tuple."""
    COUNT: gl.constexpr = values.shape[2]
    if COUNT == 1:
        return (gl.reshape(values, [values.shape[0], values.shape[1]]),)
    elif COUNT == 2:
        even, odd = gl.split(values)
        return (even, odd)
    else:
        halved = gl.reshape(values, [values.shape[0], values.shape[1], 2, COUNT // 2])
        first, second = gl.split(gl.permute(halved, [0, 1, 3, 2]))
        return apart(first) + apart(second)


@gluon.jit
def load_words(w_ptr, tile, chunk, inner, work, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """A chunk of each warp, of the program's tile `tile` and those behind it; 0 behind the end of K. Of rows that the
    program has not, anything: all warps without work read the same row."""
    warp = along(0, LAYOUT)
    thread = along(2, LAYOUT)
    line = work.K // 8
    row = gl.minimum(work.row + (tile + warp % TILE.groups) * ROWS + along(1, LAYOUT), work.end - 1)
    start = work.chunk + chunk + warp // TILE.groups * TILE.part
    place = row.to(gl.int64) * line + start * (CHUNK // 8) + thread * 4 + along(3, LAYOUT)
    source = (w_ptr + place) + inner * (CHUNK // 8)
    if TILE.whole:
        return gl.load(source)
    else:
        live = ((start + inner) * (CHUNK // 8) + thread * 4 < line) & (chunk + inner < TILE.part)
        return gl.load(source, live, other=0)


@gluon.jit
def load_values(ptr, tile, chunk, inner, work, TILE: gl.constexpr, GROUP: gl.constexpr, COUNT: gl.constexpr):
    """COUNT scales or zero points of each row from a chunk on; behind the last row or the end of K, any."""
    LAYOUT: gl.constexpr = values_layout(TILE.warps, COUNT)
    warp = along(0, LAYOUT)
    row = gl.minimum(work.row + (tile + warp % TILE.groups) * ROWS + along(1, LAYOUT), work.end - 1)
    if GROUP == 0:
        place = row + along(2, LAYOUT)
    else:
        line = work.K // (GROUP * COUNT) * COUNT if TILE.whole else work.K // GROUP  # the compiler sees COUNT in it
        start = work.chunk + chunk + warp // TILE.groups * TILE.part
        if GROUP > CHUNK:
            at = (start + inner) // (GROUP // CHUNK)
        else:
            at = (start + inner) * (CHUNK // GROUP)
        at += along(2, LAYOUT)
        if not TILE.whole:
            at = gl.minimum(at, line - 1)
        place = row * line + at
    return gl.load(ptr + place)


@triton.constexpr_function
def groups_in_chunk(group: int) -> int:
    return 128 // group if 0 < group < 128 else 1


@gluon.jit
def load_groups(scale_ptr, zero_ptr, tile, chunk, inner, work, TILE: gl.constexpr, FORM: gl.constexpr):
    """The scales and the zero points, if there are any, of the chunks whose scales are read together."""
    GROUP: gl.constexpr = FORM.group
    COUNT: gl.constexpr = TILE.together * groups_in_chunk(GROUP)
    scales = load_values(scale_ptr, tile, chunk, inner, work, TILE, GROUP, COUNT)
    zeros = 0
    if zero_ptr.dtype.element_ty == gl.int32:
        zeros = load_values(zero_ptr, tile, chunk, inner, work, TILE, GROUP, COUNT)
    return scales, zeros


@gluon.jit
def words_of(groups, index, PER: gl.constexpr, ZEROS: gl.constexpr, FORM: gl.constexpr):
    """Scales and shifts of a chunk's PER groups, as the words that decoding takes: [warps, rows] each."""
    scales, zeros = groups
    found = apart(scales)
    made = ()
    shifts = ()
    for i in gl.static_range(PER):
        made = appended(made, bits_of_scale(found[index * PER + i], FORM.plain))
        shift = gl.zeros_like(made[i])
        if not FORM.plain:
            if ZEROS:
                shift = apart(zeros)[index * PER + i]
            shift = shift_of(shift, True, FORM.signed)
        shifts = appended(shifts, shift)
    return made, shifts


@gluon.jit
def decoded_block(word, scale, shift, BIT: gl.constexpr, DTYPE: gl.constexpr, FORM: gl.constexpr):
    """The pairs of a block from a bit on: an instruction's first eight values along K, and the other eight."""
    LIKE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, word.type.layout))
    scale = gl.expand_dims(gl.expand_dims(gl.convert_layout(scale, LIKE, assert_trivial=True), 2), 3)
    if FORM.plain:
        first = decode_apart(word, BIT, scale, DTYPE, FORM.signed)
        second = decode_apart(word, BIT + 4, scale, DTYPE, FORM.signed)
    else:
        shift = gl.expand_dims(gl.expand_dims(gl.convert_layout(shift, LIKE, assert_trivial=True), 2), 3)
        first = decode_apart_exactly(word, BIT, scale, shift, DTYPE, FORM.signed)
        second = decode_apart_exactly(word, BIT + 4, scale, shift, DTYPE, FORM.signed)
    return gl.join(first, second)


@gluon.jit
def decoded_blocks(even_and_odd, scales, shifts, DTYPE: gl.constexpr, FORM: gl.constexpr):
    """Of each thread of four, the pairs of the two blocks that it has loaded."""
    PER: gl.constexpr = len(scales)
    blocks = ()
    for source in gl.static_range(4):
        scale = scales[source * PER // 4]
        shift = shifts[source * PER // 4]
        blocks = appended(blocks, decoded_block(even_and_odd[source % 2], scale, shift, source // 2 * 8, DTYPE, FORM))
    return blocks


@gluon.jit
def decoded(words, place, scales, shifts, DTYPE: gl.constexpr, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """A chunk's weights as floats, the left operand of its eight instructions."""
    W: gl.constexpr = words.shape[0]
    even_and_odd = gl.split(gl.reshape(exchanged(words, place), [W, ROWS, 4, 2, 2]))
    blocks = decoded_blocks(even_and_odd, scales, shifts, DTYPE, FORM)
    pairs = gl.join(gl.join(blocks[0], blocks[1]), gl.join(blocks[2], blocks[3]))
    low, high = halves(pairs, DTYPE)
    # [warps, rows, thread, block of two, half, source's bit 0, its bit 1, half of a pair]
    joined = gl.reshape(gl.permute(gl.join(low, high), [0, 1, 6, 5, 3, 4, 2, 7]), [W, ROWS, CHUNK])
    return gl.convert_layout(joined, LAYOUT, assert_trivial=True)


@gluon.jit
def tokens_of(x_buf, DTYPE: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """The right operand of a chunk."""
    PARTS: gl.constexpr = x_buf.shape[0]
    T: gl.constexpr = x_buf.shape[2]
    COPIES: gl.constexpr = 8 // T if T < 8 else 1
    G: gl.constexpr = TILE.groups
    FULL: gl.constexpr = operand_layout(PARTS, G, T)
    words = x_buf.load(gl.SliceLayout(1, gl.SliceLayout(3, FULL)))
    words = gl.expand_dims(gl.expand_dims(words, 1), 3)
    words, _ = gl.broadcast(words, gl.zeros([PARTS, G, 4, COPIES, T, 16], gl.int32, FULL))
    low, high = halves(words, DTYPE)
    joined = gl.reshape(gl.join(low, high), [PARTS, G, 4, COPIES, T, 4, 2, 2, 2])
    # [parts, groups, source, copies, tokens, thread, block of two, half, half of a pair]
    joined = gl.permute(joined, [0, 1, 2, 6, 7, 5, 8, 3, 4])
    joined = gl.reshape(joined, [PARTS * G, CHUNK, COPIES * T])
    return gl.convert_layout(joined, LAYOUT, assert_trivial=True)


@gluon.jit
def load_units(x_ptr, first, work, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Activations four at a time, of some chunks of each part from `first` on: the unit that thread t multiplies with
    the weights of thread s is s ^ t of their block. 0 where there are none."""
    UNITS: gl.constexpr = CHUNK // 4
    i = along(0, LAYOUT) + first
    part = along(1, LAYOUT)
    source = along(2, LAYOUT)
    token = along(3, LAYOUT)
    piece = along(4, LAYOUT) ^ source
    unit = (work.chunk + i + part * TILE.part) * UNITS + source * 8 + along(5, LAYOUT) * 4 + piece
    live = token < work.M
    if not TILE.whole:
        live = live & (i < TILE.part) & (unit < work.K // 4)
    # Not by way of L1, which the previous kernel does not write.
    return gl.load(x_ptr + token * (work.K // 4) + unit, live, other=0, cache_modifier=".cg")
