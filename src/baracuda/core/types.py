"""The values everything else is made of: element kinds, modes, and what a plan says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeVar

import torch

from .errors import InvalidProblem

__all__ = [
    "Activation",
    "Arithmetic",
    "BackendKind",
    "DynamicRangeMode",
    "ElementKind",
    "KernelSku",
    "MathPrecision",
    "NormStyle",
    "OpCategory",
    "PlanPreference",
    "PrecisionGuarantee",
    "QuantizeKind",
    "Support",
]

#: The largest magnitude of a zero point: `q - zero_point` stays an exact f32 integer for every 8-bit q.
MAX_ZERO_POINT = 2**24 - 256

#: The largest integer factor of a group: times any s4 value it still is an s8 value.
MAX_FACTOR = 15

#: How sums of floats are cut: so many lanes, each adding up so many values of a block.
SUM_LANES, SUM_STEPS = 1024, 8


class _Member(Enum):
    """Members are singletons, so identity hashes them; Enum's own hash is a Python call on the path of every run."""

    __hash__ = object.__hash__


class ElementKind(_Member):
    """What one element of a tensor is. Pass the member, its torch dtype or its name: they are the same."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    S8 = "s8"
    U8 = "u8"
    S4 = "s4"
    U4 = "u4"
    S32 = "s32"
    S64 = "s64"

    dtype: torch.dtype
    bits: int
    #: The least and the greatest storable value of an integer kind.
    q_min: int
    q_max: int
    is_float: bool
    #: Two elements share a byte along the last axis.
    is_packed: bool
    #: The type the arithmetic is done in: f64 for f64, f32 for every narrower float.
    math: ElementKind
    #: Below this a stored scale is raised, so that 1/scale and x/scale stay useful.
    smallest_scale: float

    @classmethod
    def of(cls, value: object, name: str = "") -> ElementKind:
        """The kind that a member, a torch dtype or a name such as "s8" or "bfloat16" stands for.

        `name` is that of the argument, for the error.
        """
        try:
            kind = _KINDS.get(value.lower() if isinstance(value, str) else value)
        except TypeError:  # it cannot be hashed
            kind = None
        if kind is None:
            raise InvalidProblem(
                f"{name}{name and ': '}expected an element kind (one of {', '.join(k.value for k in cls)}), "
                f"its torch dtype or its name, got {value!r}"
            )
        return kind

    @classmethod
    def of_tensor(cls, dtype: Element, name: str) -> ElementKind:
        """The kind of a tensor by its dtype."""
        kind = _KINDS.get(dtype)
        if kind is None:
            dtypes = ", ".join(str(dtype) for dtype in dict.fromkeys(k.dtype for k in cls))
            raise InvalidProblem(f"{name}: expected a tensor of {dtypes}, got {dtype}; convert it with .to()")
        return kind

    def __repr__(self) -> str:
        return f"ElementKind.{self.name}"


#: How callers name an element kind; names in capitals are taken too.
ElementName = Literal[
    "f16", "bf16", "f32", "f64", "s8", "u8", "s4", "u4", "s32", "s64", "float16", "bfloat16", "float32", "float64",
    "int8", "uint8", "int4", "uint4", "int32", "int64",
]  # fmt: skip
Element = ElementKind | torch.dtype | ElementName

_ATTRIBUTES: dict[ElementKind, tuple[torch.dtype, int, int, int, float, str]] = {
    ElementKind.F16: (torch.float16, 16, 0, 0, 2.0**-24, "float16"),
    ElementKind.BF16: (torch.bfloat16, 16, 0, 0, 2.0**-126, "bfloat16"),
    ElementKind.F32: (torch.float32, 32, 0, 0, 2.0**-126, "float32"),
    ElementKind.F64: (torch.float64, 64, 0, 0, 2.0**-1022, "float64"),
    ElementKind.S8: (torch.int8, 8, -128, 127, 0.0, "int8"),
    ElementKind.U8: (torch.uint8, 8, 0, 255, 0.0, "uint8"),
    ElementKind.S4: (torch.uint8, 4, -8, 7, 0.0, "int4"),
    ElementKind.U4: (torch.uint8, 4, 0, 15, 0.0, "uint4"),
    ElementKind.S32: (torch.int32, 32, -(2**31), 2**31 - 1, 0.0, "int32"),
    ElementKind.S64: (torch.int64, 64, -(2**63), 2**63 - 1, 0.0, "int64"),
}
_KINDS: dict[object, ElementKind] = {}
for _kind, (_dtype, _bits, _low, _high, _smallest, _long_name) in _ATTRIBUTES.items():
    _kind.dtype, _kind.bits, _kind.q_min, _kind.q_max = _dtype, _bits, _low, _high
    _kind.smallest_scale, _kind.is_float, _kind.is_packed = _smallest, _dtype.is_floating_point, _bits == 4
    _kind.math = ElementKind.F64 if _kind is ElementKind.F64 else ElementKind.F32
    _KINDS |= {_kind: _kind, _kind.value: _kind, _long_name: _kind}
    _KINDS.setdefault(_dtype, _kind)  # torch.uint8 is u8, not the packed kinds that are stored in it

FLOATS = (ElementKind.F16, ElementKind.BF16, ElementKind.F32, ElementKind.F64)
INTEGERS = (ElementKind.S8, ElementKind.U8, ElementKind.S4, ElementKind.U4)


class MathPrecision(_Member):
    """The type the arithmetic of a plan is done in."""

    F32 = "f32"
    F64 = "f64"


class OpCategory(_Member):
    """Elementwise and range operations; the linears built on a matrix product; norms and gated products, which may
    quantize what they make."""

    QUANTIZATION = "quantization"
    GEMM = "gemm"
    FUSED = "fused"


class QuantizeKind(_Member):
    """The operations of the family: one row each in `optable.OPS`."""

    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    FAKE_QUANTIZE = "fake_quantize"
    QUANTIZE_BACKWARD = "quantize_backward"
    DEQUANTIZE_BACKWARD = "dequantize_backward"
    FAKE_QUANTIZE_BACKWARD = "fake_quantize_backward"
    FAKE_QUANTIZE_LEARNED_BACKWARD = "fake_quantize_learned_backward"
    DYNAMIC_QUANTIZE = "dynamic_quantize"
    CHOOSE_QPARAMS = "choose_qparams"
    DYNAMIC_FAKE_QUANTIZE = "dynamic_fake_quantize"
    QUANTIZED_LINEAR = "quantized_linear"
    SMOOTHQUANT_LINEAR = "smoothquant_linear"
    WEIGHT_ONLY_LINEAR = "weight_only_linear"
    NORM = "norm"
    NORM_QUANTIZE = "norm_quantize"
    NORM_DYNAMIC_QUANTIZE = "norm_dynamic_quantize"
    GATED = "gated"
    GATED_QUANTIZE = "gated_quantize"
    GATED_DYNAMIC_QUANTIZE = "gated_dynamic_quantize"


class BackendKind(_Member):
    """Where a kernel comes from."""

    REFERENCE = "reference"
    CPU = "cpu"
    TRITON = "triton"


class Arithmetic(_Member):
    """How x meets its scale. DIVIDE is ONNX's QuantizeLinear, RECIPROCAL is torch.fake_quantize_*."""

    DIVIDE = "divide"
    RECIPROCAL = "reciprocal"


