"""Elementwise problems bound to their kernels: all is worked out at `select`, a launch only launches."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from ....core.optable import OPS
from ....core.problem import Problem
from ....core.types import Arithmetic, ElementKind, QuantizeKind
from ...registry import Launch
from .. import tune as common
from ..launch import Build, Step
from ..numerics import packing
from ..numerics.indices import split_by
from ..numerics.packing import Storage
from ..numerics.rounding import Quantizer
from ..sources import Source
from ..tune import Tile, Work, blocks_of
from . import kernels, tune
from .kernels import Elementwise

_OPS = {
    QuantizeKind.QUANTIZE: kernels.QUANTIZE,
    QuantizeKind.DEQUANTIZE: kernels.DEQUANTIZE,
    QuantizeKind.FAKE_QUANTIZE: kernels.FAKE_QUANTIZE,
    QuantizeKind.QUANTIZE_BACKWARD: kernels.QUANTIZE_BACKWARD,
    QuantizeKind.DEQUANTIZE_BACKWARD: kernels.DEQUANTIZE_BACKWARD,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD: kernels.FAKE_QUANTIZE_BACKWARD,
}
_BACKWARD = (
    QuantizeKind.QUANTIZE_BACKWARD,
    QuantizeKind.DEQUANTIZE_BACKWARD,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD,
)
_WORK = {
    QuantizeKind.QUANTIZE: Work.QUANTIZE,
    QuantizeKind.FAKE_QUANTIZE: Work.FAKE_QUANTIZE,
    QuantizeKind.DEQUANTIZE: Work.LIGHT,
    QuantizeKind.DEQUANTIZE_BACKWARD: Work.LIGHT,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD: Work.GRADIENT,
    QuantizeKind.QUANTIZE_BACKWARD: Work.DIVIDED_GRADIENT,
}
_PACKED = {ElementKind.U4: packing.UNSIGNED_PAIRS.value, ElementKind.S4: packing.SIGNED_PAIRS.value}


def elementwise(problem: Problem, device: torch.device) -> Launch:
    step = elementwise_step(problem, device)
    if step is None:
        return lambda operands, workspace: None
    if problem.op not in _BACKWARD:
        return bound_forward(step, 0, 1, 2, 3)
    return step.bound(None if problem.op is QuantizeKind.DEQUANTIZE_BACKWARD else 0, 1, 2, 3, 4)


def bound_forward(step: Step, x: Source, scale: Source, zero_point: Source, out: Source) -> Launch:
    if step.kernel is kernels.scattered:
        return step.bound(x, scale, zero_point, out)
    return step.bound(x, None, scale, zero_point, out)


def elementwise_step(problem: Problem, device: torch.device, *, again: bool = False) -> Step | None:
    """The kernel of an elementwise problem; `again` when another one has just read the same tensor."""
    if problem.view.numel == 0:
        return None
    pairs = packed(problem) if problem.op in (QuantizeKind.QUANTIZE, QuantizeKind.DEQUANTIZE) else 0
    if pairs and not pairs_line_up(problem):
        return _scattered(problem, device, pairs)
    work = _WORK[problem.op]
    stream = tune.streams(*traffic(problem), common.cache_of(device), work=work)
    options = {"backwards": again, "wide": wide(problem), "stream": stream}
    step = _columns if problem.view.inner > 1 else _dense
    return step(problem, device, work, pairs, options)


def _columns(problem: Problem, device: torch.device, work: Work, pairs: int, options: dict[str, bool]) -> Step:
    view, size = problem.view, problem.element.dtype.itemsize
    tile = tune.columns(view, size, common.processors_of(device), work=work, packed=bool(pairs))
    blocks, row_blocks = blocks_of(view.inner, tile.columns), blocks_of(view.run, tile.lines * tile.repeats)
    even = view.inner % tile.columns == 0 and view.run % (tile.lines * tile.repeats) == 0
    sizes = {"run": view.run, "inner": view.inner, "blocks": split_by(blocks), "row_blocks": split_by(row_blocks)}
    # A thread has few columns and walks down: there is no word to fill.
    storage = Storage(pairs, 1).one_by_one()
    spec = Elementwise(
        _OPS[problem.op].value, quantizer(problem), storage, tile, mask(even), per_column=True, **options
    )
    programs = view.rows * row_blocks * blocks
    return tiled(kernels.columns, programs, sizes, {"SPEC": spec}, tile, problem, device, again=options["backwards"])


def _dense(problem: Problem, device: torch.device, work: Work, pairs: int, options: dict[str, bool]) -> Step:
    view = problem.view
    lines = view.repeat * view.rows
    tile = tune.dense(view.run, problem.element.dtype.itemsize, work=work, packed=bool(pairs))
    across = tile.parts * tile.columns
    blocks = blocks_of(view.run, across)
    even = lines % tile.lines == 0 and view.run % across == 0
    sizes = {"lines": lines, "width": view.run, "rows": view.rows, "blocks": split_by(blocks)}
    spec = Elementwise(
        _OPS[problem.op].value,
        quantizer(problem),
        Storage(pairs, together(problem, tile, bool(pairs))),
        replace(tile, vector=tile.vector if tile.lines == 1 else 0),  # a thread has one vector: nothing to limit
        mask(even, tile.lines == 1 or view.run % across == 0),
        _segment(view.rows, view.repeat),
        **options,
    )
    programs = blocks_of(lines, tile.lines) * blocks
    unaligned = {"SPEC": spec._replace(storage=spec.storage.one_by_one())}
    return tiled(
        kernels.dense, programs, sizes, {"SPEC": spec}, tile, problem, device, again=options["backwards"],
        unaligned=unaligned,
    )  # fmt: skip


def _segment(rows: int, repeat: int) -> int:
    one, own, again = kernels.ONE_SCALE, kernels.SCALE_PER_LINE, kernels.SCALES_REPEAT
    return int((one if rows == 1 else own if repeat == 1 else again).value)


def tiled(
    kernel: Any,
    programs: int,
    sizes: dict[str, Any],
    constants: dict[str, Any],
    tile: Tile,
    problem: Problem,
    device: torch.device,
    *,
    again: bool = False,
    unaligned: dict[str, Any] | None = None,
) -> Step:
    """A kernel that moves a problem's operands, a tile at a time."""
    build = Build(tile.warps, registers=tile.registers, pdl=pdl_pays(problem, programs, device, again=again))
    return Step(kernel, programs, sizes, constants, device, build, unaligned)


