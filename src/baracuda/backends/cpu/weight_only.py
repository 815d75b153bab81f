"""Linears of float activations and integer weights: one native call, its sums in one order for every batch and CPU."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ... import _cpu
from ...core.problem import Problem
from ..registry import Launch, Value
from .elementwise import ACTIVATIONS, DENSE, DTYPES, ELEMENTS, F32, SMALL, pitch


def native_linear(p: Problem) -> _cpu.WeightOnlyLinear:
    m, n, k = p.shape
    element, weight = ELEMENTS[p.element], ELEMENTS[p.weight]
    return _cpu.WeightOnlyLinear(m, n, k, element, weight, ACTIVATIONS[p.nonlinearity], p.weight_group)


def bind(p: Problem) -> Launch:
    (m, n, k), run = p.shape, native_linear(p).run
    small = m * n * max(k, 1) < SMALL

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, weight, scale = cast("tuple[Tensor, Tensor, Tensor]", operands[:3])
        zero_point, bias, residual = cast("tuple[Tensor | None, Tensor | None, Tensor | None]", operands[3:6])
        run(
            x.data_ptr(), pitch(x), weight.data_ptr(), pitch(weight), scale.data_ptr(), DTYPES[scale.dtype],
            pitch(scale), *_rows(zero_point), *((0, F32) if bias is None else (bias.data_ptr(), DTYPES[bias.dtype])),
            *_rows(residual), 0 if workspace is None else workspace.data_ptr(), cast(Tensor, operands[6]).data_ptr(),
            1 if small else torch.get_num_threads(),
        )  # fmt: skip

    return launch


def _rows(value: Tensor | None) -> tuple[int, int]:
    return (0, DENSE) if value is None else (value.data_ptr(), pitch(value))
