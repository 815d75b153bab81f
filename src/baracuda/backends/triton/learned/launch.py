"""The backward of a learned fake-quantization: dx and, from the same pass, the sums for scale and zero point.

Each program sums one block of some segments in f64, and where segments have several blocks a second kernel adds those
up, both in the order of `reference.segment_sums`.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.problem import Problem
from ....core.types import SUM_LANES, SUM_STEPS
from ...registry import Launch, Value
from ..elementwise.launch import arithmetic, blocks_of, wide
from ..launch import Build, Step, in_turn
from ..numerics.conversions import as_offset, load_scale, load_zero_point, loop_bound, narrow, widen
from ..numerics.division import divide_gradient, exact_divide, invert
from ..numerics.packing import lanes
from ..numerics.rounding import MAGIC_F32, MAGIC_F64, awkward
from ..pdl import take_over
from ..sources import Part


@triton.jit
def to_nearest(x, NEAR: tl.constexpr, F64: tl.constexpr):
    """x rounded half to even. NEAR where no bound is beyond 2**22: a larger x then need only stay as large."""
    if NEAR:
        magic: tl.constexpr = MAGIC_F64 if F64 else MAGIC_F32
        return (x + magic) - magic
    else:
        whole: tl.constexpr = 2.0**52 if F64 else 2.0**23  # from here on it is an integer already
        size = tl.abs(x)
        rounded = tl.where(size < whole, (size + whole) - whole, size)
        return tl.where(x < 0, -rounded, rounded)


@triton.jit
def quotient(x, scale, inverse, slow, RECIPROCAL: tl.constexpr, F64: tl.constexpr):
    """x / scale as the contract has it; `slow` where a scale is not `ordinary`."""
    if RECIPROCAL:
        return x * inverse
    elif F64:
        return exact_divide(x, tl.broadcast_to(scale, x.shape), F64)
    else:
        if slow:
            ratio = exact_divide(x, tl.broadcast_to(scale, x.shape), F64)
        else:
            ratio = divide_gradient(x, tl.broadcast_to(scale, x.shape), tl.broadcast_to(inverse, x.shape), F64)
        return ratio


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
def finished(total, dtype: tl.constexpr):
    """A sum as stored, its NaN the one quiet NaN."""
    return tl.where(total == total, total, float("nan")).to(dtype)


@triton.jit
def to_the_zero_point(lost, scale):
    """The zero point's gradient from the sum of what was clamped away. A minus sign is 0 - x in Triton, +0 for a 0."""
    return tl.where(lost == 0, 0.0, scale.to(tl.float64) * -1.0 * lost)


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
    x_ptr, dy_ptr, scale_ptr, zero_point_ptr, dx_ptr, scale_sum_ptr, lost_sum_ptr,
    rows, run, inner, run_blocks, segment_blocks,
    RECIPROCAL: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, F64: tl.constexpr, WIDE: tl.constexpr,
    STRIDED: tl.constexpr, SEGMENTS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr,
    ALONE: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One block of each of SEGMENTS neighbouring segments; WHOLE where it is all of them, so the sums are final.

    ALONE where these are all segments, EVEN where no block is cut short. The tile's faster axis is the one that is
    dense in memory: the run, or the inner axis of strided segments.
    """
    take_over(EARLY)
    program, run = as_offset(tl.program_id(0), WIDE), as_offset(run, WIDE)
    group, unit = program, program * 0
    if not WHOLE:
        group, unit = (program * 0, program) if ALONE else (program % segment_blocks, program // segment_blocks)
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
        lane = lanes(LANES, VECTOR)[None, :]
        base, stride = (repeat * rows + row) * run, 1
    x, dy = load_step(x_ptr, dy_ptr, base, stride, start + lane, run, seen, EVEN)
    zero_point = load_zero_point(zero_point_ptr, segment, seen)
    near: tl.constexpr = zero_point_ptr is None
    math: tl.constexpr = tl.float64 if F64 else tl.float32
    low, high = (segment * 0 + (Q_MIN - zero_point)).to(math), (segment * 0 + (Q_MAX - zero_point)).to(math)
    one = (segment * 0 + 1).to(math)
    scale = load_scale(scale_ptr, segment, seen, F64) * one
    inverse, slow = invert(scale, F64), awkward(scale, 0, False, F64)
    scale_sum = tl.zeros([LANES, SEGMENTS] if STRIDED else [SEGMENTS, LANES], tl.float64)
    lost_sum = tl.zeros([LANES, SEGMENTS] if STRIDED else [SEGMENTS, LANES], tl.float64)
    for i in range(STEPS):
        element = start + i * LANES + lane
        keep = None if EVEN else seen & (element < run)
        now, grad = widen(x, F64), widen(dy, F64)
        if i + 1 < STEPS:  # the next ones are under way while these are looked at
            x, dy = load_step(x_ptr, dy_ptr, base, stride, element + LANES, run, seen, EVEN)
        ratio = quotient(now, scale, inverse, slow, RECIPROCAL, F64)
        t = to_nearest(ratio, near, F64)
        inside = (low <= t) & (t <= high)
        slope = tl.where(inside, t - ratio, tl.where(t > high, high, low)).to(tl.float64)
        addend = grad.to(tl.float64)
        counts = slope != 0 if EVEN else keep & (slope != 0)
        lost = inside == 0 if EVEN else keep & (inside == 0)
        scale_sum += tl.where(counts, addend * slope, 0.0)
        lost_sum += tl.where(lost, addend, 0.0)
        dx = narrow(tl.where(inside, grad, 0.0), dx_ptr.dtype.element_ty, True)
        tl.store(dx_ptr + base + element * stride, dx, mask=keep)
    scale_total, lost = halved(scale_sum, lost_sum, SEGMENTS, LANES, STRIDED)
    if WHOLE:
        lost = to_the_zero_point(lost, tl.reshape(scale, [SEGMENTS]))
    out = unit.to(tl.int64) * rows * inner + tl.reshape(segment, [SEGMENTS])
    written = None if EVEN else tl.reshape(seen, [SEGMENTS])
    tl.store(scale_sum_ptr + out, finished(scale_total, scale_sum_ptr.dtype.element_ty), mask=written)
    if lost_sum_ptr is not None:
        tl.store(lost_sum_ptr + out, finished(lost, lost_sum_ptr.dtype.element_ty), mask=written)


@triton.jit
def totals(
    part_ptr, scale_ptr, grad_scale_ptr, grad_zero_point_ptr, segments, units,
    F64: tl.constexpr, SEGMENTS: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """The blocks of each segment, added up; what was lost lies behind the sums for the scales."""
    take_over(EARLY)
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
    tl.store(grad_scale_ptr + out, finished(scale_total, grad_scale_ptr.dtype.element_ty), mask=written)
    if grad_zero_point_ptr is not None:
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
        # Long blocks are few, so each gets more of a processor.
        self.warps = 8 if self.steps > 1 and view.inner == 1 else 4

    @property
    def is_even(self) -> bool:
        """Whether every block is full."""
        across = self.view.inner if self.view.inner > 1 else self.view.rows
        return across % self.segments == 0 and self.view.run % (self.lanes * self.steps) == 0

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
                if isinstance(total, Tensor):
                    total.zero_()

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
        "ALONE": layout.segment_blocks == 1,
        "EVEN": layout.is_even,
        "VECTOR": max(1, 4 // problem.element.dtype.itemsize),
    }
    first = Step(blocks, layout.segment_blocks * layout.units, sizes, constants, device, Build(layout.warps))
    if not several:
        return first, None
    lanes = min(SUM_LANES, triton.next_power_of_2(layout.units))
    segments = min(SUM_LANES // lanes, triton.next_power_of_2(view.segments))
    folded = {"segments": view.segments, "units": layout.units}
    tile = {"F64": constants["F64"], "SEGMENTS": segments, "LANES": lanes}
    return first, Step(totals, blocks_of(view.segments, segments), folded, tile, device)
