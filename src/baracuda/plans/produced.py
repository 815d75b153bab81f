"""Descriptors and arguments of norms and gated products, with their results as floats or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.optable import OPS, UNQUANTIZED
from ..core.problem import Problem, stored_scale_element
from ..core.scope import PerTensor, PerToken
from ..core.types import (
    Activation,
    ActivationName,
    Arithmetic,
    ArithmeticName,
    DynamicRangeMode,
    Element,
    ElementKind,
    ModeName,
    NormStyle,
    OpCategory,
    QuantizeKind,
    member,
)


@dataclass(frozen=True)
class _Rows:
    """`n` rows of `d` elements, and how the result is quantized where it is."""

    n: int
    d: int
    input_element: Element = ElementKind.BF16
    q_min: int = -127
    q_max: int = 127
    output_element: Element = ElementKind.S8
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC
    scale_element: Element | None = None
    include_zero: bool = False
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE

    def problem(self, op: QuantizeKind) -> Problem:
        element = ElementKind.of(self.input_element, "input_element")
        assert OPS[op].category is OpCategory.FUSED
        static = op in UNQUANTIZED and not OPS[op].dynamic
        return Problem(
            op,
            (self.n, self.d),
            element,
            ElementKind.of(self.output_element, "output_element"),
            self.q_min,
            self.q_max,
            PerTensor() if static else PerToken(),
            DynamicRangeMode.SYMMETRIC if static else member(DynamicRangeMode, self.mode, "mode"),
            member(Arithmetic, self.arithmetic, "arithmetic"),
            stored_scale_element(self.scale_element, element),
            self.include_zero,
            **self._further(),
        )

    def _further(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class NormDescriptor(_Rows):
    """`adds` says that a residual is added first. What is said of integers counts for plans that quantize."""

    style: NormStyle | str = NormStyle.LLAMA
    eps: float = 1e-6
    adds: bool = False

    def _further(self) -> dict[str, Any]:
        return {"norm": member(NormStyle, self.style, "style"), "eps": self.eps, "adds": self.adds}


@dataclass(frozen=True)
class GatedDescriptor(_Rows):
    """`halves` says that gate and up are the halves of one tensor, `[n, 2 * d]`."""

    activation: Activation | ActivationName = Activation.SILU
    halves: bool = False

    def _further(self) -> dict[str, Any]:
        return {"nonlinearity": member(Activation, self.activation, "activation"), "halves": self.halves}


@dataclass(slots=True)
class NormArgs:
    """`addend` and `sum_out`, which receives input + addend, are there where the descriptor adds."""

    input: Tensor
    norm_weight: Tensor | None
    output: Tensor
    norm_bias: Tensor | None = None
    addend: Tensor | None = None
    sum_out: Tensor | None = None


@dataclass(slots=True)
class NormQuantizeArgs:
    """As `NormArgs`, with the one scale of the result."""

    input: Tensor
    norm_weight: Tensor | None
    scale: Tensor | float
    zero_point: Tensor | int | None
    output: Tensor
    norm_bias: Tensor | None = None
    addend: Tensor | None = None
    sum_out: Tensor | None = None


@dataclass(slots=True)
class NormDynamicQuantizeArgs:
    """As `NormArgs`; `scale_out` and, asymmetric, `zero_point_out` receive those of each row."""

    input: Tensor
    norm_weight: Tensor | None
    scale_out: Tensor
    output: Tensor
    zero_point_out: Tensor | None = None
    norm_bias: Tensor | None = None
    addend: Tensor | None = None
    sum_out: Tensor | None = None


@dataclass(slots=True)
class GatedArgs:
    """`up` is None where the gate holds both halves."""

    gate: Tensor
    up: Tensor | None
    output: Tensor


@dataclass(slots=True)
class GatedQuantizeArgs:
    """As `GatedArgs`, with the one scale of the result."""

    gate: Tensor
    up: Tensor | None
    scale: Tensor | float
    zero_point: Tensor | int | None
    output: Tensor


@dataclass(slots=True)
class GatedDynamicQuantizeArgs:
    """As `GatedArgs`; `scale_out` and, asymmetric, `zero_point_out` receive those of each row."""

    gate: Tensor
    up: Tensor | None
    scale_out: Tensor
    output: Tensor
    zero_point_out: Tensor | None = None


@dataclass(frozen=True)
class TokenLinearDescriptor:
    """A linear over activations that are quantized per token already; `output_element` is the float type out."""

    m: int
    n: int
    k: int
    activation_element: Element = ElementKind.S8
    weight_element: Element = ElementKind.S8
    output_element: Element = ElementKind.BF16
    activation: Activation | ActivationName = Activation.NONE
    weight_group: int = 0

    def problem(self, op: QuantizeKind) -> Problem:
        kind = ElementKind.of(self.activation_element, "activation_element")
        return Problem(
            op,
            (self.m, self.n, self.k),
            ElementKind.of(self.output_element, "output_element"),
            kind,
            kind.q_min,
            kind.q_max,
            PerToken(),
            weight=ElementKind.of(self.weight_element, "weight_element"),
            nonlinearity=member(Activation, self.activation, "activation"),
            weight_group=self.weight_group,
        )


@dataclass(slots=True)
class TokenLinearArgs:
    """`act_scale` has one scale for each row of `act_q`."""

    act_q: Tensor
    act_scale: Tensor | float
    weight_q: Tensor
    weight_scale: Tensor | float
    output: Tensor
    act_zero_point: Tensor | int | None = None
    bias: Tensor | None = None
    weight_sum: Tensor | None = None
    residual: Tensor | None = None
    weight_factor: Tensor | None = None
