"""The `baracuda::` operators of torch: schema, fake and implementation of each derived from its row of the op table.

An operator takes the row's inputs (an operand that may be a number is two arguments, a tensor and a number), then the
spec in plain values, and returns the row's outputs. The problem's shape is that of its tensors, so tracing keeps sizes
symbolic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends.registry import Value
from ..core.errors import InvalidProblem
from ..core.optable import OPS, Operand
from ..core.problem import Problem, Spec
from ..core.scope import Shape
from ..core.types import MAX_ZERO_POINT, ElementKind, OpCategory, QuantizeKind
from . import schema
from .eager import cached_plan

#: The last arguments of every operator: the last axis of a packed tensor, unpacked, and the factor of the gradients of
#: learned scales and zero points.
_FURTHER = ("SymInt? size", "float grad_factor")
#: Python numbers; a tracer has its own types.
_PLAIN_NUMBERS = (bool, int, float)
LIBRARY = torch.library.Library("baracuda", "DEF")  # type: ignore[no-untyped-call]


class Operator:
    """One row of the op table as an operator of torch."""

    def __init__(self, op: QuantizeKind) -> None:
        self.op, self.row = op, OPS[op]
        self.inputs = tuple(operand for operand in self.row.operands if not operand.output)
        only = "output" if op is QuantizeKind.DYNAMIC_FAKE_QUANTIZE else ""  # its scales are never read
        self.outputs = tuple(
            operand
            for operand in self.row.operands
            if operand.output and not operand.name.endswith("scratch") and operand.name.startswith(only)
        )
        self.names = names = tuple([operand.name for operand in self.inputs])
        self.zero_point = names.index("zero_point") if "zero_point" in names else None
        #: The input that has the problem's shape.
        self.whole = names.index("grad_output") if "grad_output" in names else 0
        #: Where the operator's outputs are among all that the op computes.
        self.returned = [i - len(self.inputs) for i, o in enumerate(self.row.operands) if o in self.outputs]
        self.arguments = tuple(name for operand in self.inputs for name, _ in _arguments(operand))
        self.name = f"baracuda::{op.value}"
        self.call: Callable[..., Any] = _undefined

    def declaration(self) -> str:
        declared = ", ".join(f"{kind} {name}" for operand in self.inputs for name, kind in _arguments(operand))
        returns = ", ".join(["Tensor"] * len(self.outputs))
        return f"{self.op.value}({', '.join([declared, schema.DECLARED, *_FURTHER])}) -> ({returns})"

    def define(self) -> None:
        LIBRARY.define(self.declaration(), tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(self.op.value, self.implementation, device)  # type: ignore[no-untyped-call]
        torch.library.register_fake(self.name, self.fake, lib=LIBRARY)
        self.call = getattr(torch.ops.baracuda, self.op.value).default

    def __call__(
        self, inputs: tuple[Value, ...], spec: Spec, size: int | None = None, grad_factor: float = 1.0
    ) -> tuple[Tensor, ...]:
        """Call the operator through torch's dispatcher."""
        if not torch.compiler.is_compiling():
            self._require_numbers(inputs, spec)
        arguments: list[Any] = []
        for operand, value in zip(self.inputs, inputs, strict=True):
            if operand.number is None:
                arguments.append(value)
            else:
                tensor = isinstance(value, Tensor)
                arguments += [value, None] if tensor else [None, value]
        result = self.call(*arguments, *self.encoded(spec, size, grad_factor))
        return (result,) if isinstance(result, Tensor) else tuple(result)

    def encoded(self, spec: Spec, size: int | None = None, grad_factor: float = 1.0) -> tuple[Any, ...]:
        """What the operator takes behind its inputs."""
        return *schema.encode(spec), size, grad_factor

    def _require_numbers(self, inputs: tuple[Value, ...], spec: Spec) -> None:
        """Check numbers as a plan does: the dispatcher would accept True as a number, and has other error texts."""
        for operand, value in zip(self.inputs, inputs, strict=True):
            if operand.number is not None and type(value) in _PLAIN_NUMBERS:
                operand.number(Problem.unchecked(self.op, (), spec)).require(operand.name, value)

    def implementation(self, *args: Any) -> Tensor | tuple[Tensor, ...]:
        inputs, spec, size, _ = self.unflatten(args)
        like = _device_of(inputs)
        plan = cached_plan(like, self.op, tuple(self.shape(inputs, spec, size)), spec)
        computed = plan.compute(self.with_integers(inputs))
        if len(self.returned) == 1:
            only: Tensor = computed[self.returned[0]]
            return only
        # Zeros for a symmetric zero point, nothing for a sum without an addend: neither is computed, but an operator
        # always returns the same number of tensors.
        return tuple(
            computed[i]
            if computed[i] is not None
            else torch.zeros(operand.shape(plan.problem), dtype=operand.elements(plan.problem)[0].dtype, device=like)
            for operand, i in zip(self.outputs, self.returned, strict=True)
        )

    def fake(self, *args: Any) -> Tensor | tuple[Tensor, ...]:
        inputs, spec, size, _ = self.unflatten(args)
        problem = Problem.unchecked(self.op, tuple(self.shape(inputs, spec, size)), spec)
        results = [
            torch.empty(operand.shape(problem), dtype=operand.elements(problem)[0].dtype, device=_device_of(inputs))
            for operand in self.outputs
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def with_integers(self, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
        """The inputs with a learned zero point rounded."""
        i = self.zero_point
        return inputs if i is None else (*inputs[:i], rounded(inputs[i]), *inputs[i + 1 :])

    def unflatten(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Spec, int | None, float]:
        """The arguments of `__call__`, from the arguments of the operator."""
        own = len(args) - schema.COUNT - len(_FURTHER)
        inputs, encoded, (size, grad_factor) = args[:own], args[own : -len(_FURTHER)], args[-len(_FURTHER) :]
        if len(inputs) > len(self.inputs):
            values = iter(inputs)
            inputs = tuple(
                next(values) if operand.number is None else _either(next(values), next(values))
                for operand in self.inputs
            )
        return inputs, schema.decode(*encoded), size, grad_factor

    def shape(self, inputs: tuple[Any, ...], spec: Spec, size: int | None) -> Shape:
        """The problem's shape, from its tensors; `size` is the unpacked last axis of a packed one."""
        whole: Shape = inputs[self.whole].shape
        if self.row.category is OpCategory.GEMM:
            weight = next(
                value for operand, value in zip(self.inputs, inputs, strict=True) if operand.name == "weight_q"
            )
            return whole[0], weight.shape[0], whole[1]
        if spec.halves:
            return halved(whole)
        return unpacked_shape(whole, spec.quantized, size) if self.op is QuantizeKind.DEQUANTIZE else whole


def halved(shape: Shape) -> Shape:
    """The shape of either half along the last axis."""
    if not shape or shape[-1] % 2:
        raise InvalidProblem(f"gate: expected two halves along the last axis, got shape {list(shape)}; pass up, too")
    return (*shape[:-1], shape[-1] // 2)


def unpacked_shape(shape: Shape, kind: ElementKind, size: int | None) -> Shape:
    if not kind.is_packed or not shape:
        return shape
    full = 2 * shape[-1]
    if size is not None and (size not in (full, full - 1) or isinstance(size, float)):
        raise InvalidProblem(f"size: expected {full} or {full - 1} for a last axis of {shape[-1]} bytes, got {size}")
    return (*shape[:-1], full if size is None else size)


def _arguments(operand: Operand) -> list[tuple[str, str]]:
    """An operand's arguments and their types in the schema."""
    if operand.number is None:
        return [(operand.name, "Tensor?" if operand.optional else "Tensor")]
    number = "int?" if operand.name.endswith("zero_point") else "float?"
    return [(operand.name, "Tensor?"), (f"{operand.name}_number", number)]


def _either(tensor: Tensor | None, number: float | None) -> Value:
    return number if tensor is None else tensor


def rounded(zero_point: Value) -> Value:
    """A learned zero point is a float; kernels take the nearest integer."""
    if isinstance(zero_point, Tensor) and zero_point.is_floating_point():
        return zero_point.detach().round().clamp(-MAX_ZERO_POINT, MAX_ZERO_POINT).to(torch.int32)
    return zero_point


def _device_of(inputs: tuple[Any, ...]) -> torch.device:
    device: torch.device = next(value.device for value in inputs if isinstance(value, Tensor))
    return device


def _undefined(*args: Any) -> Any:
    raise NotImplementedError("the operator is not defined yet")


OPERATORS: dict[QuantizeKind, Operator] = {op: Operator(op) for op in OPS}
for _operator in OPERATORS.values():
    _operator.define()
