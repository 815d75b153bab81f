"""The backward of a learned fake-quantization bound to its kernels: one sums blocks, one adds up the blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.problem import Problem
from ...registry import Launch, Value
from ..elementwise.launch import quantizer, wide
from ..launch import Build, Step, in_turn
from ..sources import Part
from ..tune import blocks_of
from . import kernels, tune


def learned(problem: Problem, device: torch.device) -> Launch:
    view = problem.view
    if view.numel == 0:

        def nothing(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
            for total in operands[5:]:
                if isinstance(total, Tensor):
                    total.zero_()

        return nothing
    first, second = steps(problem, device)
    if second is None:
        return first.bound(0, 1, 2, 3, 4, 5, 6)
    count = config(problem).units * view.segments
    sums, zero_point_sums = Part(0, torch.float64, 2 * count), Part(8 * count, torch.float64, count)
    return in_turn(first.bound(0, 1, 2, 3, 4, sums, zero_point_sums), second.bound(sums, 2, 5, 6))


def config(problem: Problem) -> tune.Config:
    return tune.learned(problem.view, problem.element.dtype.itemsize, wide(problem))


def workspace(problem: Problem, device: torch.device) -> int:
    """Two f64 sums for each block; none where every segment is one block."""
    units = config(problem).units
    return 0 if units <= 1 else 16 * units * problem.view.segments


def steps(problem: Problem, device: torch.device) -> tuple[Step, Step | None]:
    """The kernel that sums blocks, and the one that adds up the blocks of a segment where there are several."""
    view, plan, rule = problem.view, config(problem), quantizer(problem)
    sizes = {"rows": view.rows, "run": view.run, "inner": view.inner}
    sizes |= {"run_blocks": view.sum_blocks, "segment_blocks": plan.segment_blocks}
    constants = {"QUANTIZER": rule, "SUMS": plan.sums}
    programs = plan.segment_blocks * plan.units
    first = Step(kernels.blocks, programs, sizes, constants, device, Build(plan.warps))
    if workspace(problem, device) == 0:
        return first, None
    segments, lanes = tune.totals(view.segments, plan.units)
    sizes = {"segments": view.segments, "units": plan.units}
    tile = {"F64": rule.f64, "SEGMENTS": segments, "LANES": lanes}
    return first, Step(kernels.totals, blocks_of(view.segments, segments), sizes, tile, device)
