"""Modules that hand quantized values on: a norm, and a gated MLP, quantize where they make what a linear reads.

They take the place of a model's own modules and keep their children, parameters and names. What they hand on is
`QuantizedTokens`, which is no tensor: code that would read it as floats raises instead of going wrong. Where a call is
out of the ordinary (gradients, autocast, training), the module they stand for computes as it always did. So it does
inside torch.compile, which fuses a norm with the residual addition before it and has less to check then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.types import Activation, Arithmetic, DynamicRangeMode, QuantizeKind
from ..dispatch.eager import cached_plan
from ..dispatch.options import gated_spec, norm_spec, quantized_spec
from ..functional import gated_quantize, norm_quantize
from ..plans.plan import SelectedPlan
from .launches import KEPT, is_plain_call, lookup
from .linear import IntegerLinear, QuantizedLinear, SmoothQuantLinear
from .siblings import HELD
from .tokens import QuantizedTokens

_is_traced = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_NO_TENSORS: dict[str, Any] = {}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


#: Where a linear is held, under which name, and the linear.
Reader = tuple[dict[str, Any], str, IntegerLinear]


class _Quantizer:
    """How the linears that read a value want it quantized: per token, or by the static scale that they hold."""

    def __init__(self, linear: IntegerLinear) -> None:
        self.static = isinstance(linear, SmoothQuantLinear)
        self.mode, self.kind = linear.mode.value, linear.activation.value
        self.q_min, self.q_max = linear.q_min, linear.q_max
        #: The table of the linear, not its tensors: those are assigned anew where a model is moved or loaded.
        self.buffers: dict[str, Any] | None = linear._buffers if self.static else None

    def options(self) -> tuple[Any, ...]:
        return self.static, self.mode, self.kind, self.q_min, self.q_max

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        if self.buffers is None:
            return None, None
        zero_point = self.buffers["input_zero_point"]
        return self.buffers["input_scale"].view(()), None if zero_point is None else zero_point.view(())


def why_not_quantized_for(linear: object) -> str | None:
    """Why a linear cannot be given quantized tokens; None where it can."""
    if not isinstance(linear, QuantizedLinear | SmoothQuantLinear):
        return f"a {type(linear).__name__} reads it"
    if isinstance(linear, QuantizedLinear) and linear.mode is not DynamicRangeMode.SYMMETRIC:
        return "a linear that reads it has asymmetric activations, whose zero points differ from row to row"
    return None


def same_quantization(a: IntegerLinear, b: IntegerLinear) -> bool:
    """Whether two linears read the same integers."""
    one, other = _Quantizer(a), _Quantizer(b)
    if one.options() != other.options():
        return False
    return all(
        (s is None and t is None) or (s is not None and t is not None and torch.equal(s, t))
        for s, t in zip(one.scales(), other.scales(), strict=True)
    )


class FusedNorm(nn.Module):
    """A norm whose rows leave it quantized, for the linears that read them.

    `original` is the norm it stands for: its parameters are this module's own, and it computes where floats are asked
    for. The sums have the order of `baracuda.rms_norm`, so the bits are not those of the original.
    """

    original: nn.Module

    def __init__(self, original: nn.Module, style: str, eps: float, readers: Sequence[Reader]) -> None:
        super().__init__()
        # One table for both modules: whatever moves or loads one of them, moves or loads the other.
        self.__dict__["_parameters"] = original._parameters
        self.__dict__["original"] = original
        self.style, self.eps, self.quantizer = style, eps, _Quantizer(readers[0][2])
        self.readers = list(readers)
        self.training = original.training
        self._plans: dict[Any, SelectedPlan] = {}
        self._known = lookup()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}

    def forward(self, x: Tensor) -> Any:
        if _is_traced():
            return self.original(x)
        found = self._known.find(x, _NO_TENSORS, None, None)
        if found is None:
            if not is_plain_call(x) or x.dtype not in _FLOATS:
                return self.original(x) if _needs_floats(x) else self._dispatched(x)
            if _is_grad_enabled() and (x.requires_grad or self._learns()):
                return self.original(x)
        if not self._read_by_linears():
            return self.original(x)
        if found is None:
            found = self._plans.get((x.shape, x.dtype, x.device)) or self._find(x)
        parameters = self._parameters
        return _handed_on(found, (x, None, parameters.get("weight"), parameters.get("bias")), x.dtype, self.quantizer)

    def _find(self, x: Tensor) -> SelectedPlan:
        spec, op = norm_spec(x.dtype, self.style, self.eps, False), QuantizeKind.NORM_DYNAMIC_QUANTIZE
        shape = prod(x.shape[:-1]), x.shape[-1]
        plan = _plan(op, QuantizeKind.NORM_QUANTIZE, spec, self.quantizer, shape, x.device)
        if len(self._plans) >= KEPT:
            self._plans.clear()
        found = self._plans[x.shape, x.dtype, x.device] = plan.along(x.shape[:-1])
        self._known.add(x, None, found, KEPT)
        return found

    def _read_by_linears(self) -> bool:
        """Whether the linears are still where they were: an adapter in the place of one reads floats."""
        for modules, name, linear in self.readers:
            if modules.get(name) is not linear or linear._forward_pre_hooks or linear._forward_hooks:
                return False
        return True

    def _learns(self) -> bool:
        return any(p is not None and p.requires_grad for p in self._parameters.values())

    def _dispatched(self, x: Tensor) -> Any:
        """By torch's operators: for modes and transforms, which must see them."""
        if (_is_grad_enabled() and (x.requires_grad or self._learns())) or not self._read_by_linears():
            return self.original(x)
        _, mode, kind, low, high = self.quantizer.options()
        scale, zero_point = self.quantizer.scales()
        made = norm_quantize(
            x, self._parameters.get("weight"), self.eps, scale, zero_point, style=self.style,
            bias=self._parameters.get("bias"), mode=mode, dtype=kind, q_min=low, q_max=high,
        )  # fmt: skip
        return QuantizedTokens(made.q, made.scale.view(-1), made.zero_point, x.dtype, not self.quantizer.static)

    def extra_repr(self) -> str:
        how = "by the linears' scale" if self.quantizer.static else "per token"
        return f"{type(self.original).__name__}, style={self.style}, eps={self.eps}, quantized {how}"


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), its product quantized where it is made.

    `original` is the module it stands for: its children are this module's own, and it computes where gradients or
    autocast ask for floats.
    """

    original: nn.Module

    def __init__(self, original: nn.Module, gate: str, up: str, down: str, activation: str) -> None:
        super().__init__()
        self.__dict__["_modules"] = original._modules
        self.__dict__["original"] = original
        if HELD in original.__dict__:  # which of the children are computed as one
            self.__dict__[HELD] = original.__dict__[HELD]
        self.names = (gate, up, down)
        self.activation: Any = Activation(activation).value
        self.quantizer = _Quantizer(cast(IntegerLinear, original._modules[down]))
        self.training = original.training
        self._plans: dict[Any, SelectedPlan] = {}
        self._known = lookup()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}

    def forward(self, x: Any) -> Any:
        if _is_traced():  # before anything is read: of a trace, each tuple would be guarded by itself
            return self.original(x)
        modules = self._modules
        gate_name, up_name, down_name = self.names
        gate, up, down = modules[gate_name], modules[up_name], modules[down_name]
        # An adapter in the place of a linear reads floats.
        are_linears = (
            isinstance(gate, IntegerLinear) and isinstance(up, IntegerLinear) and isinstance(down, IntegerLinear)
        )
        if not are_linears or _watched(down):
            return self.original(x)
        gate, down, tokens = cast(IntegerLinear, gate), cast(IntegerLinear, down), type(x) is QuantizedTokens
        if not tokens and ((_is_grad_enabled() and x.requires_grad) or _needs_floats(x)):
            return self.original(x)
        if _is_grad_enabled() and (_learns(gate) or _learns(up) or _learns(down)):
            return self.original(x)
        both = None if (member := gate._member) is None else member.all_of(gate, x)
        inputs = (gate(x), cast(IntegerLinear, up)(x)) if both is None else (both, None)
        return down(self._product(inputs, x.q if tokens else x))

    def _product(self, inputs: tuple[Tensor, Tensor | None], x: Tensor) -> QuantizedTokens:
        gate, up = inputs
        found = self._known.find(gate, _NO_TENSORS, None, up is None)
        if found is not None:
            return _handed_on(found, inputs, gate.dtype, self.quantizer)
        if not is_plain_call(x) or not is_plain_call(gate):
            _, mode, kind, low, high = self.quantizer.options()
            scale, zero_point = self.quantizer.scales()
            made = gated_quantize(
                gate,
                up,
                scale,
                zero_point,
                activation=self.activation,
                mode=mode,
                dtype=kind,
                q_min=low,
                q_max=high,
            )
            return QuantizedTokens(made.q, made.scale.view(-1), made.zero_point, gate.dtype, not self.quantizer.static)
        key = gate.shape, gate.dtype, gate.device, up is None
        found = self._plans.get(key)
        if found is None:
            width = gate.shape[-1] // 2 if up is None else gate.shape[-1]
            spec, shape = gated_spec(gate.dtype, self.activation, up is None), (prod(gate.shape[:-1]), width)
            op = QuantizeKind.GATED_DYNAMIC_QUANTIZE
            if len(self._plans) >= KEPT:
                self._plans.clear()
            plan = _plan(op, QuantizeKind.GATED_QUANTIZE, spec, self.quantizer, shape, gate.device)
            found = self._plans[key] = plan.along(gate.shape[:-1])
            self._known.add(gate, up is None, found, KEPT)
        return _handed_on(found, inputs, gate.dtype, self.quantizer)

    def extra_repr(self) -> str:
        return f"{type(self.original).__name__} with {self.activation}, its product quantized where it is made"


for _module in (FusedNorm, FusedMLP):
    torch._dynamo.mark_static(_module)


def _plan(
    dynamic: QuantizeKind,
    static: QuantizeKind,
    floats: Any,
    quantizer: _Quantizer,
    shape: tuple[int, int],
    device: torch.device,
) -> SelectedPlan:
    is_static, mode, kind, low, high = quantizer.options()
    spec = quantized_spec(floats, is_static, mode, kind, low, high, None, False, Arithmetic.DIVIDE)
    return cached_plan(device, static if is_static else dynamic, shape, spec)


def _handed_on(
    plan: SelectedPlan, inputs: tuple[Any, ...], dtype: torch.dtype, quantizer: _Quantizer
) -> QuantizedTokens:
    """Run the plan; what it makes stands for values of this type."""
    if quantizer.static:
        scale, zero_point = quantizer.scales()
        stored = None if zero_point is None else zero_point.to(torch.int32)
        q = plan.compute((*inputs, scale, stored))[-1]
        return QuantizedTokens(q, cast(Tensor, scale).view(1), zero_point, dtype, False)
    *_, scale, _, q = plan.compute(inputs)
    return QuantizedTokens(q, scale, None, dtype, True)


def _watched(module: Any) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _learns(module: Any) -> bool:
    return any(p is not None and p.requires_grad for p in module._parameters.values())


def _needs_floats(x: Any) -> bool:
    """Whether a call must not be quantized here: autocast decides a type for each linear by itself."""
    return not isinstance(x, Tensor) or x.dtype not in _FLOATS or torch._C._is_any_autocast_enabled()
