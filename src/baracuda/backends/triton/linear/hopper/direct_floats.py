"""The weight-only GEMM for the fewest tokens: out.T = decoded(weight) @ x.T, with no stop on the way to the registers.

A warp has 16 rows of the weight over one part of K. A thread loads 16 bytes of a row at a time, straight from memory,
and holds several such loads of its next chunks while one is multiplied. What an instruction adds up lies in one thread
then; shuffles spread it over the four threads of the row. The activations stay in shared memory, in the order in which
they are multiplied. The parts of K meet there too, so no second kernel adds them up.

A chunk is 128 weights of a row. One instruction adds up 16 neighbours along K at once and parts are added in their
order, so a token has the same bits as in `packed`.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...numerics.decode import bits_of_scale, decode_apart, decode_apart_exactly, halves, shift_of
from ...numerics.fragments import every_other, exchanged, orders
from .epilogue import completed, scaled
from .few import appended, let_next_kernel_start, prefetch_rows, wait_for_previous_kernel

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


@gluon.jit
def load_groups(scale_ptr, zero_ptr, tile, chunk, inner, work, TILE: gl.constexpr, FORM: gl.constexpr):
    """The scales and the zero points, if there are any, of the chunks whose scales are read together."""
    GROUP: gl.constexpr = FORM.group
    COUNT: gl.constexpr = TILE.together * (128 // GROUP) if 0 < GROUP and GROUP < 128 else TILE.together
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
def decoded(words, place, scales, shifts, DTYPE: gl.constexpr, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """A chunk's weights as floats, the left operand of its eight instructions."""
    PER: gl.constexpr = len(scales)
    W: gl.constexpr = words.shape[0]
    sources = gl.split(gl.reshape(exchanged(words, place), [W, ROWS, 4, 2, 2]))
    blocks = ()
    for source in gl.static_range(4):
        blocks = appended(
            blocks,
            decoded_block(
                sources[source % 2], scales[source * PER // 4], shifts[source * PER // 4], source // 2 * 8, DTYPE, FORM
            ),
        )
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
    CHUNKS: gl.constexpr = LAYOUT.shape[0]
    PARTS: gl.constexpr = LAYOUT.shape[1]
    T: gl.constexpr = LAYOUT.shape[3]
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


@triton.constexpr_function
def group_at(chunk: int, together: int, group: int) -> int:
    return chunk // together if group else 0


@triton.constexpr_function
def group_in(chunk: int, together: int, group: int) -> int:
    return chunk % together if group else 0


@triton.constexpr_function
def min_of(a: int, b: int) -> int:
    return min(a, b)


@gluon.jit
def added_in_order(parts):
    """The sums of parts of K, the first axis, as `sum_parts` adds them up."""
    each = apart(gl.permute(parts, [1, 2, 0]))
    total = gl.zeros_like(each[0])
    for i in gl.static_range(parts.shape[0]):
        total += each[i]
    return total


@gluon.jit
def store_rows(acc, row, work, out_ptr, terms, KINDS: gl.constexpr):
    """Finish and store sums of a program's rows from `row` on: [rows, tokens]."""
    LAYOUT: gl.constexpr = acc.type.layout
    columns = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    tokens = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    y = scaled(acc, tokens, columns, work.M, work.N, (0.0, 0.0), terms, KINDS)
    y = completed(y, tokens, columns, work.M, work.N, terms, KINDS, out_ptr.dtype.element_ty)
    place = gl.expand_dims(tokens.to(gl.int64) * work.N, 0) + gl.expand_dims(columns, 1)
    gl.store(out_ptr + place, y, gl.expand_dims(tokens < work.M, 0) & gl.expand_dims(columns < work.end, 1))


@gluon.jit
def store_sums(acc, row, part, work, partial_ptr):
    """Store sums of a part of K as they are, for the kernel that adds them up."""
    LAYOUT: gl.constexpr = acc.type.layout
    columns = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    tokens = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    place = gl.expand_dims((part * work.M + tokens).to(gl.int64) * work.N, 0) + gl.expand_dims(columns, 1)
    gl.store(partial_ptr + place, acc, gl.expand_dims(tokens < work.M, 0) & gl.expand_dims(columns < work.end, 1))


@gluon.jit
def load_step(w_ptr, scale_ptr, zero_ptr, work, LAYOUT: gl.constexpr, TILE: gl.constexpr, FORM: gl.constexpr):
    """A program's first step: its words, and the groups that come with them."""
    DEPTH: gl.constexpr = TILE.depth
    TOGETHER: gl.constexpr = TILE.together
    ring = ()
    for c in gl.static_range(DEPTH):
        ring = appended(ring, load_words(w_ptr, 0, 0, c, work, LAYOUT, TILE))
    groups = ()
    for c in gl.static_range(0, DEPTH if FORM.group > 0 else 1, TOGETHER):
        groups = appended(groups, load_groups(scale_ptr, zero_ptr, 0, 0, c, work, TILE, FORM))
    return ring, groups


@gluon.jit
def fill(tokens, x_ptr, work, TILE: gl.constexpr):
    """Bring the activations to shared memory, in the order in which they are multiplied."""
    CHUNKS: gl.constexpr = tokens.shape[0]
    PARTS: gl.constexpr = tokens.shape[1]
    T: gl.constexpr = TILE.tokens
    FILL: gl.constexpr = TILE.fill
    FILLS: gl.constexpr = TILE.fills
    TURNS: gl.constexpr = CHUNKS // FILL
    BY_FILL: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[4, 3, 2, 1, 0])
    UNITS: gl.constexpr = units_layout(TILE.warps, FILL, PARTS, T)
    filled = tokens._reinterpret(gl.int32, [TURNS, FILL, PARTS, 4, T, 16], BY_FILL)
    for start in gl.static_range(0, TURNS, FILLS):
        units = ()
        for i in gl.static_range(start, min_of(start + FILLS, TURNS)):
            units = appended(units, load_units(x_ptr, i * FILL, work, TILE, UNITS))
        for i in gl.static_range(start, min_of(start + FILLS, TURNS)):
            even, odd = every_other(units[i - start])
            filled.index(i).store(gl.reshape(gl.join(even, odd), [FILL, PARTS, 4, T, 16]))