class Activation(_Member):
    """What a linear does to its sums after the bias. GELU is the exact one, by the normal distribution."""

    NONE = "none"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"


class NormStyle(_Member):
    """What a norm divides a row by, and where it rounds.

    The first three divide by the root mean square. LLAMA rounds to the input's type before it multiplies by the weight;
    GEMMA multiplies by 1 + weight and TORCH by the weight, both before the one rounding. LAYER subtracts the mean,
    divides by the standard deviation, multiplies by the weight and rounds once.
    """

    LLAMA = "llama"
    GEMMA = "gemma"
    TORCH = "torch"
    LAYER = "layer"


class DynamicRangeMode(_Member):
    """A range around zero, with a scale alone; or from the least to the greatest value, with a zero point too."""

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


#: How callers name the members of the last three: by the member, or by its value as a string.
ArithmeticName = Literal["divide", "reciprocal"]
ActivationName = Literal["none", "relu", "gelu", "silu"]
ModeName = Literal["symmetric", "asymmetric"]


@dataclass(frozen=True, slots=True)
class PrecisionGuarantee:
    """What a plan promises about its bits; the tests try to falsify every field.

    `accumulator` is what sums are held in; of a linear, the narrowest integer that none of its sums can leave, s64 for
    a long K. `matches_reference` says that the result has the bits of the reference backend, on any device.
    `batch_invariant` says that a row's result does not depend on how many rows there are, on its place or on its
    neighbours; a row is one index of the first axis. It is False where a range or a sum is found across rows, as with
    a scale for the whole tensor. `split_invariant` says that no split of a sum changes a bit. Where the result does
    not match the reference, `relative_error` bounds its distance, as a share of the sum of the absolute products,
    before the one rounding to the output's type.
    """

    math_precision: MathPrecision
    accumulator: ElementKind
    bit_stable_on_same_hardware: bool = True
    deterministic: bool = True
    matches_reference: bool = True
    batch_invariant: bool = True
    split_invariant: bool = True
    relative_error: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelSku:
    """The identity of the kernel a plan selected."""

    category: OpCategory
    op: QuantizeKind
    element: ElementKind
    aux_element: ElementKind | None
    layout: str
    epilogue: str | None
    arch: str
    backend: BackendKind
    kernel: str
    precision_guarantee: PrecisionGuarantee


_Choice = TypeVar("_Choice", bound=Enum)


def member(choices: type[_Choice], value: _Choice | str, name: str) -> _Choice:
    """The member of an enumeration that a value stands for: itself, or its name in small or capital letters.

    `name` is that of the argument, for the error.
    """
    if isinstance(value, choices):
        return value
    try:
        return choices(value.lower() if isinstance(value, str) else value)
    except ValueError:
        names = ", ".join(repr(choice.value) for choice in choices)
        raise InvalidProblem(f"{name}: expected one of {names}, got {value!r}") from None


@dataclass(frozen=True, slots=True)
class PlanPreference:
    """Limits on the choice of a kernel.

    A preferred backend, or its name, is binding: `select` raises rather than pick another.
    """

    max_workspace_bytes: int | None = None
    prefer_backend: BackendKind | None = None

    def __post_init__(self) -> None:
        if self.prefer_backend is not None:
            object.__setattr__(self, "prefer_backend", member(BackendKind, self.prefer_backend, "prefer_backend"))
        if self.max_workspace_bytes is not None and not isinstance(self.max_workspace_bytes, int):
            raise InvalidProblem(f"max_workspace_bytes: expected an int or None, got {self.max_workspace_bytes!r}")


@dataclass(frozen=True, slots=True)
class Support:
    """The answer of `plan.can_implement`: truthy, or falsy with the reason `run` would raise."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason
