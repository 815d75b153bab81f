"""Activations that a GEMM for the fewest tokens quantizes itself: with the bits of `dynamic.kernels.rows`, and no
kernel before.

Every program reads all of them, finds each token's largest magnitude and scale, and puts the integers into shared
memory as its products read them. Columns are read in steps of SPAN, of PARTS parts of a token at once that lie STRIDE
apart: those of the warps.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, RUF005
from __future__ import annotations

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...dynamic.kernels import LOW
from ...numerics.comparisons import comparable, compared, higher, largest
from ...numerics.conversions import to_float, widen
from ...numerics.division import prepare_positive, times
from ...numerics.packing import low_bytes
from ...numerics.qparams import Range, symmetric_scale
from ...numerics.rounding import HELD, Bounds, Quantizer, bounds_of, quantize_steps, step_bits
from .versions import reinterpreted


class Tokens(NamedTuple):
    """Tokens, their length and how they become integers: the constant TOKENS."""

    m: int
    k: int
    range: Range
    quantizer: Quantizer
    #: Of `dynamic.kernels`: which bounds are kept.
    bounds: int
    #: What a scale is rounded to: "fp16", "bf16" or "fp32".
    scale: str


@triton.constexpr_function
def rounded_up(n: int) -> int:
    """To a power of two."""
    return 1 << (n - 1).bit_length()


@triton.constexpr_function
def scale_type(name: str) -> gl.dtype:
    return {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}[name]


@triton.constexpr_function
def columns_layout(tokens: int, columns: int, bits: int, warps: int) -> gl.BlockedLayout:
    """[tokens, columns]: neighbouring threads have neighbouring vectors of 16 bytes, or less where all threads then
    have some."""
    vector = max(min(128 // bits, tokens * columns // (32 * warps)), 2)
    across = min(warps, max(columns // (32 * vector), 1))
    return gl.BlockedLayout([1, vector], [1, 32], [warps // across, across], [1, 0])


@triton.constexpr_function
def fragments_layout(warps: int, k: int, tokens: int, ordered: bool) -> gl.SharedLinearLayout:
    """[warps, k, tokens] as `direct.fragments_layout` has them, or one token alone. K is in the order in which it is
    multiplied, that of `direct.in_order`, or still in its own: eight neighbours stay neighbours, the even ones first.
    """
    bits = (1, 2, 16, 32, 4, 8, 64) if ordered else (2, 4, 1, 8, k // 4, k // 2, 16)
    bases = [[0, bit, 0] for bit in bits[:6]] + [[0, 0, token] for token in (1, 2, 4) if token < tokens]
    bases += [[0, bits[6], 0]] if k > 64 else []
    return gl.SharedLinearLayout(bases + [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)])


@gluon.jit
def appended(values, value):
    return values + (value,)


@gluon.jit
def load_columns(x_ptr, STEP: gl.constexpr, PARTS: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr,
                 TOKENS: gl.constexpr):  # fmt: skip
    """The columns of a step of all tokens, [tokens, PARTS * SPAN]; what does not exist is 0. Behind a part comes the
    next one, for weights that are 0. Not by way of L1, which the previous kernel does not write."""
    ROUND: gl.constexpr = rounded_up(TOKENS.m)
    K: gl.constexpr = TOKENS.k
    LAYOUT: gl.constexpr = columns_layout(
        ROUND, PARTS * SPAN, x_ptr.dtype.element_ty.primitive_bitwidth, gl.num_warps()
    )
    token = gl.expand_dims(gl.arange(0, ROUND, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, PARTS * SPAN, gl.SliceLayout(0, LAYOUT)), 0)
    at = column // SPAN * STRIDE + (column % SPAN + STEP * SPAN)
    if TOKENS.m == ROUND and (PARTS - 1) * STRIDE + STEP * SPAN + SPAN <= K:
        return gl.load(x_ptr + (token * K + at), cache_modifier=".cg")
    else:
        inside = (token < TOKENS.m) & (at < K)
        return gl.load(x_ptr + (token * K + at), inside, other=0.0, cache_modifier=".cg")


@gluon.jit
def quantized_columns(
    x_ptr, STEPS: gl.constexpr, PARTS: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """A tuple of all steps' integers, [tokens, PARTS * SPAN], and the tokens' scales as they would be read again."""
    RANGE: gl.constexpr = TOKENS.range
    QUANTIZER: gl.constexpr = TOKENS.quantizer
    SCALE: gl.constexpr = scale_type(TOKENS.scale)
    held = appended((), load_columns(x_ptr, 0, PARTS, SPAN, STRIDE, TOKENS))
    for i in gl.static_range(1, STEPS):
        held = appended(held, load_columns(x_ptr, i, PARTS, SPAN, STRIDE, TOKENS))
    highs = comparable(held[0], True)
    for i in gl.static_range(1, STEPS):
        highs = higher(highs, comparable(held[i], True))
    if highs.dtype == gl.float16:  # its maximum with NaN takes more instructions than to widen it
        highs = widen(highs, False)
    stored, used = symmetric_scale(compared(largest(highs, 1), True), SCALE, RANGE, QUANTIZER)
    divisor = prepare_positive(gl.expand_dims(used, 1), False, False)
    bounds = bounds_of(None, QUANTIZER)
    if TOKENS.bounds == LOW:
        bounds = Bounds(low=bounds.low, high=None, shift=bounds.shift)
    integers = ()
    for i in gl.static_range(STEPS):
        x = times(held[i], divisor.factor, False)
        step = quantize_steps(x, divisor, bounds, False, HELD, False)
        integers = appended(integers, low_bytes(step_bits(step, False)))
    return integers, to_float(stored, False)


@gluon.jit
def repeated(x, AXIS: gl.constexpr, SIZE: gl.constexpr):
    """x over and over along an axis, the first or the last of three, until that has SIZE: for products that are
    dropped."""
    if x.shape[AXIS] == SIZE:
        return x
    elif len(x.shape) == 1:
        return repeated(gl.reshape(gl.permute(gl.join(x, x), [1, 0]), [2 * x.shape[0]]), AXIS, SIZE)
    elif AXIS == 0:
        twice = gl.reshape(gl.permute(gl.join(x, x), [2, 0, 1]), [2 * x.shape[0], x.shape[1]])
        return repeated(twice, AXIS, SIZE)
    else:
        twice = gl.reshape(gl.permute(gl.join(x, x), [0, 1, 3, 2]), [x.shape[0], x.shape[1], 2 * x.shape[2]])
        return repeated(twice, AXIS, SIZE)


@gluon.jit
def kept_scales(scale, SIZE: gl.constexpr):
    """The tokens' scales in shared memory, where every layout of an epilogue can read them."""
    room = gl.allocate_shared_memory(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    room.store(repeated(scale, 0, SIZE))
    return room


@gluon.jit
def fragment_tokens(x_ptr, TILE: gl.constexpr, TOKENS: gl.constexpr):
    """(a tuple of each warp's chunks of all tokens, as right operands lie; their scales), in shared memory. One token
    lies there alone: see `operand_of`."""
    WARPS: gl.constexpr = TILE.warps
    SPAN: gl.constexpr = 2 * TILE.k
    CHUNKS: gl.constexpr = TILE.chunks
    ROUND: gl.constexpr = rounded_up(TOKENS.m)
    KEPT: gl.constexpr = 1 if ROUND == 1 else TILE.tokens
    WRITTEN: gl.constexpr = fragments_layout(WARPS, SPAN, KEPT, False)
    READ: gl.constexpr = fragments_layout(WARPS, SPAN, KEPT, True)
    integers, scale = quantized_columns(x_ptr, CHUNKS, WARPS, SPAN, CHUNKS * SPAN, TOKENS)
    rooms = ()
    for c in gl.static_range(CHUNKS):
        room = gl.allocate_shared_memory(gl.int8, [WARPS, SPAN, KEPT], WRITTEN)
        room.store(repeated(gl.permute(gl.reshape(integers[c], [ROUND, WARPS, SPAN]), [1, 2, 0]), 2, KEPT))
        rooms = appended(rooms, reinterpreted(room, gl.int8, [WARPS, SPAN, KEPT], READ))
    return rooms, kept_scales(scale, TILE.tokens)


@gluon.jit
def operand_of(room, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """The right operand of a chunk: one token that lies alone stands for all."""
    x = room.load(LAYOUT)
    if x.shape[2] == TOKENS:
        return x
    else:
        wide, _ = gl.broadcast(x, gl.zeros([x.shape[0], x.shape[1], TOKENS], gl.int8, LAYOUT))
        return wide
