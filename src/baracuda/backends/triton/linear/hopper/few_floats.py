"""The weight-only GEMM for few tokens: out.T = decoded(weight) @ x.T, as fast as the packed weight can be read.

Several programs share a multiprocessor, each with a ring of TMA copies in flight, as in `few`. Weights are decoded in
registers, where they are the left operand of wgmma. Instructions are the bound, so a word of eight weights is read by
all four threads that share a row of an operand. For up to 8 tokens, thread t shifts the weights t and t + 4 into the
halves of a register: within eight neighbours along K the operands have that order, and the activations are reordered in
shared memory. More activations take longer to reorder than weights to decode in their own order: thread t then takes
the two of byte t. One instruction adds up 16 products at once, so a token has the same bits in both, and in `packed`.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...numerics.decode import (
    decode_apart,
    decode_apart_exactly,
    decode_neighbours,
    decode_neighbours_exactly,
    halves,
)
from ..tune import PART_OF_K
from .epilogue import store_sums
from .few import let_next_kernel_start, prefetch_rows, spread, store, wait_for_previous_kernel
from .floats import load_qparams
from .rings import PackedWork
from .tokens import appended
from .versions import async_load, barrier, reinterpreted

#: The most tokens that are reordered.
REORDERED = gl.constexpr(8)
#: Parts of K are multiples of it.
PART = gl.constexpr(PART_OF_K)


@gluon.jit
def fetch(place, x_desc, w_desc, x_bufs, w_bufs, full, work, TILE: gl.constexpr):
    """Start the copies of a step: of its weights and of the activations."""
    unit, step, stage = place
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    XK: gl.constexpr = x_desc.block_type.shape[1]
    live = unit < work.units
    ready = full.index(stage)
    k = unit % TILE.split * work.part_steps + step
    mbarrier.expect(ready, w_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=live)
    async_load(
        w_desc, [unit // TILE.split * BN, k * BK], ready, w_bufs.index(stage), pred=live
    )  # fmt: skip
    async_load(x_desc, [0, k * XK], ready, x_bufs.index(stage), pred=live)


@gluon.jit
def steps_of(unit, work, TILE: gl.constexpr):
    """Of a unit's part of K."""
    return min(work.part_steps, work.steps - unit % TILE.split * work.part_steps)


@gluon.jit
def following(place, work, TILE: gl.constexpr):
    """Unit, step and stage of the next copy."""
    unit, step, stage = place
    step += 1
    if step == steps_of(unit, work, TILE):
        step = 0
        unit += gl.num_programs(0)
    stage += 1
    if stage == TILE.stages:
        stage = 0
    return unit, step, stage


@triton.constexpr_function
def words_layout(rows: int, words: int, warps: int, axes: int) -> gl.DistributedLinearLayout:
    """[rows, words, thread of four], or all but the last: rows as in wgmma's left operand, words in vectors of four."""
    registers = [[0, 1, 0], [0, 2, 0], [8, 0, 0], *([0, 1 << i, 0] for i in range(2, words.bit_length() - 1))]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    of_warps = [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    bases = [[base[:axes] for base in some] for some in (registers, lanes, of_warps)]
    return gl.DistributedLinearLayout(*bases, [], [rows, words, 4][:axes])


@gluon.jit
def load_groups(scale_ptr, zero_ptr, row, step, work, SPAN: gl.constexpr, FORM: gl.constexpr):
    """Tuples of the scales and shifts of the groups in a step, one for each row; behind the end of K, any."""
    COUNT: gl.constexpr = SPAN // FORM.group if FORM.group > 0 and FORM.group < SPAN else 1
    scales = ()
    shifts = ()
    for i in gl.static_range(COUNT):
        at = row
        if FORM.group > 0:
            groups = work.K // FORM.group
            at = row * groups + gl.minimum(step * SPAN // FORM.group + i, groups - 1)
        scale, shift = load_qparams(scale_ptr, zero_ptr, at, FORM)
        scales = appended(scales, scale)
        shifts = appended(shifts, shift)
    return scales, shifts


@gluon.jit
def pair_of(
    word, thread, scale, shift, REORDER: gl.constexpr, DTYPE: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """A thread's two weights of a word."""
    if REORDER and FORM.plain:
        return decode_apart(word, 4 * thread, scale, DTYPE, FORM.signed)
    elif REORDER:
        return decode_apart_exactly(word, 4 * thread, scale, shift, DTYPE, FORM.signed)
    elif FORM.plain:
        return decode_neighbours(word, thread, scale, DTYPE, FORM.signed)
    else:
        return decode_neighbours_exactly(word, thread, scale, shift, DTYPE, FORM.signed)


@gluon.jit
def decoded(
    w_buf, scales, shifts, LAYOUT: gl.constexpr, REORDER: gl.constexpr, DTYPE: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """A step's weights as floats, the left operand of wgmma."""
    BN: gl.constexpr = w_buf.shape[0]
    COUNT: gl.constexpr = w_buf.shape[1] // 4
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, COUNT], gl.int32)
    WORDS: gl.constexpr = words_layout(BN, COUNT, gl.num_warps(), 2)
    APART: gl.constexpr = words_layout(BN, COUNT, gl.num_warps(), 3)
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    word = for_each(reinterpreted(w_buf, gl.int32, [BN, COUNT], SHARED).load(WORDS), APART)
    scale = for_each(spread(scales, COUNT, WORDS), APART)
    thread = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, APART))), 0), 1)
    shift = scale
    if not FORM.plain:
        shift = for_each(spread(shifts, COUNT, WORDS), APART)
    pairs = pair_of(word, thread, scale, shift, REORDER, DTYPE, FORM)
    low, high = halves(pairs, DTYPE)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [BN, 8 * COUNT]), A, assert_trivial=True)


