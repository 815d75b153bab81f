"""Linears inside torch.compile.

Before each call, compiled code checks everything that its trace has read from an object, and the device waits for it.
So a trace calls the functions of this module, which are no methods, and reads tensors and strings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.scope import PerTensor
from ..core.types import Activation, Arithmetic, QuantizeKind
from ..dispatch.operators import OPERATORS
from ..dispatch.options import dynamic_spec, weight_only_spec
from ..functional import quantize, quantized_linear, smoothquant_linear, weight_only_linear
from .autocast import under_autocast
from .siblings import Member, Traced
from .tokens import QuantizedTokens

if TYPE_CHECKING:
    from .linear import IntegerLinear

#: What siblings have computed while torch.compile traces them, by token: input, result, how many have yet to take it.
#: Outside of a trace it is empty. It is not an attribute, since guards on one object behind many modules are slow.
_TRACED: dict[str, tuple[Tensor, Tensor, int]] = {}

_QUANTIZED_LINEAR = OPERATORS[QuantizeKind.QUANTIZED_LINEAR].call
_WEIGHT_ONLY_LINEAR = OPERATORS[QuantizeKind.WEIGHT_ONLY_LINEAR].call

_is_traced = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled

#: Whether siblings are shared inside a trace too: tried with torch 2.11 and 2.13. Older versions may break the graph
#: where the parts are asked, so there a compiled model computes its linears one by one.
_SHARED_IN_TRACES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def asks_siblings() -> bool:
    return _SHARED_IN_TRACES or not _is_traced()


def traced_forward(linear: IntegerLinear, x: Any, compute: Callable[[Any, Traced, str], Tensor]) -> Tensor:
    """The forward of a linear inside torch.compile: together with its siblings, or by itself."""
    member = linear._member
    if member is not None and asks_siblings() and (y := share_traced(member, x, compute)) is not None:
        return y
    return compute(x, linear.traced_tensors(), linear.traced_settings())


def share_traced(member: Member, x: Any, compute: Callable[[Any, Traced, str], Tensor]) -> Tensor | None:
    """`Member.share` inside torch.compile, whose trace knows when two names are one tensor.

    That nothing writes to the tensor between two siblings was seen when they were merged: they are merged only where
    one pass found it unchanged.
    """
    facts, key = member.facts(), x.q if type(x) is QuantizedTokens else x
    if facts is None or (_is_grad_enabled() and key.requires_grad):
        return None
    token, start, size, count, settings = facts.split(" ", 4)
    known = _TRACED.pop(token, None)
    if known is not None and known[0] is key:
        y, left = known[1], known[2] - 1
    elif (whole := member.whole) is None:
        return None
    else:
        y, left = compute(x, whole.traced_tensors(), settings), int(count) - 1
    if left:
        _TRACED[token] = (key, y, left)
    return y.narrow(-1, int(start), int(size))


def dynamic_linear(x: Tensor, tensors: Traced, settings: str) -> Tensor:
    """The forward of a QuantizedLinear inside torch.compile."""
    x = under_autocast(x)
    weight, weight_scale, bias, weight_factor = tensors
    bias = bias_as(bias, x.dtype)
    assert weight is not None and weight_scale is not None
    if not _learns(x, bias):
        encoded = _dynamic_arguments(settings, x.dtype, _group(x, weight_factor))
        rows, scale = x.reshape(-1, x.shape[-1]), weight_scale.view(-1)
        y: Tensor = _QUANTIZED_LINEAR(rows, weight, scale, None, bias, None, None, weight_factor, *encoded)
        return y.view(*x.shape[:-1], y.shape[-1])
    named: list[Any] = settings.split(" ")
    mode, activation, kind, low, high = named
    return quantized_linear(
        x,
        weight,
        weight_scale,
        bias,
        mode=mode,
        dtype=activation,
        weight_element=kind,
        weight_factor=weight_factor,
        q_min=int(low),
        q_max=int(high),
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _dynamic_arguments(settings: str, dtype: torch.dtype, group: int) -> tuple[Any, ...]:
    """The spec of a linear as its operator takes it. Computed while tracing: a trace guards every table it reads."""
    named: list[Any] = settings.split(" ")
    mode, activation, kind, low, high = named
    divided, none = Arithmetic.DIVIDE, Activation.NONE
    spec = dynamic_spec(
        dtype, PerTensor(), mode, activation, int(low), int(high), None, False, divided, kind, none, group
    )
    return OPERATORS[QuantizeKind.QUANTIZED_LINEAR].encoded(spec)


def _learns(x: Tensor, bias: Tensor | None) -> bool:
    return _is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def _group(x: Tensor, weight_factor: Tensor | None) -> int:
    return 0 if weight_factor is None else x.shape[-1] // weight_factor.shape[1]


def float_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, element: str
) -> Tensor:
    """The linear of floats and packed weights, with or without torch.compile."""
    if not _is_traced() or _learns(x, bias):
        return weight_only_linear(x, weight, scale, bias, weight_zero_point=zero_point, weight_element=element)  # type: ignore[arg-type]
    encoded = _float_arguments(element, x.dtype, x.shape[-1] // scale.shape[1] if scale.shape[1] > 1 else 0)
    y: Tensor = _WEIGHT_ONLY_LINEAR(x.reshape(-1, x.shape[-1]), weight, scale, zero_point, bias, None, *encoded)
    return y.view(*x.shape[:-1], y.shape[-1])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _float_arguments(element: Any, dtype: torch.dtype, group: int) -> tuple[Any, ...]:
    """As `_dynamic_arguments`."""
    return OPERATORS[QuantizeKind.WEIGHT_ONLY_LINEAR].encoded(weight_only_spec(dtype, element, Activation.NONE, group))


def static_linear(x: Tensor, tensors: Traced, settings: str) -> Tensor:
    """The forward of a SmoothQuantLinear inside torch.compile."""
    weight, weight_scale, bias, weight_factor, scale, zero_point = tensors
    named: list[Any] = settings.split(" ")
    _, activation, kind, low, high, name = named
    assert weight is not None and weight_scale is not None and scale is not None
    dtype = getattr(torch, name)
    if x.is_floating_point():
        x = under_autocast(x)
        dtype, x = x.dtype, quantize(x, scale, zero_point, dtype=activation, q_min=int(low), q_max=int(high))
    return smoothquant_linear(
        x,
        weight,
        scale,
        weight_scale,
        bias_as(bias, dtype),
        act_zero_point=zero_point,
        dtype=dtype,
        weight_element=kind,
        weight_factor=weight_factor,
    )


def bias_as(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The kernels take f32 or the type of the result."""
    return bias if bias is None or bias.dtype in (torch.float32, dtype) else bias.to(dtype)
