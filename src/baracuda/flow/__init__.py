"""The model flow: a Hugging Face directory in, a quantized checkpoint with its report out, and back into a model."""

from __future__ import annotations

from .convert import quantize_checkpoint
from .errors import CheckpointError, FlowError
from .load import load
from .report import rebuild as report
from .verify import Finding, verify

__all__ = ["CheckpointError", "Finding", "FlowError", "load", "quantize_checkpoint", "report", "verify"]
