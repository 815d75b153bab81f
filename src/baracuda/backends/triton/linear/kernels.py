"""The portable W8A8 GEMM in Triton: any sizes, any architecture from sm_80, and the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics.conversions import load_scale, loop_bound, narrow, widen
from ..numerics.nonlinearity import activated


@triton.jit
def grouped(index, along, across, GROUP: tl.constexpr):
    first = index // (GROUP * along) * GROUP
    width = min(across - first, GROUP)
    inside = index % (GROUP * along)
    return inside // width, first + inside % width


@triton.jit
def tile_at(index, tiles_m, tiles_n, GROUP: tl.constexpr, ACROSS: tl.constexpr):
    """Row and column of a tile: in groups of GROUP columns, down the rows, or of rows, across the columns.

    Those in flight share their operands in L2.
    """
    if ACROSS:
        n, m = grouped(index, tiles_n, tiles_m, GROUP)
    else:
        m, n = grouped(index, tiles_m, tiles_n, GROUP)
    return m, n


@triton.jit
def finish(
    acc, rows, columns, M, N, out_ptr, sa, sw, bias, residual_ptr, PER_TOKEN: tl.constexpr, ACTIVATION: tl.constexpr,
    F64: tl.constexpr,
):  # fmt: skip
    """act(((acc * scale_a) * scale_w) + bias) + residual, left to right, each step rounded, then stored."""
    y = acc.to(tl.float64 if F64 else tl.float32)
    if PER_TOKEN:
        y = y * load_scale(sa, rows, rows < M, F64)[:, None]
    else:
        y = y * load_scale(sa, 0, None, F64)
    if sw.dtype.is_ptr():
        y = y * load_scale(sw, columns, columns < N, F64)[None, :]
    else:
        y = y * load_scale(sw, 0, None, F64)
    if bias is not None:
        y = y + load_scale(bias, columns, columns < N, F64)[None, :]
    y = activated(y, ACTIVATION, F64)
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    if residual_ptr is not None:
        y = y + widen(tl.load(residual_ptr + place, mask=mask, other=0), F64)
    tl.store(out_ptr + place, narrow(y, out_ptr.dtype.element_ty, True), mask=mask)


@triton.jit
def centred(
    acc, rows, M, zp, sums, PER_TOKEN_ZERO: tl.constexpr, SHIFT: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr
):
    """acc - zero_point * sum of the weight's row; u8 activations went in SHIFTed into the signed range."""
    if zp is None:
        zero = tl.full((1,), 0, tl.int32)
    elif not zp.dtype.is_ptr():
        zero = tl.full((1,), 0, tl.int32) + zp
    elif PER_TOKEN_ZERO:
        zero = tl.load(zp + rows, mask=rows < M, other=0)
    else:
        zero = tl.full((1,), 0, tl.int32) + tl.minimum(tl.maximum(tl.load(zp), Q_MIN), Q_MAX)
    return acc - (zero - SHIFT).to(acc.dtype)[:, None] * sums[None, :]


@triton.jit
def load_weight(w_ptr, columns, k, N, K, ODD: tl.constexpr, PACKED: tl.constexpr):
    """The weight at columns x k, as [k, columns]; of a packed one, the even or the odd nibbles of each byte."""
    stride = (K + 1) // 2 if PACKED else K
    at = 2 * k + ODD if PACKED else k
    inside = (at < K)[:, None] & (columns < N)[None, :]
    w = tl.load(w_ptr + columns.to(tl.int64)[None, :] * stride + k[:, None], mask=inside, other=0)
    if PACKED:
        nibble = (w.to(tl.int32) >> (4 * ODD)) & 15
        w = tl.where(inside, (nibble ^ 8) - 8, 0).to(tl.int8)
    return w


@triton.jit
def load_activation(x_ptr, rows, at, M, K, SHIFT: tl.constexpr):
    x = tl.load(
        x_ptr + rows.to(tl.int64)[:, None] * K + at[None, :], mask=(rows < M)[:, None] & (at < K)[None, :], other=0
    )
    return (x.to(tl.int32) - SHIFT).to(tl.int8) if SHIFT else x


