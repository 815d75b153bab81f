"""Siblings: linears that read the same tensor, such as q, k and v, computed as one linear with their rows stacked.

Every module stays where it is, under its name, with its own tensors: views into the rows of the stacked ones. The model
calls its linears one by one as before. The first that is called computes all rows; the others, given the very same
tensor in the same state, take theirs. Whatever does not fit (another input, a hook, a tensor that was assigned, a
module that was replaced, gradients) makes a linear compute its own rows, as if it had never been merged.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from threading import local
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..dispatch.eager import transform_level
from .stacking import alike, joined_rows, same_settings, why_not_one
from .tokens import QuantizedTokens

#: How often in a row a result may go unused before siblings only watch whether they are called together again.
PATIENCE = 3
#: The key of a module's list of the siblings among its children.
HELD = "_baracuda_siblings"

#: The tensors that a trace of a linear reads.
Traced = tuple[Tensor | None, ...]

_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


class Sibling(nn.Module):
    """A linear that can be computed together with others. `forward` first asks `_member`, where it has one."""

    #: The tensors with a row for each output, the weight first: they are stacked. All others must be alike.
    rowwise: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_factor", "bias")
    #: Tensors that are stored but that no forward reads: each sibling keeps its own.
    unread: ClassVar[tuple[str, ...]] = ()
    #: Whether a row has the same bits in every batch: exact sums always, float sums where `fix_order` was called.
    fixed_order: bool = True
    in_features: int
    out_features: int
    _member: Member | None = None  # not a submodule

    def fix_order(self) -> None:
        """Give a row the same bits in every batch from now on, although that may take longer."""
        self.fixed_order = True
        if self._member is not None and self._member.whole is not None:
            self._member.whole.fixed_order = True

    def traced_tensors(self) -> Traced:
        """What a trace of the forward reads, besides `traced_settings`."""
        raise NotImplementedError

    def traced_settings(self) -> str:
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if self._member is not None and (name in self._buffers or name in self._parameters):
            self._member.siblings.part_ways()
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._settle()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._settle()

    def _settle(self) -> None:
        """After tensors were moved, cast or loaded: stack them again where they still fit together."""
        if self._member is not None:
            self._member.siblings.settle()

    def __getstate__(self) -> dict[str, Any]:
        """Without siblings, and with tensors of its own: pickled as they are, views would carry all rows each."""
        state = dict(self.__dict__)
        if state.pop("_member", None) is not None:
            state["_buffers"] = {name: t if t is None else t.clone() for name, t in self._buffers.items()}
            state["_parameters"] = {
                name: None if p is None else nn.Parameter(p.detach().clone(), p.requires_grad)
                for name, p in self._parameters.items()
            }
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = dict(self.__dict__)
        member = state.pop("_member", None)
        if member is not None and id(member.siblings.parent()) not in memo:  # copied alone
            state = self.__getstate__()
        copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        return copied


class Member(nn.Module):
    """One linear's place among its siblings.

    A module only because torch.compile checks what it has read from modules, dictionaries and tensors by their version
    alone, and everything around any other object step by step, before each call.
    """

    #: All siblings as one linear; None while they are computed apart.
    whole: Sibling | None

    def __init__(self, siblings: Siblings, part: Sibling, index: int, start: int, count: int) -> None:
        super().__init__()
        self.siblings, self.part, self.count, self.index = siblings, weakref.ref(part), count, index
        self.bit, self.start, self.size = 1 << index, start, part.out_features
        self.become(None)

    def become(self, whole: Sibling | None) -> None:
        """Be one of this linear over all siblings; None computes them apart. It is no submodule: it has no name."""
        self.__dict__["whole"] = whole

    def share(self, part: Sibling, x: Any) -> Tensor | None:
        """This linear's columns of what all siblings compute; None where it must compute them itself."""
        siblings, given = self.siblings, x
        if type(x) is QuantizedTokens:
            x = x.q
        if type(x) is not Tensor or self.part() is not part or transform_level() is not None:
            return None
        if _is_grad_enabled() and (x.requires_grad or siblings.learns()):
            return None
        thread, state = siblings.thread, _state(x)
        entry = thread.entry
        if entry is not None:
            if entry.waiting & self.bit and entry() is x and entry.state == state:
                entry.waiting ^= self.bit
                if not entry.waiting:
                    thread.entry, siblings.unused = None, 0
                return None if entry.parts is None else entry.parts[self.index]
            thread.entry = None
            siblings.unused += 1
        whole = self.whole
        if whole is None or siblings.why_apart() is not None:
            return None
        entry = _Entry(x, _forget)
        entry.state, entry.waiting = state, siblings.everyone ^ self.bit
        entry.parts = None
        if siblings.unused < PATIENCE:
            entry.parts = torch.unsafe_split_with_sizes(whole.forward(given), siblings.sizes, -1)
        thread.entry = entry
        return None if entry.parts is None else entry.parts[self.index]

    def all_of(self, part: Sibling, x: Any) -> Tensor | None:
        """What this linear, the first, and the one other compute together; None where they are computed apart."""
        if self.count != 2 or self.bit != 1 or self.part() is not part or self.whole is None:
            return None
        return None if self.siblings.why_apart() is not None else self.whole.forward(x)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def facts(self) -> str | None:
        """What names the siblings in one trace, this one's place and their settings; None where they are apart.

        Looked up while tracing, not guarded. Were the module an argument, it would be guarded, and no compiled code
        would serve two layers.
        """
        siblings, whole = self.siblings, self.whole
        if whole is None or siblings.why_apart() is not None or (_is_grad_enabled() and siblings.learns()):
            return None
        return f"{id(siblings)} {self.start} {self.size} {self.count} {whole.traced_settings()}"


