"""The weight-only GEMM for the fewest tokens: out.T = decoded(weight) @ x.T, with no stop on the way to the registers.

A warp has 16 rows of the weight over one part of K. A thread loads 16 bytes of a row at a time, straight from memory,
and holds several such loads of its next chunks while one is multiplied. What an instruction adds up lies in one thread
then; shuffles spread it over the four threads of the row. The activations stay in shared memory, in the order in which
they are multiplied. The parts of K meet there too, so no second kernel adds them up.

A chunk is 128 weights of a row. One instruction adds up 16 neighbours along K at once and parts are added in their
order, so a token has the same bits as in `packed`.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...numerics.fragments import every_other, orders
from .epilogue import completed, scaled, store_sums
from .few import let_next_kernel_start, prefetch_rows, wait_for_previous_kernel
from .float_fragments import (
    CHUNK,
    ROWS,
    FloatWork,
    along,
    apart,
    decoded,
    groups_in_chunk,
    load_groups,
    load_units,
    load_words,
    tokens_of,
    units_layout,
    words_layout,
    words_of,
)
from .tokens import appended
from .versions import barrier, reinterpreted


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
    filled = reinterpreted(tokens, gl.int32, [TURNS, FILL, PARTS, 4, T, 16], BY_FILL)
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
    PER: gl.constexpr = groups_in_chunk(GROUP)
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
        store_sums(gl.reshape(acc, [W * ROWS, COLUMNS]), part, 0, row, work.end, work.M, work.N, partial_ptr)
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
    barrier()  # the compiler's own would come inside the loop, at every step
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
