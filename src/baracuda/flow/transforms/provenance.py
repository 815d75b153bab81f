"""Where each channel of a tensor goes. A fold is proved by following channel numbers through the calls of a trace.

A value "carries" channels when each of its elements is one channel of the producer times something that does not depend
on the producer: an int tensor of the same shape says which. Dividing the producer's channel c by s then divides exactly
the elements marked c. A linear over such a value absorbs it (multiply the columns by s); what cannot is a leak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .trace import Call, Trace, Value, tensors_in

#: Elements move, their values do not change: the call is replayed on the channel numbers.
# fmt: off
_MOVES = frozenset({
    "view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze",
    "expand", "expand_as", "clone", "repeat", "repeat_interleave", "chunk", "split", "split_with_sizes",
    "__getitem__", "select", "narrow", "unbind", "t", "swapaxes", "movedim", "view_as", "T.__get__",
    "mT.__get__", "detach",
})
#: Each element is scaled, or rectified, which commutes with a positive factor.
_KEEPS = frozenset({
    "to", "float", "half", "bfloat16", "type_as", "double", "dropout", "relu", "relu_", "leaky_relu",
})
# fmt: on
_PRODUCTS = frozenset(["mul", "multiply", "__mul__", "__rmul__", "mul_", "__imul__"])
_QUOTIENTS = frozenset(["div", "true_divide", "__truediv__", "div_", "__itruediv__"])
_MATMULS = frozenset(["matmul", "__matmul__", "bmm", "mm"])


class LeakError(Exception):
    """The channels reach something that does not commute with a factor per channel."""


@dataclass(frozen=True, slots=True)
class Absorber:
    """A linear whose input channels are the producer's: `channels[k]` is the channel that column k reads."""

    parameter: str
    #: The axis of the weight that is summed over: 1 for nn.Linear, 0 for a Conv1D.
    axis: int
    channels: tuple[int, ...]
    value: Value


@dataclass
class Reach:
    """Everything one producer's channels reach."""

    absorbers: list[Absorber] = field(default_factory=list)
    #: Channel -> why it cannot be scaled.
    leaks: dict[int, str] = field(default_factory=dict)


def follow(record: Trace, start: Value, channels: Tensor, outputs: list[Value]) -> Reach:
    """Follow the channels of `start` through every call that reads them, in order."""
    reach = Reach()
    carried: dict[Value, Tensor] = {start: channels}
    leaving = set(outputs)
    queue = list(record.readers[start])
    seen: set[int] = set()
    _leak_if_aliased(record, start, channels, reach)
    while queue:
        call = min(queue, key=lambda c: c.index)
        queue = [c for c in queue if c is not call]
        if call.index in seen:
            continue
        seen.add(call.index)
        try:
            made = _step(record, call, carried, reach)
        except LeakError as leak:
            touched = torch.cat([carried[v].flatten() for v in set(call.inputs) if v in carried])
            for channel in _distinct(touched):
                reach.leaks.setdefault(channel, f"{leak} ({call.name} in {call.module or 'the model'})")
            continue
        for value, ids in made:
            carried[value] = ids
            queue += record.readers[value]
            _leak_if_aliased(record, value, ids, reach)
    for value, ids in carried.items():
        if value in leaving:
            for channel in _distinct(ids):
                reach.leaks.setdefault(channel, "it is an output of the model")
    reach.leaks.pop(-1, None)
    return reach


def _distinct(ids: Tensor) -> list[int]:
    return sorted(set(ids.flatten().tolist()))


def _leak_if_aliased(record: Trace, value: Value, ids: Tensor, reach: Reach) -> None:
    """Memory that some call overwrites through another tensor is not followed any further."""
    tensor = record.tensors[value.tensor]
    if tensor.untyped_storage().data_ptr() in _overwritten(record) and tensor.numel():
        writers = _overwritten(record)[tensor.untyped_storage().data_ptr()]
        if any(writer.tensor != value.tensor for writer in writers):
            for channel in _distinct(ids):
                reach.leaks.setdefault(channel, "its memory is overwritten in place")


def _overwritten(record: Trace) -> dict[int, set[Value]]:
    known: dict[int, set[Value]] | None = record.__dict__.get("_overwritten")
    if known is None:
        known = {}
        for call in record.calls:
            if call.in_place:
                for value in call.outputs:
                    pointer = record.tensors[value.tensor].untyped_storage().data_ptr()
                    known.setdefault(pointer, set()).add(value)
        record.__dict__["_overwritten"] = known
    return known


# -- one call ----------------------------------------------------------------------------------------------------


