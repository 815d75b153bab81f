"""Gradients: a formula for each differentiable op, and the one autograd Function that all of them go through.

The formulas also hang on the `baracuda::` operators, so that eager calls, `torch.compile` and checkpointing share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..backends.registry import Value
from ..core.errors import Unsupported
from ..core.problem import Spec
from ..core.scope import PerChannel, PerGroup, Scope, Shape
from ..core.types import Activation, QuantizeKind
from ..plans.plan import SelectedPlan
from .eager import cached_plan, route, transform_level
from .operators import LIBRARY, OPERATORS, rounded
from .options import static_spec

# -- the one Function --------------------------------------------------------------------------------------------


class Differentiable(Protocol):
    """What the Function computes, and the gradients of that."""

    @property
    def keeps_inputs(self) -> bool:
        """Whether `gradients` reads the inputs; it gets none otherwise."""
        ...

    def value(self, *inputs: Any) -> Tensor | tuple[Tensor, ...]: ...

    def gradients(self, inputs: tuple[Any, ...], needed: Sequence[bool], dy: Tensor) -> Sequence[Tensor | None]:
        """One for each input, from the gradient of the last output; None where there is none, or none is needed."""
        ...


def record(function: Differentiable, *inputs: Any) -> Any:
    """The function's value, recorded by autograd, by a transform of torch.func, or by torch.compile."""
    if torch.compiler.is_dynamo_compiling():
        return _Recorded.apply(function, *inputs)  # type: ignore[no-untyped-call]
    if transform_level() is not None:
        return _Transformed.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return record_plain(function, *inputs)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Differentiable, *inputs: Any) -> Any:
        _keep(ctx, function, inputs)
        return function.value(*inputs)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.function.gradients(_kept(ctx), ctx.needs_input_grad[1:], dy[-1])


