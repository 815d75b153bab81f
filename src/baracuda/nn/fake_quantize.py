"""FakeQuantize: rounds like the integer kernels, in float, so that a model can be trained for them."""

from __future__ import annotations

from math import prod
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..autograd import straight_through
from ..core.errors import InvalidProblem
from ..core.problem import dynamic_range
from ..core.scope import PerTensor, PerToken, Scope, Shape
from ..core.types import Arithmetic, ArithmeticName, DynamicRangeMode, Element, ElementKind, ModeName, member
from ..dispatch.eager import route
from ..functional import choose_qparams, dynamic_fake_quantize, fake_quantize
from .autocast import autocast_dtype
from .observers import MinMax, Observer
from .rounding import Rounding

Strategy = Literal["static", "dynamic", "learned"]


class FakeQuantize(nn.Module):
    """fake_quantize(x) with a scale that comes from

    - "static": an observer, which watches while the module trains and `observing` is set, and rests in `eval()`;
    - "dynamic": x itself, anew in every call;
    - "learned": training. `scale` is a parameter (LSQ), and so is `zero_point` when asymmetric. The first batch
      initialises them, under DDP that of the first rank; `grad_factor` defaults to LSQ's 1/sqrt(elements of a segment *
      q_max).

    Static and learned scales are f32 and have the fixed shape `scale_shape`, that of the scope's scales for the inputs
    to come. They are NaN, and so is every result, until a batch came in `train()`. `scale_dtype` is the type dynamic
    scales are rounded to, where it is not that of `choose_qparams`. `include_zero` widens asymmetric ranges to hold 0,
    so that 0 itself stays exact.
    """

    scale: Tensor
    zero_point: Tensor | None
    enabled: bool
    """Whether to round. Set it to False and x passes as it is, still observed."""
    observing: bool
    """Whether the observer watches while the module trains. Set it to False to freeze a static scale."""
    initialised: bool = False
    """Whether a learned scale has a value yet. Not a tensor: reading one would synchronise with the device."""
    as_operand: bool = False
    """Whether the result feeds a matrix product, so that under autocast it may have the product's type."""
    _rounding: Rounding | None = None

    def __init__(
        self,
        strategy: Strategy = "static",
        scope: Scope = PerTensor(),
        scale_shape: Shape = (),
        *,
        element: Element = ElementKind.S8,
        mode: DynamicRangeMode | ModeName = DynamicRangeMode.SYMMETRIC,
        q_min: int | None = None,
        q_max: int | None = None,
        include_zero: bool = True,
        observer: type[Observer] = MinMax,
        observer_options: dict[str, Any] | None = None,
        arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
        grad_factor: float | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if strategy not in get_args(Strategy):
            raise InvalidProblem(f"strategy: expected one of {', '.join(get_args(Strategy))}, got {strategy!r}")
        self.strategy, self.scope, self.scale_shape = strategy, scope, tuple(scale_shape)
        self.element, self.mode = ElementKind.of(element, "element"), member(DynamicRangeMode, mode, "mode")
        self.q_min, self.q_max = dynamic_range(self.element, self.mode, q_min, q_max)
        self.arithmetic, self.include_zero = member(Arithmetic, arithmetic, "arithmetic"), include_zero
        self.grad_factor, self.enabled, self.observing = grad_factor, True, True
        self.scale_dtype = scale_dtype
        self.observer: Observer | None = None
        if strategy == "dynamic":
            return
        asymmetric = self.mode is DynamicRangeMode.ASYMMETRIC
        # NaN until a batch has set it: so is every result of a module that is used too early.
        unset = torch.full(self.scale_shape, torch.nan, dtype=torch.float32)
        zeros = torch.zeros(self.scale_shape, dtype=torch.float32)
        if strategy == "learned":
            self.scale = nn.Parameter(unset)
            self.zero_point = nn.Parameter(zeros) if asymmetric else None
        else:
            self.observer = observer(scope, self.scale_shape, **(observer_options or {}))
            self.register_buffer("scale", unset)
            self.register_buffer("zero_point", zeros.to(torch.int32) if asymmetric else None)

    def forward(self, x: Tensor) -> Tensor:
        ready = self._ready_for(x)
        if ready is not None and ready.finds_scale:
            return ready.found(x)
        if self.strategy == "dynamic":
            if not self.enabled:
                return x
            recorded = x.requires_grad and torch.is_grad_enabled()
            if ready is None and self.stores_scales_of(x) and (self.clips_nothing or not recorded):
                y = dynamic_fake_quantize(x, scope=self.scope, **self.range_options())
                return straight_through(x, y) if recorded else y
        scale, zero_point = self.qparams(x)
        if not self.enabled:
            return x
        if ready is not None and ready.plan.fits((x, scale)):
            return ready.given(x, scale, zero_point)
        return self._fake_quantize(x, scale, zero_point, self.gradient_factor(x))

    def rounded_as(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x rounded, in another type: stored in it at once where one kernel does all."""
        ready = self._ready_for(x, dtype)
        return ready.found(x) if ready is not None and ready.finds_scale else self(x).to(dtype)

    def _ready_for(self, x: Tensor, dtype: torch.dtype | None = None) -> Rounding | None:
        """The prepared rounding for plain tensors like x, or None. Any change of the settings discards it."""
        taken = route(x)
        if taken == "torch" or not self.enabled:
            return None
        ready, recorded = self._rounding, taken == "autograd"
        dtype = dtype or (autocast_dtype(x) if self.as_operand else x.dtype)
        if ready is None or ready.dtype is not dtype or ready.recorded is not recorded or not ready.suits(x):
            ready = self.__dict__["_rounding"] = Rounding(self, x, dtype, recorded)
        return ready

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__["_rounding"] = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rounding": None}

    def stores_scales_of(self, x: Tensor) -> bool:
        """Whether one kernel can find the scales and use them: they are not rounded in between."""
        stored = x.dtype if x.dtype is torch.float64 else torch.float32
        return self.strategy == "dynamic" and self.scale_dtype in (None, stored)

    @property
    def clips_nothing(self) -> bool:
        """A symmetric range found in x itself holds all of x, so every finite element passes its gradient."""
        symmetric = self.mode is DynamicRangeMode.SYMMETRIC and self.q_min <= -self.q_max
        return symmetric and self.strategy == "dynamic"

    def _fake_quantize(self, x: Tensor, scale: Tensor, zero_point: Tensor | None, grad_factor: float) -> Tensor:
        return fake_quantize(
            x,
            scale,
            zero_point,
            scope=self.scope,
            q_min=self.q_min,
            q_max=self.q_max,
            arithmetic=self.arithmetic,
            grad_factor=grad_factor,
        )

    def qparams(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point for x, after the observer has seen it."""
        if self.strategy == "dynamic":
            return self._choose(x.detach(), self.scope)
        if self.observer is not None and self.observing and self.training and not _recomputes():
            self.observer(x)
            return self._set(*self.observer.range())
        if self.strategy == "learned" and self.training and not self.initialised and not self._has_scale():
            self.initialise(x)
        return self.scale, self.zero_point

    def settled(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point for x as they stand: nothing is observed."""
        return self._choose(x.detach(), self.scope) if self.strategy == "dynamic" else (self.scale, self.zero_point)

    def _has_scale(self) -> bool:
        """Whether a learned scale has a value after all: copied from another module, or by DDP from the first rank."""
        if torch.compiler.is_compiling() or self.scale.is_meta or torch._C._len_torch_dispatch_stack():
            return False  # there is no data to look at
        self.initialised = not bool(self.scale.isnan().any())
        return self.initialised

    def initialise(self, x: Tensor) -> None:
        """Set learned parameters to the range of x."""
        if tuple(self.scope.scale_shape(tuple(x.shape))) != self.scale_shape:
            raise InvalidProblem(
                f"FakeQuantize: expected inputs with scales of shape {list(self.scale_shape)}, "
                f"got {list(x.shape)} with {list(self.scope.scale_shape(tuple(x.shape)))} under {self.scope}"
            )
        replicas = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if x.numel() == 0 and replicas is None:  # an empty batch has no range
            return
        scale, zero_point = self._choose(x.detach(), self.scope)
        with torch.no_grad():
            if replicas is not None:  # all replicas start from the first rank's batch
                group = replicas.process_group
                for value in (scale, zero_point):
                    if value is not None:
                        dist.broadcast(value, dist.get_global_rank(group, 0), group)
            self.scale.copy_(scale)
            if self.zero_point is not None and zero_point is not None:
                self.zero_point.copy_(zero_point)
        self.initialised = True

    def require_usable(self, of: str) -> None:
        """Raise unless integers can be computed with this scale and zero point. Waits for the device."""
        if self.strategy == "dynamic" or self.scale.is_meta:
            return
        if bool(self.scale.isnan().any()):
            raise InvalidProblem(
                f"the scale of its {of} is NaN: it has seen nothing, or a NaN; "
                "run data through the model in train() first"
            )
        if self.zero_point is None:
            return
        zero_point, low, high = self.zero_point.detach().round(), self.element.q_min, self.element.q_max
        outside = zero_point[(zero_point < low) | (zero_point > high)]
        if outside.numel():
            raise InvalidProblem(
                f"the zero point of its {of} is {outside[0]:.0f}, expected one in [{low}, {high}]: clamp it there, "
                "and see whether the model still does what it should"
            )

    def _set(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn a range into a scale by the formula of dynamic quantization, on segments of these two values.

        Returns them beside the buffers: a backward may come after the next forward, which sets those anew.
        """
        ends = torch.stack([low, high], dim=-1)
        scale, zero_point = self._choose(ends, PerToken())
        self.scale.copy_(scale)
        if self.zero_point is not None and zero_point is not None:
            self.zero_point.copy_(zero_point)
        return scale.to(self.scale.dtype), zero_point

    def _choose(self, x: Tensor, scope: Scope) -> tuple[Tensor, Tensor | None]:
        scale, zero_point = choose_qparams(x, scope=scope, **self.range_options())
        return (scale if self.scale_dtype is None else scale.to(self.scale_dtype)), zero_point

    def range_options(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "dtype": self.element,
            "q_min": self.q_min,
            "q_max": self.q_max,
            "include_zero": self.include_zero and self.mode is DynamicRangeMode.ASYMMETRIC,
            "arithmetic": self.arithmetic,
        }

    def gradient_factor(self, x: Tensor) -> float:
        """What the gradients of learned parameters are multiplied by."""
        if self.strategy != "learned":
            return 1.0
        if self.grad_factor is not None:
            return self.grad_factor
        per_segment = x.numel() / max(1, prod(self.scale_shape))
        return float((max(1.0, per_segment) * max(1, self.q_max)) ** -0.5)

    def _apply(self, fn: Any, recurse: bool = True) -> FakeQuantize:
        """Move with the module, but keep the types: scales and ranges stay f32 whatever the model computes in."""
        before = {name: value.detach() for name, value in self._state()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in self._state():
            if value.dtype != before[name].dtype:
                value.data = before[name].to(value.device)
                if value.grad is not None:
                    value.grad = value.grad.to(value.dtype)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, value in self._state():
            stored = state_dict.get(prefix + name)
            if isinstance(stored, Tensor) and stored.is_floating_point() and value.is_floating_point():
                state_dict[prefix + name] = stored.to(value.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.strategy == "learned" and prefix + "scale" in state_dict:
            self.initialised = not bool(self.scale.isnan().any())

    def _state(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]

    def extra_repr(self) -> str:
        parts = [self.strategy, str(self.scope), f"{self.element.value}[{self.q_min}, {self.q_max}]", self.mode.value]
        return ", ".join(parts if self.enabled else [*parts, "disabled"])


def _recomputes() -> bool:
    """Whether activation checkpointing recomputes a forward inside a backward: the observer has seen this batch."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
