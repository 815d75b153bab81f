"""Linear kernels as vLLM chooses among them, computed by baracuda. Importing this module needs vLLM.

vLLM loads the checkpoint into parameters in compressed-tensors' layout, asks a kernel to prepare them, then calls it.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
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
from ..core.types import BackendKind, ElementKind
from ..plans.declarations import QuantizedLinearPlan
from ..plans.descriptors import QuantizedLinearDescriptor
from ..schemes.search import split_factors
from . import operators

logger = init_logger("vllm.baracuda")
#: Whether the layer that vLLM is making quantizes its activations, too.
_INTEGER_INPUTS: ContextVar[bool] = ContextVar("integer_inputs", default=False)
#: Where a layer keeps the integer factors of its groups.
FACTOR = "baracuda_weight_factor"
#: Support, and the reason where there is none.
Answer = tuple[bool, str | None]


class BaracudaInt8LinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8: s8 weights per channel or per tensor, activations per token or static, symmetric or not."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return _has_kernel(QuantizedLinearDescriptor(m=16, c_out=128, k=128))

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
        columns, size = c.partition_weight_shape[0], _group_size(c)
        if size % 8 or columns % size:
            return False, f"baracuda wants groups of a multiple of 8 that divide the {columns} columns, got {size}"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._take_integers(layer)
        _replace(layer, self.w_s_name, getattr(layer, self.w_s_name).data.contiguous())
        _tell("W4A16 linears run in baracuda on %s", current_platform.device_type)

    def _take_integers(self, layer: nn.Module) -> None:
        packed = getattr(layer, self.w_q_name)
        if (packed.input_dim, packed.packed_dim) != (1, 1):
            raise ValueError(
                f"expected compressed-tensors' layout, rows packed along columns, got input_dim {packed.input_dim} and "
                f"packed_dim {packed.packed_dim}; set BARACUDA_VLLM=w8a8 to leave 4-bit linears to vLLM"
            )
        # Stored offset by 8; flipping the top bit of each nibble gives two's complement.
        _replace(layer, self.w_q_name, packed.data.contiguous().view(torch.uint8) ^ 0x88)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scale, _ = self._get_weight_params(layer)
        return operators.call.int4_linear(x, weight, scale, bias, _group_size(self.config))  # type: ignore[no-any-return]


class BaracudaW4A8LinearKernel(BaracudaInt4LinearKernel):
    """W4A8: the same weights, with integer activations. vLLM's own kernels leave the activations float."""

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        if not _INTEGER_INPUTS.get():
            return False, "this kernel is for layers whose activations are quantized"
        able, reason = super().can_implement(c)
        if not able:
            return able, reason
        k, n = c.partition_weight_shape
        element, group = ElementKind.of(c.act_type, "act_type"), _group_size(c)
        wanted = QuantizedLinearDescriptor(
            m=16, c_out=n, k=k, activation_element=element, weight_element=ElementKind.S4, weight_group=group
        )
        return _has_kernel(wanted)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        split = split_factors(getattr(layer, self.w_s_name).data.float())
        if split is None:
            # vLLM has chosen its kernels by now, and would compute no more than this.
            logger.warning_once(
                "4-bit linears with integer activations are computed with float ones: their group scales are not 1 to "
                "15 times a scale of the row. Quantize with baracuda's w4a8, and serve in the checkpoint's own type"
            )
            super().process_weights_after_loading(layer)
            return
        self._take_integers(layer)
        _replace(layer, self.w_s_name, split[0].unsqueeze(1))
        layer.register_parameter(FACTOR, nn.Parameter(split[1], requires_grad=False))
        _tell("W4A8 linears with per-token symmetric activations run in baracuda on %s", current_platform.device_type)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        factor = getattr(layer, FACTOR, None)
        if factor is None:
            return super().apply_weights(layer, x, bias)
        weight, scale, _ = self._get_weight_params(layer)
        return operators.call.int4_int8_linear(x, weight, scale, bias, factor)  # type: ignore[no-any-return]


def tell_integer_inputs() -> None:
    """Have vLLM's scheme for integer activations say so while it chooses a kernel: it passes on the weights only."""
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    scheme = schemes.CompressedTensorsWNA8Int
    create_weights = scheme.create_weights
    if getattr(create_weights, "of_baracuda", False):
        return

    @functools.wraps(create_weights)
    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        token = _INTEGER_INPUTS.set(True)
        try:
            create_weights(self, *args, **kwargs)
        finally:
            _INTEGER_INPUTS.reset(token)

    create.of_baracuda = True  # type: ignore[attr-defined]
    scheme.create_weights = create


def _has_kernel(descriptor: QuantizedLinearDescriptor) -> Answer:
    """Whether baracuda has a kernel for this on the server's device: the reference would be right, but slow."""
    device = torch.device(current_platform.device_type)
    try:
        plan = QuantizedLinearPlan.select(descriptor, device=device)
    except BaracudaError as error:
        return False, f"is not supported: {error}"
    if plan.sku().backend is BackendKind.REFERENCE:
        return False, f"is not supported: baracuda has only its reference on {device}; `baracuda info` says why"
    return True, None


def _group_size(config: Any) -> int:
    """The columns that share a scale; vLLM spells all of them -1."""
    return int(config.partition_weight_shape[0] if config.group_size == -1 else config.group_size)


def _replace(layer: nn.Module, name: str, tensor: Tensor | None) -> None:
    if tensor is None:
        setattr(layer, name, None)
    else:
        replace_parameter(layer, name, nn.Parameter(tensor, requires_grad=False))


def _tell(message: str, *values: str) -> None:
    logger.info_once(message, *values)
