"""What the quantized model makes of the inputs of its linears, as floats."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...core.scope import PerToken
from ...functional import dequantize, dynamic_quantize, fake_quantize
from ...schemes import ActivationFormat


def input_rule(activation: ActivationFormat, scale: float | None) -> Callable[[Tensor], Tensor] | None:
    """What becomes of a linear's input; None where it stays as it is. `scale` is that of static activations."""
    if activation.kind == "float":
        return None
    if activation.kind == "static":
        assert scale is not None
        return lambda x: fake_quantize(x, scale, q_min=-127)
    return _rounded


def _rounded(x: Tensor) -> Tensor:
    made = dynamic_quantize(x, scope=PerToken())
    return dequantize(made.q, made.scale, scope=PerToken())
