"""A norm, and a gated MLP, as one kernel, which quantizes where it makes what integer linears read.

They take the place of a model's own modules and keep their children, parameters and names. What they hand to integer
linears is `QuantizedTokens`, which is no tensor: code that would read it as floats raises instead of going wrong. What
others read, weight-only linears among them, stays a tensor of floats. Where a call is out of the ordinary (gradients,
autocast, hooks, of floats also transforms and subclasses), the module they stand for computes as it always did. So it
does inside torch.compile, which fuses a norm with the residual addition before it and has less to check then.
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
from ..functional import ProducedQuantized, gated, gated_quantize, norm_quantize, rms_norm
from ..plans.plan import SelectedPlan
from .launches import KEPT, has_tangents, is_plain_call, is_transformed, lookup
from .linear import IntegerLinear, QuantizedLinear, SmoothQuantLinear
from .siblings import HELD, Sibling
from .tokens import QuantizedTokens

_is_traced = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_NO_TENSORS: dict[str, Any] = {}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: The ops of a producer by what leaves it: floats, tokens with a scale each, tokens with a static scale.
_NORM = QuantizeKind.NORM, QuantizeKind.NORM_DYNAMIC_QUANTIZE, QuantizeKind.NORM_QUANTIZE
_GATED = QuantizeKind.GATED, QuantizeKind.GATED_DYNAMIC_QUANTIZE, QuantizeKind.GATED_QUANTIZE

#: On the CPU the original computes float products of more rows than these: one kernel saves the time that it takes to
#: call operators, but its silu, which has the same bits everywhere, takes longer than torch's.
FEW_ROWS = 32

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

    def named_options(self) -> dict[str, Any]:
        """As the functions take them."""
        return {"mode": self.mode, "dtype": self.kind, "q_min": self.q_min, "q_max": self.q_max}

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        if self.buffers is None:
            return None, None
        zero_point = self.buffers["input_zero_point"]
        return self.buffers["input_scale"].view(()), None if zero_point is None else zero_point.view(())

    def tokens(self, made: ProducedQuantized, dtype: torch.dtype) -> QuantizedTokens:
        return QuantizedTokens(made.q, made.scale.view(-1), made.zero_point, dtype, not self.static)


def why_not_quantized_for(linear: object) -> str | None:
    """Why a linear cannot be given quantized tokens; None where it can."""
    if not isinstance(linear, QuantizedLinear | SmoothQuantLinear):
        return f"a {type(linear).__name__}, which takes floats, reads it"
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
    """A norm as one kernel, whose rows leave it quantized for the linears that read them, or else as floats.

    `original` is the norm it stands for: its parameters are this module's own, and it computes where a call is out of
    the ordinary. The sums have the order of `baracuda.rms_norm`, so the bits are not those of the original. `floats`
    says why the rows leave as floats; None quantizes them, for `readers`.
    """

    original: nn.Module

    def __init__(
        self, original: nn.Module, style: str, eps: float, readers: Sequence[Reader] = (), floats: str | None = None
    ) -> None:
        super().__init__()
        # One table for both modules: whatever moves or loads one of them, moves or loads the other.
        self.__dict__["_parameters"] = original._parameters
        self.__dict__["original"] = original
        self.style, self.eps, self.floats = style, eps, floats
        self.quantizer = _Quantizer(readers[0][2]) if floats is None else None
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
        if found is None and self._leaves_to_original(x):
            return self.original(x)
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        if not self._read_by_linears() or not _has_type(weight, x) or not _has_type(bias, x):
            return self.original(x)
        if found is None:
            if not is_plain_call(x):
                return self._dispatched(x, weight, bias)
            found = self._plans.get((x.shape, x.dtype, x.device)) or self._find(x)
        return _handed_on(found, (x, None, weight, bias), x.dtype, self.quantizer)

    def _find(self, x: Tensor) -> SelectedPlan:
        spec, shape = norm_spec(x.dtype, self.style, self.eps, False), (prod(x.shape[:-1]), x.shape[-1])
        plan = _plan(_NORM, spec, self.quantizer, shape, x.device)
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

    def _leaves_to_original(self, x: Tensor) -> bool:
        if has_tangents() or (self.quantizer is None and is_transformed(x)):
            return True
        return _needs_floats(x) or (_is_grad_enabled() and (x.requires_grad or _learns(self)))

    def _dispatched(self, x: Tensor, weight: Any, bias: Any) -> Any:
        """By torch's operators: for modes and transforms, which must see them."""
        if self.quantizer is None:
            return rms_norm(x, weight, self.eps, style=self.style, bias=bias)
        scales, options = self.quantizer.scales(), self.quantizer.named_options()
        made = norm_quantize(x, weight, self.eps, *scales, style=self.style, bias=bias, **options)
        return self.quantizer.tokens(made, x.dtype)

    def extra_repr(self) -> str:
        return f"{type(self.original).__name__}, style={self.style}, eps={self.eps}, {_made(self)}"


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), its product one kernel: quantized where `down` reads integers, or else floats.

    `original` is the module it stands for: its children are this module's own, and it computes where a call is out of
    the ordinary. `floats` says why the product is not quantized; None quantizes it.
    """

    original: nn.Module

    def __init__(
        self, original: nn.Module, gate: str, up: str, down: str, activation: str, floats: str | None = None
    ) -> None:
        super().__init__()
        self.__dict__["_modules"] = original._modules
        self.__dict__["original"] = original
        if HELD in original.__dict__:  # which of the children are computed as one
            self.__dict__[HELD] = original.__dict__[HELD]
        self.names, self.floats = (gate, up, down), floats
        self.others = [(name, child) for name, child in original._modules.items() if name not in self.names]
        self.activation: Any = Activation(activation).value
        self.quantizer = _Quantizer(cast(IntegerLinear, original._modules[down])) if floats is None else None
        self.training = original.training
        self._plans: dict[Any, SelectedPlan] = {}
        self._known = lookup()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}

    def forward(self, x: Any) -> Any:
        if _is_traced():  # before anything is read: of a trace, each tuple would be guarded by itself
            return self.original(x)
        modules, quantizer = self._modules, self.quantizer
        gate_name, up_name, down_name = self.names
        gate, up, down = modules[gate_name], modules[up_name], modules[down_name]
        # An adapter in the place of a linear reads floats.
        reader = Sibling if quantizer is None else IntegerLinear
        if not (isinstance(gate, Sibling) and isinstance(up, Sibling) and isinstance(down, reader)) or _watched(down):
            return self.original(x)
        if self._has_another_activation():
            return self.original(x)
        tokens = type(x) is QuantizedTokens
        if has_tangents() or (quantizer is None and is_transformed(x.q if tokens else x)):
            return self.original(x)
        if not tokens and ((_is_grad_enabled() and x.requires_grad) or _needs_floats(x)):
            return self.original(x)
        if _is_grad_enabled() and (_learns(gate) or _learns(up) or _learns(down)):
            return self.original(x)
        if quantizer is None and x.device.type == "cpu" and prod(x.shape[:-1]) > FEW_ROWS:
            return self.original(x)
        both = None if (member := gate._member) is None else member.all_of(gate, x)
        inputs = (gate(x), up(x)) if both is None else (both, None)
        return down(self._product(inputs, x.q if tokens else x))

    def _has_another_activation(self) -> bool:
        """Whether it was replaced, other than by one of the same formula, or is watched by hooks."""
        for name, other in self.others:
            now = self._modules[name]
            if now is not other and getattr(now, "original", None) is not other:
                return True
            if now is not None and _watched(now):
                return True
        return False

    def _product(self, inputs: tuple[Tensor, Tensor | None], x: Tensor) -> Any:
        gate, up = inputs
        found = self._known.find(gate, _NO_TENSORS, None, up is None)
        if found is not None:
            return _handed_on(found, inputs, gate.dtype, self.quantizer)
        if not is_plain_call(x) or not is_plain_call(gate):
            return self._dispatched(gate, up)
        key = gate.shape, gate.dtype, gate.device, up is None
        found = self._plans.get(key)
        if found is None:
            width = gate.shape[-1] // 2 if up is None else gate.shape[-1]
            spec, shape = gated_spec(gate.dtype, self.activation, up is None), (prod(gate.shape[:-1]), width)
            if len(self._plans) >= KEPT:
                self._plans.clear()
            found = self._plans[key] = _plan(_GATED, spec, self.quantizer, shape, gate.device).along(gate.shape[:-1])
            self._known.add(gate, up is None, found, KEPT)
        return _handed_on(found, inputs, gate.dtype, self.quantizer)

    def _dispatched(self, gate: Tensor, up: Tensor | None) -> Any:
        """By torch's operators: for modes and transforms, which must see them."""
        if self.quantizer is None:
            return gated(gate, up, activation=self.activation)
        scales, options = self.quantizer.scales(), self.quantizer.named_options()
        made = gated_quantize(gate, up, *scales, activation=self.activation, **options)
        return self.quantizer.tokens(made, gate.dtype)

    def extra_repr(self) -> str:
        return f"{type(self.original).__name__} with {self.activation}, its product {_made(self)}"


