"""The blocks of a transformer: modules that run one after the other, each on the output of the one before it.

A model whose layers are such a chain can be quantized block by block, in one pass over the calibration data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class Stop(Exception):
    """Ends a forward pass whose remaining layers are of no interest."""


@dataclass
class Call:
    """What a block is called with besides the hidden states, which are its first argument."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Chain:
    """The blocks of a model, by name, and how to call them."""

    model: nn.Module
    names: list[str]
    #: Whether a block returns a tuple that begins with the hidden states, instead of these alone.
    returns_tuple: bool
    #: What the blocks compute in.
    dtype: torch.dtype = torch.float32
    #: For each shape of a batch, the calls of all blocks: masks and positions depend on the shape alone.
    calls: dict[tuple[int, ...], list[Call]] = field(default_factory=dict)

    def block(self, index: int) -> nn.Module:
        return self.model.get_submodule(self.names[index])

    def prepare(self, index: int) -> nn.Module:
        """A block, ready to run."""
        return self.block(index).to(self.dtype)

    def begin(self, tokens: Tensor, arguments: dict[str, Any]) -> Tensor:
        """The hidden states that the first block gets for these tokens."""
        shape = tuple(tokens.shape)
        seen: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []
        with self._recording(seen), torch.no_grad(), suppress(Stop):
            self.model(input_ids=tokens, **arguments)
        if shape not in self.calls:
            self.calls[shape] = [Call(_cast(args, self.dtype), _cast(kwargs, self.dtype)) for _, args, kwargs in seen]
        return seen[0][0].to(self.dtype)

    def run(self, index: int, hidden: Tensor) -> Tensor:
        """The output of a block."""
        call = self.calls[tuple(hidden.shape[:2])][index]
        with torch.no_grad():
            result = self.block(index)(hidden, *call.args, **call.kwargs)
        first: Tensor = result[0] if self.returns_tuple else result
        return first

    @contextmanager
    def _recording(self, seen: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]) -> Iterator[None]:
        """Blocks return their input; what they are called with does not depend on what they would compute."""
        blocks = [self.block(i) for i in range(len(self.names))]

        def stand_in(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((hidden, args, kwargs))
            if len(seen) == len(blocks):
                raise Stop
            return (hidden,) if self.returns_tuple else hidden

        try:
            for block in blocks:
                block.forward = stand_in  # an attribute of the instance, which hides the method of the class
            yield
        finally:
            for block in blocks:
                del block.forward


def find_chain(model: nn.Module, wanted: Collection[str], tokens: Tensor, arguments: dict[str, Any]) -> Chain | str:
    """The chain of blocks that holds the `wanted` linears, or why there is none; `tokens` are run to see it work."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    held = {name: sum(linear.startswith(f"{name}.") for linear in wanted) for name, _ in lists}
    if not lists or max(held.values()) == 0:
        return "it has no list of blocks with layers to quantize"
    best = max(lists, key=lambda item: (held[item[0]], -len(item[0])))
    names = [f"{best[0]}.{i}" for i in range(len(best[1]))]
    seen: list[tuple[str, Any, Any]] = []
    values: list[Any] = []

    def watch(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((name, args, output))
            first = output[0] if isinstance(output, tuple) and output else output
            values.append(first.clone() if isinstance(first, Tensor) else None)  # what comes next may change it

        return note

    handles = [model.get_submodule(n).register_forward_hook(watch(n), with_kwargs=True) for n in names]
    try:
        with torch.no_grad():
            model(input_ids=tokens, **arguments)
    finally:
        for handle in handles:
            handle.remove()
    if [name for name, _, _ in seen] != names:
        return f"the blocks of {best[0]} do not run once each and in order"
    tuples = {isinstance(output, tuple) for _, _, output in seen}
    outputs = [output[0] if isinstance(output, tuple) and output else output for _, _, output in seen]
    if len(tuples) != 1 or not all(isinstance(o, Tensor) for o in outputs) or not all(args for _, args, _ in seen):
        return f"the blocks of {best[0]} do not turn hidden states into hidden states"
    if any(args[0] is not output for (_, args, _), output in zip(seen[1:], outputs, strict=False)):
        return f"the blocks of {best[0]} do not each read the output of the one before"
    returns_tuple = tuples.pop()
    if not _gives_alone(Chain(model, names, returns_tuple, outputs[0].dtype), tokens, arguments, values):
        return f"the blocks of {best[0]} hand on more than hidden states, or keep some of what they see"
    return Chain(model, names, returns_tuple)


def _gives_alone(chain: Chain, tokens: Tensor, arguments: dict[str, Any], outputs: list[Tensor]) -> bool:
    """Whether the blocks, run one by one, give what they give in a pass of the model."""
    try:
        hidden = chain.begin(tokens, arguments)
        for index, output in enumerate(outputs):
            hidden = chain.run(index, hidden)
            if not torch.allclose(hidden, output, rtol=1e-3, atol=1e-3 * float(output.abs().max()), equal_nan=True):
                return False
    except torch.OutOfMemoryError:
        raise  # a lack of memory says nothing about the blocks
    except Exception:  # a model's own code, which got less than it expects
        return False
    return True


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Masks and positions for a block that computes in this type."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    return value
