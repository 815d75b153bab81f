"""Linears over integer weights. Their state is plain tensors under the names that checkpoints use."""

from __future__ import annotations

from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..autograd import straight_through
from ..backends.registry import Value
from ..core.errors import InvalidProblem
from ..core.optable import activation_zero_point_numbers, packed_shape, scale_numbers
from ..core.problem import Problem, Spec, dynamic_range
from ..core.scope import PerChannel, PerGroup, PerTensor, Scope
from ..core.types import Activation, Arithmetic, DynamicRangeMode, Element, ElementKind, ModeName, QuantizeKind, member
from ..dispatch.options import dynamic_spec
from ..functional import dequantize, fake_quantize, quantize, quantized_linear, smoothquant_linear
from ..schemes.formats import WeightFormat
from ..schemes.method import QuantizedWeight
from ..schemes.methods.rtn import round_with, rtn
from .autocast import under_autocast
from .launches import Launches
from .requirements import require_computable, require_linear
from .row_sums import RowSums
from .siblings import Sibling, Traced
from .state import fit_state, one_value
from .tokens import QuantizedTokens, TokenLaunches, token_linear
from .traced import bias_as, dynamic_linear, static_linear, traced_forward

_is_traced = torch.compiler.is_dynamo_compiling


class IntegerLinear(Sibling):
    """What the quantized linears share: `weight`, `weight_scale` and `bias`, how they load, move and are made.

    `weight` holds s8 `[N, K]`, or s4 packed `[N, ceil(K/2)]` bytes; `weight_scale` is f32 `[N, 1]`. An s4 weight in
    groups of `weight_group` elements has `weight_factor` too, uint8 `[N, K / weight_group]`: integers of 0 to 15 that
    the groups are multiplied by. All three are buffers: nothing trains them. Scales follow the module to a device but
    never to another dtype, since an f16 scale can underflow; `bias` is an ordinary parameter and does both.
    """

    #: The buffers that keep their type under `.to(dtype)`, `.half()` and the like.
    _scales: ClassVar[tuple[str, ...]] = ("weight_scale",)
    weight: Tensor
    weight_scale: Tensor
    weight_factor: Tensor | None
    bias: nn.Parameter | None
    _plain_options: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weight_element: Element = ElementKind.S8,
        weight_group: int = 0,
        mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
        activation: Element = ElementKind.S8,
        q_min: int | None = None,
        q_max: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight_element, self.weight_group = ElementKind.of(weight_element, "weight_element"), weight_group
        self.mode, self.activation = member(DynamicRangeMode, mode, "mode"), ElementKind.of(activation, "activation")
        self.q_min, self.q_max = self._range(q_min, q_max)
        require_computable(
            self.weight_element, self.activation, self.mode, self.q_min, self.q_max, weight_group, in_features
        )
        stored = packed_shape((out_features, in_features), self.weight_element)
        self.register_buffer("weight", torch.zeros(stored, dtype=self.weight_element.dtype, device=device))
        self.register_buffer("weight_scale", torch.ones(out_features, 1, dtype=torch.float32, device=device))
        groups = (out_features, in_features // weight_group) if weight_group else None
        ones = None if groups is None else torch.ones(groups, dtype=torch.uint8, device=device)
        self.register_buffer("weight_factor", ones)
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))
        self._row_sums, self._token_launches = RowSums(), TokenLaunches()
        symmetric = self.mode is DynamicRangeMode.SYMMETRIC and self.activation is ElementKind.S8
        self._needs_sums = not symmetric and not weight_group  # of groups the kernels add up the expanded weight
        # For torch.compile, which guards one string by one comparison, but every pair of modules that share an enum
        # member by an expression in Python: hundreds of them before each step of a large model.
        # For the same reason `_member` is set here: a default of the class is looked for in every base class.
        self._member = None
        named = (self.mode.value, self.activation.value, self.weight_element.value, str(self.q_min), str(self.q_max))
        self._plain_options: Any = " ".join(named)

    def _range(self, q_min: int | None, q_max: int | None) -> tuple[int, int]:
        """The range of the activations; that of their type by default."""
        kind = self.activation
        return kind.q_min if q_min is None else q_min, kind.q_max if q_max is None else q_max

    @classmethod
    def _sized_as(cls, linear: nn.Linear, **options: Any) -> Self:
        require_linear(linear)
        has_bias = linear.bias is not None
        return cls(linear.in_features, linear.out_features, has_bias, device=linear.weight.device, **options)

    def _take(
        self, linear: nn.Linear, weight_scale: Tensor | None = None, quantized: QuantizedWeight | None = None
    ) -> Self:
        """Fill from a float linear: with its weight as `quantized`, or else rounded to nearest."""
        weight, format = linear.weight.detach(), WeightFormat(self.weight_element)
        if quantized is None and self.weight_group:
            raise InvalidProblem(
                f"weight_group={self.weight_group}: expected the weight as a method has quantized it; "
                "quantize_model(model, 'w4a8') does that"
            )
        if quantized is None and weight_scale is None:
            quantized = rtn.quantize(weight, format)
        elif quantized is None and weight_scale is not None:
            quantized = round_with(weight, weight_scale.detach().reshape(-1).to(torch.float32), format)
        assert quantized is not None
        self._require_factors(quantized)
        self.weight, self.weight_scale = quantized.q, quantized.scale.view(-1, 1)
        self.weight_factor = None if quantized.factors is None else quantized.factors.to(torch.uint8)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
        return self.train(linear.training)

    def _require_factors(self, quantized: QuantizedWeight) -> None:
        expected, came = self.weight_factor, quantized.factors
        sizes = [None if factors is None else list(factors.shape) for factors in (expected, came)]
        if sizes[0] != sizes[1]:
            raise InvalidProblem(
                f"weight_group={self.weight_group}: expected integer factors of shape {sizes[0]}, got {sizes[1]}"
            )

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float weight these integers stand for."""
        kind = self.weight_element
        size = self.in_features if kind.is_packed else None
        scale, scope = self.weight_scale, cast(Scope, PerChannel(0))
        if self.weight_factor is not None:
            scale, scope = scale * self.weight_factor, PerGroup(self.weight_group)
        return dequantize(self.weight, scale, scope=scope, element=kind, dtype=dtype, size=size)

    def traced_tensors(self) -> Traced:
        return self.weight, self.weight_scale, self.bias, self.weight_factor

    def traced_settings(self) -> str:
        return self._plain_options

    def _weight_sum(self) -> Tensor | None:
        """The weight's row sums, which activations with a zero point, or unsigned ones, need."""
        return self._row_sums(self.weight, self.weight_element, self.in_features) if self._needs_sums else None

    def _of_tokens(self, x: QuantizedTokens) -> Tensor:
        """The linear of activations that were quantized where they were made, in the type they stand for."""
        y = self._token_launches(self, x)
        return token_linear(x, self.traced_tensors(), self._plain_options) if y is None else y

    def _bias_as(self, dtype: torch.dtype) -> Tensor | None:
        return bias_as(self.bias, dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = {name: self._buffers.get(name) for name in self._scales}
        super()._apply(fn, recurse)
        for name, kept in before.items():
            moved = self._buffers.get(name)
            if kept is not None and moved is not None and moved.dtype != kept.dtype:
                self._buffers[name] = kept.to(moved.device)
        self._settle()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Check types first: `copy_` would silently truncate floats to integers."""
        for name, buffer in self._buffers.items():
            value = state_dict.get(prefix + name)
            if buffer is None or value is None:
                continue
            fitted = fit_state(value, buffer, scale=name in self._scales)
            if fitted is None:
                error_msgs.append(
                    f"{prefix + name}: expected {buffer.dtype} of shape {list(buffer.shape)} for {self}, "
                    f"got {value.dtype} of shape {list(value.shape)}"
                )
                state_dict[prefix + name] = buffer
            else:
                state_dict[prefix + name] = fitted
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        groups = f" in groups of {self.weight_group}" if self.weight_group else ""
        activations = f"{self.activation.value}[{self.q_min}, {self.q_max}]"
        kinds = f"weight={self.weight_element.value}{groups}, activation={activations}"
        return f"{sizes}, {kinds}, mode={self.mode.value}"


class QuantizedLinear(IntegerLinear):
    """y = x @ W.T + bias with integer weights, the activations quantized per token on the way in.

    Takes f16, bf16, f32 or f64 activations and gives back the same type. Under autocast it computes in autocast's type,
    as `nn.Linear` does. Gradients reach x and bias; they pass straight through the rounding of the activations.

    `weight` holds s8 `[N, K]`, or s4 packed `[N, ceil(K/2)]` bytes; `weight_scale` is f32 `[N, 1]`;
    `dequantized_weight(dtype)` is the float weight they stand for. `q_min` and `q_max` narrow the range of the
    activations. A symmetric range over u8 `activation`s begins at 0: what is negative becomes 0.
    """

    op: ClassVar[QuantizeKind] = QuantizeKind.QUANTIZED_LINEAR
    launched: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_factor")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._launches = Launches()

    def _spec(self, dtype: torch.dtype) -> Spec:
        mode, activation, low, high = self.mode, self.activation, self.q_min, self.q_max
        whole, divided, none, group = PerTensor(), Arithmetic.DIVIDE, Activation.NONE, self.weight_group
        return dynamic_spec(
            dtype, whole, mode, activation, low, high, None, False, divided, self.weight_element, none, group
        )

    def _operands(self) -> tuple[Value, ...]:
        return self.weight, self.weight_scale.view(-1), self.bias, None, None, self.weight_factor

    def _inputs(self, x: Tensor, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        if self._needs_sums:
            return x, *operands[:3], self._weight_sum(), *operands[4:]
        return x, *operands

    def _range(self, q_min: int | None, q_max: int | None) -> tuple[int, int]:
        return dynamic_range(self.activation, self.mode, q_min, q_max)

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        *,
        weight_scale: Tensor | None = None,
        quantized: QuantizedWeight | None = None,
        **options: Any,
    ) -> Self:
        """Quantize a float linear; the options are those of the constructor.

        `weight_scale`, one per output channel, stands in for the scales of the weight's own range. `quantized` is the
        weight as some method has quantized it.
        """
        return cls._sized_as(linear, **options)._take(linear, weight_scale, quantized)

    def forward(self, x: Tensor) -> Tensor:
        if _is_traced():
            tokens = type(x) is QuantizedTokens  # type: ignore[comparison-overlap]
            return traced_forward(self, x, token_linear if tokens else dynamic_linear)
        if self._member is not None and (y := self._member.share(self, x)) is not None:
            return y
        if type(x) is QuantizedTokens:  # type: ignore[comparison-overlap]
            return self._of_tokens(x)
        if (y := self._launches(self, x)) is not None:
            return y
        x = under_autocast(x)
        return quantized_linear(
            x,
            self.weight,
            self.weight_scale,
            self._bias_as(x.dtype),
            mode=self.mode,
            dtype=self.activation,
            weight_element=self.weight_element,
            weight_sum=self._weight_sum(),
            weight_factor=self.weight_factor,
            q_min=self.q_min,
            q_max=self.q_max,
        )


class SmoothQuantLinear(IntegerLinear):
    """y = quantize(x, input_scale) @ W.T + bias: one static scale for every activation, known from calibration.

    `input_scale` is f32 `[1]`; `input_zero_point`, there when asymmetric, is int8 (uint8 for u8 activations) `[1]`.
    Activations that are integers already are taken as they are; the result is then of type `dtype`. Gradients pass
    straight through the rounding of floats. Everything else, the further options of the constructor included, is as in
    `QuantizedLinear`.
    """

    _scales: ClassVar[tuple[str, ...]] = ("weight_scale", "input_scale")
    input_scale: Tensor
    input_zero_point: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype=dtype, **options)
        device = self.weight.device
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.register_buffer("input_scale", torch.ones(1, dtype=torch.float32, device=device))
        zero = torch.zeros(1, dtype=self.activation.dtype, device=device)
        self.register_buffer("input_zero_point", zero if self.mode is DynamicRangeMode.ASYMMETRIC else None)

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        input_scale: Tensor | float,
        input_zero_point: Tensor | int | None = None,
        *,
        weight_scale: Tensor | None = None,
        quantized: QuantizedWeight | None = None,
        **options: Any,
    ) -> Self:
        """Quantize a float linear whose inputs have the given scale; a zero point makes it asymmetric.

        `weight_scale`, one per output channel, stands in for the scales of the weight's own range. `quantized` is the
        weight as some method has quantized it. The options are those of the constructor.
        """
        mode = DynamicRangeMode.SYMMETRIC if input_zero_point is None else DynamicRangeMode.ASYMMETRIC
        require_linear(linear)
        made = cls._sized_as(linear, **{"mode": mode, "dtype": linear.weight.dtype, **options})
        problem = Problem(QuantizeKind.QUANTIZE, (1,), ElementKind.F32, made.activation, made.q_min, made.q_max)
        made.input_scale = one_value(input_scale, "input_scale", made.input_scale, scale_numbers(problem))
        if input_zero_point is not None and made.input_zero_point is not None:
            numbers = activation_zero_point_numbers(problem)
            made.input_zero_point = one_value(input_zero_point, "input_zero_point", made.input_zero_point, numbers)
        return made._take(linear, weight_scale, quantized)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is QuantizedTokens and _is_traced():  # type: ignore[comparison-overlap]
            return traced_forward(self, x, token_linear)
        if _is_traced():
            y = traced_forward(self, x, static_linear)
        elif self._member is not None and (shared := self._member.share(self, x)) is not None:
            return shared
        elif type(x) is QuantizedTokens:  # type: ignore[comparison-overlap]
            return self._of_tokens(x)
        else:
            y = self._forward(x)
        return straight_through(self._in_floats(x), y) if x.requires_grad and torch.is_grad_enabled() else y

    def _forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            x = under_autocast(x)
            dtype, x_q = x.dtype, self.quantize_input(x)
        else:
            dtype, x_q = self.dtype, x
        return smoothquant_linear(
            x_q,
            self.weight,
            self.input_scale,
            self.weight_scale,
            self._bias_as(dtype),
            act_zero_point=self.input_zero_point,
            dtype=dtype,
            weight_element=self.weight_element,
            weight_sum=self._weight_sum(),
            weight_factor=self.weight_factor,
        )

    def traced_tensors(self) -> Traced:
        return (*super().traced_tensors(), self.input_scale, self.input_zero_point)

    def traced_settings(self) -> str:
        return f"{self._plain_options} {str(self.dtype).removeprefix('torch.')}"

    def _in_floats(self, x: Tensor) -> Tensor:
        """The same linear in floats, for its gradients, which pass straight through the rounding of x."""
        rounded = fake_quantize(x, self.input_scale, self.input_zero_point, q_min=self.q_min, q_max=self.q_max)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(rounded, self.dequantized_weight(x.dtype), bias)

    def quantize_input(self, x: Tensor) -> Tensor:
        """The integers the matrix product sees."""
        return quantize(
            x, self.input_scale, self.input_zero_point, dtype=self.activation, q_min=self.q_min, q_max=self.q_max
        )
