"""The model flow: a Hugging Face directory in, a quantized checkpoint with its report out, and back into a model."""

from __future__ import annotations

from .checkpoint.check import Finding
from .errors import CheckpointError, FlowError
from .hf.load import load
from .hf.save import save
from .run.comparison import compare_reports
from .run.contents import inspect_checkpoint
from .run.evaluate import evaluate_checkpoint
from .run.quantize import quantize_checkpoint
from .run.report import rebuild as report
from .run.verify import verify

__all__ = [
    "CheckpointError",
    "Finding",
    "FlowError",
    "compare_reports",
    "evaluate_checkpoint",
    "inspect_checkpoint",
    "load",
    "quantize_checkpoint",
    "report",
    "save",
    "verify",
]
