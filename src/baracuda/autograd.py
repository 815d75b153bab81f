"""Gradients: straight through the rounding, and to the scale and zero point where those are learned.

The formulas hang on the `baracuda::` operators, so that eager calls, `torch.compile` and checkpointing share them.
`quantize` and `dequantize` here are the differentiable pair: their integers travel in a float tensor, since torch gives
integer tensors no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import new_class
from typing import Any

import torch
from torch import Tensor

from .backends.registry import Value
from .core.arrays import as_tensor, segment_values
from .core.errors import Unsupported
from .core.scope import PerChannel, PerTensor, Scope, Shape, require_scope
from .core.types import Activation, Arithmetic, DynamicRangeMode, ElementKind, QuantizeKind, member
from .dispatch.eager import audience, cached_plan, transform_level
from .dispatch.operators import _LIBRARY, OPERATORS, Key, rounded
from .plans.plan import SelectedPlan

_LINEAR_IN_GRAD_OUTPUT = (
    QuantizeKind.QUANTIZE_BACKWARD,
    QuantizeKind.DEQUANTIZE_BACKWARD,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD,
)


def compute(
    op: QuantizeKind,
    inputs: tuple[Value, ...],
    shape: Shape,
    key: Key,
    size: int | None = None,
    factor: float = 1.0,
    plan: SelectedPlan | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of an op, recorded by whoever watches. A caller that holds the plan spares the search for it."""
    watching = audience(*inputs)
    if watching == "nobody":
        return plan.compute(inputs) if plan is not None else _direct(op, inputs, shape, key)
    if watching == "autograd" and op is QuantizeKind.QUANTIZE:
        with torch.no_grad():  # integers have no gradient to record
            return _direct(op, inputs, shape, key)
    if watching == "autograd" and op in _FORMULAS:
        return _Recorded.apply(op, shape, key, size, factor, *inputs)  # type: ignore[no-any-return, no-untyped-call]
    if watching == "torch" and op in _FORMULAS and transform_level() is not None:
        return _Transformed.apply(op, shape, key, size, factor, *inputs)  # type: ignore[no-any-return, no-untyped-call]
    return OPERATORS[op](inputs, key, size, factor)


def _returned(op: QuantizeKind, computed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the operator returns, of all that was computed."""
    return tuple([computed[i] for i in OPERATORS[op].returned])


def _direct(op: QuantizeKind, inputs: tuple[Value, ...], shape: Shape, key: Key) -> tuple[Tensor, ...]:
    device = next(value.device for value in inputs if isinstance(value, Tensor))
    return cached_plan(device, op, shape, *key).compute(OPERATORS[op].with_integers(inputs))


class _Recorded(torch.autograd.Function):
    """An op on plain tensors, with the formula of its operator but not the operator's way through the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, op: QuantizeKind, shape: Shape, key: Key, size: int | None, factor: float, *inputs: Value
    ) -> tuple[Tensor, ...]:
        ctx.op = op
        _FORMULAS[op].save(ctx, inputs, key, size, factor)
        return _returned(op, _direct(op, inputs, shape, key))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        formula, unlearned = _FORMULAS[ctx.op], (None,) * 5
        names = [operand.name for operand in formula.operator.inputs]
        found = formula.found(ctx, names, ctx.needs_input_grad[len(unlearned) :], dy[-1])
        return (*unlearned, *[found.get(name) for name in names])


class _Transformed(_Recorded):
    """The same for torch.func, one of whose transforms is peeled off at a time; operators of libraries have no way."""

    @staticmethod
    def forward(  # type: ignore[override]
        op: QuantizeKind, shape: Shape, key: Key, size: int | None, factor: float, *inputs: Value
    ) -> tuple[Tensor, ...]:
        return _returned(op, compute(op, inputs, shape, key, size, factor))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.op, _, key, size, factor, *operands = inputs
        _FORMULAS[ctx.op].save(ctx, tuple(operands), key, size, factor)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], op: QuantizeKind, shape: Shape, key: Key, size: int | None,
        factor: float, *inputs: Any,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
        """One after the other, as torch itself does with an operator it knows nothing of."""
        if info.batch_size == 0:
            raise Unsupported("vmap over a batch of none, whose results have no shape; leave it out")
        results = []
        for i in range(info.batch_size):
            dims = zip(inputs, in_dims[-len(inputs) :], strict=True)
            each = tuple([value if dim is None else value.select(dim, i) for value, dim in dims])
            results.append(_Transformed.forward(op, shape, key, size, factor, *each))
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)


