"""Norms and gated products: one native call makes a block of rows and quantizes it while it is in the cache."""

from __future__ import annotations

from math import prod

from ... import _cpu
from ...core.optable import OPS, UNQUANTIZED
from ...core.problem import GATED, Problem, quantization_problem
from ...core.types import NormStyle
from ..registry import Launch
from .elementwise import ACTIVATIONS, ELEMENTS, native_plan

_STYLES = {style: code for code, style in enumerate(NormStyle)}


def bind(p: Problem) -> Launch:
    names = [operand.name for operand in OPS[p.op].operands]

    def place(*wanted: str) -> int:
        return next((names.index(name) for name in wanted if name in names), -1)

    producer = _cpu.Producer(
        p.op in GATED,
        prod(p.shape[:-1]),
        p.shape[-1],
        ELEMENTS[p.element],
        _STYLES[p.norm],
        ACTIVATIONS[p.nonlinearity],
        p.eps,
        native_plan(quantization_problem(p)) if p.op in UNQUANTIZED else None,
        p.adds,
        p.halves,
        len(names),
        place("sum_out"),
        place("scale", "scale_out"),
        place("zero_point", "zero_point_out"),
    )
    return producer.launch
