"""Spec and Problem: one frozen description of the work, which is also a cache key and an operator's arguments."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any, get_type_hints

import torch

from .errors import InvalidProblem, Unsupported
from .optable import OPS, UNQUANTIZED
from .scope import PerTensor, PerToken, Scope, Shape, View, require_scope
from .types import (
    FLOATS,
    INTEGERS,
    MAX_FACTOR,
    Activation,
    Arithmetic,
    DynamicRangeMode,
    Element,
    ElementKind,
    NormStyle,
    OpCategory,
    QuantizeKind,
)

#: Sizes in bytes and bits, and a tile that reaches past the end, then fit 64-bit offsets.
MAX_ELEMENTS = 2**58
#: The operations that normalize rows: RMS norms and layer norms.
NORMS = frozenset({QuantizeKind.NORM, QuantizeKind.NORM_QUANTIZE, QuantizeKind.NORM_DYNAMIC_QUANTIZE})
#: The operations that multiply by a gate after its nonlinearity.
GATED = frozenset({QuantizeKind.GATED, QuantizeKind.GATED_QUANTIZE, QuantizeKind.GATED_DYNAMIC_QUANTIZE})
#: The smallest group with an integer factor: the kernels decode this many elements at a time.
MIN_WEIGHT_GROUP = 32


@dataclass(frozen=True)
class Spec:
    """How to compute, whatever the op and the shape.

    A new field is one line here, with a default. Plan cache, operator schemas (`dispatch.schema`) and `Problem` read
    the fields of this class. A field is an element kind, another enumeration, a scope, an int, a float or a bool. One
    that says how values are made, not how they are quantized, is also named in `MAKING`.
    """

    #: The float type.
    element: ElementKind
    #: The integer type; of a linear, that of its activations.
    quantized: ElementKind
    q_min: int
    q_max: int
    #: Without a default: torch.compile of torch 2.11 cannot trace a constructor with an object as a default.
    scope: Scope
    mode: DynamicRangeMode = DynamicRangeMode.SYMMETRIC
    arithmetic: Arithmetic = Arithmetic.DIVIDE
    #: What a dynamic scale is stored as.
    scale_element: ElementKind = ElementKind.F32
    include_zero: bool = False
    #: The integer type of a linear's weight.
    weight: ElementKind = ElementKind.S8
    #: What a linear does to its sums after the bias.
    nonlinearity: Activation = Activation.NONE
    #: How many elements of an s4 weight's row share one integer factor; 0 where a row has one scale alone.
    weight_group: int = 0
    norm: NormStyle = NormStyle.LLAMA
    #: What a norm adds to the mean of the squares.
    eps: float = 0.0
    #: A norm adds a tensor to its input first, and returns the sum too.
    adds: bool = False
    #: The gate and what it is multiplied with are the halves of one tensor's last axis.
    halves: bool = False

    def __post_init__(self) -> None:
        """Exact types: 1.0 and True equal 1, so a cache would take one for the other."""
        _require_integers(self.q_min, self.q_max)
        for name, kind in FIELD_TYPES.items():
            _require_field(name, getattr(self, name), kind)

    @cached_property
    def _hash(self) -> int:
        return hash(self.values())

    def __hash__(self) -> int:
        """Computed once: every eager call looks its plan up by its spec."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the hash: enumerations hash by identity, which differs between processes."""
        return type(self), tuple([getattr(self, field.name) for field in fields(self)])

    def values(self) -> tuple[Any, ...]:
        """The fields of Spec in their order."""
        return tuple([getattr(self, name) for name in FIELD_TYPES])


#: The name and the type of every field of Spec.
FIELD_TYPES: dict[str, type] = {
    name: kind for name, kind in get_type_hints(Spec).items() if name in Spec.__dataclass_fields__
}


#: The fields that say what linears, norms and gated products compute. The others say how values are quantized.
MAKING = frozenset({"weight", "nonlinearity", "weight_group", "norm", "eps", "adds", "halves"})
_MAKES_NOTHING: dict[str, Any] = {field.name: field.default for field in fields(Spec) if field.name in MAKING}


def _require_field(name: str, value: object, kind: type) -> None:
    if kind is Scope:
        require_scope(value)
    elif issubclass(kind, Enum):
        if not isinstance(value, kind):
            members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
            raise InvalidProblem(f"{name}: expected one of {members}, got {value!r}")
    elif type(value) is not kind:
        expected = "True or False" if kind is bool else f"a value of type {kind.__name__}"
        raise InvalidProblem(f"{name}: expected {expected}, got {value!r}")


@dataclass(frozen=True)
class _Work:
    """The fields of a Problem that come before those of its Spec."""

    op: QuantizeKind
    shape: Shape


