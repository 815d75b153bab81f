"""The sm_90 GEMMs with decoding warps, from operands to the device: packed weights, and float activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonASTSource

from ..... import _host
from .....core.problem import Problem
from .....core.types import ElementKind
from ....registry import Launch, Value
from ...launch import ALIGNMENT, POINTERS, captures_pdl, finish_parameters, launching, loaded
from ...sources import WorkspaceLayout
from ...tune import processors_of
from .. import tune
from ..kernels import Epilogue, Shape
from ..launch import GemmSources, epilogue
from ..support import weight_only_tile
from ..tune_floats import DirectFloats
from .binding import (
    FACTOR,
    OUTPUT,
    PARTS,
    VECTORS,
    WEIGHT,
    ZEROS,
    X,
    aligned_only,
    compiled,
    descriptor_form,
    matrix,
    source_of,
    term_parameters,
    terms_of,
)
from .direct_floats_launch import direct_floats, direct_floats_source
from .epilogue import HopperTerms, TermKinds
from .few import Form
from .few_launch import few_floats, few_floats_source
from .floats import FloatForm
from .packed import gemm_packed
from .parts import reserve_parts, sum_of_parts


def packed_source(
    tile: tune.Packed,
    form: Form | FloatForm,
    x: torch.dtype,
    out: torch.dtype,
    forms: HopperTerms,
    kinds: TermKinds,
    factor: str = "*u8",
    zero_point: str = "*u8",
) -> GluonASTSource:
    signature = {
        "x_desc": descriptor_form(x, [tile.m, 2 * tile.k if form.packed else tile.k]),
        "p_desc": descriptor_form(torch.int8, [tile.n, tile.k]),
        "c_desc": descriptor_form(out, [tile.piece, tile.n // tile.consumers]),
        "factor_ptr": factor,
        "zero_ptr": zero_point,
        "partial_ptr": "*i32" if x is torch.int8 else "*fp32",
        "terms": forms,
        "shape": Shape("i32", "i32", "i32"),
    }
    divisible: dict[Any, int] = {("shape", "n"): ALIGNMENT // out.itemsize, ("shape", "k"): ALIGNMENT}
    return source_of(gemm_packed, signature, {"TILE": tile, "FORM": form, "KINDS": kinds}, divisible)


def finished(p: Problem, made: Any, programs: int) -> _host.Kernel:
    """The compiled kernel with its parameters."""
    m, n, k = p.shape
    kernel, (x, weight, output) = loaded(made, programs), made.metadata.tensordesc_meta
    matrix(kernel, X, x, m, k)
    matrix(kernel, WEIGHT, weight, n, k // 2 if p.weight.is_packed else k)
    matrix(kernel, OUTPUT, output, m, n)
    kernel.address(FACTOR)
    kernel.address(ZEROS)
    kernel.address(PARTS)
    term_parameters(kernel)
    return finish_parameters(kernel, m, n, k)


def many_packed(
    p: Problem, device: torch.device, f: GemmSources, layout: WorkspaceLayout, otherwise: Launch, early: str
) -> Launch:
    """`early` says how the weight may be read before the previous kernel ends (`few.Form`)."""
    m, n, k = p.shape
    group = p.weight_group
    tile = tune.packed(m, n, k, p.element.dtype.itemsize, processors_of(device))
    programs = tile.grid(m, n, processors_of(device))

    def make(arguments: list[Value]) -> _host.Kernel:
        forms, kinds = terms_of(arguments, 1, p.nonlinearity)
        pdl = captures_pdl()
        span, four = 2 * tile.k, 4 * group
        together = 4 if group and k % four == 0 and (four % span == 0 or span % four == 0) else 1
        form = Form(True, group, early if pdl else "no", together)
        factor = "*i32" if together == 4 else "*u8"
        source = packed_source(tile, form, torch.int8, p.element.dtype, forms, kinds, factor)
        return finished(p, compiled(source, 4, pdl, tile.thread_registers), programs)

    parts = layout.get("parts")
    then = sum_of_parts(p, device, tile, parts, epilogue(p), f)
    return launching(device, (*f, parts, None), aligned_only(make), (*VECTORS, FACTOR), then, otherwise)


def weight_only_layout(p: Problem, device: torch.device) -> WorkspaceLayout:
    layout = WorkspaceLayout()
    reserve_parts(layout, p, weight_only_tile(p, device), device)
    return layout


def weight_only(p: Problem, device: torch.device, otherwise: Launch) -> Launch:
    """The linear of float activations; its K is summed in one order for every number of tokens."""
    tile = weight_only_tile(p, device)
    if not isinstance(tile, DirectFloats) or tile.together == 1:
        return _weight_only(p, device, otherwise, tile, VECTORS)
    # Scales that no thread can read in vectors are read one by one.
    one_by_one = _weight_only(p, device, otherwise, replace(tile, together=1), VECTORS)
    return _weight_only(p, device, one_by_one, tile, (*VECTORS, FACTOR, ZEROS))


def _weight_only(
    p: Problem,
    device: torch.device,
    otherwise: Launch,
    tile: tune.Packed | tune.Few | DirectFloats,
    vectors: tuple[int, ...],
) -> Launch:
    m, n, k = p.shape

    def make(arguments: list[Value]) -> _host.Kernel:
        scale, zero_point = arguments[FACTOR], arguments[ZEROS]
        forms, kinds = terms_of(arguments, 1, p.nonlinearity)
        kinds = kinds._replace(scale="none", weight_scale="none")
        pdl = captures_pdl()
        same_type = isinstance(scale, Tensor) and scale.dtype is p.element.dtype
        plain = p.weight.is_packed and zero_point is None and same_type
        form = FloatForm(
            p.weight.is_packed, p.weight is not ElementKind.U4, p.weight_group, plain, "prefetch" if pdl else "no"
        )
        scales = POINTERS[scale.dtype] if isinstance(scale, Tensor) else "*fp32"
        zeros = "*u8" if zero_point is None else "*i32"
        element = p.element.dtype
        if isinstance(tile, DirectFloats):
            source = direct_floats_source(tile, form, element, forms, kinds, n, k, scales, zeros)
            return direct_floats(p, tile, source, device)
        if isinstance(tile, tune.Few):
            return few_floats(p, tile, few_floats_source(tile, form, element, forms, kinds, n, scales, zeros), device)
        source = packed_source(tile, form, element, element, forms, kinds, scales, zeros)
        programs = tile.grid(m, n, processors_of(device))
        return finished(p, compiled(source, 4, pdl, tile.thread_registers), programs)

    f = GemmSources(0, None, None, 1, None, 4, None, 5, 6, 2)
    parts = weight_only_layout(p, device).get("parts")
    unscaled = Epilogue(False, p.nonlinearity.value, scaled=False)
    then = sum_of_parts(p, device, tile, parts, unscaled, f)
    return launching(device, (*f, parts, 3), aligned_only(make), vectors, then, otherwise)
