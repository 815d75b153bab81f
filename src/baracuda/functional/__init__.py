"""The functions most people call: tensors in, tensors out, a cached plan in between."""

from __future__ import annotations

from .elementwise import (
    choose_qparams,
    dequantize,
    dynamic_fake_quantize,
    dynamic_quantize,
    fake_quantize,
    quantize,
)
from .linears import quantized_linear, smoothquant_linear, weight_only_linear
from .quantized import Quantized

__all__ = [
    "Quantized",
    "choose_qparams",
    "dequantize",
    "dynamic_fake_quantize",
    "dynamic_quantize",
    "fake_quantize",
    "quantize",
    "quantized_linear",
    "smoothquant_linear",
    "weight_only_linear",
]