# torch.compile guards the buffers of other modules for aliasing, tensor by tensor before each call. Of modules that it
# takes for torch's own it checks whole trees by the versions of their dictionaries.
for _module in (Sibling, Member):
    torch._dynamo.mark_static(_module)


class _Entry(weakref.ref[Tensor]):
    """A result that siblings have yet to take, and the input it belongs to: it lives no longer than that."""

    __slots__ = ("parts", "state", "waiting")
    state: tuple[Any, ...]
    waiting: int
    #: The columns of each sibling; None while they only watch whether they are called together.
    parts: Sequence[Tensor] | None


def _forget(entry: weakref.ref[Tensor]) -> None:
    entry.parts = None  # type: ignore[attr-defined]


def _state(x: Tensor) -> tuple[Any, ...]:
    """What must not have changed since a sibling read x. An inference tensor has no version to tell."""
    version = -1 if x.is_inference() else x._version
    if _is_autocast_enabled():
        kind = x.device.type
        return version, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), kind
    return (version, _raw_stream(x.device.index)) if x.is_cuda else (version,)


class _Thread(local):
    """Threads that run one model at a time do not take each other's results."""

    entry: _Entry | None = None


class Siblings:
    """Linears of one module that read the same tensor. Holds none of them, so that a model is freed as ever."""

    def __init__(self, parent: nn.Module, names: Sequence[str], parts: Sequence[Sibling]) -> None:
        self.parent, self.names = weakref.ref(parent), tuple(names)
        self.parts = tuple(weakref.ref(part) for part in parts)
        self.thread, self.unused, self.everyone = _Thread(), 0, (1 << len(parts)) - 1
        #: (module's dictionary, name, tensor, address) of everything that is stacked: where a part has it from.
        self.stacked: list[tuple[dict[str, Any], str, Tensor, int | None]] = []
        #: The tensors that all parts have alike, with their versions.
        self.alike: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self.sizes = [part.out_features for part in parts]
        start = 0
        for index, part in enumerate(parts):
            part.__dict__["_member"] = Member(self, part, index, start, len(parts))
            start += part.out_features
        held = parent.__dict__.setdefault(HELD, [])
        held.append(self)
        self.settle()

    def __reduce__(self) -> tuple[Any, ...]:
        parent, parts = self.parent(), [part() for part in self.parts]
        if parent is None or None in parts:
            return _nobody, ()
        return _again, (parent, self.names, parts)

    def members(self) -> list[Sibling]:
        return [part for ref in self.parts if (part := ref()) is not None]

    def learns(self) -> bool:
        """Whether a bias takes gradients, which then flow to each linear by itself."""
        return any(p is not None and p.requires_grad for part in self.members() for p in part._parameters.values())

    def part_ways(self) -> None:
        """Compute each linear by itself from now on, until tensors are moved or loaded again."""
        for part in self.members():
            if part._member is not None:
                part._member.become(None)

    def settle(self) -> None:
        """Stack the linears' tensors, unless they are stacked as they stand, or do not fit together."""
        parts = self.members()
        if self.why_apart() is None and parts[0]._member is not None and parts[0]._member.whole is not None:
            return
        self.part_ways()
        self.stacked, self.alike, self.unused = [], [], 0
        if len(parts) == len(self.parts) and why_not_one(parts) is None:
            whole = self._stack(parts)
            for part in parts:
                if part._member is not None:
                    part._member.become(whole)

    def _stack(self, parts: list[Sibling]) -> Sibling:
        """One linear over all rows; the parts get views of its tensors for their own."""
        whole = same_settings(parts[0])
        whole.out_features = sum(part.out_features for part in parts)
        with torch.no_grad(), torch.inference_mode(False):
            for name in whole.rowwise:
                is_buffer = name in parts[0]._buffers
                tables: list[dict[str, Any]] = [p._buffers if is_buffer else p._parameters for p in parts]
                rows = [table.get(name) for table in tables]
                if all(row is None for row in rows):
                    (whole._buffers if is_buffer else whole._parameters)[name] = None
                    continue
                joined = joined_rows(rows, [part.out_features for part in parts])
                if is_buffer:
                    whole._buffers[name] = joined
                else:
                    whole._parameters[name] = nn.Parameter(joined, requires_grad=False)
                start = 0
                for part, table, row in zip(parts, tables, rows, strict=True):
                    view = joined.narrow(0, start, part.out_features)
                    start += part.out_features
                    if row is None:
                        self.stacked.append((table, name, row, None))  # type: ignore[arg-type]
                    elif is_buffer:
                        table[name] = view
                        self.stacked.append((table, name, view, None))
                    else:
                        row.data = view  # the same parameter, which an optimizer may hold
                        self.stacked.append((table, name, row, view.data_ptr()))
        for name in alike(parts[0]):
            whole._buffers[name] = parts[0]._buffers[name]
            tensors = [(part._buffers, part._buffers[name]) for part in parts]
            self.alike += [(table, name, t, _version(t)) for table, t in tensors if t is not None]
        return whole

    def why_apart(self) -> str | None:
        """Why the linears are computed one by one just now; None where they are computed as one."""
        parent = self.parent()
        if parent is None or not self.stacked:
            return "their tensors are not stacked"
        modules = parent._modules
        for name, ref in zip(self.names, self.parts, strict=True):
            part = ref()
            if part is None or modules.get(name) is not part:
                return f"{name} was replaced"
            if part._forward_pre_hooks or part._forward_hooks or part._backward_hooks or part._backward_pre_hooks:
                return f"{name} has hooks"
        for table, name, tensor, address in self.stacked:
            if table.get(name) is not tensor or (address is not None and tensor.data_ptr() != address):
                return f"a {name} was assigned"
        for table, name, tensor, version in self.alike:
            if table.get(name) is not tensor or _version(tensor) != version:
                return f"an {name} was changed"
        return None


def _again(parent: nn.Module, names: Sequence[str], parts: list[Sibling]) -> Siblings:
    """For copies, whose parts are made before: `parent` is still being filled, the list of its siblings included."""
    made = Siblings(parent, names, parts)
    parent.__dict__.pop(HELD, None)  # what is being filled gets the list that this belongs to
    return made


def _nobody() -> None:
    """What a copy has in place of siblings that are no more."""


def siblings_of(module: nn.Module) -> list[Siblings]:
    """The siblings among a module's own children."""
    return [siblings for siblings in module.__dict__.get(HELD, ()) if siblings is not None]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
