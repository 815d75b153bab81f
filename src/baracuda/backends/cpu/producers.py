"""Norms and gated products: one native call makes a block of rows and quantizes it while it is in the cache."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import cast

import torch
from torch import Tensor

from ... import _cpu
from ...core.optable import OPS, UNQUANTIZED
from ...core.problem import GATED, Problem, quantization_problem
from ...core.types import NormStyle
from ..registry import Launch, Value
from .elementwise import ACTIVATIONS, DENSE, DTYPES, ELEMENTS, F32, given_scale, given_zero_point, native_plan, pitch
from .elementwise import SMALL as _SMALL

_STYLES = {style: code for code, style in enumerate(NormStyle)}
#: (address of the scales, their type, a number in their place, of the zero points, a number in their place, output)
Target = tuple[int, int, float, int, int, int]


def producer(p: Problem) -> _cpu.Producer:
    return _cpu.Producer(
        p.op in GATED,
        prod(p.shape[:-1]),
        p.shape[-1],
        ELEMENTS[p.element],
        _STYLES[p.norm],
        ACTIVATIONS[p.nonlinearity],
        p.eps,
        native_plan(quantization_problem(p)) if p.op in UNQUANTIZED else None,
    )


def bind(p: Problem) -> Launch:
    run, target = producer(p).run, _target(p)
    small = prod(p.shape) < _SMALL

    def norm(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, addend, weight, bias = cast("tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]", operands[:4])
        added, total = (0, DENSE), 0
        if adds and addend is not None:
            added, total = (addend.data_ptr(), pitch(addend)), cast(Tensor, operands[total_at]).data_ptr()
        threads = 1 if small else torch.get_num_threads()
        run(x.data_ptr(), pitch(x), *added, *_row(weight), *_row(bias), total, *target(operands), threads)  # type: ignore[arg-type]

    def gated(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        gate, up = cast("tuple[Tensor, Tensor]", operands[:2])
        if halves:
            rows = pitch(gate)
            address, across = gate.data_ptr(), 2 * width if rows == DENSE else rows
            both = (address, across, address + width * gate.element_size(), across)
        else:
            both = (gate.data_ptr(), pitch(gate), up.data_ptr(), pitch(up))
        run(*both, 0, F32, 0, F32, 0, *target(operands), 1 if small else torch.get_num_threads())  # type: ignore[arg-type]

    adds, halves, width = p.adds, p.halves, p.shape[-1]
    total_at = next((i for i, operand in enumerate(OPS[p.op].operands) if operand.name == "sum_out"), 0)
    return gated if p.op in GATED else norm


def _row(values: Tensor | None) -> tuple[int, int]:
    return (0, F32) if values is None else (values.data_ptr(), DTYPES[values.dtype])


def _target(p: Problem) -> Callable[[tuple[Value, ...]], Target]:
    """Where the result goes and what it is quantized by, from the operands."""
    names = [operand.name for operand in OPS[p.op].operands]
    out_at = names.index("output")
    if "scale_out" in names:
        at = names.index("scale_out")

        def dynamic(operands: tuple[Value, ...]) -> Target:
            scale, zero_point, out = cast("tuple[Tensor, Tensor | None, Tensor]", operands[at : at + 3])
            return scale.data_ptr(), F32, 1.0, 0 if zero_point is None else zero_point.data_ptr(), 0, out.data_ptr()

        return dynamic
    if "scale" in names:
        at = names.index("scale")

        def static(operands: tuple[Value, ...]) -> Target:
            address, code, _, number = given_scale(operands[at])
            zero_point, _, integer = given_zero_point(operands[at + 1])
            return address, code, number, zero_point, integer, cast(Tensor, operands[out_at]).data_ptr()

        return static
    return lambda operands: (0, F32, 1.0, 0, 0, cast(Tensor, operands[out_at]).data_ptr())
