"""Whether linears can be stacked into one, and what is stacked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .siblings import Sibling

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def alike(part: Sibling) -> list[str]:
    """The buffers that siblings must have in common, such as the scale of a static input."""
    return [name for name in part._buffers if name not in (*part.rowwise, *part.unread)]


def why_not_one(parts: Sequence[Sibling]) -> str | None:
    """Why these linears cannot be one with their rows stacked; None where they can."""
    first = parts[0]
    for part in parts:
        if any(getattr(part, hooks) for hooks in _HOOKS) or "forward" in vars(part):
            return "has hooks, or a forward of its own"
        if part._modules:
            return "has modules of its own, such as a parametrization"
        if part._buffers.get(part.rowwise[0]) is None:
            return "has no plain tensor for its weight"
        if any(type(t) not in (Tensor, nn.Parameter) for t in _tensors(part).values()):
            return "has tensors of a subclass"
    for part in parts[1:]:
        if type(part) is not type(first) or _settings(part) != _settings(first):
            return f"is {_described(part)}, {_described(first)} beside it"
        for name in first.rowwise:
            a, b = _tensors(first).get(name), _tensors(part).get(name)
            if a is not None and b is not None and (a.device, a.dtype, a.shape[1:]) != (b.device, b.dtype, b.shape[1:]):
                return f"{name} is {b.dtype} on {b.device}, {a.dtype} on {a.device} beside it"
        for name in alike(first):
            c, d = first._buffers[name], part._buffers.get(name)
            if c is not None and (d is None or c.is_meta or c.device != d.device or not torch.equal(c, d)):
                return f"{name} differs"
    return None


def _tensors(part: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in (*part._buffers.items(), *part._parameters.items()) if t is not None}


def _settings(part: Sibling) -> dict[str, Any]:
    """What a linear was made with, but for its number of outputs."""
    ours = {name: value for name, value in vars(part).items() if not name.startswith("_")}
    return {**ours, "out_features": None, "training": None}


def _described(part: Sibling) -> str:
    return f"{type(part).__name__}({part.extra_repr()})"


def same_settings(part: Sibling) -> Sibling:
    """A linear like this one without tensors."""
    made = type(part).__new__(type(part))
    nn.Module.__init__(made)
    for name, value in vars(part).items():
        if name not in vars(made) and name not in ("_member", "forward"):
            made.__dict__[name] = copy.copy(value)
    made.training = part.training
    return made


def joined_rows(rows: list[Any], sizes: list[int]) -> Tensor:
    """The rows below each other: the memory they are in already where they are neighbours, or else a copy.

    For a bias that is not there stands -0.0, the one number that changes nothing it is added to.
    """
    like = next(row for row in rows if row is not None).detach()
    filled = [
        like.new_full((size, *like.shape[1:]), -0.0) if row is None else row.detach()
        for row, size in zip(rows, sizes, strict=True)
    ]
    storage, offset = like.untyped_storage(), like.storage_offset()
    for tensor in filled:
        if not tensor.is_contiguous() or tensor.is_meta or tensor.storage_offset() != offset:
            return torch.cat(filled)
        if tensor.untyped_storage().data_ptr() != storage.data_ptr():
            return torch.cat(filled)
        offset += tensor.numel()
    shape = (sum(sizes), *like.shape[1:])
    joined: Tensor = like.new_empty(0).set_(storage, like.storage_offset(), shape)
    return joined
