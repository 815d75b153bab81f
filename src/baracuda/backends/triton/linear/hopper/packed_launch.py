"""The sm_90 GEMM with a packed weight for many tokens, from operands to the device."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonASTSource

from ..... import _host
from .....core.problem import Problem
from ....registry import Launch, Value
from ...launch import ALIGNMENT, captures_pdl, finish_parameters, launching, loaded
from ...tune import processors_of
from .. import tune
from ..kernels import Shape
from ..launch import GemmSources
from .binding import (
    FACTOR,
    OUTPUT,
    VECTORS,
    WEIGHT,
    X,
    compiled,
    descriptor_form,
    matrix,
    source_of,
    term_forms,
    term_parameters,
)
from .epilogue import HopperTerms, TermKinds
from .few import Form
from .packed import gemm_packed


def packed_source(
    tile: tune.Packed, form: Form, out: torch.dtype, forms: HopperTerms, kinds: TermKinds
) -> GluonASTSource:
    signature = {
        "x_desc": descriptor_form(torch.int8, [tile.m, 2 * tile.k]),
        "p_desc": descriptor_form(torch.int8, [tile.n, tile.k]),
        "c_desc": descriptor_form(out, [tile.piece, tile.n // 2]),
        "factor_ptr": "*i32" if form.factors == 4 else "*u8",
        "terms": forms,
        "shape": Shape("i32", "i32", "i32"),
    }
    divisible: dict[Any, int] = {("shape", "n"): ALIGNMENT // out.itemsize, ("shape", "k"): ALIGNMENT}
    return source_of(gemm_packed, signature, {"TILE": tile, "FORM": form, "KINDS": kinds}, divisible)


def many_packed(p: Problem, device: torch.device, f: GemmSources, otherwise: Launch, early: str) -> Launch:
    """`early` says how the weight may be read before the previous kernel ends (`few.Form`)."""
    m, n, k = p.shape
    group = p.weight_group
    tile = tune.packed(m, n, p.element.dtype.itemsize)
    programs = min(processors_of(device), tile.tiles(m, n))

    def prepare(arguments: list[Value], aligned: bool) -> _host.Kernel | None:
        if not aligned:
            return None
        _, scale, zero_point, _, weight_scale, bias, _, residual, *_ = arguments
        forms, kinds = term_forms(scale, zero_point, weight_scale, bias, 1, residual, p.nonlinearity)
        pdl = captures_pdl()
        span, four = 2 * tile.k, 4 * group
        together = 4 if group and k % four == 0 and (four % span == 0 or span % four == 0) else 1
        form = Form(True, group, early if pdl else "no", together)
        made = compiled(packed_source(tile, form, p.element.dtype, forms, kinds), 4, pdl)
        kernel, (x, weight, output) = loaded(made, programs), made.metadata.tensordesc_meta
        matrix(kernel, X, x, m, k)
        matrix(kernel, WEIGHT, weight, n, k // 2)
        matrix(kernel, OUTPUT, output, m, n)
        kernel.address(FACTOR)
        term_parameters(kernel)
        return finish_parameters(kernel, m, n, k)

    return launching(device, f, prepare, (*VECTORS, FACTOR), None, otherwise)
