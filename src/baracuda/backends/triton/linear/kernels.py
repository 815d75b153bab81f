"""The portable W8A8 GEMM in Triton: any sizes, any architecture from sm_80, and the interpreter."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....core import types
from ..numerics.comparisons import clamp
from ..numerics.conversions import load_scale, narrow, sealed, to_float, widen
from ..numerics.indices import loop_bound
from ..numerics.nonlinearity import nonlinear
from ..numerics.packing import nibble_at
from .tune import Portable

#: The low bits of a stored factor count.
MAX_FACTOR = tl.constexpr(types.MAX_FACTOR)


class Shape(NamedTuple):
    """The sizes of a GEMM: tokens, rows of the weight, and what is summed over."""

    m: Any
    n: Any
    k: Any


class Terms(NamedTuple):
    """What the sums are multiplied by and what is added: addresses, or numbers as the bits of a double. Bias and
    residual may be None."""

    scale: Any
    weight_scale: Any
    bias: Any
    residual: Any


class Epilogue(NamedTuple):
    """What becomes of the sums: the constant EPILOGUE."""

    #: Every row has a scale of its own.
    per_token: bool
    #: "none", "relu", "gelu" or "silu".
    nonlinearity: str
    #: The math type is f64, not f32.
    f64: bool = False
    #: The sums are multiplied by scales.
    scaled: bool = True


class Matmul(NamedTuple):
    """What the portable kernel is compiled for: the constant SPEC."""

    epilogue: Epilogue
    tile: Portable
    #: The activations have a zero point.
    centred: bool
    #: What is subtracted from u8 activations for the signed multiplication.
    shift: int
    #: Two elements of the weight lie in a byte.
    packed: bool
    #: Weights along K that share an integer factor; 0: there are no factors.
    group: int
    q_min: int
    q_max: int
    #: How much of the stored weight is summed in int32 before it is added in int64; 0: all of it.
    chunk: int
    #: Every row has a zero point of its own.
    zero_points: bool = False


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
def finish(acc, rows, columns, M, N, out_ptr, terms, EPILOGUE: tl.constexpr):
    """nonlinearity(((acc * scale) * weight_scale) + bias) + residual, each step rounded, then stored."""
    F64: tl.constexpr = EPILOGUE.f64
    NONLINEARITY: tl.constexpr = EPILOGUE.nonlinearity
    y = to_float(acc, F64)
    if EPILOGUE.scaled:
        if EPILOGUE.per_token and terms.scale.dtype.is_ptr():
            y = y * load_scale(terms.scale, rows, rows < M, F64)[:, None]
        else:
            y = y * load_scale(terms.scale, 0, None, F64)
        if terms.weight_scale.dtype.is_ptr():
            y = y * load_scale(terms.weight_scale, columns, columns < N, F64)[None, :]
        else:
            y = y * load_scale(terms.weight_scale, 0, None, F64)
    if terms.bias is not None:
        y = y + load_scale(terms.bias, columns, columns < N, F64)[None, :]
    y = nonlinear(y, NONLINEARITY, F64)
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    if terms.residual is not None:
        y = y + widen(tl.load(terms.residual + place, mask=mask, other=0), F64)
    tl.store(out_ptr + place, narrow(y, out_ptr.dtype.element_ty, True), mask=mask)


@triton.jit
def centred(acc, rows, M, zero_point_ptr, sums, SPEC: tl.constexpr):
    """acc - zero_point * sum of the weight's row; u8 activations were shifted into the signed range."""
    if zero_point_ptr is None:
        zero = tl.full((1,), 0, tl.int32)
    elif not zero_point_ptr.dtype.is_ptr():
        zero = tl.full((1,), 0, tl.int32) + zero_point_ptr
    elif SPEC.zero_points:
        zero = tl.load(zero_point_ptr + rows, mask=rows < M, other=0)
    else:
        zero = tl.full((1,), 0, tl.int32) + clamp(tl.load(zero_point_ptr), SPEC.q_min, SPEC.q_max)
    correction = (zero - SPEC.shift).to(acc.dtype)[:, None] * sums[None, :]
    if SPEC.group:  # Triton 3.7's LLVM fails an assertion where it vectorizes the product of such a weight's sums
        correction = sealed(correction)
    return acc - correction


