"""The sm_90 GEMMs from operands to the device: which of them, in which form, with which arguments."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonASTSource

from ..... import _host
from .....core.problem import Problem, activation_problem
from .....core.types import DynamicRangeMode, QuantizeKind
from ....registry import Launch, Value
from ...dynamic.launch import dynamic_rule, range_config
from ...launch import ALIGNMENT, POINTERS, Step, finish_parameters, launching, loaded
from ...sources import Either, Part, WorkspaceLayout
from ...tune import processors_of
from .. import tune
from ..kernels import Shape, sum_rows, sum_tail
from ..launch import (
    GemmSources,
    activation_layout,
    by_scratch,
    by_zero_point,
    epilogue,
    gemm_sources,
    portable_gemm,
    quantized_first,
)
from ..support import few_tile, quantizing_tile
from ..weight_only_launch import portable
from .binding import (
    OUTPUT,
    PARTS,
    VECTORS,
    WEIGHT,
    X,
    aligned_only,
    compiled,
    descriptor_form,
    matrix,
    source_of,
    term_parameters,
    terms_of,
)
from .direct_launch import direct_tokens
from .epilogue import HopperTerms, TermKinds
from .few_launch import few_tokens
from .gemm import gemm
from .packed_launch import many_packed, weight_only, weight_only_layout
from .parts import reserve_parts
from .tokens import Tokens


def gemm_source(tile: tune.Pingpong, out: torch.dtype, forms: HopperTerms, kinds: TermKinds) -> GluonASTSource:
    signature = {
        "a_desc": descriptor_form(torch.int8, [tile.m, tile.k]),
        "b_desc": descriptor_form(torch.int8, [tile.n, tile.k]),
        "c_desc": descriptor_form(out, [tile.m, tile.n // tile.pieces]),
        "partial_ptr": "*i32",
        "terms": forms,
        "shape": Shape("i32", "i32", "i32"),
    }
    # The residual is read in pairs of columns.
    divisible = {("terms", "residual_ptr"): ALIGNMENT, "partial_ptr": ALIGNMENT}
    divisible |= {("shape", "n"): ALIGNMENT // out.itemsize}
    return source_of(gemm, signature, {"TILE": tile, "KINDS": kinds}, divisible)


def layout_of(p: Problem, device: torch.device) -> WorkspaceLayout:
    """Room for the activations, and for what a second kernel adds up: parts of K, or the sums of the weight's rows."""
    m, n, k = p.shape
    layout = activation_layout(p, device)
    processors = processors_of(device)
    if p.mode is DynamicRangeMode.ASYMMETRIC:
        layout.reserve("sums", torch.int32, n)
    elif (few := few_tile(p, device)) is not None:
        if isinstance(few, tune.Few):
            reserve_parts(layout, p, few, device)
    elif p.weight.is_packed:
        reserve_parts(layout, p, tune.packed(m, n, k, p.element.dtype.itemsize, processors), device)
    else:
        tile = tune.pingpong(m, n, k, p.element.dtype.itemsize, processors, cut=True)
        if tile.tail > 1:
            rest = tile.tiles(m, n) - tile.whole(m, n, processors)
            layout.reserve("parts", torch.int32, rest, tile.tail, tile.m, tile.n)
    return layout


def workspace(p: Problem, device: torch.device) -> int:
    return layout_of(p, device).nbytes


def hopper(p: Problem, device: torch.device) -> Launch:
    """A linear on sm_90; operands that TMA cannot address go to the portable kernel."""
    layout = layout_of(p, device)
    sources = gemm_sources(p, layout)
    gemm = _gemm(p, device, sources, layout, portable_gemm(p, device, sources))
    two = quantized_first(p, device, layout, gemm)
    tile = quantizing_tile(p, device)
    return two if tile is None else by_scratch(_one_kernel(p, device, sources, tile, two), two)


def weight_only_workspace(p: Problem, device: torch.device) -> int:
    return weight_only_layout(p, device).nbytes


def hopper_weight_only(p: Problem, device: torch.device) -> Launch:
    """A weight-only linear on sm_90; operands that TMA cannot address go to the portable kernel."""
    return weight_only(p, device, portable(p, device))


