"""Elementwise problems bound to their kernels: all is worked out at `select`, a launch only launches."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ....core.optable import OPS
from ....core.problem import Problem
from ....core.types import Arithmetic, ElementKind, QuantizeKind
from ...registry import Launch
from ..launch import Build, Step
from ..numerics import packing
from ..sources import Source
from . import kernels, tune

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
    QuantizeKind.QUANTIZE: tune.Work.QUANTIZE,
    QuantizeKind.FAKE_QUANTIZE: tune.Work.FAKE_QUANTIZE,
    QuantizeKind.DEQUANTIZE: tune.Work.LIGHT,
    QuantizeKind.DEQUANTIZE_BACKWARD: tune.Work.LIGHT,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD: tune.Work.GRADIENT,
    QuantizeKind.QUANTIZE_BACKWARD: tune.Work.DIVIDED_GRADIENT,
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
    view, op = problem.view, _OPS[problem.op]
    if view.numel == 0:
        return None
    constants = {
        "OP": op.value,
        **arithmetic(problem),
        "PACKED": packed(problem) if problem.op in (QuantizeKind.QUANTIZE, QuantizeKind.DEQUANTIZE) else 0,
    }
    if constants["PACKED"] and not pairs_line_up(problem):
        return _scattered(problem, device, constants)
    size, is_packed = problem.element.dtype.itemsize, bool(constants["PACKED"])
    work = _WORK[problem.op]
    stream = tune.streams(*traffic(problem), tune.cache_of(device), work=work)
    constants |= {"BACKWARDS": again, "WIDE": wide(problem), "STREAM": stream}
    if view.inner > 1:
        tile = tune.columns(view, size, tune.processors_of(device), work=work, packed=is_packed)
        blocks, row_blocks = blocks_of(view.inner, tile.columns), blocks_of(view.run, tile.lines * tile.repeats)
        even = view.inner % tile.columns == 0 and view.run % (tile.lines * tile.repeats) == 0
        sizes = {"run": view.run, "inner": view.inner, **division(blocks), **division(row_blocks, "row_")}
        constants |= {"MASK": mask(even), "LINES": tile.lines, "COLS": tile.columns, "ITERS": tile.repeats}
        constants |= {"VECTOR": tile.vector} | one_by_one(constants)
        programs = view.rows * row_blocks * blocks
        return tiled(kernels.columns, programs, sizes, constants, tile, problem, device, again=again)
    lines = view.repeat * view.rows
    tile = tune.dense(view.run, size, work=work, packed=is_packed)
    across = tile.parts * tile.columns
    blocks = blocks_of(view.run, across)
    even = lines % tile.lines == 0 and view.run % across == 0
    sizes = {"lines": lines, "width": view.run, "rows": view.rows, **division(blocks)}
    constants |= {
        "SEGMENT": 0 if view.rows == 1 else 1 if view.repeat == 1 else 2,
        "MASK": mask(even, tile.lines == 1 or view.run % across == 0),
        "PARTS": tile.parts,
        "LINES": tile.lines,
        "COLS": tile.columns,
        "VECTOR": tile.vector if tile.lines == 1 else 0,  # with a vector a thread there is nothing to limit
        "EACH": together(problem, tile, is_packed),
    }
    programs = blocks_of(lines, tile.lines) * blocks
    return tiled(kernels.dense, programs, sizes, constants, tile, problem, device, again=again)


def tiled(
    kernel: Any,
    programs: int,
    sizes: dict[str, int],
    constants: dict[str, Any],
    tile: tune.Tile,
    problem: Problem,
    device: torch.device,
    *,
    again: bool = False,
) -> Step:
    """A kernel that moves a problem's operands, a tile at a time."""
    early = comes_early(problem, programs, device, again=again)
    build = Build(tile.warps, registers=tile.registers, early=early)
    return Step(kernel, programs, sizes, constants, device, build, unaligned=one_by_one(constants))


def _scattered(problem: Problem, device: torch.device, constants: dict[str, Any]) -> Step:
    view = problem.view
    axis = problem.shape[-1] if problem.shape else 1
    size = view.numel // axis * ((axis + 1) // 2)
    sizes = {"size": size, "axis": axis, "rows": view.rows, "run": view.run, "inner": view.inner}
    programs = blocks_of(size, 512)
    build = Build(early=comes_early(problem, programs, device))
    return Step(kernels.scattered, programs, sizes, {**constants, "COLS": 512}, device, build)


def comes_early(problem: Problem, programs: int, device: torch.device, *, again: bool = False) -> bool:
    work = _WORK.get(problem.op, tune.Work.QUANTIZE)
    return tune.early(programs, tune.processors_of(device), sum(traffic(problem)), work=work, again=again)


def traffic(problem: Problem) -> tuple[int, int]:
    """The bytes of what an operation reads, and of what it writes."""
    nbytes = {False: 0, True: 0}
    for operand in OPS[problem.op].operands:
        nbytes[operand.output] += prod(operand.shape(problem)) * operand.elements(problem)[0].dtype.itemsize
    return nbytes[False], nbytes[True]


def pairs_line_up(problem: Problem) -> bool:
    """Whether no packed pair straddles the rows of the tensor or the lines of its view."""
    return bool(problem.shape) and problem.shape[-1] % 2 == 0 and _line_length(problem) % 2 == 0


def together(problem: Problem, tile: tune.Tile, pairs: bool) -> int:
    """How many neighbours leave a thread in one word: those of a vector, up to 32 bits, if no line ends inside."""
    length = _line_length(problem)
    most = min(tile.vector or 1, tile.columns, 8 if pairs else 4)
    return max(min(most, length & -length), 2 if pairs else 1)


def _line_length(problem: Problem) -> int:
    """Of the lines a kernel walks: neighbours in memory that share a scale, or have one each."""
    return problem.view.inner if problem.view.inner > 1 else problem.view.run


def one_by_one(constants: dict[str, Any]) -> dict[str, Any]:
    """Bytes instead of words: where the output is not aligned, or a thread has few columns and walks down."""
    return {"EACH": 2 if constants["PACKED"] else 1}


def packed(problem: Problem) -> int:
    return int(_PACKED.get(problem.quantized, 0))


# -- what kernels are told ---------------------------------------------------------------------------------------


def arithmetic(problem: Problem) -> dict[str, Any]:
    return {
        "RECIPROCAL": problem.arithmetic is Arithmetic.RECIPROCAL,
        "Q_MIN": problem.q_min,
        "Q_MAX": problem.q_max,
        "F64": problem.element is ElementKind.F64,
    }


def mask(even: bool, edges: bool = False) -> int:
    return int((kernels.NEVER if even else kernels.EDGES if edges else kernels.ALWAYS).value)


def wide(problem: Problem) -> bool:
    """Whether element offsets need 64 bits, with room for a tile that reaches over the end."""
    return problem.view.numel >= 2**31 - 2**20


def blocks_of(size: int, by: int) -> int:
    return -(-size // by)


def division(by: int, which: str = "") -> dict[str, int]:
    """What `split_index` takes: n // by is the high half of 2n * factor, shifted, for all n below 2**31.

    With by <= 2**shift, factor * by exceeds 2**(31 + shift) by at most `by`, too little for n of them to reach the next
    quotient. A factor has its highest bit set, so that as an int32, which it is passed as, it is negative.
    """
    shift = (by - 1).bit_length()
    return {f"{which}blocks": by, f"{which}factor": 2 ** (31 + shift) // by + 1 - 2**32, f"{which}shift": shift}
