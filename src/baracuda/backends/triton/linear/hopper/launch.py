"""The sm_90 GEMMs from operands to the device: which of them, in which form, with which arguments."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, cast

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ..... import _host
from .....core.problem import Problem
from .....core.types import Activation, DynamicRangeMode
from ....registry import Launch, Value
from ...launch import ALIGNMENT, POINTERS, Step, finish_parameters, launching, loaded
from ...sources import Either, Part, WorkspaceLayout
from ...tune import processors_of
from .. import tune
from ..kernels import Shape, sum_parts, sum_rows, sum_tail
from ..launch import (
    GemmSources,
    activation_layout,
    by_zero_point,
    epilogue,
    gemm_sources,
    portable_gemm,
    quantized_first,
)
from ..support import fuses
from .epilogue import HopperTerms, TermKinds
from .gemm import gemm
from .skinny import gemm_skinny

_GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.int8: gl.int8}

#: The arguments of both GEMMs in the order of `GemmSources`, and the workspace for the sums of K's parts.
X, SCALE, ZERO_POINT, WEIGHT, WEIGHT_SCALE, BIAS, WEIGHT_SUM, RESIDUAL, OUTPUT, PARTS = range(10)
#: Those that TMA reads and writes, or threads do in vectors.
VECTORS = (X, WEIGHT, RESIDUAL, OUTPUT)


# -- what is compiled --------------------------------------------------------------------------------------------


def descriptor_form(dtype: torch.dtype, block: list[int]) -> str:
    element = _GLUON[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return f"tensordesc<{POINTERS[dtype][1:]}{block},{layout!r}>"


def _pointer(value: Value) -> str:
    return POINTERS[value.dtype] if isinstance(value, Tensor) else "*fp32"


def _kind(value: Value) -> str:
    return "number" if not isinstance(value, Tensor) else "vector" if value.dim() else "scalar"


def term_forms(
    scale: Value,
    zero_point: Value,
    weight_scale: Value,
    bias: Value,
    token_axis: int,
    residual: Value = None,
    nonlinearity: Activation = Activation.NONE,
) -> tuple[HopperTerms, TermKinds]:
    """The types of the epilogue's arguments, and the constant that says what to do with them."""
    forms = HopperTerms(
        scale_ptr=_pointer(scale),
        scale="fp32",
        weight_scale_ptr=_pointer(weight_scale),
        weight_scale="fp32",
        bias_ptr=_pointer(bias),
        zero_point_ptr="*i32",
        zero_point="i32",
        weight_sum_ptr="*i32",
        residual_ptr=_pointer(residual),
    )
    kinds = TermKinds(
        scale=_kind(scale),
        weight_scale=_kind(weight_scale),
        zero_point="none" if zero_point is None else _kind(zero_point),
        bias=bias is not None,
        residual=residual is not None,
        nonlinearity=nonlinearity.value,
        token_axis=token_axis,
    )
    return forms, kinds


def _source(kernel: Any, signature: dict[str, Any], constants: Mapping[str, object], divisible: Any) -> GluonASTSource:
    """`divisible` says by what: of a parameter, or of a (group, member)."""
    names = list(signature)
    attributes = {}
    for name, by in divisible.items():
        group, *member = name if isinstance(name, tuple) else (name,)
        path = (names.index(group), *(signature[group]._fields.index(one) for one in member))
        attributes[path] = [["tt.divisibility", by]]
    return GluonASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, attributes)


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
    return _source(gemm, signature, {"TILE": tile, "KINDS": kinds}, divisible)


def skinny_source(tile: tune.Skinny, out: torch.dtype, forms: HopperTerms, kinds: TermKinds, n: int) -> GluonASTSource:
    signature = {
        "x_desc": descriptor_form(torch.int8, [tile.tokens, tile.k]),
        "w_desc": descriptor_form(torch.int8, [tile.rows, tile.k]),
        "x_ptr": POINTERS[out],
        "out_ptr": POINTERS[out],
        "partial_ptr": "*i32",
        "scale_out_ptr": "*fp32",
        "terms": forms,
        "q_min": "fp32",
        "q_max": "fp32",
        "shape": Shape("i32", "i32", "i32"),
    }
    divisible: dict[Any, int] = dict.fromkeys(("x_ptr", "out_ptr", "partial_ptr", ("shape", "k")), ALIGNMENT)
    divisible |= {("shape", "n"): min(ALIGNMENT, n & -n)}
    return _source(gemm_skinny, signature, {"TILE": tile, "KINDS": kinds}, divisible)


def compiled(source: GluonASTSource, warps: int) -> Any:
    target = triton.runtime.driver.active.get_current_target()
    return triton.compile(source, target=target, options={"enable_fp_fusion": False, "num_warps": warps})


# -- what is launched --------------------------------------------------------------------------------------------


def term_parameters(kernel: _host.Kernel) -> None:
    """Addresses and numbers in the order of `HopperTerms`; of each pair, the one that did not come is 0."""
    for argument in (SCALE, WEIGHT_SCALE):
        kernel.address(argument)
        kernel.number(argument, "f32")
    kernel.address(BIAS)
    kernel.address(ZERO_POINT)
    kernel.number(ZERO_POINT, "i32")
    kernel.address(WEIGHT_SUM)
    kernel.address(RESIDUAL)


def matrix(kernel: _host.Kernel, argument: int, meta: dict[str, Any], rows: int, columns: int) -> None:
    """A descriptor's parameters: the map for TMA, then the matrix's sizes and strides."""
    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    kernel.matrix(argument, element, meta["swizzle"], meta["elem_size"], rows, columns, *meta["block_size"])
    for value in (rows, columns, columns, 1):
        kernel.constant(value)


