"""The sm_90 GEMM for few tokens from operands to the device."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonASTSource

from ..... import _host
from .....core.problem import Problem
from ....registry import Launch, Value
from ...launch import ALIGNMENT, POINTERS, captures_pdl, finish_parameters, launching, loaded
from ...sources import WorkspaceLayout
from ...tune import processors_of
from .. import tune
from ..kernels import Shape
from ..launch import GemmSources, epilogue
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
from .epilogue import HopperTerms, TermKinds
from .few import Form, gemm_few
from .few_floats import gemm_few_floats
from .floats import FloatForm
from .parts import sum_of_parts

#: Factors that are read together, as one integer.
FACTORS = {1: "*u8", 2: "*i16", 4: "*i32"}


def few_source(
    tile: tune.Few, form: Form, out: torch.dtype, forms: HopperTerms, kinds: TermKinds, n: int
) -> GluonASTSource:
    signature = {
        "x_desc": _tokens_form(tile, form.packed),
        "w_desc": descriptor_form(torch.int8, [tile.rows, tile.k]),
        "w_ptr": "*i8",
        "factor_ptr": FACTORS[form.factors],
        "out_ptr": "*i32" if tile.apart else POINTERS[out],
        "terms": forms,
        "shape": Shape("i32", "i32", "i32"),
    }
    return source_of(gemm_few, signature, {"TILE": tile, "FORM": form, "KINDS": kinds}, _divisible(n))


def _tokens_form(tile: tune.Few, packed: bool) -> str:
    if packed and not tile.wgmma:
        return descriptor_form(torch.int16, [tile.tokens, tile.k])
    return descriptor_form(torch.int8, [tile.tokens, tile.span(packed)])


def _divisible(n: int) -> dict[Any, int]:
    aligned: dict[Any, int] = dict.fromkeys(("w_ptr", "out_ptr", ("shape", "k")), ALIGNMENT)
    return aligned | {("shape", "n"): min(ALIGNMENT, n & -n)}


def few_floats_source(
    tile: tune.Few,
    form: FloatForm,
    element: torch.dtype,
    forms: HopperTerms,
    kinds: TermKinds,
    n: int,
    scale: str,
    zero_point: str,
) -> GluonASTSource:
    signature = {
        "x_desc": descriptor_form(element, [tile.tokens, 2 * tile.k]),
        "w_desc": descriptor_form(torch.int8, [tile.rows, tile.k]),
        "w_ptr": "*i8",
        "scale_ptr": scale,
        "zero_ptr": zero_point,
        "partial_ptr": "*fp32",
        "out_ptr": POINTERS[element],
        "terms": forms,
        "shape": Shape("i32", "i32", "i32"),
    }
    return source_of(gemm_few_floats, signature, {"TILE": tile, "FORM": form, "KINDS": kinds}, _divisible(n))


def few_floats(p: Problem, tile: tune.Few, source: GluonASTSource, device: torch.device) -> _host.Kernel:
    """The compiled weight-only kernel for few tokens with its parameters."""
    m, n, k = p.shape
    made = compiled(source, tile.warps, captures_pdl(), tile.thread_registers)
    kernel, (x, weight) = loaded(made, tile.grid(n, processors_of(device))), made.metadata.tensordesc_meta
    matrix(kernel, X, x, m, k)
    matrix(kernel, WEIGHT, weight, n, k // 2)
    for argument in (WEIGHT, FACTOR, ZEROS, PARTS, OUTPUT):
        kernel.address(argument)
    term_parameters(kernel)
    return finish_parameters(kernel, m, n, k)


def few_tokens(
    p: Problem,
    device: torch.device,
    f: GemmSources,
    layout: WorkspaceLayout,
    otherwise: Launch,
    tile: tune.Few,
    early: str,
) -> Launch:
    """`early` says how the weight may be read before the previous kernel ends (`few.Form`)."""
    m, n, k = p.shape
    packed, group, fold = p.weight.is_packed, p.weight_group, tile.fold
    pairs = 2 if packed else 1
    registers = tile.thread_registers if packed and tile.wgmma else 0

    def make(arguments: list[Value]) -> _host.Kernel:
        forms, kinds = terms_of(arguments, 1, p.nonlinearity)
        pdl = captures_pdl()
        together = tile.span(packed) // group if group else 1
        together = together if together in FACTORS and k // fold // max(group, 1) % together == 0 else 1
        form = Form(packed, group, early if pdl else "no", together)
        made = compiled(few_source(tile, form, p.element.dtype, forms, kinds, n), tile.warps, pdl, registers)
        kernel, (x, weight) = loaded(made, tile.grid(n, processors_of(device))), made.metadata.tensordesc_meta
        matrix(kernel, X, x, m * fold, k // fold // (1 if tile.wgmma else pairs))
        matrix(kernel, WEIGHT, weight, n * fold, k // fold // pairs)
        kernel.address(WEIGHT)
        kernel.address(FACTOR)
        kernel.address(PARTS if tile.apart else OUTPUT)
        term_parameters(kernel)
        return finish_parameters(kernel, m, n, k)

    parts = layout.get("parts")
    then = sum_of_parts(p, device, tile, parts, epilogue(p), f)
    return launching(device, (*f, parts), aligned_only(make), (*VECTORS, FACTOR), then, otherwise)
