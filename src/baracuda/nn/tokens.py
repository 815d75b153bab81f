"""Activations that were quantized where they were made, on their way to the linears that read them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.types import Activation, QuantizeKind
from ..dispatch.eager import cached_plan, route
from ..dispatch.options import static_linear_spec
from ..functional import smoothquant_linear
from ..plans.plan import SelectedPlan
from .launches import KEPT, is_plain_call

if TYPE_CHECKING:
    from .linear import IntegerLinear

_is_grad_enabled = torch.is_grad_enabled


class QuantizedTokens:
    """Activations that were quantized where they were made: what a linear takes in place of floats.

    `q` has the shape of the activations. `scale` is f32, one for each row in a row, or `[1]` for a static scale, which
    may have a zero point. `dtype` is the float type they stand for. It is no tensor on purpose: what is not written for
    it raises.
    """

    __slots__ = ("dtype", "q", "scale", "zero_point")

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> None:
        self.q, self.scale, self.zero_point, self.dtype = q, scale, zero_point, dtype

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def per_token(self) -> bool:
        return self.zero_point is None and self.scale.numel() != 1

    def __repr__(self) -> str:
        return f"QuantizedTokens({self.q.dtype}, shape={list(self.shape)}, for {self.dtype})"


class TokenLaunches:
    """What `Launches` is to floats: the plans of one linear over quantized tokens. Copies start empty."""

    def __init__(self) -> None:
        self._tensors: tuple[Any, ...] = ()
        self._operands: tuple[Any, ...] = ()
        self._plans: dict[tuple[Any, ...], tuple[SelectedPlan, tuple[int, int], tuple[int, ...]]] = {}

    def __call__(self, linear: IntegerLinear, x: QuantizedTokens) -> Tensor | None:
        """The linear of x; None where the call must take the long way."""
        q, bias = x.q, linear._parameters.get("bias")
        if not is_plain_call(q) or (_is_grad_enabled() and bias is not None and bias.requires_grad):
            return None
        buffers, known = linear._buffers, self._tensors
        weight, scale, factor = buffers["weight"], buffers["weight_scale"], buffers["weight_factor"]
        address = 0 if scale is None else scale.data_ptr()
        dtype = None if bias is None else bias.dtype
        same = known and known[0] is weight and known[1] is scale and known[2] is bias and known[3] is factor
        if (not same or known[4] != address or known[5] is not dtype) and not self._take(
            q, (weight, scale, bias, factor, address, dtype)
        ):
            return None
        per_token = x.per_token
        found = self._plans.get((q.shape, x.dtype, per_token))
        if found is None:
            found = self._find(linear, x)
            if found is None:
                return None
        plan, matrix, out_shape = found
        zero = None if x.zero_point is None else x.zero_point.to(torch.int32).view(())
        tokens = (q if q.ndim == 2 else q.view(matrix), x.scale if per_token else x.scale.view(()), zero)
        weight, scale, bias, factor = self._operands
        result: Tensor = plan.compute((*tokens, weight, scale, bias, linear._weight_sum(), None, factor))[-1]
        return result if len(out_shape) == 2 else result.view(out_shape)

    def _take(self, q: Tensor, tensors: tuple[Any, ...]) -> bool:
        """Remember the tensors, once they are plain ones that need no dispatcher."""
        self._plans, self._tensors = {}, ()
        weight, scale, bias, factor, _, _ = tensors
        with torch.no_grad():
            if weight is None or scale is None or route(q, weight, scale, bias, factor) != "plan":
                return False
            if scale.shape != (weight.shape[0], 1) or not scale.is_contiguous():
                return False
            self._operands = weight, scale.view(-1), bias, factor
        self._tensors = tensors
        return True

    def _find(
        self, linear: IntegerLinear, x: QuantizedTokens
    ) -> tuple[SelectedPlan, tuple[int, int], tuple[int, ...]] | None:
        (weight, _, bias, _), shape = self._operands, x.shape
        if bias is not None and bias.dtype not in (torch.float32, x.dtype):
            return None
        m, k, n = prod(shape[:-1]), shape[-1], weight.shape[0]
        spec = static_linear_spec(
            x.q.dtype, x.dtype, x.zero_point is None, linear.weight_element, Activation.NONE, linear.weight_group,
            x.per_token,
        )  # fmt: skip
        plan = cached_plan(weight.device, QuantizeKind.SMOOTHQUANT_LINEAR, (m, n, k), spec)
        if len(self._plans) >= KEPT:
            self._plans.clear()
        found = self._plans[shape, x.dtype, x.per_token] = plan, (m, k), (*shape[:-1], n)
        return found

    def __reduce__(self) -> tuple[type[TokenLaunches], tuple[()]]:
        return TokenLaunches, ()


def token_linear(x: Any, tensors: tuple[Tensor | None, ...], settings: str) -> Tensor:
    """The linear of quantized tokens the long way: inside torch.compile, and where a mode of torch is to see it."""
    weight, weight_scale, bias, weight_factor = tensors[:4]
    assert weight is not None and weight_scale is not None
    if bias is not None and bias.dtype not in (torch.float32, x.dtype):
        bias = bias.to(x.dtype)
    return smoothquant_linear(
        x.q,
        weight,
        x.scale.view(x.q.shape[:-1]) if x.per_token else x.scale,
        weight_scale,
        bias,
        act_zero_point=x.zero_point,
        dtype=x.dtype,
        weight_element=settings.split(" ")[2],  # type: ignore[arg-type]
        weight_factor=weight_factor,
    )
