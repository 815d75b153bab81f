"""A fake-quantization made ready for plain tensors of one shape, type and device: what can be known before a call, is.

A small training step takes as long as the host needs: a linear and its fake-quantizations leave little to Python.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..autograd import compute, static_key
from ..backends.registry import Value
from ..core.problem import fake_storage
from ..core.types import DynamicRangeMode, ElementKind, QuantizeKind
from ..dispatch.eager import cached_plan
from ..dispatch.operators import rounded
from ..functional import dynamic_key
from ..plans.plan import SelectedPlan

if TYPE_CHECKING:
    from .fake_quantize import FakeQuantize

_MASKED, _LEARNED = QuantizeKind.FAKE_QUANTIZE_BACKWARD, QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD
#: The gradients to x, scale and zero point.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Rounding:
    """A FakeQuantize as its settings are now."""

    def __init__(self, fake: FakeQuantize, x: Tensor, dtype: torch.dtype, recorded: bool) -> None:
        """For tensors like x, their rounded values as `dtype`, and a gradient that is to reach x or not."""
        self.kind, self.dtype, self.recorded = (x.shape, x.dtype, x.device), dtype, recorded
        #: Whether one kernel finds the scale and uses it. The gradient, if any, then passes straight through.
        self.finds_scale = fake.stores_scales_of(x) and (fake.clips_nothing or not recorded)
        if self.finds_scale:
            self.key = dynamic_key(x.dtype, fake.scope, scale_dtype=None, **fake.range_options())
            self.plan = self._plan(QuantizeKind.DYNAMIC_FAKE_QUANTIZE).only("output", dtype=dtype)
        else:
            element, low, high = ElementKind.of(x.dtype), fake.q_min, fake.q_max
            self.key = static_key(element, fake_storage(low, high), low, high, fake.scope, fake.arithmetic)
            self.plan = self._plan(QuantizeKind.FAKE_QUANTIZE).only("output", dtype=dtype)
            self.factor, self.asymmetric = fake.gradient_factor(x), fake.mode is DynamicRangeMode.ASYMMETRIC

    def suits(self, x: Tensor) -> bool:
        """Whether x is like the tensors it is for."""
        return self.plan.fits((x,)) or self.kind == (x.shape, x.dtype, x.device)

    def found(self, x: Tensor) -> Tensor:
        """x rounded by the scale found in it."""
        y = self._computed((x,))
        return _straight_through(x, y) if self.recorded else y

    def given(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """x rounded by this scale, which may learn."""
        y: Tensor = _apply(self, x, scale, zero_point)
        return y

    def _computed(self, inputs: tuple[Value, ...]) -> Tensor:
        y: Tensor = self.plan.compute(inputs)[-1]
        return y if y.dtype is self.dtype else y.to(self.dtype)

    def gradients(self, dy: Tensor, x: Value, scale: Value, zero_point: Value, *, learned: bool) -> Gradients:
        """From the gradient of what was rounded: to x and, where they are learned, to scale and zero point."""
        inputs = (x, dy, scale, rounded(zero_point))
        if not learned:
            return compute(_MASKED, inputs, dy.shape, self.key, plan=self._masked)[0], None, None
        dx, to_scale, to_zero_point = compute(_LEARNED, inputs, dy.shape, self.key, plan=self._learned)
        return dx, to_scale.mul_(self.factor), None if zero_point is None else to_zero_point.mul_(self.factor)

    @cached_property
    def _masked(self) -> SelectedPlan:
        return self._plan(_MASKED)

    @cached_property
    def _learned(self) -> SelectedPlan:
        plan = self._plan(_LEARNED)
        return plan if self.asymmetric else plan.only("grad_input", "grad_scale")

    def _plan(self, op: QuantizeKind) -> SelectedPlan:
        shape, _, device = self.kind
        return cached_plan(device, op, shape, *self.key)


def _straight_through(x: Tensor, y: Tensor) -> Tensor:
    """y with x's gradient, without a Python autograd node.

    `copy_` from x onto its own memory changes nothing but is recorded as CopyBackwards; setting `.data` then puts y in
    its place.
    """
    carrier = x.data.copy_(x)
    carrier.data = y
    return carrier


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        ctx.rounding = rounding
        ctx.save_for_backward(x, scale, zero_point)
        return rounding._computed((x, scale, rounded(zero_point)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Where a gradient's type is not that of its tensor, autograd itself converts it."""
        x, scale, zero_point = ctx.saved_tensors
        dy = dy if dy.dtype is x.dtype else dy.to(x.dtype)
        _, _, to_scale, to_zero_point = ctx.needs_input_grad
        return None, *ctx.rounding.gradients(dy, x, scale, zero_point, learned=to_scale or to_zero_point)


#: `apply` without its search for transforms, which plain tensors are not under.
_apply: Any = super(torch.autograd.Function, _Rounded).apply
