"""From a problem to its results: a cached plan, fresh outputs, and strides the kernel takes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends.registry import Value
from ..core.errors import Unsupported
from ..core.problem import Problem
from ..core.scope import PerTensor, Scope, Shape
from ..core.types import Activation, Arithmetic, DynamicRangeMode, ElementKind, QuantizeKind
from ..plans.plan import SelectedPlan


@lru_cache(maxsize=4096, typed=True)  # 1.0 and True are unlawful where 1 is lawful
def cached_plan(
    device: torch.device,
    op: QuantizeKind,
    shape: Shape,
    element: ElementKind,
    quantized: ElementKind,
    q_min: int,
    q_max: int,
    scope: Scope = PerTensor(),
    mode: DynamicRangeMode = DynamicRangeMode.SYMMETRIC,
    arithmetic: Arithmetic = Arithmetic.DIVIDE,
    scale_element: ElementKind = ElementKind.F32,
    include_zero: bool = False,
    weight: ElementKind = ElementKind.S8,
    activation: Activation = Activation.NONE,
) -> SelectedPlan:
    problem = Problem(
        op,
        tuple(shape),
        element,
        quantized,
        q_min,
        q_max,
        scope,
        mode,
        arithmetic,
        scale_element,
        include_zero,
        weight,
        activation,
    )
    return SelectedPlan(problem, device)


def run(plan: SelectedPlan, operands: tuple[Value, ...]) -> tuple[Any, ...]:
    """Run into given outputs, and return them; those whose strides the kernel does not take are copied to."""
    arranged = plan.arrange(operands)
    copied = [i for i in plan.output_indices if arranged[i] is not operands[i]]
    for i in copied:
        plan.check_output(i, operands[i])
    plan.launch(arranged, plan.allocate_workspace())
    for i in copied:
        operands[i].copy_(arranged[i])  # type: ignore[union-attr, arg-type]
    return tuple([operands[i] for i in plan.output_indices])


_is_traced = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
transform_level = torch._C._functorch.maybe_current_level
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by autograd, for jacobians
_Parameter = torch.nn.Parameter


def audience(*values: object) -> Literal["nobody", "autograd", "torch"]:
    """Who needs to see a call on these values: "nobody", "autograd", or all of "torch".

    Tracers, modes, transforms and tensor subclasses need the operator. Plain tensors outside of all that do not: going
    around the dispatcher cannot be told apart, and costs less than a small kernel.
    """
    if _is_traced():
        return "torch"
    if forward_ad._current_level >= 0:
        _refuse_tangents(values)
        return "torch"
    if _dispatch_modes() or _function_modes() or transform_level() is not None:
        return "torch"
    found: Literal["nobody", "autograd"] = "nobody"
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is _Parameter:
            # The first value says where the call runs; meta among the others is a mix of devices, which a plan refuses.
            # A minus that torch has put off is not in the memory: the dispatcher makes up for it.
            if (value is values[0] and value.is_meta) or value.is_neg() or _is_batched(value):  # type: ignore[attr-defined, arg-type]
                return "torch"
            if value.requires_grad and _is_grad_enabled():  # type: ignore[attr-defined]
                found = "autograd"
        elif isinstance(value, Tensor):
            return "torch"
    return found


def _refuse_tangents(values: tuple[object, ...]) -> None:
    """An operator without a forward derivative would answer with none, which reads as zero."""
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise Unsupported("forward-mode differentiation is not supported; use reverse mode, such as torch.func.vjp")
