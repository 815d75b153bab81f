"""What an integer linear launches: its plan for each shape of input, found once, over its own tensors."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.scope import PerTensor
from ..core.types import Activation, Arithmetic, QuantizeKind
from ..dispatch.eager import cached_plan, route, transform_level
from ..dispatch.options import dynamic_spec
from ..plans.plan import SelectedPlan

if TYPE_CHECKING:
    from .linear import QuantizedLinear

#: Shapes whose plans one linear keeps; a server that sees more of them starts over.
KEPT = 256

_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_is_batched = torch._C._functorch.is_legacy_batchedtensor


class Launches:
    """The plans of one linear on its device, by the shape and type of the input.

    `quantized_linear` checks its arguments, builds a key and looks up the plan for it on every call, which takes longer
    than the launch. A module's own tensors are the same call after call: what follows from them is looked up by their
    identity. Anything out of the ordinary (a tracer, a mode, gradients, autocast, a subclass) is left to that function.

    Copies start empty, as a copy has tensors of its own.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Any, ...] = ()
        self._address, self._bias_dtype = 0, None  # type: int, torch.dtype | None
        self._operands: tuple[Any, ...] = ()
        self._plans: dict[tuple[Any, ...], tuple[SelectedPlan, tuple[int, int], tuple[int, ...]]] = {}

    def __call__(self, linear: QuantizedLinear, x: Tensor) -> Tensor | None:
        """The linear of x; None where the call must take the long way."""
        if type(x) is not Tensor or _dispatch_modes() or _function_modes() or _is_autocast_enabled():
            return None
        if transform_level() is not None or forward_ad._current_level >= 0 or x.is_neg() or x.is_meta or _is_batched(x):
            return None
        buffers, bias = linear._buffers, linear._parameters.get("bias")
        if _is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            return None
        weight, scale, factor = buffers["weight"], buffers["weight_scale"], buffers["weight_factor"]
        known = self._tensors
        same = known and known[0] is weight and known[1] is scale and known[2] is bias and known[3] is factor
        if bias is not None and bias.dtype is not self._bias_dtype:
            same = False
        if not (same and self._address == scale.data_ptr()) and not self._take(x, weight, scale, bias, factor):  # type: ignore[union-attr]
            return None
        found = self._plans.get((x.shape, x.dtype))
        if found is None:
            found = self._find(linear, x)
            if found is None:
                return None
        plan, matrix, out_shape = found
        weight, scale, bias, factor = self._operands
        inputs = (x if x.ndim == 2 else x.reshape(matrix), weight, scale, bias, linear._weight_sum(), None, factor)
        result: Tensor = plan.compute(inputs)[-1]
        return result if len(out_shape) == 2 else result.view(out_shape)

    def _take(self, x: Tensor, *tensors: Any) -> bool:
        """Remember the tensors, once they are plain ones that need no dispatcher."""
        self._plans, self._tensors = {}, ()
        weight, scale, bias, factor = tensors
        with torch.no_grad():
            if weight is None or scale is None or route(x, *tensors) != "plan":
                return False
            if scale.ndim != 2 or scale.shape != (weight.shape[0], 1) or not scale.is_contiguous():
                return False
            self._operands = weight, scale.view(-1), bias, factor
        self._address, self._tensors = scale.data_ptr(), tensors
        self._bias_dtype = None if bias is None else bias.dtype
        return True

    def _find(self, linear: QuantizedLinear, x: Tensor) -> tuple[SelectedPlan, tuple[int, int], tuple[int, ...]] | None:
        bias, shape = self._operands[2], x.shape
        if not shape or (bias is not None and bias.dtype not in (torch.float32, x.dtype)):
            return None
        m, k, n = prod(shape[:-1]), shape[-1], self._operands[0].shape[0]  # of a shard, fewer than out_features
        spec = dynamic_spec(
            x.dtype,
            PerTensor(),
            linear.mode,
            linear.activation,
            linear.q_min,
            linear.q_max,
            None,
            False,
            Arithmetic.DIVIDE,
            linear.weight_element,
            Activation.NONE,
            linear.weight_group,
        )
        plan = cached_plan(self._operands[0].device, QuantizeKind.QUANTIZED_LINEAR, (m, n, k), spec)
        if len(self._plans) >= KEPT:
            self._plans.clear()
        found = self._plans[shape, x.dtype] = plan, (m, k), (*shape[:-1], n)
        return found

    def __reduce__(self) -> tuple[type[Launches], tuple[()]]:
        return Launches, ()