class _Transformed(_Recorded):
    """The same for torch.func, which wants `forward` without a context; elsewhere that form is slower."""

    @staticmethod
    def forward(function: Differentiable, *inputs: Any) -> Any:  # type: ignore[override]
        return function.value(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _keep(ctx, inputs[0], inputs[1:])

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = tuple([_alive(value) if isinstance(value, Tensor) else value for value in _kept(ctx)])
        return None, *ctx.function.gradients(inputs, ctx.needs_input_grad[1:], _alive(dy[-1]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: Differentiable, *inputs: Any) -> tuple[Any, Any]:
        """One sample after the other, as torch itself does with an operator it knows nothing of."""
        if info.batch_size == 0:
            raise Unsupported("vmap over an empty batch: its results have no shape; skip the call")
        results = []
        for i in range(info.batch_size):
            dims = zip(inputs, in_dims[1:], strict=True)
            sample = [value if dim is None else value.select(dim, i) for value, dim in dims]
            results.append(_Transformed.apply(function, *sample))  # type: ignore[no-untyped-call]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)


#: `apply` without its search for transforms: for callers that know that there are none.
record_plain: Callable[..., Any] = super(torch.autograd.Function, _Recorded).apply
#: What is inside a wrapper of a transform that is over: a function that `vjp` has made may be called at any time.
_alive = torch._C._functorch.unwrap_if_dead


def _keep(ctx: Any, function: Differentiable, inputs: tuple[Any, ...]) -> None:
    """Tensors go where autograd checks and frees them; numbers, which it does not take, beside them."""
    ctx.function = function
    if function.keeps_inputs:
        numbers = {i: v for i, v in enumerate(inputs) if v is not None and not isinstance(v, Tensor)}
        tensors = [None if i in numbers else v for i, v in enumerate(inputs)] if numbers else inputs
        ctx.numbers = numbers
        ctx.save_for_backward(*tensors)


def _kept(ctx: Any) -> tuple[Any, ...]:
    if not ctx.function.keeps_inputs:
        return ()
    saved: tuple[Any, ...] = ctx.saved_tensors
    return tuple([ctx.numbers.get(i, v) for i, v in enumerate(saved)]) if ctx.numbers else saved


# -- ops ---------------------------------------------------------------------------------------------------------


def compute(
    op: QuantizeKind,
    inputs: tuple[Value, ...],
    shape: Shape,
    spec: Spec,
    size: int | None = None,
    factor: float = 1.0,
    plan: SelectedPlan | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of an op by its dispatch route. A caller that holds the plan spares the search for it."""
    taken = route(*inputs)
    if taken == "plan":
        return plan.compute(inputs) if plan is not None else _direct(op, inputs, shape, spec)
    if taken == "autograd" and op is QuantizeKind.QUANTIZE:
        with torch.no_grad():  # integers have no gradient to record
            return _direct(op, inputs, shape, spec)
    if op in FORMULAS and (taken == "autograd" or transform_level() is not None):
        recorder = record_plain if taken == "autograd" else record
        return recorder(OpCall(op, shape, spec, size, factor), *inputs)  # type: ignore[no-any-return]
    return OPERATORS[op](inputs, spec, size, factor)


def _direct(op: QuantizeKind, inputs: tuple[Value, ...], shape: Shape, spec: Spec) -> tuple[Tensor, ...]:
    device = next(value.device for value in inputs if isinstance(value, Tensor))
    return cached_plan(device, op, shape, spec).compute(OPERATORS[op].with_integers(inputs))


@dataclass(eq=False, slots=True)
class OpCall:
    """An op on given options: its value by its route, its gradients by its formula."""

    op: QuantizeKind
    shape: Shape
    spec: Spec
    size: int | None = None
    factor: float = 1.0
    keeps_inputs: ClassVar[bool] = True

    def value(self, *inputs: Value) -> tuple[Tensor, ...]:
        computed = compute(self.op, inputs, self.shape, self.spec, self.size, self.factor)
        return tuple([computed[i] for i in OPERATORS[self.op].returned])

    def gradients(self, inputs: tuple[Any, ...], needed: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
        names = OPERATORS[self.op].names
        found = self.named_gradients(inputs, {name for name, need in zip(names, needed, strict=True) if need}, dy)
        return [found.get(name) for name in names]

    def named_gradients(self, inputs: tuple[Any, ...], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        return FORMULAS[self.op](self, dict(zip(OPERATORS[self.op].names, inputs, strict=True)), wanted, dy)


# -- formulas ----------------------------------------------------------------------------------------------------

#: From a call, its inputs by name, the names whose gradients are wanted, and dy: those gradients by name.
Formula = Callable[[OpCall, dict[str, Any], set[str], Tensor], dict[str, Tensor]]


def _fake_quantize(call: OpCall, inputs: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
    x, scale, zero_point = inputs["input"], inputs["scale"], inputs["zero_point"]
    operands = (x, dy, scale, rounded(zero_point))
    if not wanted & {"scale", "zero_point"}:
        return {"input": compute(QuantizeKind.FAKE_QUANTIZE_BACKWARD, operands, dy.shape, call.spec)[0]}
    dx, *sums = compute(QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD, operands, dy.shape, call.spec)
    learned = {"scale": scale, "zero_point": zero_point}
    return {"input": dx} | {
        name: (total * call.factor).to(learned[name].dtype)
        for name, total in zip(learned, sums, strict=True)
        if name in wanted
    }


def _dequantize(call: OpCall, inputs: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
    """To the scale: the sum of dy * (q - zero_point) over its segment. The integers have none."""
    if not wanted & {"scale", "zero_point"}:
        return {}
    spec, scale, zero_point = call.spec, inputs["scale"], inputs["zero_point"]
    math = spec.element.math
    dy = dy.to(math.dtype)
    found = {}
    if "scale" in wanted:
        operands, in_math = (inputs["input"], 1.0, zero_point), replace(spec, element=math)
        (steps,) = compute(QuantizeKind.DEQUANTIZE, operands, dy.shape, in_math, call.size)
        found["scale"] = (unordered_sums(dy * steps, spec.scope) * call.factor).to(scale.dtype)
    if "zero_point" in wanted:
        found["zero_point"] = (-unordered_sums(dy, spec.scope) * scale * call.factor).to(zero_point.dtype)
    return found


def _linear(call: OpCall, inputs: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
    """To x as if its integers had not been rounded, to the bias and to the residual."""
    if scales := wanted & {"weight_scale", "act_scale"}:
        raise Unsupported(
            f"{min(scales)} requires a gradient, but a linear of integers has none for its scales; "
            "detach it, or train with fake_quantize and convert"
        )
    found = {"residual": dy} if "residual" in wanted else {}
    if wanted & {"activation", "bias"}:
        dy = _before_nonlinearity(call, inputs, dy)
    if "activation" in wanted:
        found["activation"] = dy @ _float_weight(call, inputs, (dy.shape[1], inputs["activation"].shape[1]))
    if "bias" in wanted:
        found["bias"] = dy.sum(dim=0).to(inputs["bias"].dtype)
    return found


def _float_weight(call: OpCall, inputs: dict[str, Any], shape: Shape) -> Tensor:
    """The weight that a linear's integers stand for."""
    kind, group, scale = call.spec.weight, call.spec.weight_group, inputs["weight_scale"]
    scope: Scope = PerChannel(0)
    if call.op is QuantizeKind.WEIGHT_ONLY_LINEAR:
        scope = PerGroup(group or shape[1])
    elif group:
        # Exact in f32 up to the one rounding of the product, which the scale of an expanded weight does not have.
        scale = (
            scale[:, None] * inputs["weight_factor"] if isinstance(scale, Tensor) else scale * inputs["weight_factor"]
        )
        scope = PerGroup(group)
    spec, size = static_spec(call.spec.element, scope, kind), shape[1] if kind.is_packed else None
    zero_point = inputs.get("weight_zero_point")
    return compute(QuantizeKind.DEQUANTIZE, (inputs["weight_q"], scale, zero_point), shape, spec, size)[0]


#: dy times the slope of the nonlinearity at y.
_SLOPES: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    Activation.RELU: lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0),
    Activation.GELU: torch.ops.aten.gelu_backward,
    Activation.SILU: lambda dy, y: dy * (s := y.sigmoid()) * (1 + y * (1 - s)),  # aten's has no derivative
}


def _before_nonlinearity(call: OpCall, inputs: dict[str, Any], dy: Tensor) -> Tensor:
    """dy times the slope of the nonlinearity. The linear is computed again for it: only its output was kept."""
    if call.spec.nonlinearity is Activation.NONE:
        return dy
    operator, spec = OPERATORS[call.op], replace(call.spec, nonlinearity=Activation.NONE)
    operands = tuple([None if name == "residual" else value for name, value in inputs.items()])
    sums = compute(call.op, operands, operator.shape(operands, spec, None), spec)[-1]
    sums = sums.to(spec.element.math.dtype)
    return _SLOPES[call.spec.nonlinearity](dy.to(sums.dtype), sums).to(dy.dtype)


def _backward(call: OpCall, inputs: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
    """A backward op multiplies dy, element by element, by factors that do not depend on dy: so does its own."""
    operands = (inputs["input"], dy, inputs["scale"], inputs["zero_point"])
    return {"grad_output": compute(call.op, operands, dy.shape, call.spec)[0]}


def _only_once(call: OpCall, inputs: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
    raise Unsupported("the gradient of a learned scale has no gradient of its own; drop create_graph=True")


FORMULAS: dict[QuantizeKind, Formula] = {
    QuantizeKind.FAKE_QUANTIZE: _fake_quantize,
    QuantizeKind.DEQUANTIZE: _dequantize,
    QuantizeKind.QUANTIZED_LINEAR: _linear,
    QuantizeKind.SMOOTHQUANT_LINEAR: _linear,
    QuantizeKind.WEIGHT_ONLY_LINEAR: _linear,
    QuantizeKind.QUANTIZE_BACKWARD: _backward,
    QuantizeKind.DEQUANTIZE_BACKWARD: _backward,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD: _backward,
    QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD: _only_once,
}


def unordered_sums(values: Tensor, scope: Scope) -> Tensor:
    """The sum over each segment, by torch, in f64 and any order; in the type of `values`."""
    view = scope.view(tuple(values.shape))
    totals = values.to(torch.float64).reshape(view.shape).sum(dim=(0, 2))
    return totals.to(values.dtype).reshape(scope.scale_shape(tuple(values.shape)))


# -- the formulas of the operators -------------------------------------------------------------------------------


def _register(op: QuantizeKind) -> None:
    operator = OPERATORS[op]
    names = operator.arguments

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operands, spec, size, factor = operator.unflatten(inputs)
        _keep(ctx, OpCall(op, operator.shape(operands, spec, size), spec, size, factor), operands)
        ctx.others = len(inputs) - len(names)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = {name for name, need in zip(names, ctx.needs_input_grad, strict=False) if need}
        found = ctx.function.named_gradients(_kept(ctx), wanted, _alive(grads[-1]))
        return (*[found.get(name) for name in names], *[None] * ctx.others)

    torch.library.register_autograd(operator.name, backward, setup_context=setup_context, lib=LIBRARY)


for _op in FORMULAS:
    _register(_op)
#: A range found in the data counts as a constant: there is nothing to record, so the dispatcher skips autograd.
for _op in (QuantizeKind.DYNAMIC_QUANTIZE, QuantizeKind.CHOOSE_QPARAMS, QuantizeKind.DYNAMIC_FAKE_QUANTIZE):
    LIBRARY.impl(_op.value, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
