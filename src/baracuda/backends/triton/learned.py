"""The backward of a learned fake-quantization: dx and, from the same pass, the sums for scale and zero point.

Each program sums its part of some segments in f64. Where a segment has several parts, a second kernel adds them in
their order, so the result is the same in every run.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..registry import Launch, Value
from .launch import Argument, Step
from .numerics import exact_divide, load_scale, load_zero_point, loop_bound, narrow, widen
from .static import _scale, _zero_point, arithmetic, blocks_of, wide

#: Elements of a tile, and about how many programs keep a large device busy.
TILE, PROGRAMS = 1024, 4096


@triton.jit
def to_nearest(x, F64: tl.constexpr):
    """x rounded half to even, over the whole range: from 2**23 (2**52) on it is an integer already."""
    magic: tl.constexpr = 2.0**52 if F64 else 2.0**23
    size = tl.abs(x)
    rounded = tl.where(size < magic, (size + magic) - magic, size)
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def parts(
    x_ptr, dy_ptr, scale_ptr, zero_point_ptr, dx_ptr, scale_sum_ptr, zero_point_sum_ptr,
    rows, run, inner, run_blocks, segment_blocks,
    RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, F64: tl.constexpr, WIDE: tl.constexpr,
    STRIDED: tl.constexpr, SEGMENTS: tl.constexpr, ELEMENTS: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """One unit, a repeat's block of the run, of SEGMENTS neighbouring segments.

    The tile's faster axis is the one that is dense in memory: the run, or the inner axis of strided segments.
    """
    program = tl.program_id(0)
    block, unit = program % segment_blocks, program // segment_blocks
    repeat, start = unit // run_blocks, unit % run_blocks * ELEMENTS * ITERATIONS
    if WIDE:
        repeat, start, run = repeat.to(tl.int64), start.to(tl.int64), run.to(tl.int64)
    if STRIDED:
        inner_blocks = tl.cdiv(inner, SEGMENTS)
        row, column = block // inner_blocks, block % inner_blocks * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
        segment, seen = row * inner + column, column < inner
        step = tl.arange(0, ELEMENTS)[:, None]
        base, stride = (repeat * rows + row) * run * inner + column, inner
    else:
        row = block * SEGMENTS + tl.arange(0, SEGMENTS)[:, None]
        segment, seen = row, row < rows
        step = tl.arange(0, ELEMENTS)[None, :]
        base, stride = (repeat * rows + row) * run, 1
    scale = load_scale(scale_ptr, segment, seen, F64)
    zero_point = load_zero_point(zero_point_ptr, segment, seen)
    math: tl.constexpr = tl.float64 if F64 else tl.float32
    low, high = (segment * 0 + (Q_MIN - zero_point)).to(math), (segment * 0 + (Q_MAX - zero_point)).to(math)
    one = (segment * 0 + 1).to(math)
    scale = scale * one
    axis: tl.constexpr = 0 if STRIDED else 1
    scale_sum = tl.zeros([ELEMENTS, SEGMENTS] if STRIDED else [SEGMENTS, ELEMENTS], tl.float64)
    zero_point_sum = tl.zeros([ELEMENTS, SEGMENTS] if STRIDED else [SEGMENTS, ELEMENTS], tl.float64)
    for i in range(ITERATIONS):
        element = start + i * ELEMENTS + step
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
        outside = keep & (inside == 0) & (scale != 0)
        zero_point_sum += tl.where(outside, wide_dy * -scale.to(tl.float64), 0.0)
        dx = narrow(tl.where(inside, dy, 0.0), dx_ptr.dtype.element_ty, True)
        tl.store(dx_ptr + offsets, dx, mask=keep)
    out = unit.to(tl.int64) * rows * inner + tl.max(tl.where(seen, segment, 0), axis)
    first = tl.max(seen.to(tl.int32), axis) > 0
    tl.store(scale_sum_ptr + out, finished(tl.sum(scale_sum, axis), scale_sum_ptr.dtype.element_ty), mask=first)
    total = finished(tl.sum(zero_point_sum, axis), zero_point_sum_ptr.dtype.element_ty)
    tl.store(zero_point_sum_ptr + out, total, mask=first)


@triton.jit
def finished(total, dtype: tl.constexpr):
    """A sum as stored, its NaN the one quiet NaN."""
    return tl.where(total == total, total, float("nan")).to(dtype)


@triton.jit
def totals(
    part_ptr, scale_ptr, zero_point_ptr, segments, units, SEGMENTS: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """The parts of each segment, added up; those of the zero points lie behind those of the scales."""
    segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
    scale_sum, zero_point_sum = tl.zeros([UNITS, SEGMENTS], tl.float64), tl.zeros([UNITS, SEGMENTS], tl.float64)
    for first in range(0, loop_bound(units), UNITS):
        unit = first + tl.arange(0, UNITS)[:, None]
        keep = (segment < segments) & (unit < units)
        offsets = unit.to(tl.int64) * segments + segment
        scale_sum += tl.load(part_ptr + offsets, mask=keep, other=0.0)
        behind = part_ptr + segments.to(tl.int64) * units
        zero_point_sum += tl.load(behind + offsets, mask=keep, other=0.0)
    column = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    scale_total, zero_point_total = tl.sum(scale_sum, 0), tl.sum(zero_point_sum, 0)
    tl.store(scale_ptr + column, finished(scale_total, scale_ptr.dtype.element_ty), mask=column < segments)
    total = finished(zero_point_total, zero_point_ptr.dtype.element_ty)
    tl.store(zero_point_ptr + column, total, mask=column < segments)


class Layout:
    """How a problem is cut: tiles of neighbouring segments, units of a segment."""

    def __init__(self, problem: Problem) -> None:
        view = self.view = problem.view
        self.strided = view.inner > 1
        if self.strided:
            self.segments = min(128, triton.next_power_of_2(view.inner))
            self.elements = max(1, TILE // self.segments)
            self.segment_blocks = view.rows * blocks_of(view.inner, self.segments)
        else:
            self.elements = min(TILE, triton.next_power_of_2(max(1, view.run)))
            self.segments = max(1, TILE // self.elements)
            self.segment_blocks = blocks_of(view.rows, self.segments)
        blocks = blocks_of(view.run, self.elements)
        ideal = view.repeat * blocks * self.segment_blocks // PROGRAMS
        self.iterations = max(1, min(32, triton.next_power_of_2(max(1, ideal)), triton.next_power_of_2(max(1, blocks))))
        self.run_blocks = blocks_of(view.run, self.elements * self.iterations)
        self.units = view.repeat * self.run_blocks

    @property
    def workspace(self) -> int:
        """Two f64 sums for each part; none where every segment is one part."""
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
    sizes = {"rows": view.rows, "run": view.run, "inner": view.inner}
    sizes |= {"run_blocks": layout.run_blocks, "segment_blocks": layout.segment_blocks}
    constants = {
        **arithmetic(problem),
        "WIDE": wide(problem),
        "STRIDED": layout.strided,
        "SEGMENTS": layout.segments,
        "ELEMENTS": layout.elements,
        "ITERATIONS": layout.iterations,
    }
    first = Step(parts, layout.segment_blocks * layout.units, sizes, constants, 4, device)
    tile = (1024, 1) if view.segments < 64 else (16, 64)
    folded = {"segments": view.segments, "units": layout.units}
    tiles = {"SEGMENTS": tile[1], "UNITS": tile[0]}
    second = Step(totals, blocks_of(view.segments, tile[1]), folded, tiles, 4, device)
    count, several = layout.units * view.segments, layout.workspace > 0

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, dy, scale, zero_point, dx, scale_sum, zero_point_sum = operands
        inputs = cast(tuple[Argument, ...], (x, dy, _scale(scale), _zero_point(zero_point), dx))
        outputs = cast(tuple[Tensor, Tensor], (scale_sum, zero_point_sum))
        if not several:
            first(*inputs, *outputs)
            return
        sums = cast(Tensor, workspace)[: 16 * count].view(torch.float64)
        first(*inputs, sums, sums[count:])
        second(sums, *outputs)

    return launch