#: What is inside a wrapper of a transform that is over: a function that `vjp` has made may be called at any time.
_alive = torch._C._functorch.unwrap_if_dead


def unordered_sums(values: Tensor, scope: Scope) -> Tensor:
    """The sum over each segment, by torch, in f64 and any order; in the type of `values`."""
    view = scope.view(tuple(values.shape))
    totals = values.to(torch.float64).reshape(view.shape).sum(dim=(0, 2))
    return totals.to(values.dtype).reshape(scope.scale_shape(tuple(values.shape)))


# -- formulas of the operators -----------------------------------------------------------------------------------


class _Formula:
    """Saves an operator's inputs, and names the gradients it returns."""

    def __init__(self, op: QuantizeKind) -> None:
        self.operator = OPERATORS[op]
        torch.library.register_autograd(
            self.operator.name, self.backward, setup_context=self.setup_context, lib=_LIBRARY
        )

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        self.save(ctx, *self.operator.unflatten(inputs))
        ctx.argument_count = len(inputs)

    def save(self, ctx: Any, inputs: tuple[Any, ...], key: Key, size: int | None, grad_factor: float) -> None:
        ctx.key, ctx.size, ctx.grad_factor = key, size, grad_factor
        ctx.numbers = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*[value if isinstance(value, Tensor) else None for value in inputs])

    def backward(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        names = self.operator.arguments
        found = self.found(ctx, names, ctx.needs_input_grad[: len(names)], grads[-1])
        return (*[found.get(name) for name in names], *[None] * (ctx.argument_count - len(names)))

    def found(self, ctx: Any, names: Sequence[str], needs: Sequence[bool], dy: Tensor) -> dict[str, Tensor]:
        operands = {
            operand.name: number if tensor is None else _alive(tensor)
            for operand, tensor, number in zip(self.operator.inputs, ctx.saved_tensors, ctx.numbers, strict=True)
        }
        wanted = {name for name, need in zip(names, needs, strict=True) if need}
        return self.gradients(ctx, operands, wanted, _alive(dy))

    def gradients(self, ctx: Any, operands: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError


class _FakeQuantize(_Formula):
    def gradients(self, ctx: Any, operands: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        x, scale, zero_point = operands["input"], operands["scale"], operands["zero_point"]
        inputs = (x, dy, scale, rounded(zero_point))
        if not wanted & {"scale", "zero_point"}:
            return {"input": compute(QuantizeKind.FAKE_QUANTIZE_BACKWARD, inputs, dy.shape, ctx.key)[0]}
        dx, *sums = compute(QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD, inputs, dy.shape, ctx.key)
        learned = {"scale": scale, "zero_point": zero_point}
        return {"input": dx} | {
            name: (total * ctx.grad_factor).to(learned[name].dtype)
            for name, total in zip(learned, sums, strict=True)
            if name in wanted
        }


class _Dequantize(_Formula):
    """To the scale: the sum of dy * (q - zero_point) over its segment."""

    def gradients(self, ctx: Any, operands: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        if not wanted & {"scale", "zero_point"}:
            return {}
        element, quantized, q_min, q_max, scope = ctx.key[:5]
        math, scale, zero_point = element.math, operands["scale"], operands["zero_point"]
        dy = dy.to(math.dtype)
        found = {}
        if "scale" in wanted:
            key = (math, quantized, q_min, q_max, scope, *ctx.key[5:])
            inputs = (operands["input"], 1.0, zero_point)
            (steps,) = compute(QuantizeKind.DEQUANTIZE, inputs, dy.shape, key, ctx.size)
            found["scale"] = (unordered_sums(dy * steps, scope) * ctx.grad_factor).to(scale.dtype)
        if "zero_point" in wanted:
            found["zero_point"] = (-unordered_sums(dy, scope) * scale * ctx.grad_factor).to(zero_point.dtype)
        return found


#: dy times the slope of the activation at y.
_SLOPES: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    Activation.RELU: lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0),
    Activation.GELU: torch.ops.aten.gelu_backward,
    Activation.SILU: lambda dy, y: dy * (s := y.sigmoid()) * (1 + y * (1 - s)),  # aten's has no derivative
}


class _Linear(_Formula):
    """To x as if its integers had not been rounded, to the bias and to the residual."""

    def gradients(self, ctx: Any, operands: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        if scales := wanted & {"weight_scale", "act_scale"}:
            raise Unsupported(
                f"{min(scales)} requires a gradient, but a linear of integers has none for its scales; "
                "detach it, or train with fake_quantize and convert"
            )
        found = {"residual": dy} if "residual" in wanted else {}
        if wanted & {"activation", "bias"}:
            dy = self.before_activation(ctx, operands, dy)
        if "activation" in wanted:
            element, weight_q, kind = ctx.key[0], operands["weight_q"], ctx.key[9]
            key = static_key(element, kind, kind.q_min, kind.q_max, PerChannel(0))
            shape, inputs = (dy.shape[1], operands["activation"].shape[1]), (weight_q, operands["weight_scale"], None)
            size = shape[1] if kind.is_packed else None
            (weight,) = compute(QuantizeKind.DEQUANTIZE, inputs, shape, key, size)
            found["activation"] = dy @ weight
        if "bias" in wanted:
            found["bias"] = dy.sum(dim=0).to(operands["bias"].dtype)
        return found

    def before_activation(self, ctx: Any, operands: dict[str, Any], dy: Tensor) -> Tensor:
        """dy times the activation's slope, where the linear is computed once more: nothing but its output was kept."""
        *key, activation = ctx.key
        if activation is Activation.NONE:
            return dy
        operator = self.operator
        inputs = tuple(operands[operand.name] if operand.name != "residual" else None for operand in operator.inputs)
        before = (*key, Activation.NONE)
        sums = compute(operator.op, inputs, operator.shape(inputs, before, None), before)[-1]
        sums = sums.to(ctx.key[0].math.dtype)
        return _SLOPES[activation](dy.to(sums.dtype), sums).to(dy.dtype)


class _Backward(_Formula):
    """A backward op multiplies dy, element by element, with something that does not depend on it: so does its own."""

    def gradients(self, ctx: Any, operands: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        inputs = (operands["input"], dy, operands["scale"], operands["zero_point"])
        return {"grad_output": compute(self.operator.op, inputs, dy.shape, ctx.key)[0]}


class _Once(_Formula):
    def gradients(self, ctx: Any, operands: dict[str, Any], wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        raise Unsupported("the gradient of a learned scale has no gradient of its own; drop create_graph=True")


#: A range found in the data counts as a constant: nothing to record, and no detour to find that out.
for _op in (QuantizeKind.DYNAMIC_QUANTIZE, QuantizeKind.CHOOSE_QPARAMS, QuantizeKind.DYNAMIC_FAKE_QUANTIZE):
    _LIBRARY.impl(_op.value, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
_FORMULAS: dict[QuantizeKind, _Formula] = {
    QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD: _Once(QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD),
    QuantizeKind.FAKE_QUANTIZE: _FakeQuantize(QuantizeKind.FAKE_QUANTIZE),
    QuantizeKind.DEQUANTIZE: _Dequantize(QuantizeKind.DEQUANTIZE),
    QuantizeKind.QUANTIZED_LINEAR: _Linear(QuantizeKind.QUANTIZED_LINEAR),
    QuantizeKind.SMOOTHQUANT_LINEAR: _Linear(QuantizeKind.SMOOTHQUANT_LINEAR),
    **{op: _Backward(op) for op in _LINEAR_IN_GRAD_OUTPUT},
}


def static_key(
    element: ElementKind,
    quantized: ElementKind,
    q_min: int,
    q_max: int,
    scope: Scope,
    arithmetic: Arithmetic = Arithmetic.DIVIDE,
) -> Key:
    """The key of an op whose scale is given."""
    mode, stored, weight = DynamicRangeMode.SYMMETRIC, ElementKind.F32, ElementKind.S8
    return element, quantized, q_min, q_max, scope, mode, arithmetic, stored, False, weight, Activation.NONE


# -- the differentiable pair -------------------------------------------------------------------------------------


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _Quantize.keep(ctx, inputs)
        return _Quantize.integers(*inputs)

    @staticmethod
    def integers(x: Tensor, scale: Value, zero_point: Value, key: Key) -> Tensor:
        return compute(QuantizeKind.QUANTIZE, (x, scale, zero_point), x.shape, key)[0].to(x.dtype)

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None = None) -> None:
        *operands, ctx.key = inputs
        ctx.numbers = [None if isinstance(v, Tensor) else v for v in operands]
        ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in operands])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = (n if t is None else t for t, n in zip(ctx.saved_tensors, ctx.numbers, strict=True))
        inputs = (x, dy, scale, zero_point)
        return compute(QuantizeKind.QUANTIZE_BACKWARD, inputs, dy.shape, ctx.key)[0], None, None, None


class _Dequantized(torch.autograd.Function):
    """Adds the gradient of the integers to an operator that has those of scale and zero point."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _Dequantized.keep(ctx, inputs)
        return _second(*inputs)

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None = None) -> None:
        _, _, scale, ctx.key = inputs
        ctx.number = None if isinstance(scale, Tensor) else scale
        ctx.save_for_backward(scale if isinstance(scale, Tensor) else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        inputs = (None, dy, ctx.number if scale is None else scale, None)
        return compute(QuantizeKind.DEQUANTIZE_BACKWARD, inputs, dy.shape, ctx.key)[0], dy, None, None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None


def _second(_: Tensor, y: Tensor, *others: object) -> Tensor:
    """The second of the arguments, as a tensor of its own: what a function returns must not be what it was given."""
    return y.view_as(y)


def _under(function: type[torch.autograd.Function], result: Any, keep: Any) -> type[torch.autograd.Function]:
    """A function for torch.func, which has it keep things apart from computing them. Elsewhere that is slow."""
    apart = {"forward": staticmethod(result), "setup_context": staticmethod(keep), "generate_vmap_rule": True}
    return new_class(function.__name__, (function,), exec_body=lambda names: names.update(apart))


_UNDER_TRANSFORMS: dict[type[torch.autograd.Function], type[torch.autograd.Function]] = {
    _Quantize: _under(_Quantize, _Quantize.integers, _Quantize.keep),
    _Dequantized: _under(_Dequantized, _second, _Dequantized.keep),
    _StraightThrough: _under(_StraightThrough, _second, lambda ctx, inputs, output: None),
}


def _call(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    if not torch.compiler.is_dynamo_compiling() and transform_level() is not None:
        function = _UNDER_TRANSFORMS[function]
    result: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


def straight_through(x: Tensor, y: Tensor) -> Tensor:
    """y, with the gradient of x: for a fake-quantization that clips nothing, whose backward would only copy."""
    return _call(_StraightThrough, x, y)


def quantize(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    scope: Scope = PerTensor(),
    dtype: Any = ElementKind.S8,
    arithmetic: Arithmetic | str = Arithmetic.DIVIDE,
) -> Tensor:
    """The integers of `baracuda.quantize` in x's own float type, over the full range of `dtype`, s8 or u8.

    dx = dy / scale where x was in range, else 0. Scale and zero point get no gradient here.
    """
    x, kind = as_tensor(x, "x"), _carried(dtype)
    require_scope(scope)
    key = static_key(
        ElementKind.of(x.dtype), kind, kind.q_min, kind.q_max, scope, member(Arithmetic, arithmetic, "arithmetic")
    )
    scale, zero_point = segment_values(scope.scale_shape(tuple(x.shape)), scale, zero_point)
    return _call(_Quantize, x, scale, zero_point, key)


def dequantize(
    q: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    scope: Scope = PerTensor(),
    element: Any = ElementKind.S8,
) -> Tensor:
    """(q - zero_point) * scale for integers in a float tensor, in its type.

    `element` is what they are integers of: the `dtype` that `quantize` was given. Other values are taken as
    `quantize(q, 1.0)` takes them, to the nearest integer within the range of `element`. dq = dy * scale where q was in
    that range, else 0. Scale and zero point have gradients of their own.
    """
    require_scope(scope)
    kind, q = _carried(element), quantize(as_tensor(q, "q"), 1.0, dtype=element)
    key = static_key(ElementKind.of(q.dtype), kind, kind.q_min, kind.q_max, scope)
    integers = q.detach().to(kind.dtype)
    keep = audience(integers, scale, zero_point) != "nobody"
    shape = scope.scale_shape(tuple(q.shape))
    scale, zero_point = segment_values(shape, scale, zero_point, learned=True, keep=keep)
    (y,) = compute(QuantizeKind.DEQUANTIZE, (integers, scale, zero_point), q.shape, key)
    return _call(_Dequantized, q, y, scale, key)


def _carried(element: Any) -> ElementKind:
    kind = ElementKind.of(element)
    if kind.is_packed or kind.is_float:
        raise Unsupported(f"expected s8 or u8, whose integers every float type holds one by one, got {kind.value}")
    return kind
