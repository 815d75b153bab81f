"""baracuda.load: a quantized checkpoint as the transformers model it came from, its Linears computing in integers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..plan import resolve_device
from .checkpoint import read_json
from .errors import FlowError
from .experts import SERIALIZED, float_experts
from .packed import PackedLinear
from .patterns import matches
from .scheme import Scheme, parse_config
from .structure import model_class, model_config, quiet


def load(out: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Any:
    """The model in `out`, ready to run: int8 for w8a8, 4-bit weights made float for w4a16 (experts once, when loaded).

    transformers itself builds the model and reads the weights, so whatever it knows about an architecture holds here.
    `dtype` is the type of what is not quantized; the checkpoint's own unless given.
    """
    directory, device = Path(out), resolve_device(device)
    quantization = read_json(directory / "config.json").get("quantization_config")
    if quantization is None:
        raise FlowError(f"{directory}: its config.json has no quantization_config; transformers loads it as it is")
    parse_config(quantization)  # says what is unreadable before anything is loaded
    transformers = _transformers()
    _register()
    options = {"dtype": dtype or "auto", "use_safetensors": True, "local_files_only": True}
    with quiet():
        config = model_config(directory)
        config.quantization_config = {"quant_method": "baracuda", "compressed_tensors": quantization}
        cls = model_class(config) or transformers.AutoModel
        model = cls.from_pretrained(directory, config=config, **options)
    return model.to(device).eval()


def quantized_linear(linear: nn.Linear, scheme: Scheme, dtype: torch.dtype) -> nn.Module:
    """An empty module of the checkpoint's shape for a float one, where its weights are about to be loaded."""
    from ..nn import QuantizedLinear, SmoothQuantLinear

    n, k, bias, device = linear.out_features, linear.in_features, linear.bias is not None, linear.weight.device
    if scheme.packed:
        return PackedLinear(k, n, bias, scheme.group_size, device=device, dtype=dtype)
    kind = SmoothQuantLinear if scheme.activations == "static" else QuantizedLinear
    return kind(k, n, bias, device=device, dtype=dtype)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise FlowError("baracuda.load builds transformers models: pip install 'baracuda[flow]'") from None
    return transformers


@cache
def _register() -> None:
    """Tell transformers how to load what baracuda runs: a quantizer that puts our modules where the config says."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Config(QuantizationConfigMixin):  # type: ignore[misc]
        def __init__(self, compressed_tensors: dict[str, Any] | None = None, **_: Any) -> None:
            self.quant_method = "baracuda"
            self.compressed_tensors = compressed_tensors or {}

    class FloatExperts(ConversionOps):  # type: ignore[misc]
        def __init__(self, quantizer: Any) -> None:
            self.scheme = parse_config(quantizer.quantization_config.compressed_tensors)

        def convert(self, input_dict: Any, *_: Any, model: Any, full_layer_name: str, **__: Any) -> dict[str, Any]:
            return float_experts(self.scheme, input_dict, model.get_parameter(full_layer_name).dtype)

    class Quantizer(HfQuantizer):  # type: ignore[misc]
        serialized_names: ClassVar[dict[str, list[str]]] = {"weight": list(SERIALIZED)}

        def get_load_operations(self) -> dict[str, Any]:
            return {"dequantize": FloatExperts}

        def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
            config = self.quantization_config.compressed_tensors
            scheme, ignore = parse_config(config), config["ignore"]
            for name, module in list(model.named_modules()):
                if isinstance(module, nn.Linear) and not any(matches(pattern, name) for pattern in ignore):
                    model.set_submodule(name, quantized_linear(module, scheme, module.weight.dtype))

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    register_quantization_config("baracuda")(Config)
    register_quantizer("baracuda")(Quantizer)
