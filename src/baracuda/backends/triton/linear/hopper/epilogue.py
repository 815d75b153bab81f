"""What the sm_90 GEMMs make of their sums: nonlinearity(((acc * scale) * weight_scale) + bias) + residual."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...numerics.comparisons import clamp
from ...numerics.conversions import narrow_pairs, to_float
from ...numerics.nonlinearity import nonlinear


class HopperTerms(NamedTuple):
    """What the sums are multiplied by and what is added. Of a value that may be a tensor or a number, both members are
    there and `TermKinds` says which counts."""

    scale_ptr: Any
    scale: Any
    weight_scale_ptr: Any
    weight_scale: Any
    bias_ptr: Any
    zero_point_ptr: Any
    zero_point: Any
    weight_sum_ptr: Any
    residual_ptr: Any


class TermKinds(NamedTuple):
    """What a GEMM's epilogue is compiled for: the constant KINDS.

    A kind is "number", "scalar" (a tensor of one), "vector" (one for each row or column) or "none".
    """

    #: Or "given": the kernel has worked the scales out and holds them. "none": the sums are not scaled.
    scale: str
    weight_scale: str
    zero_point: str
    bias: bool
    residual: bool
    #: "none", "relu", "gelu" or "silu".
    nonlinearity: str
    #: The accumulator's axis of tokens: 0, or 1 if it is out.T.
    token_axis: int


@gluon.jit
def by_token(values, KINDS: gl.constexpr):
    """One value for each token, to broadcast along the other axis of the accumulator."""
    return gl.expand_dims(values, 1 - KINDS.token_axis)


@gluon.jit
def by_column(values, KINDS: gl.constexpr):
    """One value for each row of the weight, to broadcast along the tokens."""
    return gl.expand_dims(values, KINDS.token_axis)


@gluon.jit
def read_scales(row, column, M, N, terms, given, KINDS: gl.constexpr):
    """(scale, weight_scale) of an accumulator's rows and columns, in f32: worth reading before its products are done.

    `given` are the scales that the kernel holds, one for each row, or None.
    """
    return read_token_scale(row, M, terms, given, KINDS), read_weight_scale(column, N, terms, KINDS)


@gluon.jit
def read_token_scale(row, M, terms, given, KINDS: gl.constexpr):
    scale = terms.scale
    if KINDS.scale == "vector":
        scale = by_token(to_float(gl.load(terms.scale_ptr + row, row < M, other=0), False), KINDS)
    elif KINDS.scale == "scalar":
        scale = to_float(gl.load(terms.scale_ptr), False)
    elif KINDS.scale == "given":
        scale = by_token(given, KINDS)
    return scale


@gluon.jit
def read_weight_scale(column, N, terms, KINDS: gl.constexpr):
    weight_scale = terms.weight_scale
    if KINDS.weight_scale == "vector":
        weight_scale = by_column(to_float(gl.load(terms.weight_scale_ptr + column, column < N, other=0), False), KINDS)
    return weight_scale


@gluon.jit
def scaled(acc, row, column, M, N, scales, terms, KINDS: gl.constexpr):
    """((acc * scale) * weight_scale) + bias in f32, each step rounded; `row` and `column` are the accumulator's."""
    if KINDS.zero_point != "none":
        weight_sum = by_column(gl.load(terms.weight_sum_ptr + column, column < N, other=0), KINDS)
        if KINDS.zero_point == "vector":
            acc -= by_token(gl.load(terms.zero_point_ptr + row, row < M, other=0), KINDS) * weight_sum
        elif KINDS.zero_point == "scalar":
            acc -= clamp(gl.load(terms.zero_point_ptr), -128, 127) * weight_sum
        else:
            acc -= terms.zero_point * weight_sum
    scale, weight_scale = scales
    y = to_float(acc, False)
    if KINDS.scale != "none":
        y = (y * scale) * weight_scale
    if KINDS.bias:
        y = y + by_column(to_float(gl.load(terms.bias_ptr + column, column < N, other=0), False), KINDS)
    return y


@gluon.jit
def completed(y, row, column, M, N, terms, KINDS: gl.constexpr, OUT: gl.constexpr):
    """nonlinearity(y) + residual, rounded once more to the output's type."""
    NONLINEARITY: gl.constexpr = KINDS.nonlinearity  # a name: Triton 3.6 passes no field of a constant on
    y = nonlinear(y, NONLINEARITY, False)
    if KINDS.residual:
        place = by_token(row.to(gl.int64) * N, KINDS) + by_column(column, KINDS)
        inside = by_token(row < M, KINDS) & by_column(column < N, KINDS)
        y = y + to_float(gl.load(terms.residual_ptr + place, inside, other=0), False)
    return narrow_pairs(y, OUT)


@gluon.jit
def store_sums(acc, part, row, column, end, M, N, partial_ptr):
    """Store sums of a part of K, [columns, rows] up to the column `end`, as they are: another kernel adds them up."""
    LAYOUT: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    columns = column + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    place = gl.expand_dims((part * M + rows).to(gl.int64) * N, 0) + gl.expand_dims(columns, 1)
    gl.store(partial_ptr + place, acc, gl.expand_dims(rows < M, 0) & gl.expand_dims(columns < end, 1))
