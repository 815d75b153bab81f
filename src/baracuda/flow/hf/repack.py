"""Integer linears with 4-bit weights as checkpoints store them: packed, with a scale for each group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...nn import QuantizedLinear
from ..errors import FlowError
from .packed import PackedLinear

#: Sizes that all servers take. A weight with one scale a channel is stored in groups of that same scale.
GROUP_SIZES = (128, 64, 32)


def is_four_bit(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLinear) and module.weight_element.is_packed


def stored_groups(model: nn.Module) -> dict[str, int]:
    """The group size under which each linear with 4-bit weights is stored; 0 where no size divides its columns."""
    four = {name: module for name, module in model.named_modules() if is_four_bit(module)}
    columns = [int(module.in_features) for module in four.values() if not module.weight_group]
    common = next((size for size in GROUP_SIZES if not any(k % size for k in columns)), 0)
    return {name: int(module.weight_group) or common for name, module in four.items()}


@contextmanager
def repacked(model: nn.Module) -> Iterator[set[str]]:
    """4-bit integer linears replaced by what a checkpoint holds of them, for as long as the model is written."""
    sizes = stored_groups(model)
    before = {name: model.get_submodule(name) for name in sizes}
    try:
        for name, size in sizes.items():
            model.set_submodule(name, _packed(name, before[name], size, getattr(model, "dtype", torch.float32)))
        yield set(sizes)
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


def _packed(name: str, linear: nn.Module, size: int, dtype: torch.dtype) -> PackedLinear:
    assert isinstance(linear, QuantizedLinear)
    n, k = linear.out_features, linear.in_features
    made = PackedLinear(k, n, False, size, integer_inputs=True, device="meta")
    # Two's complement; stored offset by 8, which is the top bit of each nibble flipped.
    made.weight_packed = (linear.weight ^ 0x88).contiguous().view(torch.int32)
    made.weight_scale = _group_scales(name, linear, size, dtype)
    made.weight_shape = torch.tensor([n, k], dtype=torch.int64)
    made.register_parameter("bias", linear.bias)
    return made


def _group_scales(name: str, linear: QuantizedLinear, size: int, dtype: torch.dtype) -> Tensor:
    """The channel's scale times the group's factor, in the model's type where that holds it exactly, else in f32."""
    scale = linear.weight_scale.double()
    factor = linear.weight_factor
    products = scale.expand(-1, linear.in_features // size) if factor is None else scale * factor
    for kind in (dtype, torch.float32):
        if torch.equal(products.to(kind).double(), products):
            return products.to(kind).contiguous()
    raise FlowError(
        f"{name}: cannot be saved: the scales of its groups have no exact value in {dtype} or f32; quantize it with "
        "fewer bits in its channel scales, as `baracuda quantize` does"
    )
