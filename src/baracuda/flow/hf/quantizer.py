"""What tells transformers how to load what baracuda runs; to import it, which needs transformers, is to tell.

The classes stand in a module of their own so that a loaded model, which holds them, can be pickled.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...core.patterns import matches
from ...nn import QuantizedLinear, SmoothQuantLinear
from ..checkpoint.experts import SERIALIZED, expert_sources, float_experts
from ..checkpoint.scheme import Scheme, parse_config
from .packed import PackedLinear
from .structure import stay_float

METHOD = "baracuda"


@register_quantization_config(METHOD)
class Config(QuantizationConfigMixin):  # type: ignore[misc]
    """The checkpoint's own quantization_config, under a method that is ours."""

    def __init__(self, compressed_tensors: dict[str, Any] | None = None, **_: Any) -> None:
        self.quant_method = METHOD
        self.compressed_tensors = compressed_tensors or {}


class FloatExperts(ConversionOps):  # type: ignore[misc]
    """Packed experts, made float for the stack that transformers computes with."""

    def __init__(self, quantizer: Any) -> None:
        self.scheme = parse_config(quantizer.quantization_config.compressed_tensors)

    def convert(self, input_dict: Any, *_: Any, model: Any, full_layer_name: str, **__: Any) -> dict[str, Any]:
        return float_experts(self.scheme, input_dict, model.get_parameter(full_layer_name).dtype)


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):  # type: ignore[misc]
    """Puts our modules where the config says, before the weights are loaded."""

    serialized_names: ClassVar[dict[str, list[str]]] = {"weight": list(SERIALIZED)}

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": FloatExperts}

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """Experts are made of what is serialized. Whatever else transformers joins or cuts is float: as it was."""
        updated: list[Any] = []
        for conversion in weight_conversions:
            serialized = bool(expert_sources(conversion))
            updated += super().update_weight_conversions([conversion], model) if serialized else [conversion]
        return updated

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        config = self.quantization_config.compressed_tensors
        scheme, ignore = parse_config(config), config["ignore"]
        floats = stay_float(model)
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear) or name in floats:
                continue
            if not any(matches(pattern, name) for pattern in ignore):
                model.set_submodule(name, quantized_linear(module, scheme, module.weight.dtype))
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def quantized_linear(linear: nn.Linear, scheme: Scheme, dtype: torch.dtype) -> nn.Module:
    """An empty module of the checkpoint's shape for a float one, where its weights are about to be loaded."""
    n, k, bias, device = linear.out_features, linear.in_features, linear.bias is not None, linear.weight.device
    if scheme.packed:
        return PackedLinear(k, n, bias, scheme.group_size, device=device, dtype=dtype)
    kind = SmoothQuantLinear if scheme.activations == "static" else QuantizedLinear
    return kind(k, n, bias, device=device, dtype=dtype)
