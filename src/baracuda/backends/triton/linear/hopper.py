"""W8A8 GEMM for sm_90 in Gluon: one warp feeds TMA copies to two warpgroups of tensor-core work.

The two take turns at the tiles: one multiplies while the other scales and stores.
"""

from __future__ import annotations

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

from ..numerics.nonlinearity import activated
from .kernels import tile_at


@gluon.jit
def unit_at(unit, sizes, ORDER: gl.constexpr):
    """Row and column of a unit's tile, its first step along K and how many it has.

    A unit is a tile, or one of TAIL parts of a tile that is left over when every program had as many as any other.
    """
    _, _, tiles_m, tiles_n, steps, whole, _ = sizes
    GROUP: gl.constexpr = ORDER[0]
    ACROSS: gl.constexpr = ORDER[1]
    TAIL: gl.constexpr = ORDER[2]
    tile = unit
    first = 0
    count = steps
    if TAIL > 1:
        beyond = max(unit - whole, 0)
        tile = unit - beyond + beyond // TAIL
        first = beyond % TAIL * gl.cdiv(steps, TAIL)
        count = gl.where(unit < whole, steps, gl.cdiv(steps, TAIL))
    m, n = tile_at(tile, tiles_m, tiles_n, GROUP, ACROSS)
    return m, n, first, count


