"""The backward of a learned fake-quantization: dx and, from the same pass, the sums for scale and zero point.

Each program of `blocks` sums one block of some segments in f64; where segments have several blocks, `totals` adds those
up. Both add in the order of `reference.segment_sums`.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

import triton
import triton.language as tl

from ..numerics.conversions import load_scale, load_zero_point, narrow, quiet, to_float, widen
from ..numerics.division import invert, quotient
from ..numerics.indices import as_offset, lanes, loop_bound
from ..numerics.rounding import awkward, nearest
from ..pdl import wait_for_previous


@triton.jit
def halved(first, second, SEGMENTS: tl.constexpr, LANES: tl.constexpr, LANES_FIRST: tl.constexpr):
    """The lanes of each segment as one sum, of two sums at a time: the upper half is added to the lower half until one
    is left.

    Spelled out, since a reduction over a longer axis leaves its order to the layout; two terms have only one.
    """
    sums = tl.join(first, second)
    for i in tl.static_range(10):
        if (LANES >> i) > 1:
            if LANES_FIRST:
                sums = tl.sum(tl.reshape(sums, [2, LANES >> (i + 1), SEGMENTS, 2]), 0)
            else:
                sums = tl.sum(tl.reshape(sums, [SEGMENTS, 2, LANES >> (i + 1), 2]), 1)
    return tl.split(tl.reshape(sums, [SEGMENTS, 2]))


@triton.jit
def stored_sum(total, dtype: tl.constexpr):
    """A sum as it is stored, with the canonical NaN."""
    return quiet(total).to(dtype)


@triton.jit
def to_the_zero_point(lost, scale):
    """The zero point's gradient from the sum of what was clamped away. A minus sign is 0 - x in Triton, +0 for a 0."""
    return tl.where(lost == 0, 0.0, widen(scale, True) * -1.0 * lost)


@triton.jit
def load_step(x_ptr, dy_ptr, base, stride, element, run, seen, EVEN: tl.constexpr):
    """x and dy at some elements of the run, zeros beyond its end."""
    offsets = base + element * stride
    if EVEN:
        return tl.load(x_ptr + offsets), tl.load(dy_ptr + offsets)
    else:
        keep = seen & (element < run)
        return tl.load(x_ptr + offsets, mask=keep, other=0.0), tl.load(dy_ptr + offsets, mask=keep, other=0.0)