@dataclass(frozen=True)
class Problem(Spec, _Work):
    """What is to be computed, and on what: an op, a shape and the fields of a Spec. Kernels know nothing else.

    `shape` is the shape of the float tensor, or `(m, n, k)` for a linear. The constructor checks everything: a Problem
    that exists can be computed.
    """

    scope: Scope = PerTensor()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_elements()
        self._require_sizes()
        self._require_range()
        self._require_weight_group()
        self._require_rows()
        self.scope.view(self.shape)
        if OPS[self.op].dynamic:
            self._require_dynamic()

    @classmethod
    def of(cls, op: QuantizeKind, shape: Shape, spec: Spec) -> Problem:
        return cls(op, shape, *spec.values())

    @classmethod
    def unchecked(cls, op: QuantizeKind, shape: Shape, spec: Spec) -> Problem:
        """A Problem whose sizes may be symbolic: the op table's rules accept those, the checks do not."""
        problem = object.__new__(cls)
        problem.__dict__.update(zip(FIELD_TYPES, spec.values(), strict=True), op=op, shape=shape)
        return problem

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
        if row.takes_integers:
            floats, integers = "choose one of these, such as f32", "convert it, as with .to(torch.int8), or quantize it"
        else:
            floats, integers = "convert it, as with .to(torch.float32)", "choose one of these, such as s8"
        _require_element("the float tensor", self.element, FLOATS, floats)
        if row.category is OpCategory.GEMM:
            _require_element("quantized activations", self.quantized, (ElementKind.S8, ElementKind.U8), integers)
            remedy = "quantize it; bytes that hold pairs are weight_element='s4'"
            kinds: tuple[ElementKind, ...] = (ElementKind.S8, ElementKind.S4)
            if self.op is QuantizeKind.WEIGHT_ONLY_LINEAR:
                kinds = (ElementKind.S4, ElementKind.U4, ElementKind.S8)
            _require_element("the weight", self.weight, kinds, remedy)
            return
        _require_element("the quantized tensor", self.quantized, INTEGERS, integers)
        if self.nonlinearity is not Activation.NONE and self.op not in GATED:
            raise InvalidProblem(
                f"{self.op.value}: only linears and gated products have an activation, got {self.nonlinearity}"
            )

    def _require_range(self) -> None:
        kind, low, high = self.quantized, self.q_min, self.q_max
        if not low <= high:
            raise InvalidProblem(f"expected q_min <= q_max, got q_min={low}, q_max={high}; swap them")
        if low < kind.q_min or high > kind.q_max:
            raise InvalidProblem(
                f"expected q_min and q_max inside {kind.value}'s range [{kind.q_min}, {kind.q_max}], "
                f"got [{low}, {high}]; narrow the range or choose a wider element"
            )

    def _require_weight_group(self) -> None:
        size = self.weight_group
        if size == 0:
            return
        least = 1 if self.op is QuantizeKind.WEIGHT_ONLY_LINEAR else MIN_WEIGHT_GROUP
        if OPS[self.op].category is not OpCategory.GEMM or (least > 1 and self.weight is not ElementKind.S4):
            raise InvalidProblem(f"weight_group: expected 0 but for a linear with an s4 weight, got {size}")
        if size < least or self.shape[2] % size:
            raise InvalidProblem(
                f"weight_group: expected a divisor of K = {self.shape[2]} that is at least {least}, got {size}"
            )

    def _require_rows(self) -> None:
        """Norms and gated products need a last axis, one scale or one for each row, and a finite eps."""
        row = OPS[self.op]
        if row.category is not OpCategory.FUSED:
            if self.halves or self.adds:
                raise InvalidProblem(
                    f"{self.op.value}: expected halves and adds to be False, got {self.halves} and {self.adds}"
                )
            if self.op is QuantizeKind.SMOOTHQUANT_LINEAR and not isinstance(self.scope, PerTensor | PerToken):
                raise InvalidProblem(f"{self.op.value}: expected PerTensor() or PerToken(), got {self.scope}")
            return
        static = not row.dynamic and self.op in UNQUANTIZED
        wanted = PerTensor() if static else PerToken()
        if self.scope != wanted:
            raise InvalidProblem(f"{self.op.value}: expected scope {wanted}, got {self.scope}")
        if not self.shape:
            raise InvalidProblem(f"{self.op.value}: expected a tensor with at least one axis, got a scalar")
        if not 0 <= self.eps < float("inf"):
            raise InvalidProblem(f"eps: expected a finite number of at least 0, got {self.eps}")
        if (self.adds and self.op in GATED) or (self.halves and self.op not in GATED):
            name = "adds" if self.op in GATED else "halves"
            raise InvalidProblem(f"{self.op.value}: expected {name} to be False, got True")

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
        return (2**31 - 1) // (activation * -self.weight.q_min * (MAX_FACTOR if self.weight_group else 1))


def scale_elements(element: ElementKind) -> tuple[ElementKind, ...]:
    """The storage types of a dynamic scale, the default first: f32, or the input's own type."""
    return (ElementKind.F32, element) if element.bits == 16 else (element,)


def dynamic_range(
    kind: ElementKind, mode: DynamicRangeMode, q_min: int | None = None, q_max: int | None = None
) -> tuple[int, int]:
    """The full storage range, less the one value without a negative when a signed range is symmetric."""
    high = kind.q_max if q_max is None else q_max
    if q_min is not None:
        return q_min, high
    return (-kind.q_max if kind.q_min < 0 and mode is DynamicRangeMode.SYMMETRIC else kind.q_min), high


def stored_scale_element(requested: Element | None, element: ElementKind, name: str = "scale_element") -> ElementKind:
    return scale_elements(element)[0] if requested is None else ElementKind.of(requested, name)


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


def floats_problem(p: Problem) -> Problem:
    """A norm or a gated product with its result as floats."""
    return replace(p, op=UNQUANTIZED.get(p.op, p.op), scope=PerToken())


def quantization_problem(p: Problem) -> Problem:
    """The quantization of what a norm or a gated product has made."""
    op = QuantizeKind.DYNAMIC_QUANTIZE if OPS[p.op].dynamic else QuantizeKind.QUANTIZE
    return replace(p, op=op, **_MAKES_NOTHING)


def activation_problem(p: Problem) -> Problem:
    """The dynamic quantization of the activations inside a quantized linear: per token, zero kept representable."""
    m, _, k = p.shape
    op = QuantizeKind.DYNAMIC_QUANTIZE
    return replace(p, op=op, shape=(m, k), scope=PerToken(), include_zero=True, **_MAKES_NOTHING)
