"""The GEMM for few tokens: out.T = weight @ x.T, as fast as the weight can be read.

Several programs share a multiprocessor, each with a ring of TMA copies in flight; its four warps multiply what has
arrived. A weight with few rows is folded: [N, K] is read as [N * fold, K / fold], and x likewise, so that there are
more rows to share out and no sums to add up between programs. The products of unlike parts are dropped. Where these
would be too many, K is split into parts, whose sums a second kernel adds up.

Packed weights are decoded in registers on the way to the tensor cores.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...numerics.decode import MAX_FACTOR, decode, decode_grouped, even_and_odd, factor_in, factor_offset, without_16
from .epilogue import completed, read_scales, scaled, store_sums
from .tokens import Tokens, appended
from .versions import async_load, barrier


class Form(NamedTuple):
    """What a weight is and when it may be read: the constant FORM."""

    #: Two weights lie in a byte.
    packed: bool
    #: Weights along K that share a factor; 0: there are no factors.
    group: int
    #: The weight may be read before the previous kernel ends (programmatic dependent launch): "copy" it, since that
    #: kernel is known and does not write it; or fetch it no further than L2 ("prefetch"), which is right in any case.
    early: str
    #: Factors that are read together, those of a step; 1: one by one.
    factors: int = 1
    #: The weight is decoded to the activations' float type, with scales (`floats.FloatForm`).
    floats: bool = False
    #: How the kernel quantizes the activations itself; None: they come as integers.
    tokens: Tokens | None = None


class Work(NamedTuple):
    """Steps along K of a unit of work, the units (all parts of K of the first rows, then of the next), and the sizes of
    the folded weight."""

    steps: Any
    units: Any
    rows: Any
    columns: Any


@gluon.jit
def wait_for_previous_kernel():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_kernel_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def first_step(unit, work, TILE: gl.constexpr):
    """Where a unit begins along K, in steps."""
    return unit % TILE.split * work.steps


@gluon.jit
def fetch_weight(place, w_desc, x_desc, w_bufs, full, work, TILE: gl.constexpr):
    """Start the copy of a step's weights; its barrier will wait for the step's activations too. Behind the end of K,
    both are 0."""
    unit, step, stage = place
    live = unit < work.units
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    ready = full.index(stage)
    mbarrier.expect(ready, w_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=live)
    at = [unit // TILE.split * BN, (first_step(unit, work, TILE) + step) * BK]
    async_load(w_desc, at, ready, w_bufs.index(stage), pred=live)


@gluon.jit
def fetch_tokens(place, x_desc, x_bufs, full, work, TILE: gl.constexpr):
    unit, step, stage = place
    BK: gl.constexpr = x_desc.block_type.shape[1]
    at = [0, (first_step(unit, work, TILE) + step) * BK]
    async_load(x_desc, at, full.index(stage), x_bufs.index(stage), pred=unit < work.units)


@gluon.jit
def following(place, work, STAGES: gl.constexpr):
    """Unit, step and stage of the next copy."""
    unit, step, stage = place
    step += 1
    if step == work.steps:
        step = 0
        unit += gl.num_programs(0)
    stage += 1
    if stage == STAGES:
        stage = 0
    return unit, step, stage


@gluon.jit
def prefetch_rows(w_ptr, row, rows, begin, size, LINE, COUNT: gl.constexpr):
    """Bring `size` bytes of COUNT rows of LINE bytes to L2, from a byte on: a piece for each thread. A copy in L2 stays
    coherent: whoever writes them, writes there."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    PIECES: gl.constexpr = THREADS // COUNT if THREADS > COUNT else 1
    each = gl.cdiv(gl.cdiv(min(size, LINE - begin), PIECES), 16) * 16
    thread = gl.arange(0, PIECES * COUNT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    at = gl.minimum(row + thread % COUNT, rows - 1)
    start = gl.minimum(begin + thread // COUNT * each, LINE - each)
    WIDE: gl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8  # bytes of what the pointer counts
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [w_ptr + (at.to(gl.int64) * LINE + start) // WIDE, each], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def added(sums):
    total = sums[0]
    if len(sums) > 1:
        total += sums[1]
    return total


@gluon.jit
def factors_at(
    factor_ptr, unit, work, K, LAYOUT: gl.constexpr, BN: gl.constexpr, FOLD: gl.constexpr, SPAN: gl.constexpr
):
    """Where the factors of a unit's rows begin, those of SPAN weights in a word; behind the last row, its own."""
    row = gl.minimum(unit * BN + gl.arange(0, BN, LAYOUT), work.rows - 1)
    return factor_ptr + row // FOLD * (K // SPAN) + row % FOLD * (K // FOLD // SPAN)


@gluon.jit
def prefetch_factors(factor_ptr, unit, work, K, BN: gl.constexpr, FOLD: gl.constexpr, SPAN: gl.constexpr):
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    LINE: gl.constexpr = 128 * 8 // factor_ptr.dtype.element_ty.primitive_bitwidth
    base = factors_at(factor_ptr, unit, work, K, LANES, BN, FOLD, SPAN)
    for line in range(0, K // FOLD // SPAN, LINE):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [base + line], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def load_factors(base, step, K, FOLD: gl.constexpr, GROUP: gl.constexpr, SPAN: gl.constexpr):
    """A tuple of the factors of the groups in a step of SPAN weights; behind the end of K, any."""
    COUNT: gl.constexpr = SPAN // GROUP if SPAN > GROUP else 1
    WORDS: gl.constexpr = base.dtype.element_ty != gl.uint8
    found = ()
    if WORDS:
        word = gl.load(base + min(step, K // FOLD // SPAN - 1)).to(gl.int32)
        for i in gl.static_range(COUNT):
            found = appended(found, factor_in(word, i))
    else:
        last = K // FOLD // GROUP - 1
        for i in gl.static_range(COUNT):
            found = appended(found, gl.load(base + min(step * SPAN // GROUP + i, last)).to(gl.int32) & MAX_FACTOR)
    return found


@gluon.jit
def spread(values, BYTES: gl.constexpr, LAYOUT: gl.constexpr):
    """One value for each row and group, a tuple of them, at the bytes of their groups: [rows, BYTES]."""
    if len(values) == 1:
        return gl.expand_dims(values[0], 1)
    else:
        return gl.convert_layout(spread_over(values, BYTES, LAYOUT), LAYOUT, assert_trivial=True)


@gluon.jit
def spread_over(values, BYTES: gl.constexpr, LAYOUT: gl.constexpr):
    if len(values) == 1:
        wide, _ = gl.broadcast(gl.expand_dims(values[0], 1), gl.zeros([1, BYTES], values[0].dtype, LAYOUT))
        return wide
    else:
        HALF: gl.constexpr = len(values) // 2
        left = spread_over(values[:HALF], BYTES // 2, LAYOUT)
        right = spread_over(values[HALF:], BYTES // 2, LAYOUT)
        return gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [left.shape[0], BYTES])


@gluon.jit
def offsets_of(factors):
    offsets = ()
    for i in gl.static_range(len(factors)):
        offsets = appended(offsets, factor_offset(factors[i]))
    return offsets


@gluon.jit
def decoded(packed, factors, BYTES: gl.constexpr, GROUP: gl.constexpr):
    """The even and the odd weights of packed bytes."""
    if GROUP > 0:
        LAYOUT: gl.constexpr = packed.type.layout
        return decode_grouped(packed, spread(factors, BYTES, LAYOUT), spread(offsets_of(factors), BYTES, LAYOUT))
    else:
        return decode(packed)


@gluon.jit
def part_tokens(x_buf):
    """Bring the even activations of a step before the odd ones."""
    BT: gl.constexpr = x_buf.shape[0]
    SPAN: gl.constexpr = x_buf.shape[1]
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 16], [2, 16], [gl.num_warps(), 1], [1, 0])
    x = x_buf.load(VECTORS)
    barrier()
    x_buf.store(gl.reshape(gl.permute(gl.reshape(x, [BT, SPAN // 2, 2]), [0, 2, 1]), [BT, SPAN]))
    fence_async_shared()


@gluon.jit
def multiply(w_buf, x_buf, sums, factors, WGMMA: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr):
    """Add a step's products to the sums: of even and odd weights apart, if they are packed."""
    MMA: gl.constexpr = sums[0].type.layout
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=4)
    BYTES: gl.constexpr = w_buf.shape[1]
    if WGMMA and PACKED:
        part_tokens(x_buf)
        even, odd = decoded(w_buf.load(A), factors, BYTES, GROUP)
        barrier()
        acc = warpgroup_mma(even, x_buf.slice(0, BYTES, dim=1).permute((1, 0)), sums[0], is_async=True)
        acc = warpgroup_mma(odd, x_buf.slice(BYTES, BYTES, dim=1).permute((1, 0)), acc, is_async=True)
        sums = (warpgroup_mma_wait(num_outstanding=0, deps=(acc,)),)
    elif WGMMA:
        acc = warpgroup_mma(w_buf, x_buf.permute((1, 0)), sums[0], is_async=True)
        sums = (warpgroup_mma_wait(num_outstanding=0, deps=(acc,)),)
    elif PACKED:
        x_even, x_odd = even_and_odd(x_buf.permute((1, 0)).load(B))
        even, odd = decoded(w_buf.load(A), factors, BYTES, GROUP)
        sums = (mma_v2(even, x_even, sums[0]), mma_v2(odd, x_odd, sums[1]))
    else:
        sums = (mma_v2(w_buf.load(A), x_buf.permute((1, 0)).load(B), sums[0]),)
    return sums


@gluon.jit
def unfolded(acc, FOLD: gl.constexpr):
    """The sums of the parts of K that belong together: [rows / FOLD, tokens / FOLD]."""
    if FOLD == 1:
        return acc
    else:
        LAYOUT: gl.constexpr = acc.type.layout
        row = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
        token = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
        like = gl.where(row % FOLD == token % FOLD, acc, 0)
        apart = gl.reshape(like, [acc.shape[0] // FOLD, FOLD, acc.shape[1] // FOLD, FOLD])
        return gl.sum(gl.sum(apart, axis=3), axis=1)


@gluon.jit
def unit_scales(
    unit, BN: gl.constexpr, BT: gl.constexpr, LAYOUT: gl.constexpr, terms, M, N, KINDS: gl.constexpr, kept=None
):  # fmt: skip
    """The scales of a unit's rows of the weight and of the tokens: worth reading before the products are done.

    `kept` are the tokens' scales in shared memory, where the kernel has worked them out."""
    columns = unit * BN + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    tokens = gl.arange(0, BT, gl.SliceLayout(0, LAYOUT))
    given = None
    if kept is not None:
        given = kept.load(gl.SliceLayout(0, LAYOUT))
    return read_scales(tokens, columns, M, N, terms, given, KINDS)


@gluon.jit
def store(acc, unit, scales, out_ptr, terms, M, N, KINDS: gl.constexpr):
    """Scale and store the sums of a unit's rows of the weight; `scales` may have been read before."""
    LAYOUT: gl.constexpr = acc.type.layout
    BN: gl.constexpr = acc.shape[0]
    BT: gl.constexpr = acc.shape[1]
    if scales is None:
        scales = unit_scales(unit, BN, BT, LAYOUT, terms, M, N, KINDS)
    columns = unit * BN + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    tokens = gl.arange(0, BT, gl.SliceLayout(0, LAYOUT))
    y = scaled(acc, tokens, columns, M, N, scales, terms, KINDS)
    y = completed(y, tokens, columns, M, N, terms, KINDS, out_ptr.dtype.element_ty)
    place = gl.expand_dims(tokens.to(gl.int64) * N, 0) + gl.expand_dims(columns, 1)
    gl.store(out_ptr + place, y, gl.expand_dims(tokens < M, 0) & gl.expand_dims(columns < N, 1))


@gluon.jit
def gemm_few(
    x_desc, w_desc, w_ptr, factor_ptr, out_ptr, terms, shape, TILE: gl.constexpr, FORM: gl.constexpr,
    KINDS: gl.constexpr,
):  # fmt: skip
    """A unit of work is a tile's rows of the folded weight, or a part of K of them, whose sums are then the output. For
    mma, activations of packed weights are int16: pairs."""
    M, N, K = shape
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    BT: gl.constexpr = x_desc.block_type.shape[0]
    STAGES: gl.constexpr = TILE.stages
    FOLD: gl.constexpr = TILE.fold
    WGMMA: gl.constexpr = TILE.wgmma
    PACKED: gl.constexpr = FORM.packed
    GROUP: gl.constexpr = FORM.group
    SPAN: gl.constexpr = 2 * BK if PACKED else BK
    # Weights whose factors lie in one element of `factor_ptr`: those of a step, or a group's.
    COVERS: gl.constexpr = GROUP * factor_ptr.dtype.element_ty.primitive_bitwidth // 8
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0] if WGMMA else [2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BT, 32] if WGMMA else [16, 8]
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4))
    if FORM.early != "no":
        let_next_kernel_start()
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BT, x_desc.block_type.shape[1]], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()

    rows = N * FOLD
    work = Work(
        steps=gl.cdiv(gl.cdiv(K // FOLD, SPAN), TILE.split), units=gl.cdiv(rows, BN) * TILE.split, rows=rows,
        columns=K // FOLD // (2 if PACKED else 1),
    )  # fmt: skip
    pid = gl.program_id(0)
    if GROUP > 0:
        prefetch_factors(factor_ptr, pid // TILE.split, work, K, BN, FOLD, COVERS)
    if FORM.early == "prefetch":
        begin = first_step(pid, work, TILE) * BK
        prefetch_rows(w_ptr, pid // TILE.split * BN, rows, begin, TILE.ahead * BK, work.columns, BN)
        wait_for_previous_kernel()
    place = (pid, 0, 0)
    for _ in gl.static_range(STAGES - 1):
        fetch_weight(place, w_desc, x_desc, w_bufs, full, work, TILE)
        place = following(place, work, STAGES)
    if FORM.early == "copy":
        wait_for_previous_kernel()
    x_place = (pid, 0, 0)
    for _ in gl.static_range(STAGES - 1):
        fetch_tokens(x_place, x_desc, x_bufs, full, work, TILE)
        x_place = following(x_place, work, STAGES)

    stage = 0
    phase = 0
    for unit in range(pid, work.units, gl.num_programs(0)):
        begin = first_step(unit, work, TILE)
        base = factor_ptr
        factors = (0,)
        if GROUP > 0:
            base = factors_at(factor_ptr, unit // TILE.split, work, K, ROWS, BN, FOLD, COVERS)
            factors = load_factors(base, begin, K, FOLD, GROUP, SPAN)
            prefetch_factors(factor_ptr, (unit + gl.num_programs(0)) // TILE.split, work, K, BN, FOLD, COVERS)
        sums = (gl.zeros((BN, BT), gl.int32, MMA),)
        if PACKED and not WGMMA:
            sums = appended(sums, gl.zeros((BN, BT), gl.int32, MMA))
        for k in range(work.steps):
            next_factors = (0,)
            if GROUP > 0:  # a step early: they come from L2
                next_factors = load_factors(base, begin + k + 1, K, FOLD, GROUP, SPAN)
            mbarrier.wait(full.index(stage), phase)
            barrier()  # all warps are done with the stage before, which is fetched anew
            fetch_weight(place, w_desc, x_desc, w_bufs, full, work, TILE)
            fetch_tokens(place, x_desc, x_bufs, full, work, TILE)
            place = following(place, work, STAGES)
            sums = multiply(w_bufs.index(stage), x_bufs.index(stage), sums, factors, WGMMA, PACKED, GROUP)
            factors = next_factors
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = unfolded(added(sums), FOLD)
        if PACKED and GROUP == 0:
            acc = without_16(acc)
        if TILE.split > 1:
            store_sums(acc, unit % TILE.split, 0, unit // TILE.split * (BN // FOLD), N, M, N, out_ptr)
        else:
            store(acc, unit, None, out_ptr, terms, M, N, KINDS)
