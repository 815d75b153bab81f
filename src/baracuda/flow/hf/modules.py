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
    weight, kind = scheme.weight, scheme.activation.kind
    if weight.element.is_packed and (kind == "float" or (kind == "dynamic" and weight.group_size is not None)):
        return PackedLinear(
            k,
            n,
            bias,
            weight.group_size or k,
            zero_points=weight.zero_points,
            act_order=weight.act_order,
            integer_inputs=kind == "dynamic",
            device=device,
            dtype=dtype,
        )
    if kind == "float" or weight.element.is_packed:
        raise FlowError(f"{scheme}: no module computes this scheme from a checkpoint; use w8a8, w4a8 or w4a16")
    made = SmoothQuantLinear if kind == "static" else QuantizedLinear
    return made(k, n, bias, device=device, dtype=dtype, **scheme.linear_options)
