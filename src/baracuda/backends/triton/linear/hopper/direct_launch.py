"""The sm_90 GEMM for the fewest tokens and packed weights, from operands to the device."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonASTSource

from ..... import _host
from .....core.problem import Problem
from ....registry import Launch, Value
from ...launch import ALIGNMENT, POINTERS, captures_pdl, finish_parameters, launching, loaded
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
    aligned_only,
    compiled,
    source_of,
    term_parameters,
    terms_of,
)
from .direct import gemm_direct
from .epilogue import HopperTerms, TermKinds
from .few import Form
from .few_launch import FACTORS
from .tokens import Tokens


def direct_source(
    tile: tune.Direct, form: Form, out: torch.dtype, forms: HopperTerms, kinds: TermKinds, n: int, k: int
) -> GluonASTSource:
    signature = {
        "x_ptr": POINTERS[out] if form.tokens else "*i32",
        "w_ptr": "*i32",
        "factor_ptr": FACTORS[form.factors],
        "out_ptr": POINTERS[out],
        "terms": forms,
        "shape": Shape("i32", "i32", "i32"),
    }
    # Rows of words are read in vectors, so by what K is divisible counts.
    aligned: dict[Any, int] = dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), ALIGNMENT)
    aligned |= {("shape", "n"): min(ALIGNMENT, n & -n), ("shape", "k"): min(8 * ALIGNMENT, k & -k)}
    return source_of(gemm_direct, signature, {"TILE": tile, "FORM": form, "KINDS": kinds}, aligned)


def together(tile: tune.Direct, k: int) -> int:
    """Factors that are read as one integer: those of a warp's chunks, none of them another warp's."""
    return next(each for each in (4, 2, 1) if tile.chunks % each == 0 and k // (2 * tile.k) % each == 0)


def direct_tokens(
    p: Problem,
    device: torch.device,
    f: GemmSources,
    otherwise: Launch,
    tile: tune.Direct,
    early: str,
    tokens: Tokens | None = None,
) -> Launch:
    """`early` says how the weight may be read before the previous kernel ends, `tokens` how the activations are
    quantized if they are floats (`few.Form`)."""
    m, n, k = p.shape
    group = p.weight_group

    def make(arguments: list[Value]) -> _host.Kernel:
        forms, kinds = terms_of(arguments, 1, p.nonlinearity, tokens is not None)
        pdl = captures_pdl()
        form = Form(True, group, early if pdl else "no", together(tile, k) if group else 1, tokens=tokens)
        source = direct_source(tile, form, p.element.dtype, forms, kinds, n, k)
        made = compiled(source, tile.warps, pdl, tile.thread_registers)
        kernel = loaded(made, tile.grid(n, processors_of(device)))
        for argument in (X, WEIGHT, FACTOR, OUTPUT):
            kernel.address(argument)
        term_parameters(kernel)
        return finish_parameters(kernel, m, n, k)

    return launching(device, f, aligned_only(make), (*VECTORS, FACTOR), None, otherwise)
