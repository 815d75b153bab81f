"""The portable weight-only GEMM in Triton: float activations, integer weights, any sizes, and the interpreter.

The weight is decoded as `dequantize` does it: (q - zero_point) * scale in f32, rounded to the activations' type. One
accumulator an output takes the products in the order of K, in tiles that are the same for every number of tokens: what
a row gives does not depend on the others.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..numerics.conversions import INTERPRETED, load_scale, load_zero_point, narrow, to_float, widen
from ..numerics.indices import loop_bound
from ..numerics.packing import nibble_at
from .kernels import Epilogue, finish, tile_at
from .tune import Portable


class WeightOnly(NamedTuple):
    """What the kernel is compiled for: the constant SPEC."""

    epilogue: Epilogue
    tile: Portable
    #: Two elements of the weight lie in a byte.
    packed: bool
    signed: bool
    #: Weights along K that share a scale; 0: a row has one.
    group: int


@triton.jit
def load_integers(w_ptr, columns, start, shape, SPEC: tl.constexpr):
    """The stored integers at columns x [start, start + tile.k), int32; behind the end of K, any."""
    BK: tl.constexpr = SPEC.tile.k
    inside = (columns < shape.n)[:, None]
    if SPEC.packed:
        stored = (shape.k + 1) // 2
        at = start // 2 + tl.arange(0, BK // 2)
        place = columns.to(tl.int64)[:, None] * stored + at[None, :]
        byte = tl.load(w_ptr + place, mask=inside & (at < stored)[None, :], other=0).to(tl.int32)
        return tl.interleave(nibble_at(byte, 0, SPEC.signed), nibble_at(byte, 1, SPEC.signed))
    else:
        at = start + tl.arange(0, BK)
        place = columns.to(tl.int64)[:, None] * shape.k + at[None, :]
        return tl.load(w_ptr + place, mask=inside & (at < shape.k)[None, :], other=0).to(tl.int32)


@triton.jit
def decoded(q, scale, zero_point_ptr, place, mask):
    """(q - zero_point) * scale in f32, where a zero point of None is none."""
    if zero_point_ptr is not None:
        q = q - load_zero_point(zero_point_ptr, place, mask)
    return to_float(q, False) * scale


@triton.jit
def load_weight(w_ptr, scale_ptr, zero_point_ptr, columns, start, shape, SPEC: tl.constexpr):
    """The decoded weight at columns x [start, start + tile.k) in f32; behind the end of K, 0."""
    BK: tl.constexpr = SPEC.tile.k
    GROUP: tl.constexpr = SPEC.group
    q = load_integers(w_ptr, columns, start, shape, SPEC)
    k = start + tl.arange(0, BK)
    inside = (columns < shape.n)[:, None]
    row = columns.to(tl.int64)[:, None]
    if GROUP == 0:
        w = decoded(q, load_scale(scale_ptr, row, inside, False), zero_point_ptr, row, inside)
    elif GROUP % BK == 0:
        place = row * (shape.k // GROUP) + start // GROUP
        w = decoded(q, load_scale(scale_ptr, place, inside, False), zero_point_ptr, place, inside)
    else:
        mask = inside & (k < shape.k)[None, :]
        place = row * (shape.k // GROUP) + (k // GROUP)[None, :]
        w = decoded(q, load_scale(scale_ptr, place, mask, False), zero_point_ptr, place, mask)
    return tl.where(inside & (k < shape.k)[None, :], w, 0.0)


@triton.jit
def weight_only(x_ptr, w_ptr, scale_ptr, zero_point_ptr, out_ptr, terms, shape, SPEC: tl.constexpr):
    """out[M, N] = epilogue(x[M, K] @ decoded[N, K].T)."""
    BM: tl.constexpr = SPEC.tile.m
    BN: tl.constexpr = SPEC.tile.n
    BK: tl.constexpr = SPEC.tile.k
    EPILOGUE: tl.constexpr = SPEC.epilogue
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    m, n = tile_at(tl.program_id(0), tl.cdiv(shape.m, BM), tl.cdiv(shape.n, BN), 8, False)
    rows = m * BM + tl.arange(0, BM)
    columns = n * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, loop_bound(shape.k), BK):
        w = load_weight(w_ptr, scale_ptr, zero_point_ptr, columns, start, shape, SPEC)
        k = start + tl.arange(0, BK)
        mask = (rows < shape.m)[:, None] & (k < shape.k)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * shape.k + k[None, :], mask=mask, other=0)
        w = narrow(w, DTYPE, False)
        if INTERPRETED:  # it multiplies the bits of bf16
            acc = tl.dot(widen(x, False), tl.trans(widen(w, False)), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    finish(acc, rows, columns, shape.m, shape.n, out_ptr, terms, EPILOGUE)
