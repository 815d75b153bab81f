"""A small Llama through transformers: read, quantized in each scheme that its modules compute, and asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import torch
from torch import nn

from baracuda.flow import quantize_checkpoint
from baracuda.flow.hf.packed import PackedLinear
from baracuda.flow.hf.skeleton import quiet
from baracuda.nn import QuantizedLinear, SmoothQuantLinear

LINEARS = 14  # in two layers of a Llama


def save_llama(folder: Path) -> Path:
    """The model's directory, with tokens to calibrate with beside it."""
    models.save("llama", folder / "model", shard="100KB")
    models.tokens(folder / "tokens.safetensors")
    return folder / "model"


def read(directory: Path, **options: Any) -> Any:
    import transformers

    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(models.prompt()).logits
    return found


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


CASES = {
    "w8a8": ({"scheme": "w8a8"}, QuantizedLinear),
    "static": ({"scheme": "w8a8", "activations": "static"}, SmoothQuantLinear),
    "w4a16": ({"scheme": "w4a16", "group_size": 32}, PackedLinear),
    "w4a8": ({"scheme": "w4a8", "group_size": 32}, QuantizedLinear),
}


def quantized(llama: Path, out: Path, case: str) -> Path:
    calibration = llama.parent / "tokens.safetensors" if case == "static" else None
    quantize_checkpoint(llama, out, calibration=calibration, **CASES[case][0])
    return out
