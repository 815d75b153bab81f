"""Problem: one frozen description of the work. OPS: the table that says which tensors each operation takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from math import prod
from numbers import Integral, Real
from typing import cast

import torch

from .errors import InvalidProblem, Unsupported
from .scope import PerTensor, PerToken, Scope, Shape, View, require_scope
from .types import (
    FLOATS,
    INTEGERS,
    MAX_ZERO_POINT,
    Activation,
    Arithmetic,
    DynamicRangeMode,
    ElementKind,
    OpCategory,
    QuantizeKind,
)

#: What leaves room for sizes in bytes and bits, and for a tile over the end, in 64-bit offsets.
MAX_ELEMENTS = 2**58


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be computed, and on what: kernels and validation know nothing else.

    `shape` is the shape of the float tensor, or `(m, n, k)` for a linear. `element` is the float side, `quantized` the
    integer side (of a linear: its activations). Lawful by construction: a Problem that exists can be computed.
    """

    op: QuantizeKind
    shape: Shape
    element: ElementKind
    quantized: ElementKind
    q_min: int
    q_max: int
    scope: Scope = PerTensor()
    mode: DynamicRangeMode = DynamicRangeMode.SYMMETRIC
    arithmetic: Arithmetic = Arithmetic.DIVIDE
    scale_element: ElementKind = ElementKind.F32
    include_zero: bool = False
    weight: ElementKind = ElementKind.S8
    #: What a linear does to its sums after the bias.
    nonlinearity: Activation = Activation.NONE

    def __post_init__(self) -> None:
        self._require_elements()
        self._require_choices()
        self._require_sizes()
        self._require_range()
        self.scope.view(self.shape)
        if OPS[self.op].dynamic:
            self._require_dynamic()

    def _require_sizes(self) -> None:
        if any(type(size) is not int or size < 0 for size in self.shape):
            if torch._C._get_tracing_state() is not None:  # where sizes are tensors
                raise Unsupported(f"{self.op.value}: torch.jit cannot record it; use torch.export or torch.compile")
            raise InvalidProblem(f"{self.op.value}: expected non-negative integer sizes, got shape {list(self.shape)}")
        linear = OPS[self.op].category is OpCategory.GEMM
        tensors = combinations(self.shape, 2) if linear else (self.shape,)
        if any(prod(sizes) >= MAX_ELEMENTS for sizes in tensors):
            raise InvalidProblem(
                f"{self.op.value}: expected tensors of less than 2**58 elements, got shape {list(self.shape)}"
            )

    def _require_elements(self) -> None:
        row = OPS[self.op]
        if row.operands[0].elements is _quantized:
            floats, integers = "choose one of these, such as f32", "convert it, as with .to(torch.int8), or quantize it"
        else:
            floats, integers = "convert it, as with .to(torch.float32)", "choose one of these, such as s8"
        _require_element("the float tensor", self.element, FLOATS, floats)
        if row.category is OpCategory.GEMM:
            _require_element("quantized activations", self.quantized, (ElementKind.S8, ElementKind.U8), integers)
            remedy = "quantize it; bytes that hold pairs are weight_element='s4'"
            _require_element("the weight", self.weight, (ElementKind.S8, ElementKind.S4), remedy)
            return
        _require_element("the quantized tensor", self.quantized, INTEGERS, integers)
        if self.nonlinearity is not Activation.NONE:
            raise InvalidProblem(f"{self.op.value}: only linears have an activation, got {self.nonlinearity}")

    def _require_choices(self) -> None:
        require_scope(self.scope)
        if type(self.include_zero) is not bool:
            raise InvalidProblem(f"include_zero: expected True or False, got {self.include_zero!r}")
        choices: tuple[tuple[str, object, type[Enum]], ...] = (
            ("mode", self.mode, DynamicRangeMode),
            ("arithmetic", self.arithmetic, Arithmetic),
            ("nonlinearity", self.nonlinearity, Activation),
        )
        for name, value, kind in choices:
            if not isinstance(value, kind):
                members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
                raise InvalidProblem(f"{name}: expected one of {members}, got {value!r}")

    def _require_range(self) -> None:
        kind, low, high = self.quantized, self.q_min, self.q_max
        _require_integers(low, high)
        if not low <= high:
            raise InvalidProblem(f"expected q_min <= q_max, got q_min={low}, q_max={high}; swap them")
        if low < kind.q_min or high > kind.q_max:
            raise InvalidProblem(
                f"expected q_min and q_max inside {kind.value}'s range [{kind.q_min}, {kind.q_max}], "
                f"got [{low}, {high}]; narrow the range or choose a wider element"
            )

    def _require_dynamic(self) -> None:
        if self.mode is DynamicRangeMode.SYMMETRIC and self.q_max <= 0:
            raise InvalidProblem(
                f"symmetric mode divides by q_max: expected q_max > 0, got {self.q_max}; use mode='asymmetric'"
            )
        if self.mode is DynamicRangeMode.ASYMMETRIC and self.q_max == self.q_min:
            raise InvalidProblem(
                f"asymmetric mode divides by q_max - q_min: expected q_min < q_max, got both {self.q_min}"
            )
        stored = scale_elements(self.element)
        _require_element("the stored scale", self.scale_element, stored, "leave it out for the first of these")

    @property
    def view(self) -> View:
        return self.scope.view(self.shape)

    @property
    def segment_shape(self) -> Shape:
        """The shape of the scales and zero points."""
        return self.scope.scale_shape(self.shape)

    @property
    def accumulator_limit(self) -> int:
        """The largest K whose sum of products always fits int32, the zero point's correction included."""
        activation = 255 if self.mode is DynamicRangeMode.ASYMMETRIC else max(-self.q_min, self.q_max)
        return (2**31 - 1) // (activation * -self.weight.q_min)


