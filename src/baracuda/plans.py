"""The named plans: each a docstring, an op, a descriptor and its arguments. The base class does the rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import attrgetter

import torch
from torch import Tensor

from .backends.registry import Value
from .errors import InvalidProblem
from .plan import Plan
from .problem import Problem, fake_storage, require_activation_zero_point, require_scale, scale_elements
from .scope import PerChannel, PerGroup, PerTensor, PerToken, Scope, Shape
from .types import Arithmetic, DynamicRangeMode, ElementKind, QuantizeKind

Element = ElementKind | torch.dtype | str

# -- descriptors: which elements share a scale ... ---------------------------------------------------------------


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
        return tuple(self.shape), PerChannel(self.axis)


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
    arithmetic: Arithmetic = Arithmetic.DIVIDE

    def _elements(self) -> tuple[ElementKind, ElementKind]:
        return ElementKind.of(self.input_element), ElementKind.of(self.output_element)

    def problem(self, op: QuantizeKind) -> Problem:
        shape, scope = self._layout()
        element, quantized = self._elements()
        return Problem(op, shape, element, quantized, self.q_min, self.q_max, scope, arithmetic=self.arithmetic)


@dataclass(frozen=True)
class _Dequantize(_Quantize):
    """Integers come in and floats go out; the range is that of the integers and changes no result."""

    def _elements(self) -> tuple[ElementKind, ElementKind]:
        return ElementKind.of(self.output_element), ElementKind.of(self.input_element)


@dataclass(frozen=True)
class QuantizePerTensorDescriptor(_Quantize, _PerTensor):
    pass


@dataclass(frozen=True)
class QuantizePerChannelDescriptor(_Quantize, _PerChannel):
    pass


@dataclass(frozen=True)
class QuantizePerTokenDescriptor(_Quantize, _PerToken):
    pass


@dataclass(frozen=True)
class QuantizePerGroupDescriptor(_Quantize, _PerGroup):
    pass


@dataclass(frozen=True)
class DequantizePerTensorDescriptor(_Dequantize, _PerTensor):
    pass


@dataclass(frozen=True)
class DequantizePerChannelDescriptor(_Dequantize, _PerChannel):
    pass


@dataclass(frozen=True)
class DequantizePerTokenDescriptor(_Dequantize, _PerToken):
    pass


@dataclass(frozen=True)
class DequantizePerGroupDescriptor(_Dequantize, _PerGroup):
    pass


@dataclass(frozen=True)
class FakeQuantizeDescriptor:
    """`shape` and `scope` widen the original's flat per-tensor form; a given shape must hold `numel` elements."""

    numel: int
    q_min: int
    q_max: int
    input_element: Element
    scope: Scope = PerTensor()
    shape: Shape | None = None
    arithmetic: Arithmetic = Arithmetic.DIVIDE

    def problem(self, op: QuantizeKind) -> Problem:
        shape = (self.numel,) if self.shape is None else tuple(self.shape)
        if prod(shape) != self.numel:
            raise InvalidProblem(f"expected a shape of numel={self.numel} elements, got {list(shape)}: {prod(shape)}")
        element, storage = ElementKind.of(self.input_element), fake_storage(self.q_min, self.q_max)
        return Problem(op, shape, element, storage, self.q_min, self.q_max, self.scope, arithmetic=self.arithmetic)


@dataclass(frozen=True)
class DynamicRangeQuantizeDescriptor:
    """Rows of an `[n, d]` tensor, or `shape` of any rank in place of both."""

    n: int | None = None
    d: int | None = None
    q_min: int = -127
    q_max: int = 127
    mode: DynamicRangeMode = DynamicRangeMode.SYMMETRIC
    scope: Scope = PerToken()
    input_element: Element = ElementKind.F32
    output_element: Element = ElementKind.S8
    scale_element: Element | None = None
    include_zero: bool = False
    shape: Shape | None = None
    arithmetic: Arithmetic = Arithmetic.DIVIDE

    def problem(self, op: QuantizeKind) -> Problem:
        element = ElementKind.of(self.input_element)
        return Problem(
            op,
            self._shape(),
            element,
            ElementKind.of(self.output_element),
            self.q_min,
            self.q_max,
            self.scope,
            self.mode,
            self.arithmetic,
            stored_scale_element(self.scale_element, element),
            self.include_zero,
        )

    def _shape(self) -> Shape:
        if self.shape is not None and self.n is None and self.d is None:
            return tuple(self.shape)
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
    mode: DynamicRangeMode = DynamicRangeMode.SYMMETRIC
    quantized_element: Element = ElementKind.S8
    scale_element: Element | None = None
    arithmetic: Arithmetic = Arithmetic.DIVIDE

    def problem(self, op: QuantizeKind) -> Problem:
        element = ElementKind.of(self.activation_element)
        return Problem(
            op,
            (self.m, self.c_out, self.k),
            element,
            ElementKind.of(self.quantized_element),
            self.q_min,
            self.q_max,
            mode=self.mode,
            arithmetic=self.arithmetic,
            scale_element=stored_scale_element(self.scale_element, element),
            weight=ElementKind.of(self.weight_element),
        )


