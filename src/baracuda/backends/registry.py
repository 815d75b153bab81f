"""The registry: an ordered list of kernels, a choice among them, and the reasons of those that declined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..core.errors import Unsupported
from ..core.optable import OPS, epilogue_formula
from ..core.problem import NORMS, Problem
from ..core.scope import PerChannel, PerGroup, PerToken
from ..core.types import (
    BackendKind,
    ElementKind,
    KernelSku,
    MathPrecision,
    OpCategory,
    PlanPreference,
    PrecisionGuarantee,
    QuantizeKind,
)

#: What a launch is handed for one operand.
Value = Tensor | float | int | None


class Launch(Protocol):
    """A kernel bound to one problem. Operands come in the order of the op's row and have been checked."""

    def __call__(self, operands: tuple[Value, ...], workspace: Tensor | None, /) -> None: ...


#: Strides a kernel takes in place: any; row-strided inputs (all axes but the last collapse); contiguous tensors only.
Strides = Literal["any", "rows", "contiguous"]


def contract(problem: Problem) -> PrecisionGuarantee:
    """What a kernel guarantees unless it says otherwise: one that cannot keep the numerical contract declines."""
    precision = MathPrecision.F64 if problem.element is ElementKind.F64 else MathPrecision.F32
    if problem.op is QuantizeKind.WEIGHT_ONLY_LINEAR:
        return PrecisionGuarantee(
            precision,
            problem.element.math,
            matches_reference=False,
            split_invariant=False,
            relative_error=weight_only_error(problem),
        )
    return PrecisionGuarantee(precision, _accumulator(problem), batch_invariant=_keeps_rows_apart(problem))


def _keeps_rows_apart(problem: Problem) -> bool:
    """Whether a row, one index of the first axis, meets no other: what is found in a segment is found in one row.

    A vector is one row. Linears find their ranges per token, and given scales are the same for every batch.
    """
    found = OPS[problem.op].dynamic or problem.op is QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD
    if not found or OPS[problem.op].category is OpCategory.GEMM:
        return True
    rank, scope = len(problem.shape), problem.scope
    if isinstance(scope, PerChannel):
        return scope.axis in (0, -rank)
    if isinstance(scope, PerGroup):
        return rank == 1 or scope.size == 1 or scope.axis not in (0, -rank)
    return isinstance(scope, PerToken)


def weight_only_error(problem: Problem) -> float:
    """The bound of a float linear's sums: every product and every addition of K rounds at most once.

    Tensor cores cut the products of one instruction to the largest of them, which counts as two roundings.
    """
    unit = 2.0**-53 if problem.element is ElementKind.F64 else 2.0**-24
    return (2 * problem.shape[2] + 8) * unit


def _accumulator(problem: Problem) -> ElementKind:
    if OPS[problem.op].category is OpCategory.GEMM:
        return ElementKind.S32 if problem.shape[2] <= problem.accumulator_limit else ElementKind.S64
    if problem.op in (QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD, *NORMS):
        return ElementKind.F64
    return problem.element.math


def _no_workspace(problem: Problem, device: torch.device) -> int:
    return 0


def _epilogue(problem: Problem, device: torch.device) -> str | None:
    return epilogue_formula(problem) if OPS[problem.op].category is OpCategory.GEMM else None


@dataclass(frozen=True, slots=True)
class Kernel:
    """Why it declines a problem, how much workspace it needs, and how it is launched."""

    name: str
    backend: BackendKind
    ops: frozenset[QuantizeKind]
    declines: Callable[[Problem, torch.device], str | None]
    bind: Callable[[Problem, torch.device], Launch]
    workspace: Callable[[Problem, torch.device], int] = _no_workspace
    #: Whether its launch has memory of its own where it is given no workspace.
    scratch: Callable[[Problem, torch.device], bool] = field(default=lambda problem, device: False)
    #: The instruction set or architecture it runs on, for `plan.sku()`.
    arch: Callable[[torch.device], str] = field(default=lambda device: device.type)
    epilogue: Callable[[Problem, torch.device], str | None] = _epilogue
    #: What it promises about its bits.
    guarantee: Callable[[Problem], PrecisionGuarantee] = contract
    strides: Strides = "contiguous"
    #: Whether f32 values that are its last output may be stored as a 16-bit float instead.
    narrows: bool = False
    #: The outputs it can do without, where nobody reads them.
    spares: Callable[[Problem, torch.device], tuple[str, ...]] = field(default=lambda problem, device: ())

    def sku(self, problem: Problem, device: torch.device) -> KernelSku:
        return KernelSku(
            category=OPS[problem.op].category,
            op=problem.op,
            element=problem.element,
            aux_element=problem.weight if problem.op is QuantizeKind.WEIGHT_ONLY_LINEAR else problem.quantized,
            layout=str(problem.scope),
            epilogue=self.epilogue(problem, device),
            arch=self.arch(device),
            backend=self.backend,
            kernel=self.name,
            precision_guarantee=self.guarantee(problem),
        )


#: Fastest first. Each module offers `KERNELS` and is imported at the first selection; Triton itself when one of its
#: kernels is bound.
BACKENDS: dict[BackendKind, str] = {
    BackendKind.TRITON: "baracuda.backends.triton",
    BackendKind.CPU: "baracuda.backends.cpu",
    BackendKind.REFERENCE: "baracuda.backends.reference",
}
#: Why a backend without a kernel for the operation declines.
NO_KERNEL = "has no kernel for this operation"


def kernels(backend: BackendKind) -> tuple[Kernel, ...]:
    """The kernels of one backend, most preferred first."""
    loaded: tuple[Kernel, ...] = import_module(BACKENDS[backend]).KERNELS
    return loaded


def offers(backend: BackendKind, op: QuantizeKind) -> bool:
    """Whether a backend has kernels for an operation at all."""
    return any(op in kernel.ops for kernel in kernels(backend))


def candidates(
    problem: Problem, device: torch.device, preference: PlanPreference
) -> Iterator[tuple[Kernel, str | None]]:
    """Every kernel for this op in order of preference, with the reason it declines, or None."""
    wanted = preference.prefer_backend
    for backend in BACKENDS:
        for kernel in kernels(backend):
            if problem.op not in kernel.ops:
                continue
            if wanted is not None and wanted is not backend:
                yield kernel, f"prefer_backend is {wanted.name}"
            else:
                yield kernel, kernel.declines(problem, device) or _over_budget(kernel, problem, device, preference)


def choose(problem: Problem, device: torch.device, preference: PlanPreference | None = None) -> Kernel:
    """The first kernel that takes the problem; when none does, every reason is raised."""
    reasons: dict[str, str] = {}
    for kernel, reason in candidates(problem, device, preference or PlanPreference()):
        if reason is None:
            return kernel
        reasons[f"{kernel.backend.value}.{kernel.name}"] = reason
    without = {backend.value: NO_KERNEL for backend in BACKENDS if not offers(backend, problem.op)}
    raise Unsupported(f"no kernel takes {problem} on {device}:", reasons | without)


def _over_budget(kernel: Kernel, problem: Problem, device: torch.device, preference: PlanPreference) -> str | None:
    limit = preference.max_workspace_bytes
    if limit is None or (needed := kernel.workspace(problem, device)) <= limit:
        return None
    return f"needs {needed} bytes of workspace, max_workspace_bytes is {limit}"