def _step(record: Trace, call: Call, carried: dict[Value, Tensor], reach: Reach) -> list[tuple[Value, Tensor]]:
    """The values a call makes that carry channels on. Absorbs into `reach`, or raises LeakError."""

    def ids(argument: Any) -> Tensor | None:
        if not isinstance(argument, Tensor):
            return None
        return next((carried[v] for v in call.inputs if v.tensor == id(argument) and v in carried), None)

    name, args = call.name, call.args
    if name in ("linear", "addmm"):
        _absorb(record, call, ids, reach)
        return []
    if name in _MOVES:
        return _replay(call, ids)
    if name in _KEEPS:
        if ids(args[0]) is None or any(ids(a) is not None for a in tensors_in((args[1:], call.kwargs))):
            raise LeakError("it is an argument, not the data")
        return [(call.outputs[0], _required(ids(args[0])))]
    if name in _PRODUCTS or (name in _QUOTIENTS and ids(args[0]) is not None):
        left, right = ids(args[0]), ids(args[1]) if len(args) > 1 else None
        if (left is not None and right is not None) or call.kwargs:
            raise LeakError("it is multiplied by itself")
        return [(call.outputs[0], _broadcast(_required(left if left is not None else right), call.output))]
    if name == "scaled_dot_product_attention":
        return [(call.outputs[0], _attention(call, ids, reach))]
    if name in _MATMULS and ids(args[0]) is None:
        return [(call.outputs[0], _mix_rows(_required(ids(args[1])), call.output))]
    raise LeakError(_REASONS.get(name, "it passes through a function that does not commute with a factor"))


_RESIDUAL = "it is added to something else, a residual"
_REASONS = {
    **dict.fromkeys(("add", "__add__", "__radd__", "add_", "__iadd__", "sub"), _RESIDUAL),
    **dict.fromkeys(("silu", "gelu", "sigmoid", "tanh", "softmax", "pow"), "a nonlinearity reads it"),
    **dict.fromkeys(("matmul", "bmm", "mm", "__matmul__", "einsum", "grouped_mm", "_grouped_mm"),
                    "it is multiplied with something that is not a Linear's weight"),
    **dict.fromkeys(("layer_norm", "rms_norm"), "another norm reads it"),
}  # fmt: skip


def _required(ids: Tensor | None) -> Tensor:
    if ids is None:
        raise LeakError("it is read as an argument, not as the data")
    return ids


def _absorb(record: Trace, call: Call, ids: Callable[[Any], Tensor | None], reach: Reach) -> None:
    if call.name == "linear":
        named = {**dict(zip(("input", "weight", "bias"), call.args, strict=False)), **call.kwargs}
        x, weight, bias, axis = named["input"], named["weight"], named.get("bias"), 1
    else:
        (bias, x, weight), axis = call.args[:3], 0
        if call.kwargs:
            raise LeakError("it enters a scaled addmm")
    channels = ids(x)
    if channels is None or ids(weight) is not None or ids(bias) is not None:
        raise LeakError("it is a weight, not the data")
    parameter = record.parameters.get(id(weight))
    if parameter is None:
        raise LeakError("it is multiplied with something that is not a Linear's weight")
    if len(uses(record, parameter)) != 1:
        raise LeakError(f"{parameter} is used {len(uses(record, parameter))} times")
    columns = channels.reshape(-1, channels.shape[-1])
    if not bool((columns == columns[:1]).all()):
        raise LeakError("the columns of a Linear read different channels")
    value = next(v for v in call.inputs if v.tensor == id(x))
    reach.absorbers.append(Absorber(parameter, axis, tuple(columns[0].tolist()), value))


def uses(record: Trace, parameter: str) -> list[Call]:
    """The calls that read a parameter."""
    table: dict[str, list[Call]] | None = record.__dict__.get("_uses")
    if table is None:
        table = {}
        for call in record.calls:
            for name in {n for v in call.inputs if (n := record.parameter(v)) is not None}:
                table.setdefault(name, []).append(call)
        record.__dict__["_uses"] = table
    return table.get(parameter, [])


def _replay(call: Call, ids: Callable[[Any], Tensor | None]) -> list[tuple[Value, Tensor]]:
    """Do to the channel numbers what was done to the tensor."""
    if ids(call.args[0]) is None or any(ids(t) is not None for t in tensors_in((call.args[1:], call.kwargs))):
        raise LeakError("it is an argument, not the data")
    if any(isinstance(a, torch.dtype) for a in (*call.args[1:], *call.kwargs.values())):
        raise LeakError("its bytes are read as another type")
    with torch._C.DisableTorchFunction():
        moved = call.function(_required(ids(call.args[0])).contiguous(), *call.args[1:], **call.kwargs)
    return list(zip(call.outputs, tensors_in(moved), strict=True))


def _broadcast(ids: Tensor, like: Tensor) -> Tensor:
    return ids.expand(like.shape)


def _mix_rows(ids: Tensor, like: Tensor) -> Tensor:
    """A matrix product that sums over rows: fine when all rows of a column are the same channel."""
    if ids.ndim < 2 or not bool((ids == ids[..., :1, :]).all()):
        raise LeakError("a matrix product mixes its channels")
    row = ids[..., :1, :]
    return row.expand(*like.shape[:-2], like.shape[-2], row.shape[-1])


def _attention(call: Call, ids: Callable[[Any], Tensor | None], reach: Reach) -> Tensor:
    """Attention averages the rows of the values; queries and keys go through the softmax."""
    named = {**dict(zip(("query", "key", "value"), call.args, strict=False)), **call.kwargs}
    for part in ("query", "key"):
        # A fused projection makes queries, keys and values: the channels of the values are still followed.
        for channel in [] if (scored := ids(named[part])) is None else _distinct(scored):
            reach.leaks.setdefault(channel, f"a nonlinearity reads it: the softmax of attention in {call.module}")
    values = _required(ids(named["value"]))
    if named.get("enable_gqa"):
        values = values.repeat_interleave(call.output.shape[-3] // values.shape[-3], dim=-3)
    return _mix_rows(values, call.output)
