"""Merge siblings: linears that one pass of the model proves to read the same tensor are computed as one.

The proof is a pass on tensors without data, or on a few tokens where a model wants data. Linears of one module that got
the very same tensor, in the same state, at each of their calls are candidates; a second pass hands the model their
outputs as the slices they will be.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..nn.siblings import Sibling, Siblings, siblings_of
from ..nn.stacking import why_not_one

#: What a model is called with: its keyword arguments, or its arguments.
Inputs = Mapping[str, Any] | Sequence[Any]


@dataclass
class Merge:
    """Which linears were merged, and why others were not, by qualified name."""

    merged: dict[str, str] = field(default_factory=dict)
    """First linear -> what it became one with."""
    apart: dict[str, str] = field(default_factory=dict)
    """Linear -> why it is computed by itself."""


def merge_siblings(model: nn.Module, inputs: Inputs | None = None) -> Merge:
    """Merge the quantized linears of a model that read the same tensor, in place; every module keeps its tensors.

    `inputs` is what one pass is made with: keyword arguments or arguments. transformers' models have inputs of their
    own for that (`dummy_inputs`). Results have the same bits in every column. Merging twice changes nothing.
    """
    found = Merge()
    places: dict[str, Sibling] = {}
    homes: dict[int, list[str]] = defaultdict(list)
    owners = _owners(model)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Sibling):
            homes[id(module)].append(name)
            places[name] = module
    for name, module in places.items():
        if len(homes[id(module)]) > 1:
            found.apart[name] = f"is also {next(other for other in homes[id(module)] if other != name)}"
        elif (why := _why_no_part(name, module, owners)) is not None:
            found.apart[name] = why
    _note_merged(found, model)
    places = {n: module for n, module in places.items() if n not in found.apart and module._member is None}
    given = inputs if inputs is not None else getattr(model, "dummy_inputs", None)
    if given is None:
        why = "there are no inputs to make a pass with: give `inputs`"
        found.apart |= dict.fromkeys(places, why)
        return found
    try:
        with Passes(model, given) as passes:
            groups = _that_may_be_slices(places, passes, _groups(passes, places, found), found)
    except PassError as error:
        found.apart |= dict.fromkeys(places, f"a pass of the model failed: {error}; give other `inputs`")
        return found
    for names in groups:
        parent = model.get_submodule(names[0].rpartition(".")[0])
        Siblings(parent, [name.rpartition(".")[2] for name in names], [places[name] for name in names])
    _note_merged(found, model)
    return found


def _note_merged(found: Merge, model: nn.Module) -> None:
    for around, module in model.named_modules():
        for siblings in siblings_of(module):
            names = [f"{around}.{name}" if around else name for name in siblings.names]
            if (why := siblings.why_apart()) is not None:
                found.apart |= dict.fromkeys(names, why)
                continue
            whole = siblings.members()[0]._member.whole  # type: ignore[union-attr]
            size = "" if whole is None else f": {whole.out_features} x {whole.in_features}"
            found.merged[names[0]] = f"{', '.join(siblings.names)} as one{size}"


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Tensor -> the modules that hold it."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for tensor in (*module._buffers.values(), *module._parameters.values()):
            if tensor is not None:
                owners[id(tensor)].append(name)
    return owners


def _why_no_part(name: str, module: Sibling, owners: dict[int, list[str]]) -> str | None:
    """What keeps a linear from being merged with any other."""
    if not name:
        return "is the model itself"
    if (why := why_not_one([module])) is not None:
        return why
    for tensor in (*module.buffers(), *module.parameters()):
        if others := [other for other in owners[id(tensor)] if other != name]:
            return f"shares a tensor with {others[0] or 'the model'}"
    return None


# -- the proof ---------------------------------------------------------------------------------------------------


def _groups(passes: Passes, places: dict[str, Sibling], found: Merge) -> list[list[str]]:
    """Linears of one parent that read the same values at each of their calls, and that can be one."""
    read: dict[str, list[tuple[int, int]]] = defaultdict(list)
    kept: list[Any] = []  # alive, so that no identity is used twice

    def note(name: str, args: tuple[Any, ...]) -> None:
        kept.append(args)
        known = len(args) == 1 and isinstance(args[0], Tensor)
        read[name].append((id(args[0]), args[0]._version) if known else (id(args), -1))

    def watch() -> list[Any]:
        read.clear()
        return [m.register_forward_pre_hook(lambda _, args, n=n: note(n, args)) for n, m in places.items()]

    passes.run(watch)
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name in places:
        if name not in read:
            found.apart[name] = "the pass did not reach it"
        else:
            alike[name.rpartition(".")[0], *read[name]].append(name)
    groups = []
    for names in alike.values():
        for group in _that_fit(names, places, found):
            if len(group) > 1:
                groups.append(group)
            else:
                found.apart.setdefault(group[0], "no other linear of its module reads the same tensor")
    return groups


def _that_fit(names: list[str], places: dict[str, Sibling], found: Merge) -> Iterator[list[str]]:
    """The linears of one input, in groups of those that can be one."""
    while names:
        first, group = names[0], [names[0]]
        left: list[str] = []
        for name in names[1:]:
            why = why_not_one([places[first], places[name]])
            (group if why is None else left).append(name)
            if why is not None:
                found.apart.setdefault(name, f"{why}, {first}")
        yield group
        names = left
    return


def _that_may_be_slices(
    places: dict[str, Sibling], passes: Passes, groups: list[list[str]], found: Merge
) -> list[list[str]]:
    """The groups whose outputs the model takes as slices of one tensor, which are not contiguous.

    Groups of one kind (the same names in the same class of module) stand or fall together: few passes tell.
    """
    if _why_not_slices(places, passes, groups) is None:
        return groups
    kinds: dict[tuple[Any, ...], list[list[str]]] = defaultdict(list)
    for names in groups:
        parent, _, _ = names[0].rpartition(".")
        kinds[type(passes.model.get_submodule(parent)), *(name.rpartition(".")[2] for name in names)].append(names)
    passed = []
    for kind in kinds.values():
        if (why := _why_not_slices(places, passes, kind)) is None:
            passed += kind
        else:
            found.apart |= dict.fromkeys((name for names in kind for name in names), why)
    return passed


def _why_not_slices(places: dict[str, Sibling], passes: Passes, groups: list[list[str]]) -> str | None:
    def sliced(start: int, total: int) -> Any:
        def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
            return y.new_empty(*y.shape[:-1], total).narrow(-1, start, y.shape[-1]).copy_(y)

        return hook

    def slice_outputs() -> list[Any]:
        handles = []
        for names in groups:
            parts = [places[name] for name in names]
            start, total = 0, sum(part.out_features for part in parts)
            for part in parts:
                handles.append(part.register_forward_hook(sliced(start, total)))
                start += part.out_features
        return handles

    try:
        passes.run(slice_outputs)
    except PassError as error:  # a view that needs contiguous memory, most often
        return f"the model does not take its output as a slice: {error}"
    return None


class PassError(Exception):
    """What a model's code raised."""


