"""The named plans: each a docstring, an op, a descriptor and its arguments. The base class does the rest."""

from __future__ import annotations

from ..backends.registry import Value
from ..core.types import QuantizeKind
from .descriptors import (
    BackwardArgs,
    DequantizePerChannelDescriptor,
    DequantizePerGroupDescriptor,
    DequantizePerTensorDescriptor,
    DequantizePerTokenDescriptor,
    DynamicRangeQuantizeArgs,
    DynamicRangeQuantizeDescriptor,
    FakeQuantizeDescriptor,
    QuantizeArgs,
    QuantizedLinearArgs,
    QuantizedLinearDescriptor,
    QuantizePerChannelDescriptor,
    QuantizePerGroupDescriptor,
    QuantizePerTensorDescriptor,
    QuantizePerTokenDescriptor,
    SmoothQuantLinearArgs,
    SmoothQuantLinearDescriptor,
    WeightOnlyLinearArgs,
    WeightOnlyLinearDescriptor,
)
from .plan import Plan
from .produced import (
    GatedArgs,
    GatedDescriptor,
    GatedDynamicQuantizeArgs,
    GatedQuantizeArgs,
    NormArgs,
    NormDescriptor,
    NormDynamicQuantizeArgs,
    NormQuantizeArgs,
    TokenLinearArgs,
    TokenLinearDescriptor,
)


class QuantizePerTensorPlan(Plan[QuantizePerTensorDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale) + zero_point, q_min, q_max): one scale for the tensor."""

    op = QuantizeKind.QUANTIZE


class DequantizePerTensorPlan(Plan[DequantizePerTensorDescriptor, QuantizeArgs]):
    """y = (q - zero_point) * scale: one scale for the tensor."""

    op = QuantizeKind.DEQUANTIZE


class QuantizePerTensorBackwardPlan(Plan[QuantizePerTensorDescriptor, BackwardArgs]):
    """dx = dy / scale where x was in range, else 0: one scale for the tensor."""

    op = QuantizeKind.QUANTIZE_BACKWARD


class DequantizePerTensorBackwardPlan(Plan[DequantizePerTensorDescriptor, BackwardArgs]):
    """dq = dy * scale: one scale for the tensor."""

    op = QuantizeKind.DEQUANTIZE_BACKWARD


class QuantizePerChannelPlan(Plan[QuantizePerChannelDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale[c]) + zero_point[c], q_min, q_max): one scale for each index of an axis."""

    op = QuantizeKind.QUANTIZE


class DequantizePerChannelPlan(Plan[DequantizePerChannelDescriptor, QuantizeArgs]):
    """y = (q - zero_point[c]) * scale[c]: one scale for each index of an axis."""

    op = QuantizeKind.DEQUANTIZE


class QuantizePerChannelBackwardPlan(Plan[QuantizePerChannelDescriptor, BackwardArgs]):
    """dx = dy / scale[c] where x was in range, else 0: one scale for each index of an axis."""

    op = QuantizeKind.QUANTIZE_BACKWARD


class DequantizePerChannelBackwardPlan(Plan[DequantizePerChannelDescriptor, BackwardArgs]):
    """dq = dy * scale[c]: one scale for each index of an axis."""

    op = QuantizeKind.DEQUANTIZE_BACKWARD


class QuantizePerTokenPlan(Plan[QuantizePerTokenDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale[n]) + zero_point[n], q_min, q_max): one scale for each row."""

    op = QuantizeKind.QUANTIZE


class DequantizePerTokenPlan(Plan[DequantizePerTokenDescriptor, QuantizeArgs]):
    """y = (q - zero_point[n]) * scale[n]: one scale for each row."""

    op = QuantizeKind.DEQUANTIZE


class QuantizePerTokenBackwardPlan(Plan[QuantizePerTokenDescriptor, BackwardArgs]):
    """dx = dy / scale[n] where x was in range, else 0: one scale for each row."""

    op = QuantizeKind.QUANTIZE_BACKWARD


class DequantizePerTokenBackwardPlan(Plan[DequantizePerTokenDescriptor, BackwardArgs]):
    """dq = dy * scale[n]: one scale for each row."""

    op = QuantizeKind.DEQUANTIZE_BACKWARD


class QuantizePerGroupPlan(Plan[QuantizePerGroupDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale[n, g]) + zero_point[n, g], q_min, q_max): one scale for each group of a row."""

    op = QuantizeKind.QUANTIZE


