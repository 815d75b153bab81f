"""Linears of float activations and integer weights: one native call, its sums in one order for every batch and CPU."""

from __future__ import annotations

from ... import _cpu
from ...core.problem import Problem
from .elementwise import ACTIVATIONS, ELEMENTS


def native_linear(p: Problem) -> _cpu.WeightOnlyLinear:
    m, n, k = p.shape
    element, weight = ELEMENTS[p.element], ELEMENTS[p.weight]
    return _cpu.WeightOnlyLinear(m, n, k, element, weight, ACTIVATIONS[p.nonlinearity], p.weight_group)