class Passes:
    """Passes of the model in inference: on tensors with shapes but no values, so that nothing is computed on any
    device; with values once that has failed, as it does where a model's code asks for one."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self.mode = model, FakeTensorMode(allow_non_fake_inputs=True)
        self.training, self.log = _training(model), logging.getLogger("torch._subclasses.fake_tensor")
        device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        named = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
        self.inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in named}
        self.with_values = False
        #: What the model returned in the last pass.
        self.result: Any = None

    def __enter__(self) -> Self:
        self.model.eval()
        return self

    def __exit__(self, *_: Any) -> None:
        for module, training in self.training:
            module.training = training

    def run(self, prepare: Callable[[], list[Any]]) -> None:
        """One pass under the hooks that `prepare` sets."""
        if not self.with_values:
            level = self.log.level
            self.log.setLevel(logging.CRITICAL)  # it tells of failures that are dealt with here
            try:
                with self.mode:
                    fakes = {
                        k: self.mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in self.inputs.items()
                    }
                    return self._call(fakes, prepare)
            except PassError:  # whatever it is, the pass with values says it again
                self.with_values = True
            finally:
                self.log.setLevel(level)
        return self._call(self.inputs, prepare)

    def _call(self, inputs: dict[Any, Any], prepare: Callable[[], list[Any]]) -> None:
        handles = prepare()
        try:
            with torch.no_grad():
                args = [value for key, value in inputs.items() if isinstance(key, int)]
                self.result = self.model(
                    *args, **{key: value for key, value in inputs.items() if not isinstance(key, int)}
                )
        except Exception as error:  # a model's own code, on inputs that may not suit it
            first, *_ = str(error).strip().splitlines() or [""]
            raise PassError(f"{type(error).__name__}: {first[:160]}") from error
        finally:
            for handle in handles:
                handle.remove()


def _training(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(module, module.training) for module in model.modules()]
