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
from .fused import ProducedQuantized, gated, gated_quantize, layer_norm, norm_quantize, rms_norm
from .linears import quantized_linear, smoothquant_linear, weight_only_linear
from .quantized import Quantized

__all__ = [
    "ProducedQuantized",
    "Quantized",
    "choose_qparams",
    "dequantize",
    "dynamic_fake_quantize",
    "dynamic_quantize",
    "fake_quantize",
    "gated",
    "gated_quantize",
    "layer_norm",
    "norm_quantize",
    "quantize",
    "quantized_linear",
    "rms_norm",
    "smoothquant_linear",
    "weight_only_linear",
]
