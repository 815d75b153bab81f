"""The eager route: the spec of a call, its cached plan, and which calls may skip torch's dispatcher."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends.registry import Value
from ..core.errors import Unsupported
from ..core.problem import Problem, Spec
from ..core.scope import Shape
from ..core.types import QuantizeKind
from ..plans.plan import SelectedPlan

_log = logging.getLogger(__name__)


@lru_cache(maxsize=4096)
def cached_plan(device: torch.device, op: QuantizeKind, shape: Shape, spec: Spec) -> SelectedPlan:
    plan = SelectedPlan(Problem.of(op, tuple(shape), spec), device)
    _log.debug("%s %s on %s: %s of %s", op.value, list(shape), device, plan.kernel.name, plan.kernel.backend.value)
    return plan


def run(plan: SelectedPlan, operands: tuple[Value, ...]) -> tuple[Any, ...]:
    """Run into the given outputs and return them. Outputs with strides the kernel does not take get a copy."""
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
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # autograd makes these for vectorized jacobians
_Parameter = torch.nn.Parameter


#: The dispatch route of a call: straight to its plan; recorded by autograd alone; through torch's dispatcher.
Route = Literal["plan", "autograd", "torch"]


def route(*values: object) -> Route:
    """The dispatch route of a call on these values.

    Tracers, modes, transforms and tensor subclasses must see the operator, so such calls go through torch's dispatcher.
    Other calls skip it: no one can observe the difference, and the dispatcher takes longer than a small kernel.
    """
    if _is_traced():
        return "torch"
    if forward_ad._current_level >= 0:
        _refuse_tangents(values)
        return "torch"
    if _dispatch_modes() or _function_modes() or transform_level() is not None:
        return "torch"
    found: Literal["plan", "autograd"] = "plan"
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is _Parameter:
            # The first value says where the call runs; meta among the others is a mix of devices, which a plan refuses.
            # A view with the negative bit set has not been negated in memory; the dispatcher negates it.
            if (value is values[0] and value.is_meta) or value.is_neg() or _is_batched(value):  # type: ignore[attr-defined, arg-type]
                return "torch"
            if value.requires_grad and _is_grad_enabled():  # type: ignore[attr-defined]
                found = "autograd"
        elif isinstance(value, Tensor):
            return "torch"
    return found


def _refuse_tangents(values: tuple[object, ...]) -> None:
    """The operators have no forward-mode derivative: torch would return no tangent, which reads as zero."""
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise Unsupported("forward-mode differentiation is not supported; use reverse mode, such as torch.func.vjp")
