"""One operator of torch for each linear that a server calls: graphs see an opaque op, and what runs is chosen in it.

A server compiles its model once for any number of tokens. The number is known when an operator runs, and the plan is
chosen then, from the cache of plans; nothing waits for the device, so a CUDA graph can be captured around it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from ..core.scope import PerGroup
from ..core.types import BackendKind, DynamicRangeMode
from ..functional import dequantize, quantize, quantized_linear, smoothquant_linear, weight_only_linear
from ..plans.declarations import WeightOnlyLinearPlan
from ..plans.descriptors import WeightOnlyLinearDescriptor

_LIBRARY = torch.library.Library("baracuda_serve", "DEF")  # type: ignore[no-untyped-call]


def int8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    weight_sum: Tensor | None,
    asymmetric: bool,
) -> Tensor:
    """x @ W.T + bias, s8 weights `[N, K]`, x quantized per token to s8; `asymmetric` gives it a zero point."""
    mode = DynamicRangeMode.ASYMMETRIC if asymmetric else DynamicRangeMode.SYMMETRIC
    return quantized_linear(x, weight, weight_scale, _as(bias, x), mode=mode, weight_sum=weight_sum)


def int8_static_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    weight_sum: Tensor | None,
    input_scale: Tensor,
    input_zero_point: Tensor | None,
) -> Tensor:
    """The same, over one scale (and zero point) for all activations."""
    x_q = quantize(x, input_scale, input_zero_point)
    return smoothquant_linear(
        x_q,
        weight,
        input_scale,
        weight_scale,
        _as(bias, x),
        act_zero_point=input_zero_point,
        dtype=x.dtype,
        weight_sum=weight_sum,
    )


def int4_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group_size: int) -> Tensor:
    """x @ W.T + bias in x's type, s4 weights in groups: two's complement pairs in bytes, `[N, K / 2]`.

    Where no kernel multiplies by them as they are, the weight is made float first: the reference would be slow.
    """
    if has_kernel(x.device, x.dtype, x[..., 0].numel(), weight.shape[0], x.shape[-1], group_size):
        return weight_only_linear(x, weight, weight_scale, _as(bias, x), weight_element="s4")
    scale = weight_scale if weight_scale.dtype is x.dtype else weight_scale.float()
    whole = dequantize(weight, scale, scope=PerGroup(group_size), element="s4", dtype=x.dtype)
    return functional.linear(x, whole, _as(bias, x))


def int4_int8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, weight_factor: Tensor
) -> Tensor:
    """x @ W.T + bias, x quantized per token to s8, s4 weights in groups whose scales are `weight_scale * factor`."""
    return quantized_linear(x, weight, weight_scale, _as(bias, x), weight_element="s4", weight_factor=weight_factor)


@lru_cache(maxsize=4096)
def has_kernel(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int, group_size: int) -> bool:
    """Whether something faster than the reference multiplies floats by 4-bit weights of this shape."""
    group = group_size if group_size < k else 0
    descriptor = WeightOnlyLinearDescriptor(m, n, k, weight_group=group, activation_element=dtype)
    return WeightOnlyLinearPlan.select(descriptor, device=device).sku().backend is not BackendKind.REFERENCE


def _as(bias: Tensor | None, x: Tensor) -> Tensor | None:
    """The kernels take a bias in f32 or in the type of the result."""
    return bias if bias is None or bias.dtype in (torch.float32, x.dtype) else bias.to(x.dtype)


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_WEIGHTS = "Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias"
_SCHEMAS = {
    int8_linear: f"{_WEIGHTS}, Tensor? weight_sum, bool asymmetric",
    int8_static_linear: f"{_WEIGHTS}, Tensor? weight_sum, Tensor input_scale, Tensor? input_zero_point",
    int4_linear: f"{_WEIGHTS}, int group_size",
    int4_int8_linear: f"{_WEIGHTS}, Tensor weight_factor",
}
for _function, _arguments in _SCHEMAS.items():
    _name = _function.__name__
    _LIBRARY.define(f"{_name}({_arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _device)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"baracuda_serve::{_name}", _fake, lib=_LIBRARY)
#: The operators, through torch's dispatcher.
call = torch.ops.baracuda_serve
