"""Modules that stand for torch's norms and activations and give a row the same bits in every batch.

Torch promises no order for a norm's sum; on a CPU it computes whole vectors of exp or erf by another routine than the
elements left over, so that a value's last bits depend on its place. The kernels here have one order and one formula, on
every device, eager or compiled. The gradients are those of the module they stand for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import straight_through
from ..functional import gated, rms_norm


class Ordered(nn.Module):
    """Computes the value itself; `original` is the module it stands for, whose parameters are this one's own."""

    original: nn.Module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # One table for both modules: whatever moves or loads one of them, moves or loads the other.
        self.__dict__["_parameters"] = original._parameters
        self.__dict__["original"] = original
        self.training = original.training

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            value = self._value(x.detach())
        learns = x.requires_grad or any(p is not None and p.requires_grad for p in self._parameters.values())
        return straight_through(self.original(x), value) if learns and torch.is_grad_enabled() else value

    def _value(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class OrderedNorm(Ordered):
    """A norm by `baracuda.rms_norm`, whose sum has one order: not torch's to the last bit."""

    def __init__(self, original: nn.Module, style: str, eps: float) -> None:
        super().__init__(original)
        self.style, self.eps = style, eps

    def _value(self, x: Tensor) -> Tensor:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if torch._C._is_any_autocast_enabled() or any(p is not None and p.dtype is not x.dtype for p in (weight, bias)):
            # The original's code decides about the type of the result: it is asked with no rows.
            x = x.to(self.original(x.reshape(-1, x.shape[-1])[:0]).dtype)
        result: Tensor = rms_norm(x, _as(weight, x), self.eps, style=self.style, bias=_as(bias, x))
        return result

    def extra_repr(self) -> str:
        return f"{type(self.original).__name__}, style={self.style}, eps={self.eps}"


class OrderedActivation(Ordered):
    """silu or gelu by the formula of the linears' epilogue."""

    def __init__(self, original: nn.Module, activation: str) -> None:
        super().__init__(original)
        self.activation: Any = activation

    def _value(self, x: Tensor) -> Tensor:
        if x.ndim == 0:
            return self._value(x[None])[0]
        return gated(x, torch.ones_like(x), activation=self.activation)  # times one, which rounds nothing

    def extra_repr(self) -> str:
        return f"{type(self.original).__name__}"


def _as(value: Tensor | None, x: Tensor) -> Tensor | None:
    """A norm takes its weight in the type of x."""
    return value if value is None or value.dtype is x.dtype else value.to(x.dtype)
