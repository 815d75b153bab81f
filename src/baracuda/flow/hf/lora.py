"""LoRA adapters of PEFT beside integer linears. Importing this module needs PEFT.

The linear stays as it is and passes gradients to its input; the adapter trains.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import layer, model

from ...nn.linear import IntegerLinear
from ..errors import FlowError
from .packed import PackedLinear


class IntegerLoraLinear(layer.Linear):  # type: ignore[misc]
    """PEFT's adapter for a linear, which is not merged: the sum would have to be quantized again."""

    def merge(self, *_: Any, **__: Any) -> None:
        raise FlowError(
            f"a LoRA adapter cannot be merged into {type(self.get_base_layer()).__name__}, whose weight is integers; "
            "keep it beside the model, or merge it into the float model and quantize that"
        )


def install() -> None:
    """Have PEFT put its adapters on our linears, too."""
    create = model.LoraModel._create_new_module
    if getattr(create, "of_baracuda", False):
        return

    def create_new_module(lora_config: Any, adapter_name: str, target: Any, **options: Any) -> Any:
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if isinstance(base, IntegerLinear | PackedLinear):
            return IntegerLoraLinear(target, adapter_name, config=lora_config, **options)
        return create(lora_config, adapter_name, target, **options)

    create_new_module.of_baracuda = True  # type: ignore[attr-defined]
    model.LoraModel._create_new_module = staticmethod(create_new_module)
