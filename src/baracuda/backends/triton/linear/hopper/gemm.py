"""The GEMM for many tokens: one warp feeds TMA copies to two warpgroups of tensor-core work, in a pingpong schedule.

The two take turns at the tiles: one multiplies while the other scales and stores. The constant TILE is the
`tune.Pingpong` of a problem.
"""

# ruff: noqa: PLR1714
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..kernels import tile_at
from .epilogue import completed, read_scales, scaled
from .versions import async_load, async_store


class Work(NamedTuple):
    """The sizes of the output, its tiles and their steps along K; the tiles that are not cut, and all units of work."""

    M: Any
    N: Any
    tiles_m: Any
    tiles_n: Any
    steps: Any
    whole: Any
    units: Any


class Barriers(NamedTuple):
    """One for each stage that is full or empty, and one for each consumer's turn."""

    full: Any
    empty: Any
    turn: Any


@gluon.jit
def unit_at(unit, work, TILE: gl.constexpr):
    """Row and column of a unit's tile, its first step along K and how many it has.

    A unit is a tile, or one of TILE.tail parts of a tile that is left over when every program had as many as any other.
    """
    TAIL: gl.constexpr = TILE.tail
    tile = unit
    first = 0
    count = work.steps
    if TAIL > 1:
        beyond = max(unit - work.whole, 0)
        tile = unit - beyond + beyond // TAIL
        first = beyond % TAIL * gl.cdiv(work.steps, TAIL)
        count = gl.where(unit < work.whole, work.steps, gl.cdiv(work.steps, TAIL))
    m, n = tile_at(tile, work.tiles_m, work.tiles_n, TILE.group, TILE.across)
    return m, n, first, count


