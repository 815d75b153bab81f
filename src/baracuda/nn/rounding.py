"""A fake-quantization prepared for plain tensors of one shape, type and device: spec, plans and factors are known.

The host's time bounds a small training step, so a call does as little in Python as it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.problem import fake_storage
from ..core.types import DynamicRangeMode, QuantizeKind
from ..dispatch.eager import cached_plan
from ..dispatch.gradients import compute, record_plain
from ..dispatch.operators import rounded
from ..dispatch.options import dynamic_spec, static_spec
from ..plans.plan import SelectedPlan

if TYPE_CHECKING:
    from .fake_quantize import FakeQuantize

_MASKED, _LEARNED = QuantizeKind.FAKE_QUANTIZE_BACKWARD, QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD


class Rounding:
    """A FakeQuantize as its settings are now.

    As a Differentiable, its inputs are x alone where it finds the scale, else x, scale and zero point.
    """

    def __init__(self, fake: FakeQuantize, x: Tensor, dtype: torch.dtype, recorded: bool) -> None:
        """For tensors like x. The result has `dtype`; `recorded` says whether x gets a gradient."""
        self.kind, self.dtype, self.recorded = (x.shape, x.dtype, x.device), dtype, recorded
        #: Whether one kernel finds the scale and uses it. The gradient, if any, then passes straight through.
        self.finds_scale = fake.stores_scales_of(x) and (fake.clips_nothing or not recorded)
        self.keeps_inputs = not self.finds_scale
        if self.finds_scale:
            self.spec = dynamic_spec(x.dtype, fake.scope, scale_dtype=None, **fake.range_options())
            self.plan = self._plan(QuantizeKind.DYNAMIC_FAKE_QUANTIZE).only("output", dtype=dtype)
        else:
            low, high = fake.q_min, fake.q_max
            self.spec = static_spec(x.dtype, fake.scope, fake_storage(low, high), low, high, fake.arithmetic)
            self.plan = self._plan(QuantizeKind.FAKE_QUANTIZE).only("output", dtype=dtype)
            self.factor, self.asymmetric = fake.gradient_factor(x), fake.mode is DynamicRangeMode.ASYMMETRIC

    def suits(self, x: Tensor) -> bool:
        """Whether x has the shape, type and device this was prepared for."""
        return self.plan.fits((x,)) or self.kind == (x.shape, x.dtype, x.device)

    def found(self, x: Tensor) -> Tensor:
        """x rounded by the scale found in it."""
        y: Tensor = record_plain(self, x) if self.recorded else self.value(x)
        return y

    def given(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """x rounded by this scale, which may learn."""
        y: Tensor = record_plain(self, x, scale, zero_point)
        return y

    def value(self, *inputs: Any) -> Tensor:
        if not self.finds_scale:
            x, scale, zero_point = inputs
            inputs = (x, scale, rounded(zero_point))
        y: Tensor = self.plan.compute(inputs)[-1]
        return y if y.dtype is self.dtype else y.to(self.dtype)

    def gradients(self, inputs: tuple[Any, ...], needed: Sequence[bool], dy: Tensor) -> tuple[Tensor | None, ...]:
        """Autograd itself converts a gradient whose type is not that of its tensor."""
        if self.finds_scale:
            return (dy,)
        x, scale, zero_point = inputs
        dy = dy if dy.dtype is x.dtype else dy.to(x.dtype)
        operands = (x, dy, scale, rounded(zero_point))
        if not (needed[1] or needed[2]):
            return compute(_MASKED, operands, dy.shape, self.spec, plan=self._masked)[0], None, None
        dx, to_scale, to_zero_point = compute(_LEARNED, operands, dy.shape, self.spec, plan=self._learned)
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
        return cached_plan(device, op, shape, self.spec)