def scale_elements(element: ElementKind) -> tuple[ElementKind, ...]:
    """The storage types of a dynamic scale, the default first: f32, or the input's own type."""
    return (ElementKind.F32, element) if element.bits == 16 else (element,)


def fake_storage(q_min: int, q_max: int) -> ElementKind:
    """The 8-bit kind whose range a fake-quantization stays inside; it stores nothing."""
    _require_integers(q_min, q_max)
    for kind in (ElementKind.S8, ElementKind.U8):
        if kind.q_min <= q_min and q_max <= kind.q_max:
            return kind
    raise InvalidProblem(f"expected a range inside s8's [-128, 127] or u8's [0, 255], got [{q_min}, {q_max}]")


def _require_integers(q_min: object, q_max: object) -> None:
    if type(q_min) is not int or type(q_max) is not int:
        raise InvalidProblem(f"expected integers q_min and q_max, got {q_min!r} and {q_max!r}")


def _require_element(what: str, kind: ElementKind, accepted: tuple[ElementKind, ...], remedy: str) -> None:
    if kind not in accepted:
        names = ", ".join(k.value for k in accepted)
        raise Unsupported(f"{what}: expected one of {names}, got {kind.value}; {remedy}")


# -- the op table ------------------------------------------------------------------------------------------------

Kinds = tuple[ElementKind, ...]


#: The built-in type first: it is answered without asking the abstract one.
_REALS, _INTEGRALS = (float, Real), (int, Integral)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The Python numbers that may stand for a tensor, the same for every segment: those between `low` and `high`."""

    low: float
    high: float
    kind: type[float] | type[int]
    expected: str

    def require(self, name: str, value: object) -> None:
        kinds = _INTEGRALS if self.kind is int else _REALS
        if isinstance(value, kinds) and not isinstance(value, bool):
            # Other libraries' scalars would round the limits to their own type.
            number = value if isinstance(value, int | float) else self.kind(cast(float, value))
            if self.low < number < self.high:
                return
        raise InvalidProblem(f"{name}: expected {self.expected}, or a tensor, got {value!r}")


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor of an operation. `elements` lists what is accepted; the first is what baracuda allocates."""

    name: str
    elements: Callable[[Problem], Kinds]
    shape: Callable[[Problem], Shape]
    output: bool = False
    #: Whether it may be None.
    optional: bool = False
    #: Set where a Python number may stand for the tensor.
    number: Callable[[Problem], Numbers] | None = None


