"""The Linear of w4a16 checkpoints: 4-bit weights in groups, made float for each call by baracuda's dequantize."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.scope import PerGroup
from ...functional import dequantize
from ...nn import QuantizedLinear
from ...schemes.search import split_factors
from ..errors import FlowError


def compute_in_integers(model: nn.Module) -> nn.Module:
    """Replace what was loaded for integer activations by integer linears: their group scales become factors."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear) and module.integer_inputs:
            model.set_submodule(name, module.integer_linear(name))
    return model


class PackedLinear(nn.Module):
    """y = x @ dequantize(W).T + bias; its state is what the checkpoint stores."""

    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group_size: int,
        *,
        integer_inputs: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        #: Whether inputs are quantized too: an integer linear then takes the place of this one, once it is loaded.
        self.integer_inputs = integer_inputs
        packed = torch.zeros(out_features, in_features // 8, dtype=torch.int32, device=device)
        scale = torch.ones(out_features, in_features // group_size, dtype=dtype, device=device)
        self.register_buffer("weight_packed", packed)
        self.register_buffer("weight_scale", scale)
        self.register_buffer(
            "weight_shape", torch.tensor([out_features, in_features], dtype=torch.int64, device=device)
        )
        zeros = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", zeros)

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        # Stored offset by 8; flipping the top bit of each nibble gives two's complement.
        nibbles = self.weight_packed.view(torch.uint8) ^ 0x88
        scale = self.weight_scale if self.weight_scale.dtype is dtype else self.weight_scale.float()
        return dequantize(nibbles, scale, scope=PerGroup(self.group_size), element="s4", dtype=dtype)

    def integer_linear(self, name: str) -> QuantizedLinear:
        """The integer linear of these weights; raises unless the scales of a row are integer multiples of one."""
        split = split_factors(self.weight_scale)
        if split is None:
            raise FlowError(
                f"{name}: expected group scales that are 1 to 15 times a scale of their row, as baracuda writes "
                "them for w4a8; other group scales are computed with float activations only: load it as w4a16"
            )
        bias = self.bias if isinstance(self.bias, nn.Parameter) else None
        made = QuantizedLinear(
            self.in_features, self.out_features, False, weight_element="s4", weight_group=self.group_size
        )
        made.weight = self.weight_packed.view(torch.uint8) ^ 0x88
        made.weight_scale, made.weight_factor = split[0].unsqueeze(1), split[1]
        made.bias = bias
        return made

    @property
    def weight(self) -> Tensor:
        """The weight in the type of the scales, dequantized on each access: model code reads its type or shape.

        It is marked as loaded, as transformers does it, so that no initialization writes to it.
        """
        dtype = self.weight_scale.dtype
        if self.weight_scale.is_meta:
            weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")
        else:
            weight = self.dequantized_weight(dtype)
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.to(x.dtype) if isinstance(self.bias, Tensor) else None
        return nn.functional.linear(x, self.dequantized_weight(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group_size={self.group_size}"