@gluon.jit
def clear_where_nan(y, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(ASM, "=r,r", [y], dtype=y.dtype, is_pure=True, pack=2)


@gluon.jit
def canonical(y):
    """Every NaN becomes the one quiet NaN. The conversion to 16 bits makes 0x7fff of each: clear the excess bits."""
    if y.dtype == gl.float32:
        y = gl.where(y == y, y, float("nan"))
    elif y.dtype == gl.bfloat16:
        y = clear_where_nan(
            y, "{ .reg .b32 m; set.nan.u32.bf16x2 m, $1, $1; and.b32 m, m, 0x3f003f; not.b32 m, m; and.b32 $0, $1, m; }"
        )
    else:
        y = clear_where_nan(
            y, "{ .reg .b32 m; set.nan.u32.f16x2 m, $1, $1; and.b32 m, m, 0x1ff01ff; not.b32 m, m; and.b32 $0, $1, m; }"
        )
    return y


@gluon.jit
def read_scales(row, column, M, N, scales, EPILOGUE: gl.constexpr):
    """The scales of the rows and columns of an accumulator, in f32: worth reading before its products are done."""
    sa_ptr, sa, sw_ptr, sw, _, _, _, _, _ = scales
    AXIS: gl.constexpr = EPILOGUE[4]
    row_scale = sa
    if EPILOGUE[0] == "vector":
        row_scale = gl.expand_dims(gl.load(sa_ptr + row, row < M, other=0).to(gl.float32), 1 - AXIS)
    elif EPILOGUE[0] == "scalar":
        row_scale = gl.load(sa_ptr).to(gl.float32)
    elif EPILOGUE[0] == "given":
        row_scale = gl.expand_dims(sa, 1 - AXIS)
    column_scale = sw
    if EPILOGUE[1] == "vector":
        column_scale = gl.expand_dims(gl.load(sw_ptr + column, column < N, other=0).to(gl.float32), AXIS)
    return row_scale, column_scale


@gluon.jit
def scaled(acc, row, column, M, N, row_scale, column_scale, scales, EPILOGUE: gl.constexpr):
    """((acc * scale_a) * scale_w) + bias in f32, each step rounded; `row` and `column` the accumulator's."""
    _, _, _, _, bias_ptr, zp_ptr, zp, sum_ptr, _ = scales
    BIAS: gl.constexpr = EPILOGUE[2]
    ZERO_POINT: gl.constexpr = EPILOGUE[3]
    AXIS: gl.constexpr = EPILOGUE[4]
    if ZERO_POINT != "none":
        weight_sum = gl.expand_dims(gl.load(sum_ptr + column, column < N, other=0), AXIS)
        if ZERO_POINT == "vector":
            acc -= gl.expand_dims(gl.load(zp_ptr + row, row < M, other=0), 1 - AXIS) * weight_sum
        elif ZERO_POINT == "scalar":
            acc -= gl.minimum(gl.maximum(gl.load(zp_ptr), -128), 127) * weight_sum
        else:
            acc -= zp * weight_sum
    y = (acc.to(gl.float32) * row_scale) * column_scale
    if BIAS:
        y = y + gl.expand_dims(gl.load(bias_ptr + column, column < N, other=0).to(gl.float32), AXIS)
    return y


@gluon.jit
def completed(y, row, column, M, N, scales, EPILOGUE: gl.constexpr, OUT: gl.constexpr):
    """act(y) + residual, rounded once more to the output's type."""
    _, _, _, _, _, _, _, _, residual_ptr = scales
    AXIS: gl.constexpr = EPILOGUE[4]
    ACTIVATION: gl.constexpr = EPILOGUE[5]
    RESIDUAL: gl.constexpr = EPILOGUE[6]
    y = activated(y, ACTIVATION, False)
    if RESIDUAL:
        place = gl.expand_dims(row.to(gl.int64) * N, 1 - AXIS) + gl.expand_dims(column, AXIS)
        inside = gl.expand_dims(row < M, 1 - AXIS) & gl.expand_dims(column < N, AXIS)
        y = y + gl.load(residual_ptr + place, inside, other=0).to(gl.float32)
    return canonical(y.to(OUT))


@gluon.jit
def feed(a_desc, b_desc, a_bufs, b_bufs, full, empty, sizes, ORDER: gl.constexpr):
    STAGES: gl.constexpr = b_bufs.shape[0]
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BN: gl.constexpr = b_desc.block_type.shape[0]
    BK: gl.constexpr = b_desc.block_type.shape[1]
    _, _, _, _, _, _, units = sizes
    stage = 0
    phase = 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        m, n, first, count = unit_at(unit, sizes, ORDER)
        for k in range(first, first + count):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [m * BM, k * BK], ready, a_bufs.index(stage))
            tma.async_copy_global_to_shared(b_desc, [n * BN, k * BK], ready, b_bufs.index(stage))
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
def store_piece(y, i, row, column, M, N, scales, c_desc, c_bufs, EPILOGUE: gl.constexpr):
    """Scale the i-th piece of a tile, if it is not yet, and store it through shared memory, once the copy that last
    left that buffer is done."""
    BUFFERS: gl.constexpr = c_bufs.shape[0]
    LAYOUT: gl.constexpr = y.type.layout
    column += i * y.shape[1]
    rows = row + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    if y.dtype == gl.int32:
        row_scale, column_scale = read_scales(rows, columns, M, N, scales, EPILOGUE)
        y = scaled(y, rows, columns, M, N, row_scale, column_scale, scales, EPILOGUE)
    out = completed(y, rows, columns, M, N, scales, EPILOGUE, c_desc.dtype)
    tma.store_wait(pendings=BUFFERS - 1)
    c_smem = c_bufs.index(i % BUFFERS)
    c_smem.store(out)
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], c_smem)


@gluon.jit
def finish(y, row, column, M, N, scales, c_desc, c_bufs, EPILOGUE: gl.constexpr):
    """Store a tile piece by piece, each with scales of its own: few registers, and no burst of writes."""
    COUNT: gl.constexpr = y.shape[1] // c_desc.block_type.shape[1]
    pieces = pieces_of(y, c_desc.block_type.shape[1])
    if EPILOGUE[5] == "gelu" or EPILOGUE[5] == "silu":
        # Unrolled over a tile, the code outgrows the instruction cache: a loop, in which the pieces take turns.
        for i in range(COUNT):
            store_piece(pieces[0], i, row, column, M, N, scales, c_desc, c_bufs, EPILOGUE)
            pieces = pieces[1:] + pieces[:1]
    else:
        for i in gl.static_range(COUNT):
            store_piece(pieces[i], i, row, column, M, N, scales, c_desc, c_bufs, EPILOGUE)


