"""Folds that a trace proves: which norm or linear can divide the input of which linears, and why others cannot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .provenance import Absorber, Reach, follow, uses
from .trace import Call, Trace, Value


@dataclass
class Producer:
    """A parameter whose channels can be divided: a norm's gain `offset + weight` (and bias), or a linear's rows."""

    parameter: str
    bias: str | None
    channels: int
    value: Value
    kind: str
    #: Gemma stores gain - 1: the divided weight is (offset + weight) / s - offset.
    offset: float = 0.0
    #: The axis of a linear's weight that makes its outputs: 0 for nn.Linear, 1 for a Conv1D.
    axis: int = 0


@dataclass
class Fold:
    """A provable fold: dividing the producer's channels and multiplying the absorbers' columns changes nothing."""

    producer: Producer
    absorbers: list[Absorber]
    #: Channels that must stay as they are, because something else reads them.
    fixed: frozenset[int] = frozenset()

    @property
    def changed(self) -> list[str]:
        """The parameters that the fold divides or multiplies."""
        divided = [name for name in (self.producer.parameter, self.producer.bias) if name is not None]
        return [*divided, *(absorber.parameter for absorber in self.absorbers)]


@dataclass
class Folds:
    folds: list[Fold] = field(default_factory=list)
    #: Linear weight -> why nothing is folded into it.
    reasons: dict[str, str] = field(default_factory=dict)
    #: Value -> the linear weights that read it: they share one input, and one input scale.
    inputs: dict[Value, list[str]] = field(default_factory=lambda: defaultdict(list))

    def keep_stored(self, stored: Collection[str], wanted: set[str]) -> None:
        """Drop the folds that change a parameter which the checkpoint does not store by itself, and say so."""
        for fold in list(self.folds):
            if missing := [name for name in fold.changed if name not in stored]:
                why = f"its fold changes {missing[0]}, which the checkpoint does not store as a tensor of its own"
                self.leave_out(fold, why, wanted)

    def leave_out(self, fold: Fold, why: str, wanted: set[str]) -> None:
        """Do without a fold, and say why."""
        self.folds.remove(fold)
        self.reasons |= {a.parameter: why for a in fold.absorbers if a.parameter in wanted}


def find_folds(record: Trace, outputs: list[Value], wanted: set[str]) -> Folds:
    """Folds that smooth at least one of the `wanted` linear weights; each weight is smoothed by one producer."""
    _name_linears(record)
    found = Folds()
    for call in record.calls:
        weight = _linear_weight(record, call)
        if weight in wanted:
            x = call.args[0] if call.name == "linear" else call.args[1]
            found.inputs[next(v for v in call.inputs if v.tensor == id(x))].append(weight)
    taken: set[str] = set()
    for producer in _producers(record):
        made = record.tensors[producer.value.tensor]
        channels = torch.arange(producer.channels, device=made.device).expand(made.shape)
        reach = follow(record, producer.value, channels, outputs)
        reached = [a for a in reach.absorbers if a.parameter in wanted]
        if not reached:
            continue
        fixed = _fixed(reach, producer, taken)
        for absorber in reached:
            if set(absorber.channels) <= fixed:
                why = next((reach.leaks[c] for c in absorber.channels if c in reach.leaks), "its channels are taken")
                found.reasons.setdefault(absorber.parameter, f"fed by {producer.parameter}, but {why}")
        if any(not set(absorber.channels) <= fixed for absorber in reached):
            found.folds.append(Fold(producer, reach.absorbers, frozenset(fixed)))
            taken |= {absorber.parameter for absorber in reach.absorbers}
    for parameter in sorted(wanted - taken):
        missing = "the traced pass did not reach it" if not uses(record, parameter) else (
            "no norm or linear feeds it without a nonlinearity in between"
        )  # fmt: skip
        found.reasons.setdefault(parameter, missing)
    for parameter in taken:
        found.reasons.pop(parameter, None)
    return found


def _fixed(reach: Reach, producer: Producer, taken: set[str]) -> set[int]:
    fixed = set(reach.leaks)
    for absorber in reach.absorbers:
        if absorber.parameter in taken:
            fixed |= set(absorber.channels)
    return fixed & set(range(producer.channels))


def _producers(record: Trace) -> list[Producer]:
    """Norms first, in order: a linear's output is smoothed by the norm it reads from, its rows by what reads it."""
    norms, linears = [], []
    for call in record.calls:
        producer = _norm(record, call) or _gain(record, call)
        if producer is not None:
            norms.append(producer)
        elif (linear := _linear(record, call)) is not None:
            linears.append(linear)
    once = [p for p in (*norms, *linears) if len(uses(record, p.parameter)) == 1]
    return [p for p in once if p.bias is None or len(uses(record, p.bias)) == 1]


