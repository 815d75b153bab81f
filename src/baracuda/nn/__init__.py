"""Modules: fake-quantization for training, integer linears for inference."""

from __future__ import annotations

from .fake_quantize import FakeQuantize
from .linear import QuantizedLinear, SmoothQuantLinear
from .observers import MinMax, MovingAverage, Observer, Percentile
from .qat import QATLinear

__all__ = [
    "FakeQuantize",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "QATLinear",
    "QuantizedLinear",
    "SmoothQuantLinear",
]