@triton.jit
def load_weight(w_ptr, factor_ptr, columns, k, N, K, ODD: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr):
    """The weight at columns x k, as [k, columns]; of a packed one, the even or the odd elements of each byte, times the
    factors of their groups, which s8 holds."""
    stride = (K + 1) // 2 if PACKED else K
    at = 2 * k + ODD if PACKED else k
    inside = (at < K)[:, None] & (columns < N)[None, :]
    w = tl.load(w_ptr + columns.to(tl.int64)[None, :] * stride + k[:, None], mask=inside, other=0)
    if PACKED:
        w = tl.where(inside, nibble_at(w.to(tl.int32), ODD, True), 0)
        if GROUP:
            place = columns.to(tl.int64)[None, :] * (K // GROUP) + (at // GROUP)[:, None]
            w = w * (tl.load(factor_ptr + place, mask=inside, other=0).to(tl.int32) & MAX_FACTOR)
        w = w.to(tl.int8)
    return w


@triton.jit
def load_activation(x_ptr, rows, at, M, K, SHIFT: tl.constexpr):
    x = tl.load(
        x_ptr + rows.to(tl.int64)[:, None] * K + at[None, :], mask=(rows < M)[:, None] & (at < K)[None, :], other=0
    )
    return (x.to(tl.int32) - SHIFT).to(tl.int8) if SHIFT else x


@triton.jit
def dot(x_ptr, w_ptr, factor_ptr, rows, columns, first, last, shape, SUMS: tl.constexpr, SPEC: tl.constexpr):
    """The int32 sums over the stored weight from first to last, and with SUMS those of the weight alone."""
    BM: tl.constexpr = SPEC.tile.m
    BN: tl.constexpr = SPEC.tile.n
    BK: tl.constexpr = SPEC.tile.k
    acc = tl.zeros((BM, BN), tl.int32)
    sums = tl.zeros((BN,), tl.int32)
    for start in range(first, loop_bound(last), BK):
        k = start + tl.arange(0, BK)
        for odd in tl.static_range(2 if SPEC.packed else 1):
            w = load_weight(w_ptr, factor_ptr, columns, k, shape.n, shape.k, odd, SPEC.packed, SPEC.group)
            x = load_activation(x_ptr, rows, 2 * k + odd if SPEC.packed else k, shape.m, shape.k, SPEC.shift)
            acc = tl.dot(x, w, acc, out_dtype=tl.int32)
            if SUMS:
                sums += tl.sum(w.to(tl.int32), 0)
    return acc, sums


@triton.jit
def matmul(x_ptr, w_ptr, factor_ptr, out_ptr, terms, zero_point_ptr, sum_ptr, shape, SPEC: tl.constexpr):
    """A K longer than int32 sums are exact for is cut into chunks of the stored weight, added in int64."""
    BM: tl.constexpr = SPEC.tile.m
    BN: tl.constexpr = SPEC.tile.n
    tiles_m = tl.cdiv(shape.m, BM)
    tiles_n = tl.cdiv(shape.n, BN)
    pid = tl.program_id(0)
    first = pid // (8 * tiles_n) * 8
    height = tl.minimum(tiles_m - first, 8)
    inside = pid % (8 * tiles_n)
    rows = (first + inside % height) * BM + tl.arange(0, BM)
    columns = inside // height * BN + tl.arange(0, BN)
    SUMS: tl.constexpr = SPEC.centred and sum_ptr is None
    stored = (shape.k + 1) // 2 if SPEC.packed else shape.k
    if SPEC.chunk == 0:
        acc, sums = dot(x_ptr, w_ptr, factor_ptr, rows, columns, 0, stored, shape, SUMS, SPEC)
    else:
        acc = tl.zeros((BM, BN), tl.int64)
        sums = tl.zeros((BN,), tl.int64)
        for first in range(0, loop_bound(stored), SPEC.chunk):
            last = tl.minimum(first + SPEC.chunk, stored)
            part, part_sums = dot(x_ptr, w_ptr, factor_ptr, rows, columns, first, last, shape, SUMS, SPEC)
            acc += part
            sums += part_sums
    if SPEC.centred:
        if sum_ptr is not None:
            sums = tl.load(sum_ptr + columns, mask=columns < shape.n, other=0)
        acc = centred(acc, rows, shape.m, zero_point_ptr, sums, SPEC)
    EPILOGUE: tl.constexpr = SPEC.epilogue
    finish(acc, rows, columns, shape.m, shape.n, out_ptr, terms, EPILOGUE)


@triton.jit
def sum_tail(partial_ptr, out_ptr, terms, M, N, whole, EPILOGUE: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr):
    """The tiles behind the `whole` ones, their parts in partial[tile, TILE.tail, TILE.m, TILE.n]: LINES rows of one in
    a program. TILE is a `tune.Pingpong`."""
    BM: tl.constexpr = TILE.m
    BN: tl.constexpr = TILE.n
    TAIL: tl.constexpr = TILE.tail
    tile = tl.program_id(0) // (BM // LINES)
    line = tl.program_id(0) % (BM // LINES) * LINES + tl.arange(0, LINES)
    m, n = tile_at(whole + tile, tl.cdiv(M, BM), tl.cdiv(N, BN), TILE.group, TILE.across)
    place = line[:, None] * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((LINES, BN), tl.int32)
    for part in tl.static_range(TAIL):
        acc += tl.load(partial_ptr + (tile * TAIL + part) * (BM * BN) + place)
    columns = n * BN + tl.arange(0, BN)
    finish(acc, m * BM + line, columns, M, N, out_ptr, terms, EPILOGUE)


@triton.jit
def sum_parts(
    partial_ptr, out_ptr, terms, M, N, EPILOGUE: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The output from partial[PARTS, M, N], the sums of parts of K, added up in their order."""
    across = tl.cdiv(N, BN)
    rows = tl.program_id(0) // across * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % across * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    acc = tl.zeros((BM, BN), partial_ptr.dtype.element_ty)
    for part in tl.static_range(PARTS):
        place = (part * M + rows).to(tl.int64)[:, None] * N + columns[None, :]
        acc += tl.load(partial_ptr + place, mask=mask, other=0)
    finish(acc, rows, columns, M, N, out_ptr, terms, EPILOGUE)


@triton.jit
def sum_rows(w_ptr, sum_ptr, N, K, BK: tl.constexpr):
    """The sum of each row of the weight: what a zero point is multiplied by."""
    row = tl.program_id(0)
    total = tl.zeros((BK,), tl.int32)
    for start in range(0, loop_bound(K), BK):
        k = start + tl.arange(0, BK)
        total += tl.load(w_ptr + row.to(tl.int64) * K + k, mask=k < K, other=0).to(tl.int32)
    tl.store(sum_ptr + row, tl.sum(total, 0))
