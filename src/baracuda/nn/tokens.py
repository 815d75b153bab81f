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
from .launches import KEPT, is_plain_call, lookup

if TYPE_CHECKING:
    from .linear import IntegerLinear

_is_grad_enabled = torch.is_grad_enabled


class QuantizedTokens:
    """Activations that were quantized where they were made: what a linear takes in place of floats.

    `q` has the shape of the activations. `scale` is f32, one for each row in a row (`per_token`), or `[1]` for a static
    scale, which may have a zero point. `dtype` is the float type they stand for. It is no tensor on purpose: what is
    not written for it raises.
    """

    __slots__ = ("dtype", "per_token", "q", "scale", "zero_point")

    def __init__(
        self, q: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype, per_token: bool
    ) -> None:
        self.q, self.scale, self.zero_point, self.dtype, self.per_token = q, scale, zero_point, dtype, per_token

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def device(self) -> torch.device:
        return self.q.device

    def __repr__(self) -> str:
        return f"QuantizedTokens({self.q.dtype}, shape={list(self.shape)}, for {self.dtype})"


class TokenLaunches:
    """What `Launches` is to floats: the plans of one linear over quantized tokens. Copies start empty."""

    def __init__(self) -> None:
        self._tensors: tuple[Any, ...] = ()
        self._operands: tuple[Any, ...] = ()
        self._plans: dict[tuple[Any, ...], SelectedPlan] = {}
        #: Of static scales, and of those per token.
        self._known = (lookup(), lookup())

    def __call__(self, linear: IntegerLinear, x: QuantizedTokens) -> Tensor | None:
        """The linear of x; None where the call must take the long way."""
        q, per_token = x.q, x.per_token
        found = self._known[per_token].find(q, linear._buffers, linear._parameters.get("bias"), x.dtype)
        if found is None:
            found = self._plan(linear, x)
            if found is None:
                return None
        weight, scale, bias, factor = self._operands
        act_scale, zero = x.scale, None
        if not per_token:
            act_scale = act_scale.view(())
            zero = None if x.zero_point is None else x.zero_point.to(torch.int32).view(())
        sums = linear._weight_sum() if linear._needs_sums else None
        result: Tensor = found.compute((q, act_scale, zero, weight, scale, bias, sums, None, factor))[-1]
        return result

    def _plan(self, linear: IntegerLinear, x: QuantizedTokens) -> SelectedPlan | None:
        """The plan of a call that the compiled module does not know."""
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
        return self._plans.get((q.shape, x.dtype, x.per_token)) or self._find(linear, x)

    def _take(self, q: Tensor, tensors: tuple[Any, ...]) -> bool:
        """Remember the tensors, once they are plain ones that need no dispatcher."""
        self._plans, self._tensors, self._known = {}, (), (lookup(), lookup())
        weight, scale, bias, factor, _, _ = tensors
        with torch.no_grad():
            if weight is None or scale is None or route(q, weight, scale, bias, factor) != "plan":
                return False
            if scale.shape != (weight.shape[0], 1) or not scale.is_contiguous():
                return False
            self._operands = weight, scale.view(-1), bias, factor
        self._tensors = tensors
        for known in self._known:
            known.take({"weight": weight, "weight_scale": scale, "weight_factor": factor}, bias)
        return True

    def _find(self, linear: IntegerLinear, x: QuantizedTokens) -> SelectedPlan | None:
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
        found = self._plans[shape, x.dtype, x.per_token] = plan.along(shape[:-1])
        self._known[x.per_token].add(x.q, x.dtype, found, KEPT)
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