@gluon.jit
def finish_tile(
    acc, row, column, M, N, held, scales, c_desc, c_bufs, EAGER: gl.constexpr, EPILOGUE: gl.constexpr
):  # fmt: skip
    """Scale all of a tile by scales that were read before, or each piece by its own."""
    if EAGER:
        LAYOUT: gl.constexpr = acc.type.layout
        rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
        columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
        row_scale, column_scale = held
        y = scaled(acc, rows, columns, M, N, row_scale, column_scale, scales, EPILOGUE)
        finish(y, row, column, M, N, scales, c_desc, c_bufs, EPILOGUE)
    else:
        finish(acc, row, column, M, N, scales, c_desc, c_bufs, EPILOGUE)


@gluon.jit
def consume(
    a_bufs, b_bufs, c_desc, c_bufs, partial_ptr, barriers, sizes, scales, ORDER: gl.constexpr, EAGER: gl.constexpr,
    WHICH: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Multiply, scale and store this consumer's share, every other unit. EAGER reads the scales before multiplying.

    The sums of a part of a tile go to partial[part, BM, BN] as they are.
    """
    STAGES: gl.constexpr = b_bufs.shape[0]
    BM: gl.constexpr = a_bufs.shape[1]
    BN: gl.constexpr = b_bufs.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, min(BN, 128), 32]
    )
    full, empty, turn = barriers
    M, N, _, _, _, whole, units = sizes
    TAIL: gl.constexpr = ORDER[2]
    programs = gl.num_programs(0)
    done = 0
    if WHICH == 1:
        _, _, _, done = unit_at(gl.program_id(0), sizes, ORDER)
    my_turn = 1 - WHICH
    for unit in range(gl.program_id(0) + WHICH * programs, units, 2 * programs):
        m, n, _, count = unit_at(unit, sizes, ORDER)
        _, _, _, others = unit_at(unit + programs, sizes, ORDER)
        row = m * BM
        rows = row + gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
        columns = n * BN + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
        if EAGER:
            held = read_scales(rows, columns, M, N, scales, EPILOGUE)
        else:
            held = (row, row)
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
        if TAIL > 1:
            if unit < whole:
                finish_tile(total, row, n * BN, M, N, held, scales, c_desc, c_bufs, EAGER, EPILOGUE)
            else:
                place = gl.expand_dims(rows - row, 1) * BN + gl.expand_dims(columns - n * BN, 0)
                gl.store(partial_ptr + (unit - whole) * (BM * BN) + place, total)
        else:
            finish_tile(total, row, n * BN, M, N, held, scales, c_desc, c_bufs, EAGER, EPILOGUE)
    tma.store_wait(pendings=0)


@gluon.jit
def gemm(
    a_desc, b_desc, c_desc, partial_ptr, sa_ptr, sa, sw_ptr, sw, bias_ptr, zp_ptr, zp, sum_ptr, residual_ptr, M, N, K,
    STAGES: gl.constexpr, ORDER: gl.constexpr, EAGER: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """out[M, N] = scaled(a[M, K] @ b[N, K].T), the shapes any: TMA fills with zeros and clips."""
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BN: gl.constexpr = b_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    PIECE: gl.constexpr = c_desc.block_type.shape[1]
    TAIL: gl.constexpr = ORDER[2]
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
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    tiles = tiles_m * tiles_n
    whole = tiles // gl.num_programs(0) * gl.num_programs(0)
    units = whole + (tiles - whole) * TAIL
    scales = (sa_ptr, sa, sw_ptr, sw, bias_ptr, zp_ptr, zp, sum_ptr, residual_ptr)
    sizes = (M, N, tiles_m, tiles_n, steps, whole, units)
    barriers = (full, empty, turn)
    gl.warp_specialize(
        [
            (
                consume,
                (a_bufs, b_bufs, c_desc, c_bufs, partial_ptr, barriers, sizes, scales, ORDER, EAGER, 0, EPILOGUE),
            ),
            (
                consume,
                (a_bufs, b_bufs, c_desc, d_bufs, partial_ptr, barriers, sizes, scales, ORDER, EAGER, 1, EPILOGUE),
            ),
            (feed, (a_desc, b_desc, a_bufs, b_bufs, full, empty, sizes, ORDER)),
        ],
        [4, 1],
        [232, 24],
    )
