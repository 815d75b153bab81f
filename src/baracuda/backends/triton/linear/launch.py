"""The linears from operands to the device: the activations quantized first where the op asks for it, then a GEMM.

Here is what all GEMMs share, and the portable one; `hopper.launch` has the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....core.problem import Problem, activation_problem
from ....core.scope import PerToken
from ....core.types import DynamicRangeMode, ElementKind, QuantizeKind
from ...registry import Launch, Value
from ..dynamic import launch as quantization
from ..launch import Build, Step, in_turn
from ..sources import Either, Source, WorkspaceLayout
from . import kernels, tune
from .kernels import Epilogue, Matmul, Shape, Terms

#: The operands of a quantized linear that quantized activations are written to.
Q_SCRATCH, SCALE_SCRATCH = 7, 8


class GemmSources(NamedTuple):
    """Where the arguments of a GEMM with its epilogue come from."""

    x: Source
    scale: Source
    zero_point: Source
    weight: Source
    weight_scale: Source
    bias: Source
    weight_sum: Source
    residual: Source
    output: Source
    #: Integers that the groups' weights are multiplied by.
    weight_factor: Source = None

    @property
    def terms(self) -> Terms:
        return Terms(self.scale, self.weight_scale, self.bias, self.residual)


def gemm_sources(p: Problem, layout: WorkspaceLayout) -> GemmSources:
    """The operands of either op in the GEMM's order; quantized activations are in the workspace unless they are asked
    for."""
    if p.op is QuantizeKind.SMOOTHQUANT_LINEAR:
        return GemmSources(0, 1, 2, 3, 4, 5, 6, 7, 9, 8 if p.weight_group else None)
    q, scale = Either(Q_SCRATCH, layout["q"]), Either(SCALE_SCRATCH, layout["scale"])
    return GemmSources(q, scale, layout.get("zero_point"), 1, 2, 3, 4, 5, 9, 6 if p.weight_group else None)


def activation_layout(p: Problem, device: torch.device) -> WorkspaceLayout:
    """Room for the quantized activations and for the kernels that quantize them."""
    layout = WorkspaceLayout()
    if p.op is QuantizeKind.QUANTIZED_LINEAR:
        m, _, k = p.shape
        layout.reserve("q", p.quantized.dtype, m, k)
        layout.reserve("scale", p.scale_element.dtype, m)
        if p.mode is DynamicRangeMode.ASYMMETRIC:
            layout.reserve("zero_point", torch.int32, m)
        layout.reserve("quantizer", torch.uint8, quantization.workspace(activation_problem(p), device))
    return layout


def quantized_first(p: Problem, device: torch.device, layout: WorkspaceLayout, gemm: Launch) -> Launch:
    """The whole linear: the activations quantized where the op asks for it, then the GEMM."""
    if p.op is QuantizeKind.SMOOTHQUANT_LINEAR:
        return gemm
    f, start = gemm_sources(p, layout), layout["quantizer"].offset
    quantize = quantization.dynamic(activation_problem(p), device, (0, f.scale, f.zero_point, f.x), start)
    return in_turn(quantize, gemm)


def by_zero_point(zero_point: Source, without: Launch, with_it: Launch) -> Launch:
    """The launch for a zero point that is there, or for one that is None or the number 0."""
    if not isinstance(zero_point, int):
        return without if zero_point is None else with_it

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        value = operands[zero_point]
        absent = value is None or (isinstance(value, int) and value == 0)
        (without if absent else with_it)(operands, workspace)

    return launch


def by_scratch(one: Launch, two: Launch) -> Launch:
    """The launch of a linear of one kernel, which writes down no quantized activations, or of two if they are asked
    for."""

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        asked = operands[Q_SCRATCH] is not None or operands[SCALE_SCRATCH] is not None
        (two if asked else one)(operands, workspace)

    return launch


def epilogue(p: Problem) -> Epilogue:
    per_token = p.op is QuantizeKind.QUANTIZED_LINEAR or isinstance(p.scope, PerToken)
    return Epilogue(per_token, p.nonlinearity.value, p.element is ElementKind.F64)


# -- the portable kernel -----------------------------------------------------------------------------------------


def workspace(p: Problem, device: torch.device) -> int:
    return activation_layout(p, device).nbytes


def matmul(p: Problem, device: torch.device) -> Launch:
    m, n, _ = p.shape
    if m == 0:
        return _nothing
    layout = activation_layout(p, device)
    # Whoever gave scratch memory reads the activations from it, even where the weight has no rows.
    gemm = portable_gemm(p, device, gemm_sources(p, layout)) if n else _nothing
    return quantized_first(p, device, layout, gemm)


def _nothing(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
    """An empty output asks for no launch."""


def portable_gemm(p: Problem, device: torch.device, f: GemmSources) -> Launch:
    m, n, k = p.shape
    tile = tune.portable(m)
    shift = 128 if p.quantized is ElementKind.U8 else 0
    centred = bool(shift) or p.mode is DynamicRangeMode.ASYMMETRIC
    chunk = _chunk(p.accumulator_limit, p, tile.k)
    stored, group = p.weight.is_packed, p.weight_group
    dynamic = p.op is QuantizeKind.QUANTIZED_LINEAR
    low, high = p.quantized.q_min, p.quantized.q_max
    spec = Matmul(epilogue(p), tile, centred, shift, stored, group, low, high, chunk, zero_points=dynamic)
    programs = -(-m // tile.m) * -(-n // tile.n)

    def bound(zero_point: Source, spec: Matmul) -> Launch:
        build = Build(tile.warps, tile.stages)
        step = Step(kernels.matmul, programs, {"shape": Shape(m, n, k)}, {"SPEC": spec}, device, build)
        return step.bound(f.x, f.weight, f.weight_factor, f.output, f.terms, zero_point, f.weight_sum)

    # A zero point that comes with a symmetric problem (a tensor: its value is not known here) still counts.
    limit = replace(p, mode=DynamicRangeMode.ASYMMETRIC).accumulator_limit
    with_it = spec._replace(centred=True, chunk=_chunk(limit, p, tile.k))
    return by_zero_point(f.zero_point, bound(None, spec), bound(f.zero_point, with_it))


def _chunk(limit: int, p: Problem, step: int) -> int:
    """How much of the stored weight is summed in int32 at a time: whole steps, as many as stay exact; 0: all of it."""
    if p.shape[2] <= limit:
        return 0
    return (limit // 2 if p.weight.is_packed else limit) // step * step
