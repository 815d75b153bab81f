"""Which module computes a linear of a scheme, with the tensors of a checkpoint as its state."""

from __future__ import annotations

import torch
from torch import nn

from ...nn import QuantizedLinear, SmoothQuantLinear
from ...schemes import Scheme
from ..errors import FlowError
from .packed import PackedLinear


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
