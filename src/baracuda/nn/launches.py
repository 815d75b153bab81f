"""What a quantized linear launches: its plan for each shape of input, found once, over its own tensors."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends.registry import Value
from ..core.problem import Spec
from ..core.types import QuantizeKind
from ..dispatch.eager import cached_plan, route, transform_level
from ..plans.plan import SelectedPlan

#: Shapes whose plans one linear keeps; a server that sees more of them starts over.
KEPT = 256

_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_plain_call(x: Tensor) -> bool:
    """Whether a call on x may skip torch's dispatcher: no tracer, mode, transform, autocast or subclass sees it."""
    if type(x) is not Tensor or _dispatch_modes() or _function_modes() or _is_autocast_enabled():
        return False
    if transform_level() is not None or forward_ad._current_level >= 0 or x.is_neg() or x.is_meta:
        return False
    return not _is_batched(x)


class Launching(Protocol):
    """A linear with launches of its own. `weight_scale`, `[N, groups]`, is among the buffers that it computes with."""

    op: ClassVar[QuantizeKind]
    #: The buffers whose identity its operands follow from, the weight first.
    launched: ClassVar[tuple[str, ...]]
    _buffers: dict[str, Tensor | None]
    _parameters: dict[str, Any]

    def _spec(self, dtype: torch.dtype) -> Spec:
        """What it computes for inputs of this type."""
        ...

    def _operands(self) -> tuple[Value, ...]:
        """What follows from its tensors alone, the weight first."""
        ...

    def _inputs(self, x: Tensor, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        """The inputs of the plan, in the order of the op's row."""
        ...


class Launches:
    """The plans of one linear on its device, by the shape and type of the input.

    The functions check their arguments, build a key and look up the plan for it on every call, which takes longer than
    the launch. A module's own tensors are the same call after call: what follows from them is looked up by their
    identity. Anything out of the ordinary (a tracer, a mode, gradients, autocast, a subclass) is left to the functions.

    Copies start empty, as a copy has tensors of its own.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Any, ...] = ()
        self._address, self._bias, self._bias_dtype = 0, None, None  # type: int, Any, torch.dtype | None
        self._operands: tuple[Value, ...] = ()
        self._plans: dict[tuple[Any, ...], tuple[SelectedPlan, tuple[int, int], tuple[int, ...]]] = {}

    def __call__(self, linear: Launching, x: Tensor) -> Tensor | None:
        """The linear of x; None where the call must take the long way."""
        if not is_plain_call(x):
            return None
        buffers, bias = linear._buffers, linear._parameters.get("bias")
        if _is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            return None
        same = self._bias is bias and (bias is None or bias.dtype is self._bias_dtype)
        for name, known in self._tensors:
            if buffers[name] is not known:
                same = False
        scale: Tensor = buffers["weight_scale"]  # type: ignore[assignment]
        if not (same and self._tensors and self._address == scale.data_ptr()) and not self._take(linear, x, bias):
            return None
        found = self._plans.get((x.shape, x.dtype))
        if found is None:
            found = self._find(linear, x)
            if found is None:
                return None
        plan, matrix, out_shape = found
        inputs = linear._inputs(x if x.ndim == 2 else x.reshape(matrix), self._operands)
        result: Tensor = plan.compute(inputs)[-1]
        return result if len(out_shape) == 2 else result.view(out_shape)

    def _take(self, linear: Launching, x: Tensor, bias: Any) -> bool:
        """Remember the tensors, once they are plain ones that need no dispatcher."""
        self._plans, self._tensors = {}, ()
        tensors = tuple((name, linear._buffers[name]) for name in linear.launched)
        weight, scale = tensors[0][1], linear._buffers["weight_scale"]
        with torch.no_grad():
            if weight is None or scale is None or route(x, bias, *(t for _, t in tensors)) != "plan":
                return False
            if scale.ndim != 2 or scale.shape[0] != weight.shape[0] or not scale.is_contiguous():
                return False
            self._operands = linear._operands()
        self._address, self._tensors = scale.data_ptr(), tensors
        self._bias, self._bias_dtype = bias, None if bias is None else bias.dtype
        return True

    def _find(self, linear: Launching, x: Tensor) -> tuple[SelectedPlan, tuple[int, int], tuple[int, ...]] | None:
        bias, shape, weight = self._bias, x.shape, self._operands[0]
        assert isinstance(weight, Tensor)
        if not shape or (bias is not None and bias.dtype not in (torch.float32, x.dtype)):
            return None
        scale: Tensor = linear._buffers["weight_scale"]  # type: ignore[assignment]
        if scale.dtype not in (torch.float32, x.dtype):
            return None
        m, k, n = prod(shape[:-1]), shape[-1], weight.shape[0]  # of a shard, fewer than out_features
        plan = cached_plan(weight.device, linear.op, (m, n, k), linear._spec(x.dtype))
        if len(self._plans) >= KEPT:
            self._plans.clear()
        found = self._plans[shape, x.dtype] = plan, (m, k), (*shape[:-1], n)
        return found

    def __reduce__(self) -> tuple[type[Launches], tuple[()]]:
        return Launches, ()
