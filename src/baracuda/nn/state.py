"""Tensors that a module is given, as its buffers hold them: one value, or what a checkpoint stores."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..core.arrays import as_tensor
from ..core.errors import InvalidProblem
from ..core.optable import Numbers


def one_value(value: Any, name: str, like: Tensor, numbers: Numbers) -> Tensor:
    """A number that `numbers` allows, or a tensor of one element, in the type and shape of the buffer `like`."""
    if isinstance(value, Real):
        numbers.require(name, value)
        return torch.tensor([value], dtype=like.dtype, device=like.device)
    tensor = as_tensor(value, name)
    if tensor.numel() != 1:
        raise InvalidProblem(f"{name}: expected one value for all activations, got shape {list(tensor.shape)}")
    if not like.is_floating_point():  # a cast alone would wrap
        storage = torch.iinfo(like.dtype)
        tensor = tensor.double().round().clamp(storage.min, storage.max)
    return tensor.detach().reshape(1).to(dtype=like.dtype, device=like.device)


def fit_state(value: Any, buffer: Tensor, *, scale: bool) -> Tensor | None:
    """A stored tensor as the buffer holds it, or None where it does not match.

    Scales may be stored in any float type, and as `[N]`, `[N, 1]` or one for all; everything else only as it is.
    """
    if not isinstance(value, Tensor):
        return None
    if not scale:
        return value if value.dtype == buffer.dtype and value.shape == buffer.shape else None
    if not value.is_floating_point() or value.numel() not in (1, buffer.numel()):
        return None
    fitted = value.to(buffer.dtype)
    return fitted.reshape(buffer.shape) if value.numel() == buffer.numel() else fitted.expand(buffer.shape).clone()