@gluon.jit
def feed(a_desc, b_desc, a_bufs, b_bufs, barriers, work, TILE: gl.constexpr):
    """Keep the ring of stages full, unit after unit."""
    STAGES: gl.constexpr = b_bufs.shape[0]
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BN: gl.constexpr = b_desc.block_type.shape[0]
    BK: gl.constexpr = b_desc.block_type.shape[1]
    stage = 0
    phase = 1
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        m, n, first, count = unit_at(unit, work, TILE)
        for k in range(first, first + count):
            ready = barriers.full.index(stage)
            mbarrier.wait(barriers.empty.index(stage), phase)
            mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            async_load(a_desc, [m * BM, k * BK], ready, a_bufs.index(stage))
            async_load(b_desc, [n * BN, k * BK], ready, b_bufs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def pieces_of(y, WIDTH: gl.constexpr):
    """A tuple of pieces of so many columns, left to right."""
    BM: gl.constexpr = y.shape[0]
    BN: gl.constexpr = y.shape[1]
    if BN == WIDTH:
        pieces = (y,)
    else:
        left, right = gl.split(gl.permute(gl.reshape(y, [BM, 2, BN // 2]), [0, 2, 1]))
        pieces = pieces_of(left, WIDTH) + pieces_of(right, WIDTH)
    return pieces


@gluon.jit
def store_piece(y, i, row, column, work, terms, c_desc, c_bufs, KINDS: gl.constexpr):
    """Scale the i-th piece of a tile, if it is not yet, and store it through shared memory, once the copy that last
    left that buffer is done."""
    BUFFERS: gl.constexpr = c_bufs.shape[0]
    LAYOUT: gl.constexpr = y.type.layout
    column += i * y.shape[1]
    rows = row + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    if y.dtype == gl.int32:
        scales = read_scales(rows, columns, work.M, work.N, terms, None, KINDS)
        y = scaled(y, rows, columns, work.M, work.N, scales, terms, KINDS)
    out = completed(y, rows, columns, work.M, work.N, terms, KINDS, c_desc.dtype)
    tma.store_wait(pendings=BUFFERS - 1)
    c_smem = c_bufs.index(i % BUFFERS)
    c_smem.store(out)
    fence_async_shared()
    async_store(c_desc, [row, column], c_smem)


@gluon.jit
def finish(y, row, column, work, terms, c_desc, c_bufs, KINDS: gl.constexpr):
    """Store a tile piece by piece, each with scales of its own: few registers, and no burst of writes."""
    COUNT: gl.constexpr = y.shape[1] // c_desc.block_type.shape[1]
    pieces = pieces_of(y, c_desc.block_type.shape[1])
    if KINDS.nonlinearity == "gelu" or KINDS.nonlinearity == "silu":
        # Unrolled over a tile, the code outgrows the instruction cache: a loop, in which the pieces take turns.
        for i in range(COUNT):
            store_piece(pieces[0], i, row, column, work, terms, c_desc, c_bufs, KINDS)
            pieces = pieces[1:] + pieces[:1]
    else:
        for i in gl.static_range(COUNT):
            store_piece(pieces[i], i, row, column, work, terms, c_desc, c_bufs, KINDS)


@gluon.jit
def finish_tile(acc, row, column, work, scales, terms, c_desc, c_bufs, EAGER: gl.constexpr, KINDS: gl.constexpr):
    """Scale all of a tile by scales that were read before, or each piece by its own."""
    if EAGER:
        LAYOUT: gl.constexpr = acc.type.layout
        rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
        columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
        y = scaled(acc, rows, columns, work.M, work.N, scales, terms, KINDS)
        finish(y, row, column, work, terms, c_desc, c_bufs, KINDS)
    else:
        finish(acc, row, column, work, terms, c_desc, c_bufs, KINDS)


@gluon.jit
def consume(
    a_bufs, b_bufs, c_desc, c_bufs, partial_ptr, barriers, work, terms, WHICH: gl.constexpr, TILE: gl.constexpr,
    KINDS: gl.constexpr,
):  # fmt: skip
    """Multiply, scale and store this consumer's share, every other unit.

    The sums of a part of a tile go to partial[part, BM, BN] as they are.
    """
    STAGES: gl.constexpr = b_bufs.shape[0]
    BM: gl.constexpr = a_bufs.shape[1]
    BN: gl.constexpr = b_bufs.shape[1]
    EAGER: gl.constexpr = TILE.eager
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, min(BN, 128), 32]
    )
    full, empty, turn = barriers
    programs = gl.num_programs(0)
    done = 0
    if WHICH == 1:
        _, _, _, done = unit_at(gl.program_id(0), work, TILE)
    my_turn = 1 - WHICH
    for unit in range(gl.program_id(0) + WHICH * programs, work.units, 2 * programs):
        m, n, _, count = unit_at(unit, work, TILE)
        _, _, _, others = unit_at(unit + programs, work, TILE)
        row = m * BM
        rows = row + gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
        columns = n * BN + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
        if EAGER:
            scales = read_scales(rows, columns, work.M, work.N, terms, None, KINDS)
        else:
            scales = (row, row)  # not read
        stage = done % STAGES
        phase = done // STAGES & 1
        # Not a copy of `stage`: the compiler would take the two names for one value through the loop.
        previous = (done + STAGES - 1) % STAGES
        mbarrier.wait(turn.index(WHICH), my_turn)
        my_turn ^= 1
        acc = warpgroup_mma_init(gl.zeros((BM, BN), gl.int32, LAYOUT))
        for k in range(count):
            mbarrier.wait(full.index(stage), phase)
            # A stage's barrier tells one phase from the next, no more: the other consumer may look at it only now.
            mbarrier.arrive(turn.index(1 - WHICH), count=1, pred=k == count - 1)
            b = b_bufs.index(stage).permute((1, 0))
            acc = warpgroup_mma(a_bufs.index(stage), b, acc, use_acc=k > 0, is_async=True)
            # One product stays in flight: the stage before it is free.
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            mbarrier.arrive(empty.index(previous), count=1, pred=k > 0)
            previous = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(previous), count=1)
        done += count + others
        if TILE.tail > 1:
            if unit < work.whole:
                finish_tile(total, row, n * BN, work, scales, terms, c_desc, c_bufs, EAGER, KINDS)
            else:
                place = gl.expand_dims(rows - row, 1) * BN + gl.expand_dims(columns - n * BN, 0)
                gl.store(partial_ptr + (unit - work.whole) * (BM * BN) + place, total)
        else:
            finish_tile(total, row, n * BN, work, scales, terms, c_desc, c_bufs, EAGER, KINDS)
    tma.store_wait(pendings=0)


@gluon.jit
def gemm(a_desc, b_desc, c_desc, partial_ptr, terms, shape, TILE: gl.constexpr, KINDS: gl.constexpr):
    """out[M, N] = epilogue(a[M, K] @ b[N, K].T), the sizes any: TMA fills with zeros and clips."""
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BN: gl.constexpr = b_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    PIECE: gl.constexpr = c_desc.block_type.shape[1]
    STAGES: gl.constexpr = TILE.stages
    a_bufs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.int8, [STAGES, BN, BK], b_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [1 if PIECE == BN else 2, BM, PIECE], c_desc.layout)
    d_bufs = gl.allocate_shared_memory(c_desc.dtype, [1 if PIECE == BN else 2, BM, PIECE], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    tiles_m = gl.cdiv(shape.m, BM)
    tiles_n = gl.cdiv(shape.n, BN)
    steps = gl.cdiv(shape.k, BK)
    tiles = tiles_m * tiles_n
    whole = tiles // gl.num_programs(0) * gl.num_programs(0)
    units = whole + (tiles - whole) * TILE.tail
    work = Work(M=shape.m, N=shape.n, tiles_m=tiles_m, tiles_n=tiles_n, steps=steps, whole=whole, units=units)
    barriers = Barriers(full=full, empty=empty, turn=turn)
    gl.warp_specialize(
        [
            (consume, (a_bufs, b_bufs, c_desc, c_bufs, partial_ptr, barriers, work, terms, 0, TILE, KINDS)),
            (consume, (a_bufs, b_bufs, c_desc, d_bufs, partial_ptr, barriers, work, terms, 1, TILE, KINDS)),
            (feed, (a_desc, b_desc, a_bufs, b_bufs, barriers, work, TILE)),
        ],
        [4, 1],
        [232, 24],
    )
