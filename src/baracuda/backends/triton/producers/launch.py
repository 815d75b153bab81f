"""Norms and gated products bound to their kernels: one that makes and quantizes whole rows, or floats, then q."""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import torch

from ....core.optable import OPS, UNQUANTIZED
from ....core.problem import GATED, Problem, floats_problem, quantization_problem
from ....core.scope import View
from ....core.types import ElementKind
from ...registry import Launch
from .. import tune as common
from ..dynamic import launch as ranges
from ..dynamic.kernels import Scan
from ..elementwise.kernels import QUANTIZE, Elementwise
from ..elementwise.launch import bound_forward, elementwise_step, mask, pairs_line_up, quantizer
from ..elementwise.launch import packed as packed_pairs
from ..launch import Build, Step, in_turn
from ..numerics.packing import Storage
from ..sources import Part, Source
from ..tune import Tile, blocks_of
from . import kernels, tune
from .kernels import Made, Rule, Target


def producer(problem: Problem, device: torch.device) -> Launch:
    rows, width = _size(problem)
    if rows == 0:
        return lambda operands, workspace: None
    if width == 0:
        return _of_nothing(problem, device)
    tile = whole_tile(problem, device)
    sources = {operand.name: i for i, operand in enumerate(OPS[problem.op].operands)}
    if tile is not None:
        return whole_step(problem, tile, device).bound(*_inputs(problem, sources), _target(sources))
    if problem.op not in UNQUANTIZED:
        return _floats(problem, device, _inputs(problem, sources), sources["output"])
    made = Part(0, problem.element.dtype, rows * width)
    first = _floats(floats_problem(problem), device, _inputs(problem, sources), made)
    return in_turn(first, _quantized(problem, device, sources, made))


def workspace(problem: Problem, device: torch.device) -> int:
    """Room for the floats, and for what quantizes them, where one kernel does not do it all."""
    rows, width = _size(problem)
    if problem.op not in UNQUANTIZED or rows * width == 0 or whole_tile(problem, device) is not None:
        return 0
    after = quantization_problem(problem)
    return _start(problem) + (ranges.workspace(after, device) if OPS[problem.op].dynamic else 0)


def whole_tile(problem: Problem, device: torch.device) -> Tile | None:
    """The tile of the kernel that makes and stores whole rows; None where rows are too long, or packed pairs do not
    line up."""
    if problem.op in UNQUANTIZED and problem.quantized.is_packed and not pairs_line_up(quantization_problem(problem)):
        return None
    (rows, width), size = _size(problem), problem.element.dtype.itemsize
    if problem.op in GATED:
        return tune.gated(View(1, rows, width, 1), size, common.processors_of(device))
    return tune.norm(width, size)


def whole_step(problem: Problem, tile: Tile, device: torch.device) -> Step:
    """The kernel that makes whole rows and stores them as they are asked for."""
    rows, width = _size(problem)
    even = width == tile.parts * tile.columns and rows % tile.lines == 0
    programs = blocks_of(rows, tile.lines)
    constants, unaligned = _constants(problem, tile, even, _made(problem, tile))
    build = Build(
        tile.warps, registers=tile.registers if problem.op in GATED else 0, pdl=_pdl(problem, programs, device)
    )
    kernel = kernels.gated if problem.op in GATED else kernels.norm
    return Step(kernel, programs, {"lines": rows, "width": width}, constants, device, build, unaligned)


