"""QATLinear: a float linear that simulates the integer linear it will be converted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..autograd import straight_through
from ..core.errors import InvalidProblem
from ..core.problem import dynamic_range
from ..core.scope import PerChannel, PerTensor, PerToken
from ..core.types import DynamicRangeMode, Element, ElementKind, ModeName
from ..dispatch.eager import route
from ..dispatch.gradients import record_plain
from ..functional import dequantize, dynamic_quantize, quantize, quantized_linear, smoothquant_linear
from ..schemes.formats import WeightFormat
from ..schemes.method import QuantizedWeight
from ..schemes.methods.rtn import round_with
from .autocast import under_autocast
from .fake_quantize import FakeQuantize, Strategy
from .linear import QuantizedLinear, SmoothQuantLinear
from .observers import MovingAverage, Observer
from .requirements import require_computable, require_linear
from .traced import bias_as

Forward = Literal["fake", "integer"]


class QATLinear(nn.Linear):
    """y = fake_quantize(x) @ fake_quantize(W).T + bias.

    Weights are quantized per output channel, symmetrically; activations per token, from their own range
    (`activation_strategy="dynamic"`, which becomes a QuantizedLinear), or with one scale for all of them, observed or
    learned (which becomes a SmoothQuantLinear). `q_min` and `q_max` narrow the range of the activations, to 4 bits for
    example.

    `forward="integer"` computes the value with the integer kernel that serves the converted linear, so that `convert`
    changes no bit of any output. The gradients are those of the formula above.
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
        forward: Forward = "fake",
        observer: type[Observer] = MovingAverage,
        observer_options: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if forward not in get_args(Forward):
            raise InvalidProblem(f"forward: expected one of {', '.join(get_args(Forward))}, got {forward!r}")
        self.in_integers = forward == "integer"
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
        x = under_autocast(x)
        fake: Any = self._modules  # `self.name` finds modules last, after a slow search
        weight_fake, act_fake = fake["weight_fake_quantize"], fake["activation_fake_quantize"]
        if self.in_integers and weight_fake.enabled and act_fake.enabled:
            if weight_fake.clips_nothing and act_fake.clips_nothing and route(x, self.weight, self.bias) != "torch":
                value: Tensor = record_plain(_Integer(self), x, self.weight, self.bias)
                return value
            if weight_fake.clips_nothing and self.weight.dtype is not torch.float64:
                weight, made = self._both_weights(x.dtype)
            else:
                weight, made = weight_fake(self.weight), None
            floats = functional.linear(act_fake(x), weight, self.bias)
            with torch.no_grad():
                value = self.integer_value(x.detach(), made)
            return straight_through(floats, value)
        return functional.linear(act_fake(x), weight_fake(self.weight), self.bias)

    def integer_weight(self) -> tuple[Tensor, Tensor]:
        """The weight's integers and f32 scales, one per output channel, by the scales as they stand."""
        fake, weight = self.weight_fake_quantize, self.weight.detach()
        if fake.strategy == "dynamic" and weight.dtype is not torch.float64:  # whose scales would be f64
            low, high = fake.q_min, fake.q_max
            made = dynamic_quantize(
                weight, scope=PerChannel(0), dtype=self.weight_element, q_min=low, q_max=high, scale_dtype=torch.float32
            )
            return made.q, made.scale
        scale = fake.settled(weight)[0].detach().reshape(-1).to(torch.float32)
        return round_with(weight, scale, WeightFormat(self.weight_element)).q, scale

    def _both_weights(self, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The fake-quantized weight, with the gradient of the weight, and the integers it is made from.

        For a trace: there a fake-quantization could not be stored in another type at once.
        """
        with torch.no_grad():
            made = self.integer_weight()
            kind, size = self.weight_element, self.in_features if self.weight_element.is_packed else None
            floats = dequantize(*made, scope=PerChannel(0), element=kind, dtype=dtype, size=size)
        return straight_through(self.weight.to(dtype), floats), made

    def integer_value(self, x: Tensor, made: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """What the converted linear makes of x, by the scales as they stand. `made` are the weight's integers."""
        weight, scale = self.integer_weight() if made is None else made
        act, kind, bias = self.activation_fake_quantize, self.weight_element, bias_as(self.bias, x.dtype)
        limits: dict[str, Any] = {"dtype": act.element, "q_min": act.q_min, "q_max": act.q_max}
        if act.strategy == "dynamic":
            return quantized_linear(x, weight, scale, bias, mode=act.mode, weight_element=kind, **limits)
        zero_point = None if act.zero_point is None else act.zero_point.round().to(act.element.dtype)
        x_q = quantize(x, act.scale, zero_point, **limits)
        return smoothquant_linear(
            x_q, weight, act.scale, scale, bias, act_zero_point=zero_point, dtype=x.dtype, weight_element=kind
        )

    def convert(self) -> QuantizedLinear | SmoothQuantLinear:
        """The integer linear whose outputs are these: the very same with `forward="integer"`, else within
        `conversion_bound`."""
        act, fake = self.activation_fake_quantize, self.weight_fake_quantize
        fake.require_usable("weight")
        act.require_usable("activations")
        with torch.no_grad():
            weight, scale = self.integer_weight()
        options: dict[str, Any] = {"weight_element": self.weight_element, "activation": act.element}
        options |= {"quantized": QuantizedWeight(weight, scale), "q_min": act.q_min, "q_max": act.q_max}
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


class _Integer:
    """A QATLinear whose ranges clip nothing: the value of its integers, the gradients of its fake-quantized product.

    The inputs are x, weight and bias. The backward rounds x and the weight anew, which takes less than keeping them.
    """

    keeps_inputs: ClassVar[bool] = True

    def __init__(self, linear: QATLinear) -> None:
        self.linear = linear

    def value(self, x: Tensor, *_: Tensor | None) -> Tensor:
        return self.linear.integer_value(x)

    def gradients(self, inputs: tuple[Any, ...], needed: Sequence[bool], dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = inputs
        fakes: Any = self.linear._modules
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if needed[0]:
            dx = (rows @ fakes["weight_fake_quantize"].rounded_as(weight, x.dtype)).view(x.shape)
        if needed[1]:
            dw = rows.T @ fakes["activation_fake_quantize"](x).reshape(-1, x.shape[-1])
        if needed[2]:
            db = rows.sum(0).to(bias.dtype)
        return dx, dw, db
