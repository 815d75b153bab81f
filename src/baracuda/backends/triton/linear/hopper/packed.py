"""GEMMs with decoding warps between TMA and the tensor cores; here for a packed weight and quantized activations.

TMA brings stored bytes to one ring. Some warps decode them, in the order of K, into the stages of another, whose
activations TMA brings directly. One or two warpgroups multiply, each with its share of the tile's rows of the weight. A
tile is out.T: the weight is the left operand. The constant TILE is the `tune.Packed` of a problem.
"""

from __future__ import annotations

import triton
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

from ...numerics.decode import decode, decode_grouped, factor_in, factor_offset, without_16
from ..tune import PART_OF_K
from .epilogue import completed, read_token_scale, read_weight_scale, scaled, store_sums
from .few import let_next_kernel_start, wait_for_previous_kernel
from .floats import decode_to_floats
from .rings import PackedWork, Rings, at_step, ring_of, spread, step_on, unit_at
from .versions import async_load, async_store

#: Parts of K are multiples of it.
PART = gl.constexpr(PART_OF_K)


@gluon.jit
def feed_weight(p_desc, ring, work, TILE: gl.constexpr, FORM: gl.constexpr):
    """Keep the ring of stored weights full, tile after tile."""
    BN: gl.constexpr = p_desc.block_type.shape[0]
    BK: gl.constexpr = p_desc.block_type.shape[1]
    STAGES: gl.constexpr = ring.stages.shape[0]
    stage = 0
    phase = 1
    if FORM.early == "prefetch":
        wait_for_previous_kernel()
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        _, n, _, begin, count = unit_at(unit, work, TILE)
        for k in range(begin, begin + count):
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(ring.full.index(stage), p_desc.block_type.nbytes)
            async_load(p_desc, [n * BN, k * BK], ring.full.index(stage), ring.stages.index(stage))
            stage, phase = step_on(stage, phase, STAGES)


@gluon.jit
def feed_tokens(x_desc, ring, work, TILE: gl.constexpr, FORM: gl.constexpr):
    """Keep the ring of activations full, tile after tile."""
    BM: gl.constexpr = x_desc.block_type.shape[0]
    XK: gl.constexpr = x_desc.block_type.shape[1]
    STAGES: gl.constexpr = ring.stages.shape[0]
    stage = 0
    phase = 1
    if FORM.early != "no":
        wait_for_previous_kernel()
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        m, _, _, begin, count = unit_at(unit, work, TILE)
        for k in range(begin, begin + count):
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(ring.full.index(stage), x_desc.block_type.nbytes)
            async_load(x_desc, [m * BM, k * XK], ring.full.index(stage), ring.stages.index(stage))
            stage, phase = step_on(stage, phase, STAGES)


