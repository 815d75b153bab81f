"""The GEMM for few tokens: out.T = weight @ x.T, as fast as the weight can be read.

Each program keeps a ring of TMA copies in flight while four warps multiply, so there is nothing to overlap by hand. The
constant TILE is the `tune.Skinny` of a problem.

Where the scales are "given" (`TermKinds.scale`), the activations come in as floats and every program quantizes the few
rows for itself: one launch in all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...numerics.comparisons import from_magnitude_bits, magnitude_bits
from ...numerics.conversions import to_float
from ...numerics.division import invert, ordinary
from ...numerics.qparams import symmetric_scale
from ...numerics.rounding import quantize_to_int8
from .epilogue import completed, read_scales, scaled

#: Of the program's threads; Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def fetch(j, total, x_desc, w_desc, x_bufs, w_bufs, full, per_unit, TILE: gl.constexpr, QUANTIZE: gl.constexpr):
    """Start the copies of this program's step j. Steps behind the end of K read zeros."""
    STAGES: gl.constexpr = w_bufs.shape[0]
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    BT: gl.constexpr = x_desc.block_type.shape[0]
    SPLIT: gl.constexpr = TILE.split
    unit = gl.program_id(0) + j // per_unit * gl.num_programs(0)
    k = (unit % SPLIT * per_unit + j % per_unit) * BK
    stage = j % STAGES
    tokens = unit // SPLIT % TILE.tiles * BT
    rows = unit // (SPLIT * TILE.tiles) * BN
    ready = full.index(stage)
    if QUANTIZE:
        mbarrier.expect(ready, w_desc.block_type.nbytes, pred=j < total)
    else:
        mbarrier.expect(ready, w_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=j < total)
        tma.async_copy_global_to_shared(x_desc, [tokens, k], ready, x_bufs.index(stage), pred=j < total)
    tma.async_copy_global_to_shared(w_desc, [rows, k], ready, w_bufs.index(stage), pred=j < total)


@gluon.jit
def load_rows(x_ptr, k, M, K, BT: gl.constexpr, BK: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.expand_dims(gl.arange(0, BT, gl.SliceLayout(1, LAYOUT)), 1)
    columns = k + gl.expand_dims(gl.arange(0, BK, gl.SliceLayout(0, LAYOUT)), 0)
    return to_float(gl.load(x_ptr + rows * K + columns, (rows < M) & (columns < K), other=0), False)


@gluon.jit
def row_scales(x_ptr, M, K, q_max, BT: gl.constexpr, LAYOUT: gl.constexpr):
    """The scale of every row, from its largest magnitude. An integer maximum over the bits lets NaN through."""
    WIDE: gl.constexpr = 16384 // BT
    largest = gl.zeros((BT, WIDE), gl.int32, LAYOUT)
    for k in range(0, K, WIDE):
        largest = gl.maximum(largest, magnitude_bits(load_rows(x_ptr, k, M, K, BT, WIDE, LAYOUT)))
    amax = from_magnitude_bits(gl.max(largest, axis=1))
    return symmetric_scale(amax, gl.full_like(amax, 1.0) * q_max)


@gluon.jit
def gemm_skinny(
    x_desc, w_desc, x_ptr, out_ptr, partial_ptr, scale_out_ptr, terms, q_min, q_max, shape, TILE: gl.constexpr,
    KINDS: gl.constexpr,
):  # fmt: skip
    """A unit of work is BN rows of the weight, one of TILE.tiles parts of the tokens and one of TILE.split parts of K.

    With split-K the sums go to partial[TILE.split, M, N].
    """
    M, N, K = shape
    BT: gl.constexpr = TILE.tokens
    STAGES: gl.constexpr = TILE.stages
    SPLIT: gl.constexpr = TILE.split
    TILES: gl.constexpr = TILE.tiles
    QUANTIZE: gl.constexpr = KINDS.scale == "given"
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BT, 32])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (BK // 16), BK // 16], [4, 1], [1, 0])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BN // 8), BN // 8], [4, 1], [1, 0])
    w_bufs = gl.allocate_shared_memory(gl.int8, [STAGES, BN, BK], w_desc.layout)
    x_bufs = gl.allocate_shared_memory(gl.int8, [2 if QUANTIZE else STAGES, BT, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()

    per_unit = gl.cdiv(gl.cdiv(K, BK), SPLIT)
    units = gl.cdiv(N, BN) * SPLIT * TILES
    pid = gl.program_id(0)
    total = gl.cdiv(units - pid, gl.num_programs(0)) * per_unit
    for j in gl.static_range(STAGES - 1):
        fetch(j, total, x_desc, w_desc, x_bufs, w_bufs, full, per_unit, TILE, QUANTIZE)

    if QUANTIZE:
        scale = row_scales(x_ptr, M, K, q_max, BT, ROWS)
        is_ordinary = gl.min(gl.where(ordinary(scale, False), 1, 0), axis=0) == 1
        divisor, reciprocal = gl.expand_dims(scale, 1), gl.expand_dims(invert(scale, False), 1)
        if pid == 0:
            token = gl.arange(0, BT, gl.SliceLayout(1, ROWS))
            gl.store(scale_out_ptr + token, scale, token < M)
        given = gl.convert_layout(scale, gl.SliceLayout(0, MMA))
        x = load_rows(x_ptr, pid % SPLIT * per_unit * BK, M, K, BT, BK, ROWS)
    else:
        given = None

    acc = gl.zeros((BN, BT), gl.int32, MMA)
    for j in range(total):
        inner = j % per_unit
        unit = pid + j // per_unit * gl.num_programs(0)
        if QUANTIZE:
            x_now = x_bufs.index(j % 2)
            x_now.store(quantize_to_int8(x, divisor, reciprocal, is_ordinary, q_min, q_max))
            fence_async_shared()
            following = j + 1
            unit_then = pid + following // per_unit * gl.num_programs(0)
            x = load_rows(x_ptr, (unit_then % SPLIT * per_unit + following % per_unit) * BK, M, K, BT, BK, ROWS)
        else:
            x_now = x_bufs.index(j % STAGES)
        mbarrier.wait(full.index(j % STAGES), j // STAGES & 1)
        acc = warpgroup_mma(w_bufs.index(j % STAGES), x_now.permute((1, 0)), acc, use_acc=inner > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        barrier()
        fetch(j + STAGES - 1, total, x_desc, w_desc, x_bufs, w_bufs, full, per_unit, TILE, QUANTIZE)
        if inner == per_unit - 1:
            column = unit // (SPLIT * TILES) * BN
            first = unit // SPLIT % TILES * BT
            token = first + gl.expand_dims(gl.arange(0, BT, gl.SliceLayout(1, STORE)), 1)
            place = column + gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, STORE)), 0)
            mask = (token < M) & (place < N)
            if SPLIT > 1:
                sums = gl.convert_layout(gl.permute(acc, [1, 0]), STORE)
                gl.store(partial_ptr + (unit % SPLIT * M + token).to(gl.int64) * N + place, sums, mask)
            else:
                tokens = first + gl.arange(0, BT, gl.SliceLayout(0, MMA))
                columns = column + gl.arange(0, BN, gl.SliceLayout(1, MMA))
                scales = read_scales(tokens, columns, M, N, terms, given, KINDS)
                y = scaled(acc, tokens, columns, M, N, scales, terms, KINDS)
                y = completed(y, tokens, columns, M, N, terms, KINDS, OUT)
                gl.store(
                    out_ptr + token.to(gl.int64) * N + place, gl.convert_layout(gl.permute(y, [1, 0]), STORE), mask
                )
