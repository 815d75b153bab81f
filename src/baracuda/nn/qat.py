"""QATLinear: a float linear that simulates the integer linear it will be converted to."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.problem import dynamic_range
from ..core.scope import PerChannel, PerTensor, PerToken
from ..core.types import DynamicRangeMode, Element, ElementKind, ModeName
from .autocast import under_autocast
from .fake_quantize import FakeQuantize, Strategy
from .linear import QuantizedLinear, SmoothQuantLinear
from .observers import MovingAverage, Observer
from .requirements import require_computable, require_linear


class QATLinear(nn.Linear):
    """y = fake_quantize(x) @ fake_quantize(W).T + bias.

    Weights are quantized per output channel, symmetrically; activations per token, from their own range
    (`activation_strategy="dynamic"`, which becomes a QuantizedLinear), or with one scale for all of them, observed or
    learned (which becomes a SmoothQuantLinear). `q_min` and `q_max` narrow the range of the activations, to 4 bits for
    example.
    """

    weight_element: ElementKind
    weight_fake_quantize: FakeQuantize
    activation_fake_quantize: FakeQuantize

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weight_element: Element = ElementKind.S8,
        weight_strategy: Strategy = "dynamic",
        activation: Element = ElementKind.S8,
        activation_strategy: Strategy = "dynamic",
        mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
        q_min: int | None = None,
        q_max: int | None = None,
        observer: type[Observer] = MovingAverage,
        observer_options: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight_element = ElementKind.of(weight_element, "weight_element")
        low, high = dynamic_range(self.weight_element, DynamicRangeMode.SYMMETRIC)
        self.weight_fake_quantize = FakeQuantize(
            weight_strategy, PerChannel(0), (out_features,), q_min=low, q_max=high, scale_dtype=torch.float32
        )
        self.weight_fake_quantize.as_operand = True
        dynamic = activation_strategy == "dynamic"
        self.activation_fake_quantize = FakeQuantize(
            activation_strategy,
            PerToken() if dynamic else PerTensor(),
            element=activation,
            mode=mode,
            q_min=q_min,
            q_max=q_max,
            observer=observer,
            observer_options=observer_options,
        )
        act = self.activation_fake_quantize
        require_computable(self.weight_element, act.element, act.mode, act.q_min, act.q_max)
        if not self.weight.is_meta:
            self._follow_weight()

    @classmethod
    def from_float(cls, linear: nn.Linear, **options: Any) -> Self:
        """Take over a float linear: the very same parameters, so that an optimizer that has them keeps them.

        The options are those of the constructor.
        """
        require_linear(linear)
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        made.weight, made.bias = linear.weight, linear.bias
        made._follow_weight()
        return made.train(linear.training)

    def _follow_weight(self) -> None:
        """Round on the weight's device, and start its scale, where that is learned, at its range."""
        for fake in (self.weight_fake_quantize, self.activation_fake_quantize):
            fake.to(self.weight.device)
        if self.weight_fake_quantize.strategy == "learned" and not self.weight.is_meta:
            self.weight_fake_quantize.initialise(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        fake: Any = self._modules  # `self.name` finds modules last, after a slow search
        weight = fake["weight_fake_quantize"](self.weight)
        return functional.linear(fake["activation_fake_quantize"](under_autocast(x)), weight, self.bias)

    def convert(self) -> QuantizedLinear | SmoothQuantLinear:
        """The integer linear whose outputs are these, within `conversion_bound`."""
        act = self.activation_fake_quantize
        fake, training = self.weight_fake_quantize, self.weight_fake_quantize.training
        fake.require_usable("weight")
        act.require_usable("activations")
        with torch.no_grad():
            weight_scale, _ = fake.eval().qparams(self.weight)
        fake.train(training)
        options: dict[str, Any] = {"weight_element": self.weight_element, "activation": act.element}
        options |= {"weight_scale": weight_scale, "q_min": act.q_min, "q_max": act.q_max}
        if act.strategy == "dynamic":
            return QuantizedLinear.from_float(self, mode=act.mode, **options)
        zero_point = None if act.zero_point is None else act.zero_point.detach().round()
        return SmoothQuantLinear.from_float(self, act.scale, zero_point, **options)

    @torch.no_grad()
    def conversion_bound(self, x: Tensor) -> Tensor:
        """How far the converted linear's outputs may be from this forward's, element by element.

        Both multiply the same integers. This forward rounds each product of a scale and an integer (u of its type),
        each step of a K-term sum (u of f32, the type matrix libraries sum in) and the result; the converted one rounds
        four times in f32 and once at the end. With A = |x^| @ |W^|.T + |bias| over the fake-quantized operands, to
        first order in the units u: ((K + 8) * u_f32 + 6 * u) * A. Holds for matrix products that keep f32 in f32,
        which excludes TF32.
        """
        x = under_autocast(x)
        scaled, weight = self.activation_fake_quantize(x), self.weight_fake_quantize(self.weight)
        magnitude = scaled.double().abs() @ weight.double().abs().T
        if self.bias is not None:
            magnitude += self.bias.double().abs()
        math = torch.float64 if x.dtype is torch.float64 else torch.float32
        unit, unit_sum = torch.finfo(x.dtype).eps / 2, torch.finfo(math).eps / 2
        bound: Tensor = ((self.in_features + 8) * unit_sum + 6 * unit) * magnitude
        return bound