@triton.jit
def dot(
    x_ptr, w_ptr, rows, columns, first, last, M, N, K, SHIFT: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The int32 sums over the stored weight from first to last, and with SUMS those of the weight alone."""
    acc = tl.zeros((BM, BN), tl.int32)
    sums = tl.zeros((BN,), tl.int32)
    for start in range(first, loop_bound(last), BK):
        k = start + tl.arange(0, BK)
        for odd in tl.static_range(2 if PACKED else 1):
            w = load_weight(w_ptr, columns, k, N, K, odd, PACKED)
            x = load_activation(x_ptr, rows, 2 * k + odd if PACKED else k, M, K, SHIFT)
            acc = tl.dot(x, w, acc, out_dtype=tl.int32)
            if SUMS:
                sums += tl.sum(w.to(tl.int32), 0)
    return acc, sums


@triton.jit
def matmul(
    x_ptr, w_ptr, out_ptr, sa, sw, bias, zp, sum_ptr, residual_ptr, M, N, K, PER_TOKEN: tl.constexpr,
    CENTRED: tl.constexpr, SHIFT: tl.constexpr, PACKED: tl.constexpr, F64: tl.constexpr, Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr, ACTIVATION: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """A K longer than int32 sums are exact for is cut into CHUNKs of the stored weight, added in int64 (0: not cut)."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first = pid // (8 * tiles_n) * 8
    height = tl.minimum(tiles_m - first, 8)
    inside = pid % (8 * tiles_n)
    rows = (first + inside % height) * BM + tl.arange(0, BM)
    columns = inside // height * BN + tl.arange(0, BN)
    SUMS: tl.constexpr = CENTRED and sum_ptr is None
    stored = (K + 1) // 2 if PACKED else K
    if CHUNK == 0:
        acc, sums = dot(x_ptr, w_ptr, rows, columns, 0, stored, M, N, K, SHIFT, PACKED, SUMS, BM, BN, BK)
    else:
        acc = tl.zeros((BM, BN), tl.int64)
        sums = tl.zeros((BN,), tl.int64)
        for first in range(0, loop_bound(stored), CHUNK):
            last = tl.minimum(first + CHUNK, stored)
            part, part_sums = dot(x_ptr, w_ptr, rows, columns, first, last, M, N, K, SHIFT, PACKED, SUMS, BM, BN, BK)
            acc += part
            sums += part_sums
    if CENTRED:
        if sum_ptr is not None:
            sums = tl.load(sum_ptr + columns, mask=columns < N, other=0)
        acc = centred(acc, rows, M, zp, sums, PER_TOKEN, SHIFT, Q_MIN, Q_MAX)
    finish(acc, rows, columns, M, N, out_ptr, sa, sw, bias, residual_ptr, PER_TOKEN, ACTIVATION, F64)


@triton.jit
def sum_parts(
    partial_ptr, out_ptr, sa, sw, bias, residual_ptr, M, N, PER_TOKEN: tl.constexpr, ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sums of K's parts, partial[SPLIT, M, N], added and scaled: one row and BN columns per program."""
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    rows = pid // tiles_n + tl.arange(0, 1)
    columns = pid % tiles_n * BN + tl.arange(0, BN)
    acc = tl.zeros((1, BN), tl.int32)
    for part in tl.static_range(SPLIT):
        place = (part * M + rows).to(tl.int64)[:, None] * N + columns[None, :]
        acc += tl.load(partial_ptr + place, mask=(columns < N)[None, :], other=0)
    finish(acc, rows, columns, M, N, out_ptr, sa, sw, bias, residual_ptr, PER_TOKEN, ACTIVATION, False)


@triton.jit
def sum_tail(
    partial_ptr, out_ptr, sa, sw, bias, residual_ptr, M, N, whole, PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr, GROUP: tl.constexpr, ACROSS: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The tiles behind the whole ones, their parts in partial[tile, TAIL, BM, BN]: LINES rows of one per program."""
    tile = tl.program_id(0) // (BM // LINES)
    line = tl.program_id(0) % (BM // LINES) * LINES + tl.arange(0, LINES)
    m, n = tile_at(whole + tile, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP, ACROSS)
    place = line[:, None] * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((LINES, BN), tl.int32)
    for part in tl.static_range(TAIL):
        acc += tl.load(partial_ptr + (tile * TAIL + part) * (BM * BN) + place)
    columns = n * BN + tl.arange(0, BN)
    finish(acc, m * BM + line, columns, M, N, out_ptr, sa, sw, bias, residual_ptr, PER_TOKEN, ACTIVATION, False)


@triton.jit
def sum_rows(w_ptr, sum_ptr, N, K, BK: tl.constexpr):
    """The sum of each row of the weight: what a zero point is multiplied by."""
    row = tl.program_id(0)
    total = tl.zeros((BK,), tl.int32)
    for start in range(0, loop_bound(K), BK):
        k = start + tl.arange(0, BK)
        total += tl.load(w_ptr + row.to(tl.int64) * K + k, mask=k < K, other=0).to(tl.int32)
    tl.store(sum_ptr + row, tl.sum(total, 0))
