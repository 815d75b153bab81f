"""baracuda's quantizer for transformers. Importing this module registers it, and needs transformers.

The classes have a module of their own, so that a loaded model, which holds them, can be pickled.
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
from ...schemes import Scheme
from ..checkpoint.config import parse_config
from ..checkpoint.storage import Storage
from ..errors import FlowError
from .experts import SERIALIZED, expert_sources, float_experts
from .packed import PackedLinear
from .skeleton import stay_float

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
        self.recipe = parse_config(quantizer.quantization_config.compressed_tensors)

    def convert(self, input_dict: Any, *_: Any, model: Any, full_layer_name: str, **__: Any) -> dict[str, Any]:
        storage = Storage(self.recipe.of(full_layer_name).scheme)
        return float_experts(storage, input_dict, model.get_parameter(full_layer_name).dtype)


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):  # type: ignore[misc]
    """Puts our modules where the config says, before the weights are loaded."""

    serialized_names: ClassVar[dict[str, list[str]]] = {"weight": list(SERIALIZED)}

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": FloatExperts}

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Build experts from the serialized tensors. All other tensors that transformers joins or cuts are float.

        Some versions of transformers pass the model too, others do not: it is handed on where it is given.
        """
        updated: list[Any] = []
        for conversion in weight_conversions:
            serialized = bool(expert_sources(conversion))
            updated += super().update_weight_conversions([conversion], *model) if serialized else [conversion]
        return updated

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        config = self.quantization_config.compressed_tensors
        recipe, ignore = parse_config(config), config["ignore"]
        floats = stay_float(model)
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear) or name in floats:
                continue
            if not any(matches(pattern, name) for pattern in ignore):
                model.set_submodule(name, quantized_linear(module, recipe.of(name).scheme, module.weight.dtype))
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        """Without this `generate` with a static cache runs eagerly."""
        return True


def quantized_linear(linear: nn.Linear, scheme: Scheme, dtype: torch.dtype) -> nn.Module:
    """A module that computes this scheme, of the shape of a float linear; its weights are loaded afterwards."""
    n, k, bias, device = linear.out_features, linear.in_features, linear.bias is not None, linear.weight.device
    size = scheme.weight.group_size
    if scheme.activation.kind != "static" and scheme.weight.element.is_packed and size is not None:
        integer = scheme.activation.kind == "dynamic"
        return PackedLinear(k, n, bias, size, integer_inputs=integer, device=device, dtype=dtype)
    if scheme.activation.kind == "float" or scheme.weight.element.is_packed:
        raise FlowError(f"{scheme}: no module computes this scheme from a checkpoint; use w8a8, w4a8 or w4a16")
    kind = SmoothQuantLinear if scheme.activation.kind == "static" else QuantizedLinear
    return kind(k, n, bias, device=device, dtype=dtype, **scheme.linear_options)
