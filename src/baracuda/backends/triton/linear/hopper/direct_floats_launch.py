"""The sm_90 weight-only GEMM for the fewest tokens, from operands to the device."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonASTSource

from ..... import _host
from .....core.problem import Problem
from ...launch import ALIGNMENT, POINTERS, captures_pdl, finish_parameters, loaded
from ...tune import processors_of
from ..kernels import Shape
from ..tune_floats import DirectFloats
from .binding import FACTOR, OUTPUT, PARTS, WEIGHT, ZEROS, X, compiled, source_of, term_parameters
from .direct_floats import gemm_direct_floats
from .epilogue import HopperTerms, TermKinds
from .floats import FloatForm


def direct_floats_source(
    tile: DirectFloats,
    form: FloatForm,
    element: torch.dtype,
    forms: HopperTerms,
    kinds: TermKinds,
    n: int,
    k: int,
    scale: str,
    zero_point: str,
) -> GluonASTSource:
    signature = {
        "x_ptr": "*i64",
        "w_ptr": "*i32",
        "scale_ptr": scale,
        "zero_ptr": zero_point,
        "partial_ptr": "*fp32",
        "out_ptr": POINTERS[element],
        "terms": forms,
        "shape": Shape("i32", "i32", "i32"),
    }
    # Rows of words, units and scales are read in vectors, so by what K is divisible counts.
    vectors = ("x_ptr", "w_ptr", "out_ptr", *(("scale_ptr", "zero_ptr") if tile.together > 1 else ()))
    aligned: dict[Any, int] = dict.fromkeys(vectors, ALIGNMENT)
    aligned |= {("shape", "n"): min(ALIGNMENT, n & -n), ("shape", "k"): min(8 * ALIGNMENT * 8, k & -k)}
    return source_of(gemm_direct_floats, signature, {"TILE": tile, "FORM": form, "KINDS": kinds}, aligned)


def direct_floats(p: Problem, tile: DirectFloats, source: GluonASTSource, device: torch.device) -> _host.Kernel:
    """The compiled kernel with its parameters."""
    m, n, k = p.shape
    made = compiled(source, tile.warps, captures_pdl(), tile.thread_registers)
    kernel = loaded(made, tile.grid(n, processors_of(device)))
    for argument in (X, WEIGHT, FACTOR, ZEROS, PARTS, OUTPUT):
        kernel.address(argument)
    term_parameters(kernel)
    return finish_parameters(kernel, m, n, k)
