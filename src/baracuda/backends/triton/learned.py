"""The backward of a learned fake-quantization: dx and, from the same pass, the sums for scale and zero point.

Each program sums one block of some segments in f64, and where segments have several blocks a second kernel adds those
up, both in the order of `reference.segment_sums`.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ...types import SUM_LANES, SUM_STEPS
from ..registry import Launch, Value
from .launch import Step, in_turn
from .numerics import exact_divide, load_scale, load_zero_point, loop_bound, narrow, widen
from .sources import Part
from .static import arithmetic, blocks_of, wide


@triton.jit
def to_nearest(x, F64: tl.constexpr):
    """x rounded half to even, over the whole range: from 2**23 (2**52) on it is an integer already."""
    magic: tl.constexpr = 2.0**52 if F64 else 2.0**23
    size = tl.abs(x)
    rounded = tl.where(size < magic, (size + magic) - magic, size)
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def halved(sums, SEGMENTS: tl.constexpr, LANES: tl.constexpr, LANES_FIRST: tl.constexpr):
    """The lanes of each segment as one sum: the upper half is added to the lower half until one is left.

    Spelled out, since a reduction over a longer axis leaves its order to the layout; two terms have only one.
    """
    for i in tl.static_range(10):
        if (LANES >> i) > 1:
            if LANES_FIRST:
                sums = tl.sum(tl.reshape(sums, [2, LANES >> (i + 1), SEGMENTS]), 0)
            else:
                sums = tl.sum(tl.reshape(sums, [SEGMENTS, 2, LANES >> (i + 1)]), 1)
    return tl.reshape(sums, [SEGMENTS])


@triton.jit
def finished(total, dtype: tl.constexpr):
    """A sum as stored, its NaN the one quiet NaN."""
    return tl.where(total == total, total, float("nan")).to(dtype)


@triton.jit
def to_the_zero_point(lost, scale):
    """The zero point's gradient from the sum of what was clamped away. A minus sign is 0 - x in Triton, +0 for a 0."""
    return tl.where(lost == 0, 0.0, scale.to(tl.float64) * -1.0 * lost)