@triton.jit
def blocks(
    x_ptr, dy_ptr, scale_ptr, zero_point_ptr, dx_ptr, scale_sum_ptr, lost_sum_ptr, rows, run, inner, run_blocks,
    segment_blocks, QUANTIZER: tl.constexpr, SUMS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One block of each of SUMS.segments neighbouring segments; if the block is all of them, the sums are final.

    The tile's faster axis is the one that is dense in memory: the run, or the inner axis of strided segments.
    """
    wait_for_previous(PDL)
    F64: tl.constexpr = QUANTIZER.f64
    WIDE: tl.constexpr = SUMS.wide
    STRIDED: tl.constexpr = SUMS.strided
    SEGMENTS: tl.constexpr = SUMS.segments
    LANES: tl.constexpr = SUMS.lanes
    STEPS: tl.constexpr = SUMS.steps
    EVEN: tl.constexpr = SUMS.even
    program, run = as_offset(tl.program_id(0), WIDE), as_offset(run, WIDE)
    group, unit = program, program * 0
    if not SUMS.whole:
        group, unit = (program * 0, program) if SUMS.alone else (program % segment_blocks, program // segment_blocks)
    repeat, start = unit // run_blocks, unit % run_blocks * LANES * STEPS
    if STRIDED:
        inner_blocks = tl.cdiv(inner, SEGMENTS)
        row, column = group // inner_blocks, group % inner_blocks * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
        segment, seen = row * inner + column, None if EVEN else column < inner
        lane = tl.arange(0, LANES)[:, None]
        base, stride = (repeat * rows + row) * run * inner + column, inner
    else:
        row = group * SEGMENTS + tl.arange(0, SEGMENTS)[:, None]
        segment, seen = row, None if EVEN else row < rows
        lane = lanes(LANES, SUMS.vector)[None, :]
        base, stride = (repeat * rows + row) * run, 1
    x, dy = load_step(x_ptr, dy_ptr, base, stride, start + lane, run, seen, EVEN)
    near: tl.constexpr = zero_point_ptr is None
    zero_point = 0 if near else load_zero_point(zero_point_ptr, segment, seen)
    low = to_float(segment * 0 + (QUANTIZER.q_min - zero_point), F64)
    high = to_float(segment * 0 + (QUANTIZER.q_max - zero_point), F64)
    one = to_float(segment * 0 + 1, F64)
    scale = load_scale(scale_ptr, segment, seen, F64) * one
    inverse, slow = invert(scale, F64), awkward(scale, None, F64)
    scale_sum = tl.zeros([LANES, SEGMENTS] if STRIDED else [SEGMENTS, LANES], tl.float64)
    lost_sum = tl.zeros([LANES, SEGMENTS] if STRIDED else [SEGMENTS, LANES], tl.float64)
    for i in range(STEPS):
        element = start + i * LANES + lane
        keep = None if EVEN else seen & (element < run)
        now, grad = widen(x, F64), widen(dy, F64)
        if i + 1 < STEPS:  # the next ones are under way while these are looked at
            x, dy = load_step(x_ptr, dy_ptr, base, stride, element + LANES, run, seen, EVEN)
        ratio = quotient(now, scale, inverse, slow, QUANTIZER.reciprocal, F64)
        t = nearest(ratio, near, F64)
        inside = (low <= t) & (t <= high)
        slope = widen(tl.where(inside, t - ratio, tl.where(t > high, high, low)), True)
        addend = widen(grad, True)
        counts = slope != 0 if EVEN else keep & (slope != 0)
        lost = inside == 0 if EVEN else keep & (inside == 0)
        scale_sum += tl.where(counts, addend * slope, 0.0)
        lost_sum += tl.where(lost, addend, 0.0)
        dx = narrow(tl.where(inside, grad, 0.0), dx_ptr.dtype.element_ty, True)
        tl.store(dx_ptr + base + element * stride, dx, mask=keep)
    scale_total, lost = halved(scale_sum, lost_sum, SEGMENTS, LANES, STRIDED)
    if SUMS.whole:
        lost = to_the_zero_point(lost, tl.reshape(scale, [SEGMENTS]))
    out = unit.to(tl.int64) * rows * inner + tl.reshape(segment, [SEGMENTS])
    written = None if EVEN else tl.reshape(seen, [SEGMENTS])
    tl.store(scale_sum_ptr + out, stored_sum(scale_total, scale_sum_ptr.dtype.element_ty), mask=written)
    if lost_sum_ptr is not None:
        tl.store(lost_sum_ptr + out, stored_sum(lost, lost_sum_ptr.dtype.element_ty), mask=written)


@triton.jit
def totals(
    part_ptr, scale_ptr, grad_scale_ptr, grad_zero_point_ptr, segments, units, F64: tl.constexpr,
    SEGMENTS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """The blocks of each segment, added up; what was lost lies behind the sums for the scales."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    segment = program * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
    scale_sum, lost_sum = tl.zeros([LANES, SEGMENTS], tl.float64), tl.zeros([LANES, SEGMENTS], tl.float64)
    for first in range(0, loop_bound(units), LANES):
        unit = first + tl.arange(0, LANES)[:, None]
        keep = (segment < segments) & (unit < units)
        offsets = unit.to(tl.int64) * segments + segment
        scale_sum += tl.load(part_ptr + offsets, mask=keep, other=0.0)
        lost_sum += tl.load(part_ptr + segments.to(tl.int64) * units + offsets, mask=keep, other=0.0)
    out = program * SEGMENTS + tl.arange(0, SEGMENTS)
    written = out < segments
    scale_total, lost = halved(scale_sum, lost_sum, SEGMENTS, LANES, True)
    to_zero_point = to_the_zero_point(lost, load_scale(scale_ptr, out, written, F64))
    tl.store(grad_scale_ptr + out, stored_sum(scale_total, grad_scale_ptr.dtype.element_ty), mask=written)
    if grad_zero_point_ptr is not None:
        tl.store(
            grad_zero_point_ptr + out, stored_sum(to_zero_point, grad_zero_point_ptr.dtype.element_ty), mask=written
        )
