"""What a scheme is made of: the format of the weights, and that of the activations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ..core.errors import InvalidProblem
from ..core.problem import dynamic_range
from ..core.scope import PerChannel, PerGroup, Scope
from ..core.types import DynamicRangeMode, Element, ElementKind, ModeName, member

ActivationKind = Literal["float", "dynamic", "static"]


@dataclass(frozen=True)
class WeightFormat:
    """Symmetric integers with one scale for each output channel, or for each group of columns in it."""

    element: ElementKind = ElementKind.S8
    """s8 or s4."""
    group_size: int | None = None
    """Columns that share a scale; None for all columns of an output channel."""
    zero_points: bool = False
    """Whether each scale has a zero point beside it. Checkpoints of other tools have them; no method here makes any."""
    act_order: bool = False
    """Whether a stored index gives the group of each column, as GPTQ's act-order may write it; read, never written."""
    scales: str = field(default="absmax", compare=False)
    """The rule that chooses the scales, by its name in `scales.RULES`; not a part of what is stored."""
    factors: bool = field(default=False, compare=False)
    """Whether the scale of a group is that of its channel times an integer from 1 to 15, as integer linears need it."""

    @classmethod
    def searched(cls, element: ElementKind, group_size: int | None = None, factors: bool = False) -> WeightFormat:
        """With the rule that suits the element: 4-bit scales are searched, for 8 bits that gains nothing."""
        return cls(element, group_size, scales="search" if element.is_packed else "absmax", factors=factors)

    @property
    def scope(self) -> Scope:
        return PerChannel(0) if self.group_size is None else PerGroup(self.group_size)

    @property
    def bits(self) -> int:
        return 4 if self.element.is_packed else 8

    @property
    def range(self) -> tuple[int, int]:
        """The integers that weights are clamped to: symmetric around zero for absmax, else all there are."""
        low, high = dynamic_range(self.element, DynamicRangeMode.SYMMETRIC)
        return (low, high) if self.scales == "absmax" else (low - 1, high)

    def scale_dtype(self, weight: torch.dtype) -> torch.dtype:
        """The type of the scales of a weight of this type.

        Channel scales are f32, as servers hold them. Group scales have the model's type, as servers' kernels read them.
        """
        return weight if self.group_size is not None and weight is not torch.float64 else torch.float32

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows,) if self.group_size is None else (rows, columns // self.group_size)


@dataclass(frozen=True)
class ActivationFormat:
    """What the inputs of a linear become: floats as they are, or integers.

    `dynamic` integers have a scale for each token, from its own range. `static` ones share one calibrated scale.
    """

    kind: ActivationKind = "dynamic"
    element: ElementKind = ElementKind.S8
    mode: DynamicRangeMode = DynamicRangeMode.SYMMETRIC
    q_min: int | None = None
    q_max: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As the constructors of linears spell them."""
        return {"activation": self.element, "mode": self.mode, "q_min": self.q_min, "q_max": self.q_max}


@dataclass(frozen=True)
class Scheme:
    """How a linear is quantized: its weight, and its input."""

    weight: WeightFormat = field(default_factory=WeightFormat)
    activation: ActivationFormat = field(default_factory=ActivationFormat)

    def with_activations(self, kind: ActivationKind) -> Scheme:
        return replace(self, activation=replace(self.activation, kind=kind))

    def with_groups(self, size: int) -> Scheme:
        return replace(self, weight=replace(self.weight, group_size=size))

    @property
    def linear_options(self) -> dict[str, Any]:
        """The options of the integer linear that computes this scheme."""
        if self.activation.kind == "float" or self.weight.group_size is not None:
            raise InvalidProblem(
                f"scheme: expected integer activations and a scale per output channel, got {self.activation.kind} "
                f"activations and groups of {self.weight.group_size}; use w8a8 or w4a8"
            )
        return {"weight_element": self.weight.element, **self.activation.options}


@dataclass(frozen=True)
class LinearScheme:
    """How a linear is quantized; weights are symmetric and per output channel throughout.

    A symmetric range over u8 activations begins at 0, so that every negative one becomes 0. That fits what comes out of
    a ReLU; for anything else take s8, or the asymmetric mode.
    """

    weight: Element = ElementKind.S8
    """s8 or s4."""
    activation: Element = ElementKind.S8
    """s8 or u8; for fewer bits `q_min` and `q_max` narrow the range."""
    mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC
    """Whether activations have a zero point."""
    static: bool = False
    """One calibrated scale for all activations, instead of one for each token from its own range."""
    q_min: int | None = None
    """The lower end of a narrower range for the activations."""
    q_max: int | None = None
    """Its upper end: 7, after a `q_min` of -7, makes 4 bits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", ElementKind.of(self.weight, "weight"))
        object.__setattr__(self, "activation", ElementKind.of(self.activation, "activation"))
        object.__setattr__(self, "mode", member(DynamicRangeMode, self.mode, "mode"))

    @property
    def _scheme(self) -> Scheme:
        element, mode = ElementKind.of(self.activation, "activation"), member(DynamicRangeMode, self.mode, "mode")
        kind: ActivationKind = "static" if self.static else "dynamic"
        return Scheme(
            WeightFormat.searched(ElementKind.of(self.weight, "weight")),
            ActivationFormat(kind, element, mode, self.q_min, self.q_max),
        )