def _constants(
    problem: Problem, tile: Tile, even: bool, made: Made | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    constants: dict[str, Any] = {"SCAN": Scan(tile, mask(even), _wide(problem))}
    if problem.op in GATED:
        constants["KIND"] = problem.nonlinearity.value
    else:
        (bits,) = struct.unpack("<q", struct.pack("<d", problem.eps))
        constants["RULE"] = Rule(problem.norm.value, bits, problem.element is ElementKind.F64)
    if made is None:
        return constants, None
    apart = Made(
        made.dynamic and made.dynamic._replace(storage=made.dynamic.storage.one_by_one()),
        made.static and made.static._replace(storage=made.static.storage.one_by_one()),
    )
    return constants | {"OUT": made}, {"OUT": apart}


def _made(problem: Problem, tile: Tile) -> Made:
    if problem.op not in UNQUANTIZED:
        return Made()
    after = quantization_problem(problem)
    pairs, width = packed_pairs(after), problem.shape[-1]
    # Lines are rows here, also where the canonical view of the problem sees them otherwise.
    each = max(min(tile.vector or 1, tile.columns, 8 if pairs else 4, width & -width), 2 if pairs else 1)
    if OPS[problem.op].dynamic:
        rule = ranges.dynamic_rule(after, tile)
        return Made(dynamic=rule._replace(storage=Storage(pairs, min(rule.storage.each, each))))
    return Made(static=Elementwise(int(QUANTIZE.value), quantizer(after), Storage(pairs, each), tile))


def _floats(problem: Problem, device: torch.device, inputs: tuple[Source, ...], out: Source) -> Launch:
    """The floats of rows of any length."""
    rows, width = _size(problem)
    tile = whole_tile(problem, device)
    if tile is not None:
        return whole_step(problem, tile, device).bound(*inputs, Target(None, None, out))
    if problem.op in GATED:
        return _long_gated(problem, device, inputs, out)
    tile = tune.long_norm(problem.element.dtype.itemsize)
    constants, _ = _constants(problem, tile, False, None)
    step = Step(kernels.long_norm, rows, {"lines": rows, "width": width}, constants, device, Build(tile.warps))
    return step.bound(*inputs, out)


def _long_gated(problem: Problem, device: torch.device, inputs: tuple[Source, ...], out: Source) -> Launch:
    rows, width = _size(problem)
    tile = tune.pieces(problem.element.dtype.itemsize)
    constants, _ = _constants(problem, tile, False, None)
    blocks = blocks_of(width, tile.parts * tile.columns)
    sizes = {"lines": rows, "width": width, "blocks": blocks}
    return Step(kernels.long_gated, rows * blocks, sizes, constants, device, Build(tile.warps)).bound(*inputs, out)


def _quantized(problem: Problem, device: torch.device, sources: dict[str, int], made: Part) -> Launch:
    """The quantization of floats that lie in the workspace."""
    after = quantization_problem(problem)
    if OPS[problem.op].dynamic:
        where = (made, sources["scale_out"], sources["zero_point_out"], sources["output"])
        return ranges.dynamic(after, device, where, _start(problem))
    step = elementwise_step(after, device, again=True)
    assert step is not None
    return bound_forward(step, made, sources["scale"], sources["zero_point"], sources["output"])


def _of_nothing(problem: Problem, device: torch.device) -> Launch:
    """Rows without elements have scales alone."""
    if not OPS[problem.op].dynamic:
        return lambda operands, workspace: None
    sources = {operand.name: i for i, operand in enumerate(OPS[problem.op].operands)}
    first = 0
    where = (first, sources["scale_out"], sources["zero_point_out"], sources["output"])
    return ranges.dynamic(quantization_problem(problem), device, where)


def _inputs(problem: Problem, sources: dict[str, int]) -> tuple[Source, ...]:
    if problem.op in GATED:
        return sources["gate"], None if problem.halves else sources["up"]
    adds = problem.adds
    return (
        sources["input"],
        sources["addend"] if adds else None,
        sources["norm_weight"],
        sources["norm_bias"],
        sources["sum_out"] if adds else None,
    )


def _target(sources: dict[str, int]) -> Target:
    scale = sources.get("scale_out", sources.get("scale"))
    zero_point = sources.get("zero_point_out", sources.get("zero_point"))
    return Target(scale, zero_point, sources["output"])


def _size(problem: Problem) -> tuple[int, int]:
    return prod(problem.shape[:-1]), problem.shape[-1]


def _start(problem: Problem) -> int:
    """Where in the workspace there is room behind the floats."""
    return -(-prod(problem.shape) * problem.element.dtype.itemsize // 256) * 256


def _wide(problem: Problem) -> bool:
    return prod(problem.shape) >= 2**30 - 2**20  # twice as many in a gate with both halves


def _pdl(problem: Problem, programs: int, device: torch.device) -> bool:
    nbytes = prod(problem.shape) * (problem.element.dtype.itemsize * (2 if problem.op in GATED else 1) + 1)
    return common.pdl_pays(programs, common.processors_of(device), nbytes)
