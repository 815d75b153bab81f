"""Linear kernels as vLLM chooses among them, computed by baracuda. Importing this module needs vLLM.

vLLM loads the checkpoint into parameters in compressed-tensors' layout, asks a kernel to prepare them, then calls it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, MPLinearKernel
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from ..core.errors import BaracudaError
from ..core.types import BackendKind
from ..plans.declarations import QuantizedLinearPlan
from ..plans.descriptors import QuantizedLinearDescriptor
from . import operators

logger = init_logger("vllm.baracuda")
#: Support, and the reason where there is none.
Answer = tuple[bool, str | None]


class BaracudaInt8LinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8: s8 weights per channel or per tensor, activations per token or static, symmetric or not."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever baracuda has a kernel: the reference would be right, but slow."""
        device = torch.device(current_platform.device_type)
        try:
            plan = QuantizedLinearPlan.select(QuantizedLinearDescriptor(m=16, c_out=128, k=128), device=device)
        except BaracudaError as error:
            return False, f"is not supported: {error}"
        if plan.sku().backend is BackendKind.REFERENCE:
            return False, f"is not supported: baracuda has only its reference on {device}; `baracuda info` says why"
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight_name, scale_name, input_scale_name, zero_point_name, sum_name = self.layer_param_names
        weight, scale = getattr(layer, weight_name).data, getattr(layer, scale_name).data
        if not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        _replace(layer, weight_name, weight.contiguous())
        _replace(layer, scale_name, scale.reshape(-1, 1).contiguous())
        # Activations with a zero point need the row sums of the weight: once here instead of in every call.
        sums = None if self.config.input_symmetric else weight.sum(dim=1, dtype=torch.int32)
        _replace(layer, sum_name, sums)
        if self.config.is_static_input_scheme:
            self._join_input_scales(layer, input_scale_name, zero_point_name)
        kind = "static" if self.config.is_static_input_scheme else "per-token"
        mode = "symmetric" if self.config.input_symmetric else "asymmetric"
        _tell("W8A8 linears with %s %s activations run in baracuda on %s", kind, mode, current_platform.device_type)

    def _join_input_scales(self, layer: nn.Module, scale_name: str, zero_point_name: str) -> None:
        """One range that covers those of all shards; vLLM loads one of them today."""
        scale = getattr(layer, scale_name).data.float().reshape(-1)
        if self.config.input_symmetric:
            _replace(layer, scale_name, scale.max().reshape(1))
            return
        zero = getattr(layer, zero_point_name).data.to(torch.int32).reshape(-1)
        low, high = ((scale * (end - zero)) for end in (-128, 127))
        joined = (high.max() - low.min()) / 255
        _replace(layer, zero_point_name, (-128 - low.min() / joined).round().to(torch.int32).reshape(1))
        _replace(layer, scale_name, joined.reshape(1))

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scale, input_scale, zero_point, sums = self._get_layer_params(layer)
        if self.config.is_static_input_scheme:
            return operators.call.int8_static_linear(x, weight, scale, bias, sums, input_scale, zero_point)  # type: ignore[no-any-return]
        return operators.call.int8_linear(x, weight, scale, bias, sums, not self.config.input_symmetric)  # type: ignore[no-any-return]


class BaracudaInt4LinearKernel(MPLinearKernel):  # type: ignore[misc]
    """W4A16: symmetric s4 weights in groups, float activations."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return False, f"baracuda computes symmetric 4-bit weights, not {c.weight_type}"
        columns = c.partition_weight_shape[0]
        size = columns if c.group_size == -1 else c.group_size
        if size % 8 or columns % size:
            return False, f"baracuda wants groups of a multiple of 8 that divide the {columns} columns, got {size}"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        if (packed.input_dim, packed.packed_dim) != (1, 1):
            raise ValueError(
                f"expected compressed-tensors' layout, rows packed along columns, got input_dim {packed.input_dim} and "
                f"packed_dim {packed.packed_dim}; set BARACUDA_VLLM=w8a8 to leave 4-bit linears to vLLM"
            )
        # Stored offset by 8; flipping the top bit of each nibble gives two's complement.
        _replace(layer, self.w_q_name, packed.data.contiguous().view(torch.uint8) ^ 0x88)
        _replace(layer, self.w_s_name, scale.data.contiguous())
        _tell("W4A16 linears run in baracuda on %s", current_platform.device_type)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scale, _ = self._get_weight_params(layer)
        columns = self.config.partition_weight_shape[0]
        size = columns if self.config.group_size == -1 else self.config.group_size
        return operators.call.int4_linear(x, weight, scale, bias, size)  # type: ignore[no-any-return]


def _replace(layer: nn.Module, name: str, tensor: Tensor | None) -> None:
    if tensor is None:
        setattr(layer, name, None)
    else:
        replace_parameter(layer, name, nn.Parameter(tensor, requires_grad=False))


def _tell(message: str, *values: str) -> None:
    logger.info_once(message, *values)
