"""What a quantized linear launches: its plan for each shape of input, found once, over its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..backends.registry import Value
from ..core.host import MISSING
from ..core.problem import Spec
from ..core.types import QuantizeKind
from ..dispatch.eager import cached_plan, route, transform_level
from ..plans.plan import SelectedPlan

if MISSING is None:
    from .. import _host

#: Shapes whose plans one linear keeps; a server that sees more of them starts over.
KEPT = 256

_is_grad_enabled = torch.is_grad_enabled


def _never(x: object) -> bool:
    return False


class _Nothing:
    """A lookup that knows nothing: without the compiled module."""

    def take(self, *_: object) -> None: ...

    def add(self, *_: object) -> None: ...

    def find(self, *_: object) -> None: ...


def lookup() -> _host.Lookup | _Nothing:
    """What a module knows of its calls, empty."""
    return _Nothing() if MISSING is not None else _host.Lookup()


#: Whether a call on x may skip torch's dispatcher: no tracer, mode, transform, autocast or subclass sees it. Without
#: the compiled module every call takes the long way.
is_plain_call: Callable[[object], bool] = _never if MISSING is not None else _host.is_plain_call


def has_tangents() -> bool:
    """Whether forward-mode differentiation is under way. Linears refuse it: what comes before must not hide it."""
    return forward_ad._current_level >= 0


def is_transformed(x: object) -> bool:
    """Whether torch's own operators must compute floats: transforms and subclasses know no other ones."""
    return not (type(x) is Tensor or type(x) is nn.Parameter) or transform_level() is not None


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
        self._plans: dict[tuple[Any, ...], SelectedPlan] = {}
        self._known = lookup()

    def __call__(self, linear: Launching, x: Tensor) -> Tensor | None:
        """The linear of x; None where the call must take the long way."""
        found = self._known.find(x, linear._buffers, linear._parameters.get("bias"), None)
        if found is None:
            found = self._plan(linear, x)
            if found is None:
                return None
        result: Tensor = found.compute(linear._inputs(x, self._operands))[-1]
        return result

    def _plan(self, linear: Launching, x: Tensor) -> SelectedPlan | None:
        """The plan of a call that the compiled module does not know."""
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
        return self._plans.get((x.shape, x.dtype)) or self._find(linear, x)

    def _take(self, linear: Launching, x: Tensor, bias: Any) -> bool:
        """Remember the tensors, once they are plain ones that need no dispatcher."""
        self._plans, self._tensors, self._known = {}, (), lookup()
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
        self._known.take(dict(tensors), bias)
        return True

    def _find(self, linear: Launching, x: Tensor) -> SelectedPlan | None:
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
        found = self._plans[shape, x.dtype] = plan.along(shape[:-1])
        self._known.add(x, None, found, KEPT)
        return found

    def __reduce__(self) -> tuple[type[Launches], tuple[()]]:
        return Launches, ()