@gluon.jit
def for_each(values, APART: gl.constexpr):
    """Values of words, or of rows, that each of the four threads has."""
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(2, APART), assert_trivial=True), 2)


@gluon.jit
def reorder(x_buf):
    """Bring each eight neighbours of a step's activations into the order 0 4 1 5 2 6 3 7; a thread has whole eights."""
    BT: gl.constexpr = x_buf.shape[0]
    SPAN: gl.constexpr = x_buf.shape[1]
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    apart = gl.permute(gl.reshape(x_buf.load(VECTORS), [BT, SPAN // 8, 2, 4]), [0, 1, 3, 2])
    x_buf.store(gl.convert_layout(gl.reshape(apart, [BT, SPAN]), VECTORS, assert_trivial=True))
    fence_async_shared()


@gluon.jit
def gemm_few_floats(
    x_desc, w_desc, w_ptr, scale_ptr, zero_ptr, partial_ptr, out_ptr, terms, shape, TILE: gl.constexpr,
    FORM: gl.constexpr, KINDS: gl.constexpr,
):  # fmt: skip
    """A unit of work is a tile's rows of the weight, over a part of K. The sums of parts are stored as they are."""
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    BT: gl.constexpr = x_desc.block_type.shape[0]
    SPAN: gl.constexpr = x_desc.block_type.shape[1]
    DTYPE: gl.constexpr = x_desc.dtype
    STAGES: gl.constexpr = TILE.stages
    REORDER: gl.constexpr = BT <= REORDERED
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BT, 16]
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, words_layout(BN, BK // 4, gl.num_warps(), 2))
    if FORM.early != "no":
        let_next_kernel_start()
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BT, SPAN], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()

    tiles_n = gl.cdiv(shape.n, BN)
    work = PackedWork(
        M=shape.m, N=shape.n, K=shape.k, tiles_m=1, tiles_n=tiles_n, steps=gl.cdiv(shape.k, SPAN),
        part_steps=gl.cdiv(gl.cdiv(shape.k, TILE.split), PART) * (PART // SPAN), units=tiles_n * TILE.split,
    )  # fmt: skip
    pid = gl.program_id(0)
    if FORM.early != "no":
        prefetch_rows(w_ptr, pid // TILE.split * BN, shape.n, 0, TILE.ahead * BK, shape.k // 2, BN)
        wait_for_previous_kernel()
    place = (pid, 0, 0)
    for _ in gl.static_range(STAGES - 1):
        fetch(place, x_desc, w_desc, x_bufs, w_bufs, full, work, TILE)
        place = following(place, work, TILE)

    stage = 0
    phase = 0
    for unit in range(pid, work.units, gl.num_programs(0)):
        n = unit // TILE.split
        part = unit % TILE.split
        begin = part * work.part_steps
        row = gl.minimum(n * BN + gl.arange(0, BN, ROWS), shape.n - 1)
        scales, shifts = load_groups(scale_ptr, zero_ptr, row, begin, work, SPAN, FORM)
        acc = gl.zeros((BN, BT), gl.float32, MMA)
        for k in range(steps_of(unit, work, TILE)):
            next_scales = scales
            next_shifts = shifts
            if FORM.group > 0:  # a step early: they come from L2
                next_scales, next_shifts = load_groups(scale_ptr, zero_ptr, row, begin + k + 1, work, SPAN, FORM)
            mbarrier.wait(full.index(stage), phase)
            if REORDER:
                reorder(x_bufs.index(stage))
            weight = decoded(w_bufs.index(stage), scales, shifts, MMA, REORDER, DTYPE, FORM)
            barrier()  # all warps have reordered theirs, and are done with the stage before, which is fetched anew
            x = x_bufs.index(stage).permute((1, 0))
            acc = warpgroup_mma(weight, x, acc, use_acc=k > 0, is_async=True)
            fetch(place, x_desc, w_desc, x_bufs, w_bufs, full, work, TILE)
            place = following(place, work, TILE)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            scales = next_scales
            shifts = next_shifts
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if TILE.split > 1:
            store_sums(acc, part, 0, n * BN, work.N, work.M, work.N, partial_ptr)
        else:
            store(acc, n, None, out_ptr, terms, shape.m, shape.n, KINDS)