class DequantizePerGroupPlan(Plan[DequantizePerGroupDescriptor, QuantizeArgs]):
    """y = (q - zero_point[n, g]) * scale[n, g]: one scale for each group of a row."""

    op = QuantizeKind.DEQUANTIZE


class QuantizePerGroupBackwardPlan(Plan[QuantizePerGroupDescriptor, BackwardArgs]):
    """dx = dy / scale[n, g] where x was in range, else 0: one scale for each group of a row."""

    op = QuantizeKind.QUANTIZE_BACKWARD


class DequantizePerGroupBackwardPlan(Plan[DequantizePerGroupDescriptor, BackwardArgs]):
    """dq = dy * scale[n, g]: one scale for each group of a row."""

    op = QuantizeKind.DEQUANTIZE_BACKWARD


class FakeQuantizePlan(Plan[FakeQuantizeDescriptor, QuantizeArgs]):
    """y = dequantize(quantize(x)) in one pass, in any scope."""

    op = QuantizeKind.FAKE_QUANTIZE


class FakeQuantizeBackwardPlan(Plan[FakeQuantizeDescriptor, BackwardArgs]):
    """dx = dy where x was in range, else 0."""

    op = QuantizeKind.FAKE_QUANTIZE_BACKWARD


class DynamicRangeQuantizePlan(Plan[DynamicRangeQuantizeDescriptor, DynamicRangeQuantizeArgs]):
    """The scale of every segment from its own range, then quantize with the scale as stored."""

    op = QuantizeKind.DYNAMIC_QUANTIZE


class QuantizedLinearPlan(Plan[QuantizedLinearDescriptor, QuantizedLinearArgs]):
    """y = act(x @ W.T + bias) + residual with int8 weights, x quantized per token on the way in."""

    op = QuantizeKind.QUANTIZED_LINEAR


class SmoothQuantLinearPlan(Plan[SmoothQuantLinearDescriptor, SmoothQuantLinearArgs]):
    """y = act((act_q @ W.T) * act_scale * weight_scale[n] + bias) + residual: x already smoothed and quantized."""

    op = QuantizeKind.SMOOTHQUANT_LINEAR

    def operands(self, args: SmoothQuantLinearArgs) -> tuple[Value, ...]:
        activations, *rest = super().operands(args)
        return (activations, self.descriptor.act_scale, self.descriptor.act_zero_point, *rest)


class WeightOnlyLinearPlan(Plan[WeightOnlyLinearDescriptor, WeightOnlyLinearArgs]):
    """y = act(x @ dequantize(W).T + bias) + residual: integer weights, float activations and sums."""

    op = QuantizeKind.WEIGHT_ONLY_LINEAR


class TokenLinearPlan(Plan[TokenLinearDescriptor, TokenLinearArgs]):
    """y = act((act_q @ W.T) * act_scale[m] * weight_scale[n] + bias) + residual: x quantized per token already."""

    op = QuantizeKind.SMOOTHQUANT_LINEAR


class NormPlan(Plan[NormDescriptor, NormArgs]):
    """y = the norm of x, or of x + addend, row by row: RMSNorm in three styles, or LayerNorm."""

    op = QuantizeKind.NORM


class NormQuantizePlan(Plan[NormDescriptor, NormQuantizeArgs]):
    """q = quantize(norm(x), scale, zero_point) in one pass."""

    op = QuantizeKind.NORM_QUANTIZE


class NormDynamicQuantizePlan(Plan[NormDescriptor, NormDynamicQuantizeArgs]):
    """q = dynamic_quantize(norm(x)) per token, in one pass."""

    op = QuantizeKind.NORM_DYNAMIC_QUANTIZE


class GatedPlan(Plan[GatedDescriptor, GatedArgs]):
    """y = act(gate) * up, such as silu(gate) * up."""

    op = QuantizeKind.GATED


class GatedQuantizePlan(Plan[GatedDescriptor, GatedQuantizeArgs]):
    """q = quantize(act(gate) * up, scale, zero_point) in one pass."""

    op = QuantizeKind.GATED_QUANTIZE


class GatedDynamicQuantizePlan(Plan[GatedDescriptor, GatedDynamicQuantizeArgs]):
    """q = dynamic_quantize(act(gate) * up) per token, in one pass."""

    op = QuantizeKind.GATED_DYNAMIC_QUANTIZE
