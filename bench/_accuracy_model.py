"""What a checkpoint in the layout of compressed-tensors costs a model: one reader and one comparison for all tools."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baracuda.flow.checkpoint.tensorfile import read_tensors

_INTEGERS = ("weight_packed", "weight_scale", "weight_shape", "input_scale", "weight_zero_point", "weight_g_idx")


class Reference:
    """The float model in f32 on some sequences: its logits, and how others compare."""

    def __init__(self, directory: Path, tokens: Tensor) -> None:
        self.directory, self.tokens = directory, tokens
        model = self._model()
        self.logits = torch.stack([logits.to(torch.float32) for logits in _logits(model, tokens)])
        nll = sum(_nll(logits, row) for logits, row in zip(self.logits, tokens, strict=True))
        self.targets = tokens[:, 1:].numel()
        self.perplexity = math.exp(nll / self.targets)

    def _model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()
        return model

    def compare(self, checkpoint: Path) -> dict[str, Any]:
        """Perplexity, KL(float || quantized) per token, and the share of tokens with the same most likely successor."""
        model = self._model()
        fill(model, checkpoint)
        divergence = nll = 0.0
        same = 0
        for exact, noisy, row in zip(self.logits, _logits(model, self.tokens), self.tokens, strict=True):
            p, q = exact.log_softmax(-1), noisy.log_softmax(-1)
            divergence += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            same += int((exact.argmax(-1) == noisy.argmax(-1)).sum())
            nll += _nll(noisy, row)
        count = self.tokens.numel()
        return {"perplexity": math.exp(nll / self.targets), "kl": divergence / count, "top1_agreement": same / count}


def _logits(model: nn.Module, tokens: Tensor) -> Iterator[Tensor]:
    for row in tokens:
        with torch.no_grad():
            yield model(input_ids=row[None], use_cache=False).logits[0]


def _nll(logits: Tensor, row: Tensor) -> float:
    return -float(logits[:-1].log_softmax(-1).gather(-1, row[1:, None]).sum(dtype=torch.float64))


def fill(model: nn.Module, checkpoint: Path) -> int:
    """Put the weights of a checkpoint into a float model, and quantize the inputs of its linears as it says."""
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    inputs, stored = group["input_activations"], {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        stored |= read_tensors(file)
    modules = sorted(name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale"))
    quantized = {f"{m}.{part}" for m in modules for part in ("weight", *_INTEGERS)}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in stored.keys() & parameters.keys() - quantized:
            parameters[name].copy_(stored[name])
        for name in modules:
            linear = model.get_submodule(name)
            linear.weight.copy_(_dequantized(stored, name, linear.weight.shape))
            if inputs is not None:
                scale = stored.get(f"{name}.input_scale")
                linear.register_forward_pre_hook(lambda module, args, scale=scale: (_rounded(args[0], scale),))
    return len(modules)


def _dequantized(stored: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    scale = stored[f"{name}.weight_scale"].float()
    if (packed := stored.get(f"{name}.weight_packed")) is not None:
        integers = torch.stack([(packed >> (4 * i)) & 15 for i in range(8)], -1).reshape(len(packed), -1)
        integers = integers[:, : shape[1]].float() - 8
    else:
        integers = stored[f"{name}.weight"].float()
    return (integers.reshape(*scale.shape, -1) * scale[..., None]).reshape(shape)


def _rounded(x: Tensor, scale: Tensor | None) -> Tensor:
    """int8 with the scale that is stored, or with one for each token."""
    step = scale.float() if scale is not None else x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / step).round().clamp(-127, 127) * step
