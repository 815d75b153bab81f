"""A fake-quantization made ready for tensors of one shape, type and device: what can be known before the call, is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..autograd import compute, static_key
from ..backends.registry import Value
from ..execute import cached_plan
from ..functional import dynamic_key
from ..ops import rounded
from ..problem import fake_storage
from ..types import ElementKind, QuantizeKind

if TYPE_CHECKING:
    from .fake_quantize import FakeQuantize

_MASKED, _LEARNED = QuantizeKind.FAKE_QUANTIZE_BACKWARD, QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD
#: The gradients to x, scale and zero point.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Rounding:
    """The forward and the backward of a FakeQuantize as its settings are now, below autograd."""

    def __init__(self, fake: FakeQuantize, x: Tensor) -> None:
        #: The tensors it is for.
        self.kind = (x.shape, x.dtype, x.device)
        #: Whether forward finds the scale too, in one pass, and the gradient passes straight through.
        self.straight = fake.clips_nothing and fake.stores_scales_of(x)
        if self.straight:
            key = dynamic_key(x.dtype, fake.scope, scale_dtype=None, **fake.range_options())
            self.plan = cached_plan(x.device, QuantizeKind.DYNAMIC_FAKE_QUANTIZE, x.shape, *key)
            return
        low, high = fake.q_min, fake.q_max
        element, storage = ElementKind.of(x.dtype), fake_storage(low, high)
        self.key = static_key(element, storage, low, high, fake.scope, fake.arithmetic)
        self.plan = cached_plan(x.device, QuantizeKind.FAKE_QUANTIZE, x.shape, *self.key)
        self.backward_plan = cached_plan(x.device, _MASKED, x.shape, *self.key)
        self.learned_plan = cached_plan(x.device, _LEARNED, x.shape, *self.key)
        self.factor = fake.gradient_factor(x)

    def __call__(self, dtype: torch.dtype, x: Tensor, scale: Value = None, zero_point: Value = None) -> Tensor:
        """x rounded, as `dtype`."""
        return self.plan.compute_as(dtype, (x,) if self.straight else (x, scale, rounded(zero_point)))

    def gradients(self, dy: Tensor, x: Value, scale: Value, zero_point: Value, *, learned: bool) -> Gradients:
        """From the gradient of what was rounded: to x and, where they are learned, to scale and zero point.

        Not for what is straight, where dy is all there is.
        """
        inputs = (x, dy, scale, rounded(zero_point))
        if not learned:
            return compute(_MASKED, inputs, dy.shape, self.key, plan=self.backward_plan)[0], None, None
        dx, to_scale, to_zero_point = compute(_LEARNED, inputs, dy.shape, self.key, plan=self.learned_plan)
        return dx, to_scale.mul_(self.factor), None if zero_point is None else to_zero_point.mul_(self.factor)
