"""Dynamic ranges bound to their kernels: one that reads a segment once, or partial ranges, then scales, then q."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ....core.problem import Problem
from ....core.types import DynamicRangeMode, ElementKind, QuantizeKind
from ...registry import Launch
from .. import tune as common
from ..elementwise.launch import (
    bound_forward,
    elementwise_step,
    mask,
    packed,
    pairs_line_up,
    quantizer,
    tiled,
    together,
    wide,
)
from ..launch import Build, Step, in_turn
from ..numerics.indices import split_by
from ..numerics.packing import Storage
from ..numerics.qparams import Range
from ..sources import Part, Source
from ..tune import Tile, blocks_of, power_of_two
from . import kernels, tune
from .kernels import Dynamic, Scan
from .tune import Schedule

_OUT = {QuantizeKind.CHOOSE_QPARAMS: tune.Out.SCALES, QuantizeKind.DYNAMIC_FAKE_QUANTIZE: tune.Out.FLOATS}
_ONE_KERNEL = (Schedule.ROWS, Schedule.LONG_ROWS, Schedule.BLOCKS)
#: (input, scale_out, zero_point_out, output)
Sources = tuple[Source, Source, Source, Source]


def dynamic(problem: Problem, device: torch.device, sources: Sources = (0, 1, 2, 3), start: int = 0) -> Launch:
    """`sources` say where the operands are, `start` where in the workspace there is room."""
    if problem.view.segments == 0:
        return lambda operands, workspace: None
    config = range_config(problem, device)
    if config.schedule in _ONE_KERNEL:
        return _one_kernel(problem, config, device, sources)
    return _two_stages(problem, config, device, sources, start)


def workspace(problem: Problem, device: torch.device) -> int:
    """Partial ranges: a maximum and, asymmetric, a minimum of each chunk of each segment."""
    if problem.view.segments == 0:
        return 0
    return (
        (1 if problem.mode is DynamicRangeMode.SYMMETRIC else 2)
        * _partials(problem, range_config(problem, device))
        * problem.element.math.dtype.itemsize
    )


def spares(problem: Problem, device: torch.device) -> tuple[str, ...]:
    """Scales need no memory where the kernel that finds them uses them itself, as it found them."""
    if problem.op is not QuantizeKind.DYNAMIC_FAKE_QUANTIZE or problem.scale_element is not problem.element.math:
        return ()
    empty = problem.view.segments == 0
    in_one = not empty and range_config(problem, device).schedule in _ONE_KERNEL
    return ("scale_out", "zero_point_out") if in_one else ()


def range_config(problem: Problem, device: torch.device) -> tune.Config:
    processors, out = common.processors_of(device), _OUT.get(problem.op, tune.Out.INTEGERS)
    return tune.dynamic(problem.view, problem.element.dtype.itemsize, processors, out=out)


def _partials(problem: Problem, config: tune.Config) -> int:
    return config.chunks * problem.view.segments


def _one_kernel(problem: Problem, config: tune.Config, device: torch.device, sources: Sources) -> Launch:
    # Where packed pairs do not line up, the kernel finds the scales and another one writes.
    apart = bool(_packed(problem)) and not pairs_line_up(problem)
    whole = whole_step(problem, config, device).bound(*sources[:3], None if apart else sources[3])
    return in_turn(whole, *_then_quantize(problem, device, sources)) if apart else whole


def _two_stages(problem: Problem, config: tune.Config, device: torch.device, sources: Sources, start: int) -> Launch:
    x, scale, zero_point, _ = sources
    low = high = None
    first: list[Launch] = []
    if config.chunks:
        math, partials = problem.element.math.dtype, _partials(problem, config)
        high = Part(start, math, partials)
        if problem.mode is DynamicRangeMode.ASYMMETRIC:
            low = Part(start + partials * math.itemsize, math, partials)
        first.append(partial_step(problem, config, device).bound(x, low, high))
    last = finish_step(problem, config, device).bound(low, high, scale, zero_point)
    return in_turn(*first, last, *_then_quantize(problem, device, sources))


def whole_step(problem: Problem, config: tune.Config, device: torch.device) -> Step:
    """The kernel that holds or re-reads whole segments."""
    view, tile = problem.view, config.tile
    across = tile.parts * tile.columns
    sizes: dict[str, Any] = {"lines": view.rows, "width": view.run}
    if config.schedule is Schedule.BLOCKS:
        blocks = blocks_of(view.inner, tile.columns)
        kernel, programs = kernels.blocks, view.rows * blocks
        even = view.run == tile.parts * tile.lines and view.inner % tile.columns == 0
        sizes = {"run": view.run, "inner": view.inner, "blocks": split_by(blocks)}
    elif config.schedule is Schedule.ROWS:
        kernel, programs = kernels.rows, blocks_of(view.rows, tile.lines)
        even = view.run == across and view.rows % tile.lines == 0
    else:
        kernel, programs = kernels.long_rows, view.rows
        even = view.run % across == 0
    spec = dynamic_rule(problem, tile)
    constants = {"SCAN": Scan(tile, mask(even), wide(problem)), "SPEC": spec}
    unaligned = {"SPEC": spec._replace(storage=spec.storage.one_by_one())}
    return tiled(kernel, programs, sizes, constants, tile, problem, device, unaligned=unaligned)


def dynamic_rule(problem: Problem, tile: Tile) -> Dynamic:
    """How a kernel that holds whole segments quantizes them."""
    pairs = _packed(problem)
    # Bytes with no zero point to add are as fast one by one.
    alone = problem.mode is DynamicRangeMode.SYMMETRIC and not pairs
    storage = Storage(pairs, 1 if alone else together(problem, tile, bool(pairs)))
    return Dynamic(_range(problem), quantizer(problem), storage, _bounds(problem))


def partial_step(problem: Problem, config: tune.Config, device: torch.device) -> Step:
    """The first stage: the range of every chunk of every segment."""
    view, tile = problem.view, config.tile
    symmetric = problem.mode is DynamicRangeMode.SYMMETRIC
    if config.schedule is Schedule.PARTIAL_COLUMNS:
        blocks = blocks_of(view.inner, tile.columns)
        lines = tile.parts * tile.lines
        span = blocks_of(blocks_of(view.run, config.chunks), lines) * lines
        scan = Scan(tile, mask(view.inner % tile.columns == 0 and view.run % lines == 0), wide(problem))
        sizes = {"rows": view.rows, "run": view.run, "inner": view.inner, "column_blocks": blocks, "span": span}
        programs = config.chunks * view.rows * blocks
        # Without PDL: beside what is left of another kernel they would not spread evenly, and all wait for the last.
        kernel, build = kernels.partial_columns, Build(tile.warps, pdl=False)
    else:
        across = tile.parts * tile.columns
        blocks = blocks_of(view.run, across)
        items = blocks_of(view.repeat, tile.lines) * blocks
        scan = Scan(tile, mask(view.run % across == 0 and view.repeat % tile.lines == 0), wide(problem))
        sizes = {"repeat": view.repeat, "rows": view.rows, "run": view.run}
        sizes |= {"column_blocks": blocks, "items": items, "chunks": config.chunks}
        kernel, programs, build = kernels.partial, config.chunks * view.rows, Build(tile.warps)
    return Step(kernel, programs, sizes, {"SYMMETRIC": symmetric, "SCAN": scan}, device, build)


def finish_step(problem: Problem, config: tune.Config, device: torch.device) -> Step:
    """The second stage: scales and zero points from the chunks' ranges."""
    segments, chunks = problem.view.segments, config.chunks
    across = min(power_of_two(segments), 128)
    tile = Tile(min(power_of_two(max(chunks, 1)), 2048 // across), across, 4)
    constants = {"RANGE": _range(problem), "QUANTIZER": quantizer(problem), "TILE": tile}
    sizes = {"chunks": chunks, "segments": segments}
    return Step(kernels.finish, blocks_of(segments, across), sizes, constants, device)


def _then_quantize(problem: Problem, device: torch.device, sources: Sources) -> list[Launch]:
    """The quantization by scales that are now known, where there is something to quantize."""
    if problem.op is QuantizeKind.CHOOSE_QPARAMS:
        return []
    fake = problem.op is QuantizeKind.DYNAMIC_FAKE_QUANTIZE
    static = replace(problem, op=QuantizeKind.FAKE_QUANTIZE if fake else QuantizeKind.QUANTIZE)
    step = elementwise_step(static, device, again=True)
    return [] if step is None else [bound_forward(step, *sources)]


def _bounds(problem: Problem) -> int:
    """Which bounds a quotient by its own range's scale must be kept to, and where."""
    symmetric = problem.mode is DynamicRangeMode.SYMMETRIC
    floats, exact = problem.op is QuantizeKind.DYNAMIC_FAKE_QUANTIZE, problem.scale_element is ElementKind.F32
    if problem.element is ElementKind.F64 or (floats and not symmetric) or (symmetric and not exact):
        return int(kernels.BOTH.value)
    return int((kernels.LOW if symmetric else kernels.OF_THE_INTEGER).value)


def _packed(problem: Problem) -> int:
    """How pairs are packed; the output of a fake-quantization holds none."""
    return 0 if problem.op is QuantizeKind.DYNAMIC_FAKE_QUANTIZE else packed(problem)


def _range(problem: Problem) -> Range:
    symmetric = problem.mode is DynamicRangeMode.SYMMETRIC
    return Range(symmetric, problem.include_zero, problem.scale_element.smallest_scale)
