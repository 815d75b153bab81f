"""The op table: which tensors each operation takes, in launch order, and the rules they follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, cast

from .errors import InvalidProblem
from .scope import PerToken, Shape
from .types import MAX_ZERO_POINT, Activation, DynamicRangeMode, ElementKind, OpCategory, QuantizeKind

if TYPE_CHECKING:
    from .problem import Problem

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

    @property
    def takes_integers(self) -> bool:
        """Whether the first input is the quantized tensor."""
        return self.operands[0].elements is _quantized


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


def _n_groups(p: Problem) -> Shape:
    return (p.shape[1], p.shape[2] // p.weight_group if p.weight_group else 0)


def _row(p: Problem) -> Shape:
    return p.shape[-1:]


def _addend(p: Problem) -> Shape:
    """Of what is added before a norm and of the sum: nothing where the problem adds nothing."""
    return p.shape if p.adds else (0,)


def _gate(p: Problem) -> Shape:
    return (*p.shape[:-1], 2 * p.shape[-1]) if p.halves else p.shape


def _up(p: Problem) -> Shape:
    return (0,) if p.halves else p.shape


def _row_values(p: Problem) -> Kinds:
    return (p.element,) if p.element.bits > 16 else (p.element, p.element.math)


def _act_scales(p: Problem) -> Shape:
    return p.shape[:1] if isinstance(p.scope, PerToken) else ()


def _n_segments(p: Problem) -> Shape:
    return (p.shape[1], p.shape[2] // p.weight_group if p.weight_group else 1)


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
    Operand("weight_factor", lambda p: (ElementKind.U8,), _n_groups, optional=True),
)
_FLOAT_WEIGHTS = (
    Operand("weight_q", lambda p: (p.weight,), _n_k),
    Operand("weight_scale", _static_scale, _n_segments),
    Operand("weight_zero_point", _int32, _n_segments, optional=True),
    Operand("bias", _static_scale, _n, optional=True),
    Operand("residual", _float, _m_n, optional=True),
)
_LINEAR_OUT = Operand("output", _float, _m_n, output=True)
_NORM = (
    _INPUT,
    Operand("addend", _float, _addend, optional=True),
    Operand("norm_weight", _row_values, _row, optional=True),
    Operand("norm_bias", _row_values, _row, optional=True),
)
_SUM_OUT = Operand("sum_out", _float, _addend, output=True, optional=True)
_GATED = (Operand("gate", _float, _gate), Operand("up", _float, _up, optional=True))
_FLOATS_OUT = Operand("output", _float, _whole, output=True)
_INTEGERS_OUT = Operand("output", _quantized, _stored, output=True)


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


def _fused(*operands: Operand, dynamic: bool = False) -> OpRow:
    return OpRow(operands, OpCategory.FUSED, dynamic)


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
            Operand("act_scale", _static_scale, _act_scales, number=scale_numbers),
            Operand("act_zero_point", _int32, lambda p: (), optional=True, number=activation_zero_point_numbers),
            *_WEIGHTS,
            _LINEAR_OUT,
        ),
        category=OpCategory.GEMM,
    ),
    QuantizeKind.WEIGHT_ONLY_LINEAR: OpRow(
        (Operand("activation", _float, _m_k), *_FLOAT_WEIGHTS, _LINEAR_OUT), category=OpCategory.GEMM
    ),
    QuantizeKind.NORM: _fused(*_NORM, _SUM_OUT, _FLOATS_OUT),
    QuantizeKind.NORM_QUANTIZE: _fused(*_NORM, _SCALE, _ZERO_POINT, _SUM_OUT, _INTEGERS_OUT),
    QuantizeKind.NORM_DYNAMIC_QUANTIZE: _fused(
        *_NORM, _SUM_OUT, _SCALE_OUT, _ZERO_POINT_OUT, _INTEGERS_OUT, dynamic=True
    ),
    QuantizeKind.GATED: _fused(*_GATED, _FLOATS_OUT),
    QuantizeKind.GATED_QUANTIZE: _fused(*_GATED, _SCALE, _ZERO_POINT, _INTEGERS_OUT),
    QuantizeKind.GATED_DYNAMIC_QUANTIZE: _fused(*_GATED, _SCALE_OUT, _ZERO_POINT_OUT, _INTEGERS_OUT, dynamic=True),
}
#: The same work with its result as floats.
UNQUANTIZED: dict[QuantizeKind, QuantizeKind] = {
    QuantizeKind.NORM_QUANTIZE: QuantizeKind.NORM,
    QuantizeKind.NORM_DYNAMIC_QUANTIZE: QuantizeKind.NORM,
    QuantizeKind.GATED_QUANTIZE: QuantizeKind.GATED,
    QuantizeKind.GATED_DYNAMIC_QUANTIZE: QuantizeKind.GATED,
}


def needed(p: Problem, operand: Operand) -> bool:
    """Whether this problem cannot do without the operand."""
    if operand.name == "zero_point_out":
        return p.mode is DynamicRangeMode.ASYMMETRIC
    if operand.name == "weight_factor":
        return p.weight_group > 0
    if operand.name in ("addend", "sum_out"):
        return p.adds
    if operand.name == "up":
        return not p.halves
    return not operand.optional


def epilogue_formula(p: Problem) -> str:
    """What a linear makes of its exact integer sums, for `plan.sku()`; bias and residual where a call gives them."""
    if p.op is QuantizeKind.WEIGHT_ONLY_LINEAR:
        scaled = "acc + bias"
        return f"{scaled if p.nonlinearity is Activation.NONE else f'{p.nonlinearity.value}({scaled})'} + residual"
    sums = "(acc - zero_point * weight_sum)" if p.mode is DynamicRangeMode.ASYMMETRIC else "acc"
    scaled = f"({sums} * scale_a) * scale_w + bias"
    return f"{scaled if p.nonlinearity is Activation.NONE else f'{p.nonlinearity.value}({scaled})'} + residual"