def _one_kernel(p: Problem, device: torch.device, f: GemmSources, tile: tune.Direct, two: Launch) -> Launch:
    """A GEMM that quantizes the activations; operands that it cannot address take `two` kernels.

    The kernel before is anyone's and may have written the weight.
    """
    f, early = f._replace(x=0, scale=None, zero_point=None), "prefetch"
    (m, _, k), rows, scale = p.shape, activation_problem(p), POINTERS[p.scale_element.dtype]
    rule = dynamic_rule(rows, range_config(rows, device).tile)
    tokens = Tokens(m, k, rule.range, rule.quantizer, rule.bounds, scale.removeprefix("*"))
    return direct_tokens(p, device, f, two, tile, early, tokens)


def _gemm(p: Problem, device: torch.device, f: GemmSources, layout: WorkspaceLayout, portable: Launch) -> Launch:
    _, n, k = p.shape
    plain = f._replace(zero_point=None)
    if p.mode is DynamicRangeMode.SYMMETRIC:
        # The kernel that quantizes the activations comes right before and writes no weight. It lets this one start when
        # all that came before has ended.
        early = "copy" if p.op is QuantizeKind.QUANTIZED_LINEAR else "prefetch"
        few = few_tile(p, device)
        if isinstance(few, tune.Direct):
            symmetric = direct_tokens(p, device, plain, portable, few, early)
        elif few is not None:
            symmetric = few_tokens(p, device, plain, layout, portable, few, early)
        elif p.weight.is_packed:
            symmetric = many_packed(p, device, plain, layout, portable, early)
        else:
            symmetric = _many_tokens(p, device, plain, layout, portable, cut=True)
        return by_zero_point(f.zero_point, symmetric, portable)
    given = cast(int, f.weight_sum)
    summed = f._replace(weight_sum=Either(given, layout["sums"]))
    multiply = _many_tokens(p, device, summed, layout, portable)
    add_up = Step(sum_rows, n, {"N": n, "K": k}, {"BK": 1024}, device).bound(f.weight, layout["sums"])

    def centred(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        if operands[given] is None:
            add_up(operands, workspace)
        multiply(operands, workspace)

    return by_zero_point(f.zero_point, _many_tokens(p, device, plain, layout, portable), centred)


def _many_tokens(
    p: Problem, device: torch.device, f: GemmSources, layout: WorkspaceLayout, portable: Launch, cut: bool = False
) -> Launch:
    m, n, k = p.shape
    processors = processors_of(device)
    tile = tune.pingpong(m, n, k, p.element.dtype.itemsize, processors, cut)
    programs = tile.programs(m, n, processors)
    parts = layout["parts"] if tile.tail > 1 else None
    then = None if parts is None else _tail(p, device, f, parts, tile, tile.whole(m, n, processors))

    def make(arguments: list[Value]) -> _host.Kernel:
        forms, kinds = terms_of(arguments, 0, p.nonlinearity)
        made = compiled(gemm_source(tile, p.element.dtype, forms, kinds), tile.warps)
        kernel, (x, weight, output) = loaded(made, programs), made.metadata.tensordesc_meta
        matrix(kernel, X, x, m, k)
        matrix(kernel, WEIGHT, weight, n, k)
        matrix(kernel, OUTPUT, output, m, n)
        kernel.address(PARTS)
        term_parameters(kernel)
        return finish_parameters(kernel, m, n, k)

    return launching(device, (*f, parts), aligned_only(make), VECTORS, then, portable)


def _tail(p: Problem, device: torch.device, f: GemmSources, parts: Part, tile: tune.Pingpong, whole: int) -> Launch:
    """Adds up the parts of the tiles that were cut."""
    m, n, _ = p.shape
    lines = 16
    constants = {"EPILOGUE": epilogue(p), "TILE": tile, "LINES": lines}
    programs = (tile.tiles(m, n) - whole) * (tile.m // lines)
    step = Step(sum_tail, programs, {"M": m, "N": n, "whole": whole}, constants, device)
    return step.bound(parts, f.output, f.terms)