def _scattered(problem: Problem, device: torch.device, pairs: int) -> Step:
    view = problem.view
    axis = problem.shape[-1] if problem.shape else 1
    size = view.numel // axis * ((axis + 1) // 2)
    sizes = {"size": size, "axis": axis, "rows": view.rows, "run": view.run, "inner": view.inner}
    tile = Tile(1, 512, 4)
    spec = Elementwise(_OPS[problem.op].value, quantizer(problem), Storage(pairs, 2), tile)
    return tiled(kernels.scattered, blocks_of(size, tile.columns), sizes, {"SPEC": spec}, tile, problem, device)


def pdl_pays(problem: Problem, programs: int, device: torch.device, *, again: bool = False) -> bool:
    work = _WORK.get(problem.op, Work.QUANTIZE)
    return common.pdl_pays(programs, common.processors_of(device), sum(traffic(problem)), work=work, again=again)


def traffic(problem: Problem) -> tuple[int, int]:
    """The bytes of what an operation reads, and of what it writes."""
    nbytes = {False: 0, True: 0}
    for operand in OPS[problem.op].operands:
        nbytes[operand.output] += prod(operand.shape(problem)) * operand.elements(problem)[0].dtype.itemsize
    return nbytes[False], nbytes[True]


def pairs_line_up(problem: Problem) -> bool:
    """Whether no packed pair straddles the rows of the tensor or the lines of its view."""
    return bool(problem.shape) and problem.shape[-1] % 2 == 0 and _line_length(problem) % 2 == 0


def together(problem: Problem, tile: Tile, pairs: bool) -> int:
    """How many neighbours leave a thread in one word: those of a vector, up to 32 bits, if no line ends inside."""
    length = _line_length(problem)
    most = min(tile.vector or 1, tile.columns, 8 if pairs else 4)
    return max(min(most, length & -length), 2 if pairs else 1)


def _line_length(problem: Problem) -> int:
    """Of the lines a kernel walks: neighbours in memory that share a scale, or have one each."""
    return problem.view.inner if problem.view.inner > 1 else problem.view.run


def packed(problem: Problem) -> int:
    return int(_PACKED.get(problem.quantized, 0))


# -- what kernels are told ---------------------------------------------------------------------------------------


def quantizer(problem: Problem) -> Quantizer:
    reciprocal, f64 = problem.arithmetic is Arithmetic.RECIPROCAL, problem.element is ElementKind.F64
    return Quantizer(reciprocal, problem.q_min, problem.q_max, f64)


def mask(even: bool, edges: bool = False) -> int:
    return int((kernels.NEVER if even else kernels.EDGES if edges else kernels.ALWAYS).value)


def wide(problem: Problem) -> bool:
    """Whether element offsets need 64 bits, with room for a tile that reaches over the end."""
    return problem.view.numel >= 2**31 - 2**20