for _module in (FusedNorm, FusedMLP):
    torch._dynamo.mark_static(_module)


def _made(module: FusedNorm | FusedMLP) -> str:
    if module.quantizer is None:
        return f"in floats, not torch's to the last bit: {module.floats}"
    return "quantized by the linears' scale" if module.quantizer.static else "quantized per token"


def _plan(
    ops: tuple[QuantizeKind, QuantizeKind, QuantizeKind],
    floats: Any,
    quantizer: _Quantizer | None,
    shape: tuple[int, int],
    device: torch.device,
) -> SelectedPlan:
    if quantizer is None:
        return cached_plan(device, ops[0], shape, floats)
    is_static, mode, kind, low, high = quantizer.options()
    spec = quantized_spec(floats, is_static, mode, kind, low, high, None, False, Arithmetic.DIVIDE)
    return cached_plan(device, ops[2 if is_static else 1], shape, spec)


def _handed_on(plan: SelectedPlan, inputs: tuple[Any, ...], dtype: torch.dtype, quantizer: _Quantizer | None) -> Any:
    """Run the plan; tokens that it makes stand for values of this type."""
    if quantizer is None:
        return plan.compute(inputs)[-1]
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


def _has_type(parameter: Any, x: Tensor) -> bool:
    """Whether the kernel takes this beside x; the original decides about the type of a mixture."""
    return parameter is None or parameter.dtype is x.dtype


def _needs_floats(x: Any) -> bool:
    """Whether a call is the original's: autocast decides a type for each linear by itself."""
    return not isinstance(x, Tensor) or x.dtype not in _FLOATS or torch._C._is_any_autocast_enabled()
