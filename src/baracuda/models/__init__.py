"""Whole models: replace their linears in place, train them for quantization, convert them."""

from ..schemes import LinearScheme
from .replace import Report, convert, prepare_qat, quantize_model

__all__ = ["LinearScheme", "Report", "convert", "prepare_qat", "quantize_model"]
