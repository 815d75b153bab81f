"""The op matrix, asked from the registry: every op x scope x element x backend, and the reason of each refusal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..core.optable import OPS, UNQUANTIZED
from ..core.problem import Problem, scale_elements
from ..core.scope import PerChannel, PerGroup, PerTensor, PerToken, Scope
from ..core.types import (
    FLOATS,
    INTEGERS,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    OpCategory,
    PlanPreference,
    QuantizeKind,
)
from .registry import BACKENDS, NO_KERNEL, candidates

SCOPES: tuple[Scope, ...] = (PerTensor(), PerChannel(0), PerToken(), PerGroup(32))


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem of the matrix and what each backend answers to it: None where a kernel takes it, else the reason."""

    problem: Problem
    answers: dict[BackendKind, str | None]

    @property
    def scope_name(self) -> str:
        """The scope of the scales; of a linear, of its activations' scales."""
        if self.problem.op is QuantizeKind.QUANTIZED_LINEAR:
            return PerToken.name
        return self.problem.scope.name

    @property
    def served(self) -> bool:
        return None in self.answers.values()


def cells(device: torch.device) -> Iterator[Cell]:
    """Every cell the public API promises, on a shape of ordinary size."""
    for op, row in OPS.items():
        if row.category is OpCategory.GEMM:
            scopes: tuple[Scope, ...] = (PerTensor(),)
            shape: tuple[int, ...] = (64, 64, 64)
            integers: tuple[ElementKind, ...] = (ElementKind.S8, ElementKind.U8)
            if op is QuantizeKind.WEIGHT_ONLY_LINEAR:
                integers = (ElementKind.S8,)  # its activations stay floats
        elif row.category is OpCategory.FUSED:
            static = op in UNQUANTIZED and not row.dynamic
            scopes, shape = (PerTensor() if static else PerToken(),), (64, 64)
            integers = INTEGERS if op in UNQUANTIZED else (ElementKind.S8,)  # of which there are none
        else:
            scopes, shape, integers = SCOPES, (64, 64), INTEGERS
        modes = tuple(DynamicRangeMode) if row.dynamic else (DynamicRangeMode.SYMMETRIC,)
        for scope, element, kind, mode in itertools.product(scopes, FLOATS, integers, modes):
            if op.value.startswith("fake_quantize") and kind.is_packed:
                continue  # fake quantization stores nothing: a 4-bit range is an 8-bit problem
            stored = scale_elements(element)[0]
            problem = Problem(op, shape, element, kind, kind.q_min, kind.q_max, scope, mode, scale_element=stored)
            yield Cell(problem, _ask(problem, device))


def _ask(problem: Problem, device: torch.device) -> dict[BackendKind, str | None]:
    answers: dict[BackendKind, str | None] = dict.fromkeys(BACKENDS, NO_KERNEL)
    for kernel, reason in candidates(problem, device, PlanPreference()):
        if answers[kernel.backend] is not None:
            answers[kernel.backend] = reason
    return answers
