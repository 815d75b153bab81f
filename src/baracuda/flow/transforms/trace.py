"""A trace of one small forward pass: every torch call, with the tensors it read and made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor at one moment: in-place calls make a new version of it."""

    tensor: int
    version: int


@dataclass
class Call:
    """One torch function call. `inputs` are the values of the tensor arguments, in order of appearance."""

    index: int
    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    output: Any = None
    in_place: bool = False


class Trace(TorchFunctionMode):
    """Records calls while active. Every tensor is kept alive, so that no identity or storage is used twice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.readers: dict[Value, list[Call]] = defaultdict(list)
        self.tensors: dict[int, Tensor] = {}
        self.parameters = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
        self._versions: dict[int, int] = defaultdict(int)
        self._stack: list[str] = [""]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [self.value(t) for t in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        made = list(tensors_in(result))
        if not made and (not inputs or _reads_metadata_only(short_name(func))):
            return result
        call = Call(len(self.calls), short_name(func), func, args, kwargs, self._stack[-1], inputs)
        written = self._written(call, made)
        call.in_place = written is not None
        if written is None and len(made) == 1 and args and made[0] is args[0]:
            return result  # a cast to the type it has, contiguous() of a contiguous tensor: nothing happened
        if written is not None:
            self._versions[id(written)] += 1
        call.outputs = [self.value(t) for t in (made or ([written] if written is not None else []))]
        call.output = result
        self.calls.append(call)
        for value in set(inputs):
            self.readers[value].append(call)
        return result

    def value(self, tensor: Tensor) -> Value:
        self.tensors[id(tensor)] = tensor
        return Value(id(tensor), self._versions[id(tensor)])

    def _written(self, call: Call, made: list[Tensor]) -> Tensor | None:
        if "out" in call.kwargs and isinstance(call.kwargs["out"], Tensor):
            return call.kwargs["out"]
        first = call.args[0] if call.args else None
        if not isinstance(first, Tensor):
            return None
        if call.name == "__setitem__" or any(t is first for t in made):
            in_place = (call.name.endswith("_") and not call.name.endswith("__")) or call.name in _IN_PLACE_DUNDERS
            return first if in_place or call.name == "__setitem__" else None
        return None

    def parameter(self, value: Value) -> str | None:
        return self.parameters.get(value.tensor)

    def enter(self, name: str) -> None:
        self._stack.append(name)

    def leave(self) -> None:
        self._stack.pop()


def _reads_metadata_only(name: str) -> bool:
    """Whether a call reads only shapes or types. Any other call that returns no tensor has read or written data."""
    return name.endswith("__get__") or name in _METADATA


_IN_PLACE_DUNDERS = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"}
# fmt: off
_METADATA = {
    "size", "dim", "ndimension", "numel", "stride", "storage_offset", "is_contiguous", "is_complex",
    "is_floating_point", "get_device", "type", "element_size", "data_ptr", "is_same_size", "__len__",
}
# fmt: on


def short_name(function: Any) -> str:
    """`linear`, `mul`, `view`, ...; properties as `T.__get__`."""
    name = resolve_name(function) or getattr(function, "__name__", str(function))
    parts = str(name).split(".")
    return ".".join(parts[-2:]) if parts[-1] == "__get__" else parts[-1]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
    elif hasattr(tree, "__dataclass_fields__"):
        yield from tensors_in(vars(tree))


def trace(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Trace, list[Value]]:
    """One forward pass, recorded; also the values that leave the model."""
    record = Trace(model)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, name=name: record.enter(name)))
        handles.append(module.register_forward_hook(lambda m, a, o: record.leave(), always_call=True))
    try:
        with torch.no_grad(), record:
            result = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return record, [record.value(t) for t in tensors_in(result)]
