"""What the GPU's elementwise and dynamic operations are measured beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baracuda import DynamicRangeMode, ElementKind, PerChannel, PerTensor, QuantizeKind
from baracuda.core.problem import Problem


def formula(p: Problem) -> tuple[Callable[..., object], int] | None:
    """The op in torch, and how many of its operands that takes; unpacked 8-bit ops only."""
    if p.quantized.is_packed:
        return None
    view, math = p.view, p.element.math.dtype
    low, high, out_type, element = p.q_min, p.q_max, p.quantized.dtype, p.element.dtype
    shape = (view.rows, 1, view.inner)

    def see(x: Tensor) -> Tensor:
        return x.view(view.shape).to(math)

    def steps(x: Tensor, s: Tensor, zp: Tensor) -> Tensor:
        return torch.clamp(torch.round(see(x) / s.view(shape)) + zp.view(shape), low, high)

    def quantize(x: Tensor, s: Tensor, zp: Tensor) -> Tensor:
        return steps(x, s, zp).to(out_type)

    def fake_quantize(x: Tensor, s: Tensor, zp: Tensor) -> Tensor:
        return ((steps(x, s, zp) - zp.view(shape)) * s.view(shape)).to(element)

    def dequantize(q: Tensor, s: Tensor, zp: Tensor) -> Tensor:
        return ((q.view(view.shape).to(math) - zp.view(shape)) * s.view(shape)).to(element)

    def dynamic(x: Tensor) -> tuple[Tensor, ...]:
        seen = see(x)
        if p.mode is DynamicRangeMode.SYMMETRIC:
            scale, zero_point = seen.abs().amax(dim=(0, 2), keepdim=True).clamp(min=1e-30) / high, None
        else:
            least, most = seen.amin(dim=(0, 2), keepdim=True), seen.amax(dim=(0, 2), keepdim=True)
            scale = (most - least).clamp(min=1e-30) / (high - low)
            zero_point = low - torch.round(least / scale)
        chosen = (scale,) if zero_point is None else (scale, zero_point.to(torch.int32))
        if p.op is QuantizeKind.CHOOSE_QPARAMS:
            return chosen
        shift = 0.0 if zero_point is None else zero_point
        q = torch.clamp(torch.round(seen / scale) + shift, low, high)
        return *chosen, q.to(out_type) if p.op is QuantizeKind.DYNAMIC_QUANTIZE else ((q - shift) * scale).to(element)

    def backward(x: Tensor, dy: Tensor, s: Tensor, zp: Tensor) -> Tensor:
        t = torch.round(see(x) / s.view(shape)) + zp.view(shape)
        grad = see(dy) / s.view(shape) if p.op is QuantizeKind.QUANTIZE_BACKWARD else see(dy)
        return torch.where((t >= low) & (t <= high), grad, 0.0).to(element)

    def dequantize_backward(_: None, dy: Tensor, s: Tensor) -> Tensor:
        return (see(dy) * s.view(shape)).to(element)

    bodies: dict[QuantizeKind, tuple[Callable[..., object], int]] = {
        QuantizeKind.QUANTIZE: (quantize, 3),
        QuantizeKind.FAKE_QUANTIZE: (fake_quantize, 3),
        QuantizeKind.DEQUANTIZE: (dequantize, 3),
        QuantizeKind.QUANTIZE_BACKWARD: (backward, 4),
        QuantizeKind.FAKE_QUANTIZE_BACKWARD: (backward, 4),
        QuantizeKind.DEQUANTIZE_BACKWARD: (dequantize_backward, 3),
        QuantizeKind.DYNAMIC_QUANTIZE: (dynamic, 1),
        QuantizeKind.DYNAMIC_FAKE_QUANTIZE: (dynamic, 1),
        QuantizeKind.CHOOSE_QPARAMS: (dynamic, 1),
    }
    return bodies.get(p.op)


def compiled_peer(p: Problem, values: tuple[Any, ...]) -> Callable[[], object] | None:
    """torch.compile's kernel for the same formula; of s8 alone, since u8 takes as long and each a second to compile."""
    found = formula(p) if p.quantized is ElementKind.S8 else None
    if found is None:
        return None
    body, count = found
    torch._dynamo.reset()
    compiled = torch.compile(body, dynamic=False)
    return lambda: compiled(*values[:count])


def native_peer(p: Problem, values: tuple[Any, ...]) -> Callable[[], object] | None:
    """torch's own kernel for the op, where it has one."""
    if p.op is QuantizeKind.FAKE_QUANTIZE and p.scope == PerTensor() and p.element is not ElementKind.F64:
        x, scale, zero_point, _ = values
        return lambda: torch.fake_quantize_per_tensor_affine(x, scale, zero_point, p.q_min, p.q_max)
    if p.op is QuantizeKind.QUANTIZE and p.element is ElementKind.F32 and p.quantized is ElementKind.S8:
        x, scale, zero_point, _ = values
        if p.scope == PerTensor():
            return lambda: torch.quantize_per_tensor(x, scale, zero_point, torch.qint8)
        if p.scope == PerChannel(0):
            return lambda: torch.quantize_per_channel(x, scale, zero_point, 0, torch.qint8)
    return None


#: Who else computes the same: a call, or None where they do not.
PEERS: dict[str, Callable[[Problem, tuple[Any, ...]], Callable[[], object] | None]] = {
    "torch.compile": compiled_peer,
    "torch": native_peer,
}