def _norm(record: Trace, call: Call) -> Producer | None:
    """F.layer_norm and F.rms_norm with a weight over the last axis."""
    if call.name not in ("layer_norm", "rms_norm"):
        return None
    named = {**dict(zip(("input", "normalized_shape", "weight", "bias"), call.args, strict=False)), **call.kwargs}
    weight, bias = named.get("weight"), named.get("bias") if call.name == "layer_norm" else None
    parameter = record.parameters.get(id(weight))
    bias_name = record.parameters.get(id(bias)) if bias is not None else None
    if (
        parameter is None
        or not isinstance(weight, Tensor)
        or weight.ndim != 1
        or (bias is not None and bias_name is None)
    ):
        return None
    return Producer(parameter, bias_name, weight.numel(), call.outputs[0], "norm")


def _gain(record: Trace, call: Call) -> Producer | None:
    """x * g, where g is a one-dimensional parameter, cast perhaps, with a constant added perhaps."""
    if call.name not in ("mul", "__mul__", "__rmul__") or len(call.args) != 2 or call.kwargs:
        return None
    for gain, x in (call.args, call.args[::-1]):
        if not isinstance(gain, Tensor) or not isinstance(x, Tensor) or gain.ndim != 1:
            continue
        origin = _origin(record, next(v for v in call.inputs if v.tensor == id(gain)))
        if origin is None or x.ndim < 2 or x.shape[-1] != gain.numel():
            continue
        return Producer(origin[0], None, gain.numel(), call.outputs[0], "norm", offset=origin[1])
    return None


def _origin(record: Trace, value: Value) -> tuple[str, float] | None:
    """The parameter behind a gain, and the constant added to it; None when anything else was done on the way."""
    offset = 0.0
    while (parameter := record.parameter(value)) is None:
        if len(record.readers[value]) != 1:
            return None
        makers = [call for call in record.calls if value in call.outputs]
        if len(makers) != 1 or makers[0].in_place:
            return None
        call = makers[0]
        tensors = [a for a in call.args if isinstance(a, Tensor)]
        if len(tensors) != 1 or call.kwargs:
            return None
        if call.name in ("add", "__add__", "__radd__") and len(call.args) == 2:
            offset += float(next(a for a in call.args if not isinstance(a, Tensor)))
        elif call.name not in ("to", "float", "type_as", "half", "bfloat16"):
            return None
        value = call.inputs[0]
    return parameter, offset


def _name_linears(record: Trace) -> None:
    """Record x @ weight.T, which is how Falcon writes it, as the linear it is."""
    turns = {c.outputs[0]: c for c in record.calls if c.name in ("T.__get__", "t") and c.output.ndim == 2}
    for call in record.calls:
        product = call.name in ("matmul", "__matmul__") and len(call.args) == 2
        turn = turns.get(call.inputs[-1]) if product else None
        if turn is None or record.parameter(turn.inputs[0]) is None or len(record.readers[turn.outputs[0]]) != 1:
            continue
        weight = turn.inputs[0]
        call.name, call.args, call.inputs = "linear", (call.args[0], turn.args[0]), [call.inputs[0], weight]
        record.readers[weight] = [call if reader is turn else reader for reader in record.readers[weight]]
        record.calls = [other for other in record.calls if other is not turn]


def _linear_weight(record: Trace, call: Call) -> str:
    if call.name == "linear":
        weight = call.args[1] if len(call.args) > 1 else call.kwargs.get("weight")
        return record.parameters.get(id(weight), "")
    if call.name == "addmm" and len(call.args) == 3:
        return record.parameters.get(id(call.args[2]), "")
    return ""


def _linear(record: Trace, call: Call) -> Producer | None:
    parameter = _linear_weight(record, call)
    if not parameter:
        return None
    if call.name == "linear":
        bias, axis = (call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")), 0
    else:
        bias, axis = call.args[0], 1
    bias_name = record.parameters.get(id(bias)) if isinstance(bias, Tensor) else None
    if isinstance(bias, Tensor) and bias_name is None:
        return None
    width = call.output.shape[-1]
    return Producer(parameter, bias_name, width, call.outputs[0], "linear", axis=axis)
