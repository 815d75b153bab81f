"""baracuda.load: a quantized checkpoint as the transformers model it came from, its Linears computing in integers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..plan import resolve_device
from .checkpoint import read_json
from .errors import FlowError, some
from .experts import SERIALIZED, float_experts
from .packed import PackedLinear
from .patterns import matches
from .scheme import STORED, Scheme, parse_config
from .structure import model_class, model_config, quiet, stays_float
from .verify import require_stored


def load(out: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Any:
    """The model in `out`, ready to run: int8 for w8a8, 4-bit weights made float for w4a16 (experts once, when loaded).

    transformers itself builds the model and reads the weights, so whatever it knows about an architecture holds here.
    `dtype` is the type of what is not quantized; the checkpoint's own unless given.
    """
    directory, device = Path(out), resolve_device(device)
    quantization = read_json(directory / "config.json").get("quantization_config")
    if quantization is None:
        raise FlowError(f"{directory}: its config.json has no quantization_config; transformers loads it as it is")
    scheme = parse_config(quantization)  # says what is unreadable before anything is loaded
    require_transformers("baracuda.load builds transformers models")
    require_stored(directory, scheme)
    _register()
    config = model_config(directory)
    config.quantization_config = {"quant_method": "baracuda", "compressed_tensors": quantization}
    return read_model(directory, config, dtype or "auto").to(device).eval()


def read_model(directory: Path, config: Any, dtype: torch.dtype | str) -> nn.Module:
    """The model as transformers reads it, from safetensors only; transformers makes up what is not there, this raises.

    Floats that nothing reads are no reason: many a checkpoint has a head of its training left.
    """
    import transformers

    cls = model_class(config) or transformers.AutoModel
    with quiet():
        model: nn.Module
        model, found = cls.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    missing, unread = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    shapes = {name: (stored, there) for name, stored, there in found["mismatched_keys"]}
    # Where there is a quantizer, transformers leaves shapes to it.
    expected = getattr(getattr(model, "hf_quantizer", None), "shapes", {})
    shapes |= {n: (t.shape, expected[n]) for n, t in model.state_dict().items() if t.shape != expected.get(n, t.shape)}
    mismatched = [f"{name} ({list(stored)}, not {list(there)})" for name, (stored, there) in sorted(shapes.items())]
    quantized = any(name.rpartition(".")[2] in set(STORED) - {"weight"} for name in unread)
    if missing or mismatched or quantized:
        told = {"no file holds": missing, "have another shape": mismatched, "nothing reads": unread}
        raise FlowError(
            f"{directory}: the files do not fill transformers' {type(model).__name__}: "
            + "; ".join(f"{what} {some(names)}" for what, names in told.items() if names)
            + "; make or download the checkpoint again"
        )
    return model


def quantized_linear(linear: nn.Linear, scheme: Scheme, dtype: torch.dtype) -> nn.Module:
    """An empty module of the checkpoint's shape for a float one, where its weights are about to be loaded."""
    from ..nn import QuantizedLinear, SmoothQuantLinear

    n, k, bias, device = linear.out_features, linear.in_features, linear.bias is not None, linear.weight.device
    if scheme.packed:
        return PackedLinear(k, n, bias, scheme.group_size, device=device, dtype=dtype)
    kind = SmoothQuantLinear if scheme.activations == "static" else QuantizedLinear
    return kind(k, n, bias, device=device, dtype=dtype)


def require_transformers(why: str) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise FlowError(f"{why}: pip install 'baracuda[flow]'") from None


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
                if not isinstance(module, nn.Linear) or stays_float(name, module) is not None:
                    continue
                if not any(matches(pattern, name) for pattern in ignore):
                    model.set_submodule(name, quantized_linear(module, scheme, module.weight.dtype))
            self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    register_quantization_config("baracuda")(Config)
    register_quantizer("baracuda")(Quantizer)