def layout_of(p: Problem, device: torch.device) -> WorkspaceLayout:
    """Room for the activations, and for what a second kernel adds up: parts of K, or the sums of the weight's rows."""
    m, n, k = p.shape
    layout = activation_layout(p, device)
    processors = processors_of(device)
    if p.mode is DynamicRangeMode.ASYMMETRIC:
        layout.reserve("sums", torch.int32, n)
    elif m <= tune.SKINNY_TOKENS:
        split = tune.skinny(m, n, k, processors).split
        if fuses(p):
            split = max(split, tune.fused(n, k, processors).split)
        if split > 1:
            layout.reserve("parts", torch.int32, split, m, n)
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
    apart = quantized_first(p, device, layout, gemm)
    if not fuses(p):
        return apart
    fused = fused_gemm(p, device, sources, layout, apart)

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        (fused if operands[7] is None else apart)(operands, workspace)  # act_q_scratch is a result where it is given

    return launch


def _gemm(p: Problem, device: torch.device, f: GemmSources, layout: WorkspaceLayout, portable: Launch) -> Launch:
    m, n, k = p.shape
    plain = f._replace(zero_point=None)
    if p.mode is DynamicRangeMode.SYMMETRIC:
        if m <= tune.SKINNY_TOKENS:
            tile = tune.skinny(m, n, k, processors_of(device))
            symmetric = _few_tokens(p, device, plain, layout, portable, tile, quantize=False)
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

    def prepare(arguments: list[Value], aligned: bool) -> _host.Kernel | None:
        if not aligned:
            return None
        _, scale, zero_point, _, weight_scale, bias, _, residual, *_ = arguments
        forms, kinds = term_forms(scale, zero_point, weight_scale, bias, 0, residual, p.nonlinearity)
        made = compiled(gemm_source(tile, p.element.dtype, forms, kinds), tile.warps)
        kernel, (x, weight, output) = loaded(made, programs), made.metadata.tensordesc_meta
        matrix(kernel, X, x, m, k)
        matrix(kernel, WEIGHT, weight, n, k)
        matrix(kernel, OUTPUT, output, m, n)
        kernel.address(PARTS)
        term_parameters(kernel)
        return finish_parameters(kernel, m, n, k)

    return launching(device, (*f, parts), prepare, VECTORS, then, portable)


def _tail(p: Problem, device: torch.device, f: GemmSources, parts: Part, tile: tune.Pingpong, whole: int) -> Launch:
    """Adds up the parts of the tiles that were cut."""
    m, n, _ = p.shape
    lines = 16
    constants = {"EPILOGUE": epilogue(p), "TILE": tile, "LINES": lines}
    programs = (tile.tiles(m, n) - whole) * (tile.m // lines)
    step = Step(sum_tail, programs, {"M": m, "N": n, "whole": whole}, constants, device)
    return step.bound(parts, f.output, f.terms)


def fused_gemm(p: Problem, device: torch.device, f: GemmSources, layout: WorkspaceLayout, apart: Launch) -> Launch:
    """Floats in, floats out, one launch: every program quantizes the few rows for itself."""
    _, n, k = p.shape
    tile = tune.fused(n, k, processors_of(device))
    return _few_tokens(p, device, f._replace(x=0), layout, apart, tile, quantize=True)


def _few_tokens(
    p: Problem,
    device: torch.device,
    f: GemmSources,
    layout: WorkspaceLayout,
    otherwise: Launch,
    tile: tune.Skinny,
    quantize: bool,
) -> Launch:
    """The kernel that streams the weight past a few tokens, and with split-K the one that adds up the parts."""
    m, n, k = p.shape
    programs = _grid(tile, n, device)
    parts = layout["parts"] if tile.split > 1 else None
    then = None
    if parts is not None:
        constants = {"EPILOGUE": epilogue(p), "SPLIT": tile.split, "BN": 512}
        add_up = Step(sum_parts, m * -(-n // 512), {"M": m, "N": n}, constants, device)
        then = add_up.bound(parts, f.output, f.terms)

    def prepare(arguments: list[Value], aligned: bool) -> _host.Kernel | None:
        if not aligned:
            return None
        _, scale, zero_point, _, weight_scale, bias, _, residual, *_ = arguments
        forms, kinds = term_forms(scale, zero_point, weight_scale, bias, 1, residual, p.nonlinearity)
        if quantize:
            kinds = kinds._replace(scale="given")
        made = compiled(skinny_source(tile, p.element.dtype, forms, kinds, n), 4)
        kernel, (x, weight) = loaded(made, programs), made.metadata.tensordesc_meta
        if quantize:  # it reads x by itself, and has no use for a map of quantized rows
            matrix(kernel, WEIGHT, x, n, k)
        else:
            matrix(kernel, X, x, m, k)
        matrix(kernel, WEIGHT, weight, n, k)
        kernel.address(X)
        kernel.address(OUTPUT)
        kernel.address(PARTS)
        kernel.address(SCALE)
        term_parameters(kernel)
        for limit in (p.q_min, p.q_max):
            kernel.constant(int.from_bytes(struct.pack("<f", limit), "little"))
        return finish_parameters(kernel, m, n, k)

    return launching(device, (*f, parts), prepare, VECTORS, then, otherwise)


def _grid(tile: tune.Skinny, n: int, device: torch.device) -> int:
    units = -(-n // tile.rows) * tile.split * tile.tiles
    rounds = -(-units // (tile.programs * processors_of(device)))
    return -(-units // rounds)