@gluon.jit
def decode_to_s8(rings, factor_ptr, work, WHICH: gl.constexpr, TILE: gl.constexpr, FORM: gl.constexpr):
    """Turn packed stages into stages of s8, a thread 16 bytes of a row at a time."""
    BN: gl.constexpr = rings.stored.stages.shape[1]
    BK: gl.constexpr = rings.stored.stages.shape[2]
    STAGES: gl.constexpr = rings.w.stages.shape[0]
    PACKED_STAGES: gl.constexpr = rings.stored.stages.shape[0]
    TEAMS: gl.constexpr = TILE.teams
    GROUP: gl.constexpr = FORM.group
    SPAN: gl.constexpr = 2 * BK
    # Weights whose factors lie in one element of `factor_ptr`.
    COVERS: gl.constexpr = GROUP * factor_ptr.dtype.element_ty.primitive_bitwidth // 8
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (BK // 16), BK // 16], [WARPS, 1], [1, 0])
    PARTS: gl.constexpr = gl.BlockedLayout([1, 1, 16], [32 // (BK // 16), BK // 16, 1], [WARPS, 1, 1], [2, 1, 0])
    FACTORS: gl.constexpr = gl.SliceLayout(2, PARTS)
    done = 0
    if GROUP > 0 and FORM.early == "prefetch":
        wait_for_previous_kernel()
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        _, n, _, begin, count = unit_at(unit, work, TILE)
        first = begin + (WHICH + done) % TEAMS
        if GROUP > 0:
            row = gl.minimum(n * BN + gl.arange(0, BN, gl.SliceLayout(1, FACTORS)), work.N - 1)
            part = gl.expand_dims(gl.arange(0, BK // 16, gl.SliceLayout(0, FACTORS)) * 32, 0)
            base = factor_ptr + gl.expand_dims(row, 1) * (work.K // COVERS) + part * 0
            last = work.K // COVERS - 1
            word = gl.load(base + gl.minimum((first * SPAN + part) // COVERS, last)).to(gl.int32)
        for k in range(first, begin + count, TEAMS):
            p_stage, p_phase = at_step(done + k - begin, PACKED_STAGES)
            stage, phase = at_step(done + k - begin, STAGES)
            if GROUP > 0:
                # Loaded before the step that needs them: they come from L2.
                upcoming = gl.load(base + gl.minimum(((k + TEAMS) * SPAN + part) // COVERS, last)).to(gl.int32)
                factor = factor_in(word, (k * SPAN + part) // GROUP) if COVERS > GROUP else factor_in(word, 0)
                word = upcoming
            mbarrier.wait(rings.stored.full.index(p_stage), p_phase)
            packed = rings.stored.stages.index(p_stage).load(BYTES)
            if GROUP > 0:
                offset = spread(factor_offset(factor), BK, BYTES, PARTS)
                even, odd = decode_grouped(packed, spread(factor, BK, BYTES, PARTS), offset)
            else:
                even, odd = decode(packed)
            weight = gl.reshape(gl.join(even, odd), (BN, 2 * BK))
            mbarrier.wait(rings.w.empty.index(stage), phase ^ 1)
            rings.w.stages.index(stage).store(weight)
            fence_async_shared()
            mbarrier.arrive(rings.w.full.index(stage), count=1)
            # Not before: a barrier does not wait for loads under way, and the next copy overwrites what they read. What
            # was stored depends on them.
            mbarrier.arrive(rings.stored.empty.index(p_stage), count=1)
        done += count


@gluon.jit
def pieces_of(y, WIDTH: gl.constexpr):
    """A tuple of pieces of so many tokens."""
    if y.shape[1] == WIDTH:
        pieces = (y,)
    else:
        halves = gl.permute(gl.reshape(y, [y.shape[0], 2, y.shape[1] // 2]), [0, 2, 1])
        left, right = gl.split(halves)
        pieces = pieces_of(left, WIDTH) + pieces_of(right, WIDTH)
    return pieces


@gluon.jit
def place_in(acc, i):
    """Where a consumer keeps the i-th piece of its sums: what lanes hold side by side lies side by side.

    Of 16 rows and 8 tokens a lane has rows g and g + 8 and two neighbouring tokens.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    token = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    lane = row // 16 * 32 + row % 8 * 4 + token % 8 // 2
    place = ((token // 8) * 2 + row // 8 % 2) * (acc.shape[0] * 4) + lane * 2 + token % 2
    return i * (acc.shape[0] * acc.shape[1]) + place


@gluon.jit
def keep(total, part, kept_ptr, PIECE: gl.constexpr):
    """Add the sums of a part of K to those of the parts before it."""
    pieces = pieces_of(total, PIECE)
    for i in gl.static_range(total.shape[1] // PIECE):
        place = place_in(pieces[i], i)
        before = gl.load(kept_ptr + place, mask=(place >= 0) & (part > 0), other=0)
        gl.store(kept_ptr + place, before + pieces[i])


@gluon.jit
def store_part(acc, part, row, column, work, partial_ptr, TIMES_16: gl.constexpr):
    if TIMES_16:
        acc = without_16(acc)
    store_sums(acc, part, row, column, work.N, work.M, work.N, partial_ptr)


@gluon.jit
def rows_of(acc, i, row):
    """The tokens of the i-th piece of a tile."""
    return row + i * acc.shape[1] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))


@gluon.jit
def columns_of(acc, column):
    return column + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))


@gluon.jit
def store_piece(
    acc, i, row, column, work, kept_ptr, scales, terms, c_desc, c_bufs, KEPT: gl.constexpr, TIMES_16: gl.constexpr,
    KINDS: gl.constexpr,
):  # fmt: skip
    """Scale the i-th piece of a tile and store it through shared memory, once the copy that last left that buffer is
    done. With KEPT, sums of earlier parts of K are added first."""
    if KEPT:
        acc = gl.load(kept_ptr + place_in(acc, i)) + acc
    BUFFERS: gl.constexpr = c_bufs.shape[0]
    rows = rows_of(acc, i, row)
    columns = columns_of(acc, column)
    if TIMES_16:
        acc = without_16(acc)
    y = scaled(acc, rows, columns, work.M, work.N, scales, terms, KINDS)
    out = completed(y, rows, columns, work.M, work.N, terms, KINDS, c_desc.dtype)
    tma.store_wait(pendings=BUFFERS - 1)
    buffer = c_bufs.index(i % BUFFERS)
    buffer.permute((1, 0)).store(out)
    fence_async_shared()
    async_store(c_desc, [row + i * acc.shape[1], column], buffer)


@triton.constexpr_function
def sums_layout(tokens: int, warps: int, k: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, min(tokens, 128), k])


@gluon.jit
def no_sums(rings, TILE: gl.constexpr):
    """Zeros for this warpgroup's share of a tile's rows."""
    BM: gl.constexpr = rings.x.stages.shape[1]
    SHARE: gl.constexpr = rings.w.stages.shape[1] // TILE.consumers
    INTEGERS: gl.constexpr = rings.x.stages.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INTEGERS else gl.float32
    return gl.zeros((SHARE, BM), SUM, sums_layout(BM, gl.num_warps(), 32 if INTEGERS else 16))


@gluon.jit
def products(rings, done, count, WHICH: gl.constexpr, TILE: gl.constexpr):
    """The sums of `count` steps, in the order of K, for this warpgroup's share of a tile's rows; the last product is
    still in flight."""
    STAGES: gl.constexpr = rings.w.stages.shape[0]
    X_STAGES: gl.constexpr = rings.x.stages.shape[0]
    SHARE: gl.constexpr = rings.w.stages.shape[1] // TILE.consumers
    acc = warpgroup_mma_init(no_sums(rings, TILE))
    for k in range(count):
        stage, phase = at_step(done + k, STAGES)
        x_stage, x_phase = at_step(done + k, X_STAGES)
        mbarrier.wait(rings.x.full.index(x_stage), x_phase)
        mbarrier.wait(rings.w.full.index(stage), phase)
        w = rings.w.stages.index(stage).slice(WHICH * SHARE, SHARE)
        acc = warpgroup_mma(w, rings.x.stages.index(x_stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        # One product stays in flight: the stages before it are free.
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(rings.w.empty.index((done + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        mbarrier.arrive(rings.x.empty.index((done + k + X_STAGES - 1) % X_STAGES), count=1, pred=k > 0)
    return acc


@gluon.jit
def settled(acc, rings, done):
    """The sums when their last product, of the step before `done`, is there."""
    STAGES: gl.constexpr = rings.w.stages.shape[0]
    X_STAGES: gl.constexpr = rings.x.stages.shape[0]
    total = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(rings.w.empty.index((done + STAGES - 1) % STAGES), count=1)
    mbarrier.arrive(rings.x.empty.index((done + X_STAGES - 1) % X_STAGES), count=1)
    return total


@gluon.jit
def consume(
    rings, c_desc, c_bufs, partial_ptr, terms, work, WHICH: gl.constexpr, TILE: gl.constexpr, FORM: gl.constexpr,
    KINDS: gl.constexpr,
):  # fmt: skip
    """Multiply, scale and store this warpgroup's share of each tile's rows of the weight.

    The sums of parts of K that lie apart are stored as they are; those of one program are added up in turn.
    """
    BM: gl.constexpr = rings.x.stages.shape[1]
    BN: gl.constexpr = rings.w.stages.shape[1]
    SHARE: gl.constexpr = BN // TILE.consumers
    PIECE: gl.constexpr = c_desc.block_type.shape[0]
    TIMES_16: gl.constexpr = rings.x.stages.dtype == gl.int8 and FORM.group == 0
    IN_TURN: gl.constexpr = TILE.split > 1 and not TILE.apart
    kept_ptr = partial_ptr + (gl.program_id(0) * TILE.consumers + WHICH) * (SHARE * BM)
    done = 0
    if FORM.early != "no":
        wait_for_previous_kernel()
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        m, n, part, _, count = unit_at(unit, work, TILE)
        column = n * BN + WHICH * SHARE
        if IN_TURN:
            # A number that the compiler does not know: it would unroll one turn, whose products then spill registers.
            for earlier in range(gl.cdiv(work.steps, work.part_steps) - 1):
                total = products(rings, done, work.part_steps, WHICH, TILE)
                done += work.part_steps
                count -= work.part_steps
                keep(settled(total, rings, done), earlier, kept_ptr, PIECE)
        total = products(rings, done, count, WHICH, TILE)
        done += count
        if not TILE.apart:
            # The first piece's scales come while the last product is under way, later ones a piece ahead: no load is
            # moved over the copy of the piece before.
            like = pieces_of(no_sums(rings, TILE), PIECE)[0]
            scale = read_token_scale(rows_of(like, 0, m * BM), work.M, terms, None, KINDS)
            weight_scale = read_weight_scale(columns_of(like, column), work.N, terms, KINDS)
        pieces = pieces_of(settled(total, rings, done), PIECE)
        if TILE.apart:
            for i in gl.static_range(BM // PIECE):
                store_part(pieces[i], part, m * BM + i * PIECE, column, work, partial_ptr, TIMES_16)
        else:
            for i in gl.static_range(BM // PIECE):
                scales = (scale, weight_scale)
                if i + 1 < BM // PIECE:
                    scale = read_token_scale(rows_of(pieces[i + 1], i + 1, m * BM), work.M, terms, None, KINDS)
                store_piece(
                    pieces[i], i, m * BM, column, work, kept_ptr, scales, terms, c_desc, c_bufs, IN_TURN, TIMES_16,
                    KINDS,
                )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit
def decode_tiles(
    rings, factor_ptr, zero_ptr, work, WHICH: gl.constexpr, TILE: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """A team of warps decodes every TILE.teams-th step, from WHICH on."""
    if FORM.floats:
        decode_to_floats(rings, factor_ptr, zero_ptr, work, WHICH, TILE, FORM)
    else:
        decode_to_s8(rings, factor_ptr, work, WHICH, TILE, FORM)


@gluon.jit
def gemm_packed(
    x_desc, p_desc, c_desc, factor_ptr, zero_ptr, partial_ptr, terms, shape, TILE: gl.constexpr,
    FORM: gl.constexpr, KINDS: gl.constexpr,
):  # fmt: skip
    """out[M, N] = epilogue(x[M, K] @ decoded[N, K].T), the sizes any: TMA fills with zeros and clips.

    `factor_ptr` has the integer factors of groups, or with float activations their scales; `zero_ptr` the zero points.
    `partial_ptr` has room for the sums of parts of K.
    """
    BM: gl.constexpr = x_desc.block_type.shape[0]
    XK: gl.constexpr = x_desc.block_type.shape[1]
    BN: gl.constexpr = p_desc.block_type.shape[0]
    BK: gl.constexpr = p_desc.block_type.shape[1]
    PIECE: gl.constexpr = c_desc.block_type.shape[0]
    CONSUMERS: gl.constexpr = TILE.consumers
    TEAMS: gl.constexpr = TILE.teams
    BUFFERS: gl.constexpr = 1 if PIECE == BM else 2
    if FORM.early != "no":
        let_next_kernel_start()
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, XK], x_desc.dtype)
    stored = ring_of(gl.allocate_shared_memory(gl.int8, [TILE.packed_stages, BN, BK], p_desc.layout), 1)
    w = ring_of(gl.allocate_shared_memory(x_desc.dtype, [TILE.stages, BN, XK], W), CONSUMERS)
    x = ring_of(gl.allocate_shared_memory(x_desc.dtype, [TILE.x_stages, BM, XK], x_desc.layout), CONSUMERS)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [BUFFERS, PIECE, BN // CONSUMERS], c_desc.layout)
    d_bufs = c_bufs
    if CONSUMERS == 2:
        d_bufs = gl.allocate_shared_memory(c_desc.dtype, [BUFFERS, PIECE, BN // CONSUMERS], c_desc.layout)
    fence_async_shared()
    work = PackedWork(
        M=shape.m, N=shape.n, K=shape.k, tiles_m=gl.cdiv(shape.m, BM), tiles_n=gl.cdiv(shape.n, BN),
        steps=gl.cdiv(shape.k, XK), part_steps=gl.cdiv(gl.cdiv(shape.k, TILE.split), PART) * (PART // XK),
        units=gl.cdiv(shape.m, BM) * gl.cdiv(shape.n, BN) * (TILE.split if TILE.apart else 1),
    )  # fmt: skip
    rings = Rings(stored=stored, w=w, x=x)
    if CONSUMERS == 2 and TEAMS == 2:
        gl.warp_specialize(
            [
                (consume, (rings, c_desc, c_bufs, partial_ptr, terms, work, 0, TILE, FORM, KINDS)),
                (consume, (rings, c_desc, d_bufs, partial_ptr, terms, work, 1, TILE, FORM, KINDS)),
                (decode_tiles, (rings, factor_ptr, zero_ptr, work, 0, TILE, FORM)),
                (decode_tiles, (rings, factor_ptr, zero_ptr, work, 1, TILE, FORM)),
                (feed_weight, (p_desc, stored, work, TILE, FORM)),
                (feed_tokens, (x_desc, x, work, TILE, FORM)),
            ],
            [4, TILE.decoders, TILE.decoders, 1, 1],
            TILE.registers,
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (rings, c_desc, c_bufs, partial_ptr, terms, work, 0, TILE, FORM, KINDS)),
                (consume, (rings, c_desc, d_bufs, partial_ptr, terms, work, 1, TILE, FORM, KINDS)),
                (decode_tiles, (rings, factor_ptr, zero_ptr, work, 0, TILE, FORM)),
                (feed_weight, (p_desc, stored, work, TILE, FORM)),
                (feed_tokens, (x_desc, x, work, TILE, FORM)),
            ],
            [4, TILE.decoders, 1, 1],
            TILE.registers,
        )
    elif TEAMS == 2:
        gl.warp_specialize(
            [
                (consume, (rings, c_desc, c_bufs, partial_ptr, terms, work, 0, TILE, FORM, KINDS)),
                (decode_tiles, (rings, factor_ptr, zero_ptr, work, 0, TILE, FORM)),
                (decode_tiles, (rings, factor_ptr, zero_ptr, work, 1, TILE, FORM)),
                (feed_weight, (p_desc, stored, work, TILE, FORM)),
                (feed_tokens, (x_desc, x, work, TILE, FORM)),
            ],
            [TILE.decoders, TILE.decoders, 1, 1],
            TILE.registers,
        )
    else:
        gl.warp_specialize(
            [
                (consume, (rings, c_desc, c_bufs, partial_ptr, terms, work, 0, TILE, FORM, KINDS)),
                (decode_tiles, (rings, factor_ptr, zero_ptr, work, 0, TILE, FORM)),
                (feed_weight, (p_desc, stored, work, TILE, FORM)),
                (feed_tokens, (x_desc, x, work, TILE, FORM)),
            ],
            [TILE.decoders, 1, 1],
            TILE.registers,
        )
