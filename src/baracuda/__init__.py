"""baracuda: quantization kernels behind plans, the same bits on every backend."""

from __future__ import annotations

from . import plans as _plans
from .errors import BaracudaError, InvalidProblem, Unsupported, WorkspaceTooSmall
from .functional import (
    Quantized,
    choose_qparams,
    dequantize,
    dynamic_quantize,
    fake_quantize,
    quantize,
    quantized_linear,
    smoothquant_linear,
)
from .packing import pack_int4, unpack_int4
from .plan import Plan
from .plans import *  # noqa: F403
from .scope import DynamicRangeScope, PerChannel, PerGroup, PerTensor, PerToken, Scope
from .types import (
    Arithmetic,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    KernelSku,
    MathPrecision,
    OpCategory,
    PlanPreference,
    PrecisionGuarantee,
    QuantizeKind,
    Support,
)

__version__ = "0.1.0"

__all__ = [
    "Arithmetic",
    "BackendKind",
    "BaracudaError",
    "DynamicRangeMode",
    "DynamicRangeScope",
    "ElementKind",
    "InvalidProblem",
    "KernelSku",
    "MathPrecision",
    "OpCategory",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Plan",
    "PlanPreference",
    "PrecisionGuarantee",
    "Quantized",
    "QuantizeKind",
    "Scope",
    "Support",
    "Unsupported",
    "WorkspaceTooSmall",
    "__version__",
    "choose_qparams",
    "dequantize",
    "dynamic_quantize",
    "fake_quantize",
    "pack_int4",
    "quantize",
    "quantized_linear",
    "smoothquant_linear",
    "unpack_int4",
    *_plans.__all__,
]
