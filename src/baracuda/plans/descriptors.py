"""Descriptors, which lower themselves to a Problem, and the arguments their plans run on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from ..core.errors import InvalidProblem
from ..core.optable import activation_zero_point_numbers, scale_numbers
from ..core.problem import Problem, fake_storage, stored_scale_element
from ..core.scope import PerChannel, PerGroup, PerTensor, PerToken, Scope, Shape
from ..core.types import (
    Activation,
    ActivationName,
    Arithmetic,
    ArithmeticName,
    DynamicRangeMode,
    Element,
    ElementKind,
    ModeName,
    QuantizeKind,
    member,
)

# -- descriptors: which elements share a scale ... ---------------------------------------------------------------


def _sizes(shape: Shape) -> Shape:
    try:
        return tuple(shape)
    except TypeError:
        raise InvalidProblem(f"shape: expected a size for each axis, as in (4096, 4096), got {shape!r}") from None


class _Layout:
    def _layout(self) -> tuple[Shape, Scope]:
        raise NotImplementedError


@dataclass(frozen=True)
class _PerTensor(_Layout):
    numel: int

    def _layout(self) -> tuple[Shape, Scope]:
        return (self.numel,), PerTensor()


@dataclass(frozen=True)
class _PerChannel(_Layout):
    shape: Shape
    axis: int

    def _layout(self) -> tuple[Shape, Scope]:
        return _sizes(self.shape), PerChannel(self.axis)


@dataclass(frozen=True)
class _PerToken(_Layout):
    n: int
    d: int

    def _layout(self) -> tuple[Shape, Scope]:
        return (self.n, self.d), PerToken()


@dataclass(frozen=True)
class _PerGroup(_Layout):
    outer_size: int
    axis_size: int
    group_size: int

    def _layout(self) -> tuple[Shape, Scope]:
        return (self.outer_size, self.axis_size), PerGroup(self.group_size)


# -- ... times what is done with them ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Quantize(_Layout):
    q_min: int
    q_max: int
    input_element: Element
    output_element: Element
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE

    def _elements(self) -> tuple[ElementKind, ElementKind]:
        element = ElementKind.of(self.input_element, "input_element")
        return element, ElementKind.of(self.output_element, "output_element")

    def problem(self, op: QuantizeKind) -> Problem:
        shape, scope = self._layout()
        element, quantized = self._elements()
        arithmetic = member(Arithmetic, self.arithmetic, "arithmetic")
        return Problem(op, shape, element, quantized, self.q_min, self.q_max, scope, arithmetic=arithmetic)


@dataclass(frozen=True)
class _Dequantize(_Quantize):
    """Integers come in and floats go out; the range is that of the integers and changes no result."""

    def _elements(self) -> tuple[ElementKind, ElementKind]:
        return super()._elements()[::-1]


@dataclass(frozen=True)
class QuantizePerTensorDescriptor(_Quantize, _PerTensor):
    """One scale for `numel` elements."""


@dataclass(frozen=True)
class QuantizePerChannelDescriptor(_Quantize, _PerChannel):
    """One scale for each index of `axis`."""


@dataclass(frozen=True)
class QuantizePerTokenDescriptor(_Quantize, _PerToken):
    """One scale for each of `n` rows of `d` elements."""


@dataclass(frozen=True)
class QuantizePerGroupDescriptor(_Quantize, _PerGroup):
    """One scale for each `group_size` elements of the `outer_size` rows of `axis_size`."""


@dataclass(frozen=True)
class DequantizePerTensorDescriptor(_Dequantize, _PerTensor):
    """One scale for `numel` elements."""


@dataclass(frozen=True)
class DequantizePerChannelDescriptor(_Dequantize, _PerChannel):
    """One scale for each index of `axis`."""


@dataclass(frozen=True)
class DequantizePerTokenDescriptor(_Dequantize, _PerToken):
    """One scale for each of `n` rows of `d` elements."""


@dataclass(frozen=True)
class DequantizePerGroupDescriptor(_Dequantize, _PerGroup):
    """One scale for each `group_size` elements of the `outer_size` rows of `axis_size`."""


@dataclass(frozen=True)
class FakeQuantizeDescriptor:
    """`shape` and `scope` widen the original's flat per-tensor form; a given shape must hold `numel` elements."""

    numel: int
    q_min: int
    q_max: int
    input_element: Element
    scope: Scope = PerTensor()
    shape: Shape | None = None
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE

    def problem(self, op: QuantizeKind) -> Problem:
        shape = (self.numel,) if self.shape is None else _sizes(self.shape)
        if prod(shape) != self.numel:
            raise InvalidProblem(f"expected a shape of numel={self.numel} elements, got {list(shape)}: {prod(shape)}")
        element = ElementKind.of(self.input_element, "input_element")
        storage, arithmetic = fake_storage(self.q_min, self.q_max), member(Arithmetic, self.arithmetic, "arithmetic")
        return Problem(op, shape, element, storage, self.q_min, self.q_max, self.scope, arithmetic=arithmetic)


@dataclass(frozen=True)
class DynamicRangeQuantizeDescriptor:
    """Rows of an `[n, d]` tensor, or `shape` of any rank in place of both."""

    n: int | None = None
    d: int | None = None
    q_min: int = -127
    q_max: int = 127
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC
    scope: Scope = PerToken()
    input_element: Element = ElementKind.F32
    output_element: Element = ElementKind.S8
    scale_element: Element | None = None
    include_zero: bool = False
    shape: Shape | None = None
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE

    def problem(self, op: QuantizeKind) -> Problem:
        element = ElementKind.of(self.input_element, "input_element")
        return Problem(
            op,
            self._shape(),
            element,
            ElementKind.of(self.output_element, "output_element"),
            self.q_min,
            self.q_max,
            self.scope,
            member(DynamicRangeMode, self.mode, "mode"),
            member(Arithmetic, self.arithmetic, "arithmetic"),
            stored_scale_element(self.scale_element, element),
            self.include_zero,
        )

    def _shape(self) -> Shape:
        if self.shape is not None and self.n is None and self.d is None:
            return _sizes(self.shape)
        if self.shape is None and self.n is not None and self.d is not None:
            return (self.n, self.d)
        raise InvalidProblem(f"expected either n and d or shape, got n={self.n}, d={self.d}, shape={self.shape}")


@dataclass(frozen=True)
class QuantizedLinearDescriptor:
    """`activation_element` is the float type in and out; `quantized_element` what the activations become inside."""

    m: int
    c_out: int
    k: int
    q_min: int = -127
    q_max: int = 127
    activation_element: Element = ElementKind.F32
    weight_element: Element = ElementKind.S8
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC
    quantized_element: Element = ElementKind.S8
    scale_element: Element | None = None
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE
    activation: Activation | ActivationName = Activation.NONE
    weight_group: int = 0

    def problem(self, op: QuantizeKind) -> Problem:
        element = ElementKind.of(self.activation_element, "activation_element")
        return Problem(
            op,
            (self.m, self.c_out, self.k),
            element,
            ElementKind.of(self.quantized_element, "quantized_element"),
            self.q_min,
            self.q_max,
            mode=member(DynamicRangeMode, self.mode, "mode"),
            arithmetic=member(Arithmetic, self.arithmetic, "arithmetic"),
            scale_element=stored_scale_element(self.scale_element, element),
            weight=ElementKind.of(self.weight_element, "weight_element"),
            nonlinearity=member(Activation, self.activation, "activation"),
            weight_group=self.weight_group,
        )


@dataclass(frozen=True)
class SmoothQuantLinearDescriptor:
    """The static scale of the activations is part of the description; asymmetric ones add their zero point.

    `arithmetic` is taken as everywhere and changes nothing: what comes in is quantized already.
    """

    m: int
    n: int
    k: int
    act_scale: float
    activation_element: Element = ElementKind.S8
    weight_element: Element = ElementKind.S8
    output_element: Element = ElementKind.F32
    act_zero_point: int = 0
    activation: Activation | ActivationName = Activation.NONE
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE
    weight_group: int = 0

    def problem(self, op: QuantizeKind) -> Problem:
        member(Arithmetic, self.arithmetic, "arithmetic")
        kind = ElementKind.of(self.activation_element, "activation_element")
        problem = Problem(
            op,
            (self.m, self.n, self.k),
            ElementKind.of(self.output_element, "output_element"),
            kind,
            kind.q_min,
            kind.q_max,
            mode=DynamicRangeMode.SYMMETRIC if self.act_zero_point == 0 else DynamicRangeMode.ASYMMETRIC,
            weight=ElementKind.of(self.weight_element, "weight_element"),
            nonlinearity=member(Activation, self.activation, "activation"),
            weight_group=self.weight_group,
        )
        scale_numbers(problem).require("act_scale", self.act_scale)
        activation_zero_point_numbers(problem).require("act_zero_point", self.act_zero_point)
        return problem


@dataclass(frozen=True)
class WeightOnlyLinearDescriptor:
    """`activation_element` is the float type in and out; `weight_group` is 0 where a row has one scale."""

    m: int
    n: int
    k: int
    weight_group: int = 0
    activation_element: Element = ElementKind.BF16
    weight_element: Element = ElementKind.S4
    activation: Activation | ActivationName = Activation.NONE

    def problem(self, op: QuantizeKind) -> Problem:
        return Problem(
            op,
            (self.m, self.n, self.k),
            ElementKind.of(self.activation_element, "activation_element"),
            ElementKind.S8,
            ElementKind.S8.q_min,
            ElementKind.S8.q_max,
            weight=ElementKind.of(self.weight_element, "weight_element"),
            nonlinearity=member(Activation, self.activation, "activation"),
            weight_group=self.weight_group,
        )


# -- arguments ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class QuantizeArgs:
    """Of quantize, dequantize and fake-quantize. A number stands for the same value in every segment."""

    input: Tensor
    scale: Tensor | float
    zero_point: Tensor | int | None
    output: Tensor


@dataclass(slots=True)
class BackwardArgs:
    """Of the straight-through backwards; dequantize's reads neither `input` nor `zero_point`, so None will do."""

    input: Tensor | None
    grad_output: Tensor
    scale: Tensor | float
    zero_point: Tensor | int | None
    grad_input: Tensor


@dataclass(slots=True)
class DynamicRangeQuantizeArgs:
    """`zero_point_out` is needed in asymmetric mode; in symmetric mode zeros are written if it is given."""

    input: Tensor
    scale_out: Tensor
    output: Tensor
    zero_point_out: Tensor | None = None


@dataclass(slots=True)
class QuantizedLinearArgs:
    """`weight_sum`, the int32 row sums of the weight, spares asymmetric runs a pass. `residual` is added at the end.
    `act_q_scratch` and `act_scale_scratch`, if given, receive the quantized activations and their scales."""

    activation: Tensor
    weight_q: Tensor
    weight_scale: Tensor | float
    output: Tensor
    bias: Tensor | None = None
    weight_sum: Tensor | None = None
    act_q_scratch: Tensor | None = None
    act_scale_scratch: Tensor | None = None
    residual: Tensor | None = None
    weight_factor: Tensor | None = None


@dataclass(slots=True)
class SmoothQuantLinearArgs:
    """The activations are already quantized; their scale is the descriptor's."""

    act_q: Tensor
    weight_q: Tensor
    weight_scale: Tensor | float
    output: Tensor
    bias: Tensor | None = None
    weight_sum: Tensor | None = None
    residual: Tensor | None = None
    weight_factor: Tensor | None = None


@dataclass(slots=True)
class WeightOnlyLinearArgs:
    """`weight_scale` and `weight_zero_point` are `[N, K / weight_group]`, or `[N, 1]` for one group a row."""

    activation: Tensor
    weight_q: Tensor
    weight_scale: Tensor
    output: Tensor
    weight_zero_point: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
