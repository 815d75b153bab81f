"""Whole models: replace their linears in place, train them for quantization, convert them."""

from ..schemes import LinearScheme
from .deterministic import Invariance, deterministic
from .fuse import fuse_producers
from .merge import merge_siblings
from .replace import Report, convert, prepare_qat, quantize_model

__all__ = [
    "Invariance",
    "LinearScheme",
    "Report",
    "convert",
    "deterministic",
    "fuse_producers",
    "merge_siblings",
    "prepare_qat",
    "quantize_model",
]