@triton.jit
def blocks(
    x_ptr, dy_ptr, scale_ptr, zero_point_ptr, dx_ptr, scale_sum_ptr, lost_sum_ptr,
    rows, run, inner, run_blocks, segment_blocks,
    RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, F64: tl.constexpr, WIDE: tl.constexpr,
    STRIDED: tl.constexpr, SEGMENTS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One block of each of SEGMENTS neighbouring segments; WHOLE where it is all of them, so the sums are final.

    The tile's faster axis is the one that is dense in memory: the run, or the inner axis of strided segments.
    """
    program = tl.program_id(0)
    group, unit = program % segment_blocks, program // segment_blocks
    repeat, start = unit // run_blocks, unit % run_blocks * LANES * STEPS
    if WIDE:
        repeat, start, run = repeat.to(tl.int64), start.to(tl.int64), run.to(tl.int64)
    if STRIDED:
        inner_blocks = tl.cdiv(inner, SEGMENTS)
        row, column = group // inner_blocks, group % inner_blocks * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
        segment, seen = row * inner + column, column < inner
        lane = tl.arange(0, LANES)[:, None]
        base, stride = (repeat * rows + row) * run * inner + column, inner
    else:
        row = group * SEGMENTS + tl.arange(0, SEGMENTS)[:, None]
        segment, seen = row, row < rows
        lane = tl.arange(0, LANES)[None, :]
        base, stride = (repeat * rows + row) * run, 1
    zero_point = load_zero_point(zero_point_ptr, segment, seen)
    math: tl.constexpr = tl.float64 if F64 else tl.float32
    low, high = (segment * 0 + (Q_MIN - zero_point)).to(math), (segment * 0 + (Q_MAX - zero_point)).to(math)
    one = (segment * 0 + 1).to(math)
    scale = load_scale(scale_ptr, segment, seen, F64) * one
    scale_sum = tl.zeros([LANES, SEGMENTS] if STRIDED else [SEGMENTS, LANES], tl.float64)
    lost_sum = tl.zeros([LANES, SEGMENTS] if STRIDED else [SEGMENTS, LANES], tl.float64)
    for i in range(STEPS):
        element = start + i * LANES + lane
        keep = seen & (element < run)
        offsets = base + element * stride
        x = widen(tl.load(x_ptr + offsets, mask=keep, other=0.0), F64)
        dy = widen(tl.load(dy_ptr + offsets, mask=keep, other=0.0), F64)
        dy = tl.where(dy == dy, dy, float("nan"))
        ratio = (
            x * exact_divide(one, scale, F64) if RECIPROCAL else exact_divide(x, tl.broadcast_to(scale, x.shape), F64)
        )
        t = to_nearest(ratio, F64)
        inside = (low <= t) & (t <= high)
        slope = tl.where(inside, t - ratio, tl.where(t > high, high, low)).to(tl.float64)
        wide_dy = dy.to(tl.float64)
        scale_sum += tl.where(keep & (slope != 0), wide_dy * slope, 0.0)
        lost_sum += tl.where(keep & (inside == 0), wide_dy, 0.0)
        dx = narrow(tl.where(inside, dy, 0.0), dx_ptr.dtype.element_ty, True)
        tl.store(dx_ptr + offsets, dx, mask=keep)
    scale_total, lost = halved(scale_sum, SEGMENTS, LANES, STRIDED), halved(lost_sum, SEGMENTS, LANES, STRIDED)
    if WHOLE:
        lost = to_the_zero_point(lost, tl.reshape(scale, [SEGMENTS]))
    out, written = unit.to(tl.int64) * rows * inner + tl.reshape(segment, [SEGMENTS]), tl.reshape(seen, [SEGMENTS])
    tl.store(scale_sum_ptr + out, finished(scale_total, scale_sum_ptr.dtype.element_ty), mask=written)
    tl.store(lost_sum_ptr + out, finished(lost, lost_sum_ptr.dtype.element_ty), mask=written)


@triton.jit
def totals(
    part_ptr, scale_ptr, grad_scale_ptr, grad_zero_point_ptr, segments, units,
    F64: tl.constexpr, SEGMENTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The blocks of each segment, added up; what was lost lies behind the sums for the scales."""
    segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
    scale_sum, lost_sum = tl.zeros([LANES, SEGMENTS], tl.float64), tl.zeros([LANES, SEGMENTS], tl.float64)
    for first in range(0, loop_bound(units), LANES):
        unit = first + tl.arange(0, LANES)[:, None]
        keep = (segment < segments) & (unit < units)
        offsets = unit.to(tl.int64) * segments + segment
        scale_sum += tl.load(part_ptr + offsets, mask=keep, other=0.0)
        lost_sum += tl.load(part_ptr + segments.to(tl.int64) * units + offsets, mask=keep, other=0.0)
    out = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    written = out < segments
    scale_total, lost = halved(scale_sum, SEGMENTS, LANES, True), halved(lost_sum, SEGMENTS, LANES, True)
    to_zero_point = to_the_zero_point(lost, load_scale(scale_ptr, out, written, F64))
    tl.store(grad_scale_ptr + out, finished(scale_total, grad_scale_ptr.dtype.element_ty), mask=written)
    tl.store(grad_zero_point_ptr + out, finished(to_zero_point, grad_zero_point_ptr.dtype.element_ty), mask=written)


class Layout:
    """How a problem is cut: tiles of lanes of neighbouring segments, units of a segment."""

    def __init__(self, problem: Problem) -> None:
        view = self.view = problem.view
        # Lanes beyond the run would only hold zeros.
        self.lanes = min(view.sum_lanes, triton.next_power_of_2(max(1, view.run)))
        self.steps = min(SUM_STEPS, triton.next_power_of_2(blocks_of(max(1, view.run), self.lanes)))
        if view.inner > 1:
            self.segments = min(128, triton.next_power_of_2(view.inner))
            self.segment_blocks = view.rows * blocks_of(view.inner, self.segments)
        else:
            self.segments = SUM_LANES // self.lanes
            self.segment_blocks = blocks_of(view.rows, self.segments)
        self.units = view.repeat * view.sum_blocks

    @property
    def workspace(self) -> int:
        """Two f64 sums for each block; none where every segment is one."""
        return 0 if self.units <= 1 else 16 * self.units * self.view.segments


def workspace(problem: Problem, device: torch.device) -> int:
    return Layout(problem).workspace


def learned(problem: Problem, device: torch.device) -> Launch:
    view, layout = problem.view, Layout(problem)
    if view.numel == 0:

        def nothing(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
            for total in operands[5:]:
                cast(Tensor, total).zero_()

        return nothing
    first, second = steps(problem, layout, device)
    if second is None:
        return first.bound(0, 1, 2, 3, 4, 5, 6)
    count = layout.units * view.segments
    sums, zero_point_sums = Part(0, torch.float64, 2 * count), Part(8 * count, torch.float64, count)
    return in_turn(first.bound(0, 1, 2, 3, 4, sums, zero_point_sums), second.bound(sums, 2, 5, 6))


def steps(problem: Problem, layout: Layout, device: torch.device) -> tuple[Step, Step | None]:
    """The kernel that sums blocks, and the one that adds up the blocks of a segment where there are several."""
    view, several = problem.view, layout.workspace > 0
    sizes = {"rows": view.rows, "run": view.run, "inner": view.inner}
    sizes |= {"run_blocks": view.sum_blocks, "segment_blocks": layout.segment_blocks}
    constants = {
        **arithmetic(problem),
        "WIDE": wide(problem),
        "STRIDED": view.inner > 1,
        "SEGMENTS": layout.segments,
        "LANES": layout.lanes,
        "STEPS": layout.steps,
        "WHOLE": not several,
    }
    first = Step(blocks, layout.segment_blocks * layout.units, sizes, constants, 4, device)
    if not several:
        return first, None
    lanes = min(SUM_LANES, triton.next_power_of_2(layout.units))
    segments = min(SUM_LANES // lanes, triton.next_power_of_2(view.segments))
    folded = {"segments": view.segments, "units": layout.units}
    tile = {"F64": constants["F64"], "SEGMENTS": segments, "LANES": lanes}
    return first, Step(totals, blocks_of(view.segments, segments), folded, tile, 4, device)