@dataclass(frozen=True, slots=True)
class OpRow:
    """An operation: its tensors in launch order, and the few facts validation needs."""

    operands: tuple[Operand, ...]
    category: OpCategory = OpCategory.QUANTIZATION
    #: The scale is computed from the data, so mode, include_zero and scale_element matter.
    dynamic: bool = False
    #: Output i depends on input i alone, so an output may be one of the inputs.
    elementwise: bool = False


def _float(p: Problem) -> Kinds:
    return (p.element,)


def _quantized(p: Problem) -> Kinds:
    return (p.quantized,)


def _static_scale(p: Problem) -> Kinds:
    return (p.element.math, p.element) if p.element.bits == 16 else (p.element, ElementKind.F32)


def _stored_scale(p: Problem) -> Kinds:
    return (p.scale_element,)


def _math(p: Problem) -> Kinds:
    return (p.element.math,)


def _int32(p: Problem) -> Kinds:
    return (ElementKind.S32,)


def _whole(p: Problem) -> Shape:
    return p.shape


def packed_shape(shape: Shape, kind: ElementKind) -> Shape:
    """The shape in storage: two 4-bit elements share a byte along the last axis."""
    return (*shape[:-1], (shape[-1] + 1) // 2) if kind.is_packed and shape else shape


def _stored(p: Problem) -> Shape:
    return packed_shape(p.shape, p.quantized)


def _segments(p: Problem) -> Shape:
    return p.segment_shape


def _m_k(p: Problem) -> Shape:
    return (p.shape[0], p.shape[2])


def _n_k(p: Problem) -> Shape:
    return packed_shape(p.shape[1:], p.weight)


def _m_n(p: Problem) -> Shape:
    return p.shape[:2]


def _m(p: Problem) -> Shape:
    return p.shape[:1]


def _n(p: Problem) -> Shape:
    return p.shape[1:2]


#: Between these a number rounds to a finite, non-zero value of the math type.
_SCALE_LIMITS = {ElementKind.F32: (2.0**-150, 2.0**128 - 2.0**103), ElementKind.F64: (0.0, float("inf"))}


def scale_numbers(p: Problem) -> Numbers:
    return Numbers(*_SCALE_LIMITS[p.element.math], float, f"a number that is finite and > 0 in {p.element.math.value}")


def _integers(low: int, high: int) -> Numbers:
    return Numbers(low - 1, high + 1, int, f"an integer in [{low}, {high}]")


def zero_point_numbers(p: Problem) -> Numbers:
    return _integers(-MAX_ZERO_POINT, MAX_ZERO_POINT)


def activation_zero_point_numbers(p: Problem) -> Numbers:
    return _integers(p.quantized.q_min, p.quantized.q_max)


_SCALE = Operand("scale", _static_scale, _segments, number=scale_numbers)
_ZERO_POINT = Operand("zero_point", _int32, _segments, optional=True, number=zero_point_numbers)
_SCALE_OUT = Operand("scale_out", _stored_scale, _segments, output=True)
_ZERO_POINT_OUT = Operand("zero_point_out", _int32, _segments, output=True, optional=True)
_INPUT = Operand("input", _float, _whole)
_WEIGHTS = (
    Operand("weight_q", lambda p: (p.weight,), _n_k),
    Operand("weight_scale", _static_scale, _n, number=scale_numbers),
    Operand("bias", _static_scale, _n, optional=True),
    Operand("weight_sum", _int32, _n, optional=True),
    Operand("residual", _float, _m_n, optional=True),
)
_LINEAR_OUT = Operand("output", _float, _m_n, output=True)


def _backward(forward_input: Operand) -> OpRow:
    return OpRow(
        (
            forward_input,
            Operand("grad_output", _float, _whole),
            _SCALE,
            _ZERO_POINT,
            Operand("grad_input", _float, _whole, output=True),
        ),
        elementwise=True,
    )


OPS: dict[QuantizeKind, OpRow] = {
    QuantizeKind.QUANTIZE: OpRow(
        (_INPUT, _SCALE, _ZERO_POINT, Operand("output", _quantized, _stored, output=True)), elementwise=True
    ),
    QuantizeKind.DEQUANTIZE: OpRow(
        (
            Operand("input", _quantized, _stored),
            _SCALE,
            _ZERO_POINT,
            Operand("output", _float, _whole, output=True),
        ),
        elementwise=True,
    ),
    QuantizeKind.FAKE_QUANTIZE: OpRow(
        (_INPUT, _SCALE, _ZERO_POINT, Operand("output", _float, _whole, output=True)), elementwise=True
    ),
    QuantizeKind.QUANTIZE_BACKWARD: _backward(_INPUT),
    QuantizeKind.DEQUANTIZE_BACKWARD: _backward(Operand("input", _quantized, _stored, optional=True)),
    QuantizeKind.FAKE_QUANTIZE_BACKWARD: _backward(_INPUT),
    QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD: OpRow(
        (
            *_backward(_INPUT).operands,
            Operand("grad_scale", _math, _segments, output=True),
            Operand("grad_zero_point", _math, _segments, output=True),
        )
    ),
    QuantizeKind.DYNAMIC_QUANTIZE: OpRow(
        (_INPUT, _SCALE_OUT, _ZERO_POINT_OUT, Operand("output", _quantized, _stored, output=True)), dynamic=True
    ),
    QuantizeKind.CHOOSE_QPARAMS: OpRow((_INPUT, _SCALE_OUT, _ZERO_POINT_OUT), dynamic=True),
    QuantizeKind.DYNAMIC_FAKE_QUANTIZE: OpRow(
        (_INPUT, _SCALE_OUT, _ZERO_POINT_OUT, Operand("output", _float, _whole, output=True)), dynamic=True
    ),
    QuantizeKind.QUANTIZED_LINEAR: OpRow(
        (
            Operand("activation", _float, _m_k),
            *_WEIGHTS,
            Operand("act_q_scratch", _quantized, _m_k, output=True, optional=True),
            Operand("act_scale_scratch", _stored_scale, _m, output=True, optional=True),
            _LINEAR_OUT,
        ),
        category=OpCategory.GEMM,
        dynamic=True,
    ),
    QuantizeKind.SMOOTHQUANT_LINEAR: OpRow(
        (
            Operand("act_q", _quantized, _m_k),
            Operand("act_scale", _static_scale, lambda p: (), number=scale_numbers),
            Operand("act_zero_point", _int32, lambda p: (), optional=True, number=activation_zero_point_numbers),
            *_WEIGHTS,
            _LINEAR_OUT,
        ),
        category=OpCategory.GEMM,
    ),
}


def needed(p: Problem, operand: Operand) -> bool:
    """Whether this problem cannot do without the operand."""
    if operand.name == "zero_point_out":
        return p.mode is DynamicRangeMode.ASYMMETRIC
    return not operand.optional


def epilogue_formula(p: Problem) -> str:
    """What a linear makes of its exact integer sums, for `plan.sku()`; bias and residual where a call gives them."""
    sums = "(acc - zero_point * weight_sum)" if p.mode is DynamicRangeMode.ASYMMETRIC else "acc"
    scaled = f"({sums} * scale_a) * scale_w + bias"
    return f"{scaled if p.nonlinearity is Activation.NONE else f'{p.nonlinearity.value}({scaled})'} + residual"


def activation_problem(p: Problem) -> Problem:
    """The dynamic quantization of the activations inside a quantized linear: per token, zero kept representable."""
    return Problem(
        QuantizeKind.DYNAMIC_QUANTIZE,
        (p.shape[0], p.shape[2]),
        p.element,
        p.quantized,
        p.q_min,
        p.q_max,
        PerToken(),
        p.mode,
        p.arithmetic,
        p.scale_element,
        include_zero=True,
    )