@dataclass(frozen=True)
class SmoothQuantLinearDescriptor:
    """The static scale of the activations is part of the description; asymmetric ones add their zero point."""

    m: int
    n: int
    k: int
    act_scale: float
    activation_element: Element = ElementKind.S8
    weight_element: Element = ElementKind.S8
    output_element: Element = ElementKind.F32
    act_zero_point: int = 0

    def problem(self, op: QuantizeKind) -> Problem:
        problem = smoothquant_problem(
            (self.m, self.n, self.k),
            ElementKind.of(self.output_element),
            ElementKind.of(self.activation_element),
            ElementKind.of(self.weight_element),
            symmetric=self.act_zero_point == 0,
        )
        require_scale(problem, self.act_scale)
        require_activation_zero_point(problem, self.act_zero_point)
        return problem


def stored_scale_element(requested: Element | None, element: ElementKind) -> ElementKind:
    return scale_elements(element)[0] if requested is None else ElementKind.of(requested)


def smoothquant_problem(
    shape: Shape, element: ElementKind, activation: ElementKind, weight: ElementKind, *, symmetric: bool
) -> Problem:
    return Problem(
        QuantizeKind.SMOOTHQUANT_LINEAR,
        shape,
        element,
        activation,
        activation.q_min,
        activation.q_max,
        mode=DynamicRangeMode.SYMMETRIC if symmetric else DynamicRangeMode.ASYMMETRIC,
        weight=weight,
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
    """`weight_sum` (int32 row sums of the weight) spares asymmetric runs a pass over it. Scratch receives what it names."""

    activation: Tensor
    weight_q: Tensor
    weight_scale: Tensor | float
    output: Tensor
    bias: Tensor | None = None
    weight_sum: Tensor | None = None
    act_q_scratch: Tensor | None = None
    act_scale_scratch: Tensor | None = None


@dataclass(slots=True)
class SmoothQuantLinearArgs:
    act_q: Tensor
    weight_q: Tensor
    weight_scale: Tensor | float
    output: Tensor
    bias: Tensor | None = None
    weight_sum: Tensor | None = None


# -- plans -------------------------------------------------------------------------------------------------------


class QuantizePerTensorPlan(Plan[QuantizePerTensorDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale) + zero_point, q_min, q_max): one scale for the tensor."""

    op = QuantizeKind.QUANTIZE


class DequantizePerTensorPlan(Plan[DequantizePerTensorDescriptor, QuantizeArgs]):
    """y = (q - zero_point) * scale: one scale for the tensor."""

    op = QuantizeKind.DEQUANTIZE


class QuantizePerTensorBackwardPlan(Plan[QuantizePerTensorDescriptor, BackwardArgs]):
    """dx = dy / scale where x was in range, else 0: one scale for the tensor."""

    op = QuantizeKind.QUANTIZE_BACKWARD


class DequantizePerTensorBackwardPlan(Plan[DequantizePerTensorDescriptor, BackwardArgs]):
    """dq = dy * scale: one scale for the tensor."""

    op = QuantizeKind.DEQUANTIZE_BACKWARD


class QuantizePerChannelPlan(Plan[QuantizePerChannelDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale[c]) + zero_point[c], q_min, q_max): one scale for each index of an axis."""

    op = QuantizeKind.QUANTIZE


class DequantizePerChannelPlan(Plan[DequantizePerChannelDescriptor, QuantizeArgs]):
    """y = (q - zero_point[c]) * scale[c]: one scale for each index of an axis."""

    op = QuantizeKind.DEQUANTIZE


class QuantizePerChannelBackwardPlan(Plan[QuantizePerChannelDescriptor, BackwardArgs]):
    """dx = dy / scale[c] where x was in range, else 0: one scale for each index of an axis."""

    op = QuantizeKind.QUANTIZE_BACKWARD


class DequantizePerChannelBackwardPlan(Plan[DequantizePerChannelDescriptor, BackwardArgs]):
    """dq = dy * scale[c]: one scale for each index of an axis."""

    op = QuantizeKind.DEQUANTIZE_BACKWARD


class QuantizePerTokenPlan(Plan[QuantizePerTokenDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale[n]) + zero_point[n], q_min, q_max): one scale for each row."""

    op = QuantizeKind.QUANTIZE


class DequantizePerTokenPlan(Plan[DequantizePerTokenDescriptor, QuantizeArgs]):
    """y = (q - zero_point[n]) * scale[n]: one scale for each row."""

    op = QuantizeKind.DEQUANTIZE


class QuantizePerTokenBackwardPlan(Plan[QuantizePerTokenDescriptor, BackwardArgs]):
    """dx = dy / scale[n] where x was in range, else 0: one scale for each row."""

    op = QuantizeKind.QUANTIZE_BACKWARD


class DequantizePerTokenBackwardPlan(Plan[DequantizePerTokenDescriptor, BackwardArgs]):
    """dq = dy * scale[n]: one scale for each row."""

    op = QuantizeKind.DEQUANTIZE_BACKWARD


class QuantizePerGroupPlan(Plan[QuantizePerGroupDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale[n, g]) + zero_point[n, g], q_min, q_max): one scale for each group of a row."""

    op = QuantizeKind.QUANTIZE


class DequantizePerGroupPlan(Plan[DequantizePerGroupDescriptor, QuantizeArgs]):
    """y = (q - zero_point[n, g]) * scale[n, g]: one scale for each group of a row."""

    op = QuantizeKind.DEQUANTIZE


class QuantizePerGroupBackwardPlan(Plan[QuantizePerGroupDescriptor, BackwardArgs]):
    """dx = dy / scale[n, g] where x was in range, else 0: one scale for each group of a row."""

    op = QuantizeKind.QUANTIZE_BACKWARD


class DequantizePerGroupBackwardPlan(Plan[DequantizePerGroupDescriptor, BackwardArgs]):
    """dq = dy * scale[n, g]: one scale for each group of a row."""

    op = QuantizeKind.DEQUANTIZE_BACKWARD


class FakeQuantizePlan(Plan[FakeQuantizeDescriptor, QuantizeArgs]):
    """y = dequantize(quantize(x)) in one pass, in any scope."""

    op = QuantizeKind.FAKE_QUANTIZE


class FakeQuantizeBackwardPlan(Plan[FakeQuantizeDescriptor, BackwardArgs]):
    """dx = dy where x was in range, else 0."""

    op = QuantizeKind.FAKE_QUANTIZE_BACKWARD


class DynamicRangeQuantizePlan(Plan[DynamicRangeQuantizeDescriptor, DynamicRangeQuantizeArgs]):
    """The scale of every segment from its own range, then quantize with the scale as stored."""

    op = QuantizeKind.DYNAMIC_QUANTIZE


class QuantizedLinearPlan(Plan[QuantizedLinearDescriptor, QuantizedLinearArgs]):
    """y = x @ W.T with int8 weights, the activations quantized per token on the way in."""

    op = QuantizeKind.QUANTIZED_LINEAR


class SmoothQuantLinearPlan(Plan[SmoothQuantLinearDescriptor, SmoothQuantLinearArgs]):
    """y = (act_scale * weight_scale[n]) * (act_q @ W.T): activations already smoothed and quantized."""

    op = QuantizeKind.SMOOTHQUANT_LINEAR

    def operands(self, args: SmoothQuantLinearArgs) -> tuple[Value, ...]:
        desc = self.descriptor
        return (args.act_q, desc.act_scale, desc.act_zero_point, *_WEIGHTS_AND_OUTPUT(args))


_WEIGHTS_AND_OUTPUT = attrgetter("weight_q", "weight_scale", "bias", "weight_sum", "output")


# The names of the original, where one class serves several plans.
QuantizePerTensorBackwardDescriptor = QuantizePerTensorDescriptor
DequantizePerTensorBackwardDescriptor = DequantizePerTensorDescriptor
QuantizePerTensorArgs = DequantizePerTensorArgs = QuantizeArgs
QuantizePerTensorBackwardArgs = DequantizePerTensorBackwardArgs = BackwardArgs
QuantizePerChannelBackwardDescriptor = QuantizePerChannelDescriptor
DequantizePerChannelBackwardDescriptor = DequantizePerChannelDescriptor
QuantizePerChannelArgs = DequantizePerChannelArgs = QuantizeArgs
QuantizePerChannelBackwardArgs = DequantizePerChannelBackwardArgs = BackwardArgs
QuantizePerTokenBackwardDescriptor = QuantizePerTokenDescriptor
DequantizePerTokenBackwardDescriptor = DequantizePerTokenDescriptor
QuantizePerTokenArgs = DequantizePerTokenArgs = QuantizeArgs
QuantizePerTokenBackwardArgs = DequantizePerTokenBackwardArgs = BackwardArgs
QuantizePerGroupBackwardDescriptor = QuantizePerGroupDescriptor
DequantizePerGroupBackwardDescriptor = DequantizePerGroupDescriptor
QuantizePerGroupArgs = DequantizePerGroupArgs = QuantizeArgs
QuantizePerGroupBackwardArgs = DequantizePerGroupBackwardArgs = BackwardArgs
FakeQuantizeBackwardDescriptor = FakeQuantizeDescriptor
FakeQuantizeArgs, FakeQuantizeBackwardArgs = QuantizeArgs, BackwardArgs

#: The public names of this module: every Descriptor, Args and Plan.
__all__ = sorted(name for name in globals() if name.endswith(("Descriptor", "Args", "Plan")) and name != "Plan" and not name.startswith("_"))  # noqa: PLE0605