@gluon.jit
def multiply_turn(
    held, turn, tokens, place, w_ptr, scale_ptr, zero_ptr, work, MMA: gl.constexpr, DTYPE: gl.constexpr,
    TILE: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """The sums of a turn's tiles, and in the place of the words that were `held` those of the next turn."""
    W: gl.constexpr = TILE.warps
    DEPTH: gl.constexpr = TILE.depth
    COLUMNS: gl.constexpr = max(8, TILE.tokens)
    GROUP: gl.constexpr = FORM.group
    PER: gl.constexpr = 128 // GROUP if 0 < GROUP and GROUP < 128 else 1
    ZEROS: gl.constexpr = zero_ptr.dtype.element_ty == gl.int32
    TOGETHER: gl.constexpr = TILE.together
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    WORDS: gl.constexpr = words_layout(W)
    ring, groups = held
    acc = gl.zeros([W, ROWS, COLUMNS], gl.float32, MMA)
    for step in range(TILE.steps):
        next_turn = turn
        next_step = step + 1
        if next_step == TILE.steps:
            next_step = 0
            next_turn += 1
        # Behind the last turn, rows that the program has not.
        tile = next_turn * TILE.groups
        chunk = next_step * DEPTH
        following = ()
        later = ()
        for c in gl.static_range(DEPTH):
            scales, shifts = words_of(
                groups[group_at(c, TOGETHER, GROUP)], group_in(c, TOGETHER, GROUP), PER, ZEROS, FORM
            )
            weight = decoded(ring[c], place, scales, shifts, DTYPE, FORM, A)
            if not TILE.once:
                # The registers are free again.
                following = appended(following, load_words(w_ptr, tile, chunk, c, work, WORDS, TILE))
                if GROUP > 0 and (c + 1) % TOGETHER == 0:
                    later = appended(
                        later, load_groups(scale_ptr, zero_ptr, tile, chunk, c + 1 - TOGETHER, work, TILE, FORM)
                    )
            acc = mma_v2(weight, tokens_of(tokens.index(step * DEPTH + c), DTYPE, TILE, B), acc)
        if not TILE.once:
            ring = following
            if GROUP > 0:
                groups = later
    if GROUP == 0 and not TILE.once:
        groups = (load_groups(scale_ptr, zero_ptr, (turn + 1) * TILE.groups, 0, 0, work, TILE, FORM),)
    return acc, (ring, groups)


@gluon.jit
def finish(
    acc, turn, part, work, partial_ptr, out_ptr, terms, TILE: gl.constexpr, KINDS: gl.constexpr
):  # fmt: skip
    """Add up the parts of K, and store the output of a turn's tiles; or their sums, if the parts lie apart."""
    W: gl.constexpr = TILE.warps
    G: gl.constexpr = TILE.groups
    PARTS: gl.constexpr = W // G
    COLUMNS: gl.constexpr = acc.shape[2]
    row = work.row + turn * (G * ROWS)
    if TILE.apart:
        store_sums(gl.reshape(acc, [W * ROWS, COLUMNS]), row, part, work, partial_ptr)
    elif PARTS == 1:
        store_rows(gl.reshape(acc, [W * ROWS, COLUMNS]), row, work, out_ptr, terms, KINDS)
    else:
        SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
        ADDED: gl.constexpr = gl.BlockedLayout([PARTS, 1, 1], [1, 32 // COLUMNS, COLUMNS], [1, W, 1], [2, 1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [PARTS, G * ROWS, COLUMNS], SUMS)
        sums.store(gl.reshape(acc, [PARTS, G * ROWS, COLUMNS]))
        store_rows(added_in_order(sums.load(ADDED)), row, work, out_ptr, terms, KINDS)


@gluon.jit
def gemm_direct_floats(
    x_ptr, w_ptr, scale_ptr, zero_ptr, partial_ptr, out_ptr, terms, shape, TILE: gl.constexpr, FORM: gl.constexpr,
    KINDS: gl.constexpr,
):  # fmt: skip
    """A program has neighbouring tiles, TILE.groups of them at a time, a warp for each and each part of K; or, where
    the parts lie apart, for one part."""
    G: gl.constexpr = TILE.groups
    W: gl.constexpr = TILE.warps
    DEPTH: gl.constexpr = TILE.depth
    PARTS: gl.constexpr = W // G
    APART: gl.constexpr = TILE.split // PARTS
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    WORDS: gl.constexpr = words_layout(W)
    if FORM.early != "no":
        let_next_kernel_start()
    tiles = gl.cdiv(shape.n, ROWS)
    part = gl.program_id(0) % APART
    share = gl.program_id(0) // APART
    shares = gl.num_programs(0) // APART
    first = (share.to(gl.int64) * tiles // shares).to(gl.int32)
    last = ((share + 1).to(gl.int64) * tiles // shares).to(gl.int32)
    work = FloatWork(
        M=shape.m, N=shape.n, K=shape.k, row=first * ROWS, end=gl.minimum(last * ROWS, shape.n), chunk=part * TILE.part
    )  # fmt: skip
    if FORM.early != "no":
        for i in gl.static_range(PARTS):
            begin = (part + i) * TILE.part * (CHUNK // 2)
            prefetch_rows(w_ptr, work.row, shape.n, begin, DEPTH * (CHUNK // 2), shape.k // 2, ROWS * G)
        wait_for_previous_kernel()
    place = orders(along(2, WORDS))
    held = load_step(w_ptr, scale_ptr, zero_ptr, work, WORDS, TILE, FORM)
    ROW_MAJOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[3, 2, 1, 0])
    CHUNKS: gl.constexpr = TILE.steps * DEPTH
    T: gl.constexpr = TILE.tokens
    tokens = gl.allocate_shared_memory(gl.int32, [CHUNKS, PARTS, 4, T, 16], ROW_MAJOR)
    fill(tokens, x_ptr, work, TILE)
    if TILE.one_turn:
        # Without a loop the sums take the room of the activations.
        acc, _ = multiply_turn(
            held, 0, tokens, place, w_ptr, scale_ptr, zero_ptr, work, MMA, DTYPE, TILE, FORM
        )  # fmt: skip
        finish(acc, 0, part, work, partial_ptr, out_ptr, terms, TILE, KINDS)
    else:
        for turn in range(gl.cdiv(last - first, G)):
            acc, held = multiply_turn(
                held, turn, tokens, place, w_ptr, scale_ptr, zero_ptr, work, MMA, DTYPE, TILE, FORM
            )
            finish(acc, turn, part, work, partial_ptr, out_ptr, terms, TILE, KINDS)
