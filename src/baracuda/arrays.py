"""Other people's arrays: whatever speaks DLPack comes in without a copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor, strided
from torch.utils.dlpack import from_dlpack

from .errors import InvalidProblem


def as_tensor(value: Any, name: str) -> Tensor:
    """A torch tensor over the same memory. Read-only or reversed NumPy arrays, which torch cannot hold, are copied."""
    if isinstance(value, Tensor):
        if value.layout is not strided:
            raise InvalidProblem(f"{name}: expected a dense tensor, got layout {value.layout}; call .to_dense()")
        return value
    if not hasattr(value, "__dlpack__"):
        raise InvalidProblem(
            f"{name}: expected a torch tensor or an array with __dlpack__ (NumPy, CuPy, JAX), "
            f"got {type(value).__name__}; wrap it with torch.tensor()"
        )
    if type(value).__module__ == "numpy" and not (value.flags.writeable and min(value.strides, default=0) >= 0):
        value = value.copy()
    try:
        return from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise InvalidProblem(f"{name}: expected an array torch can read, got one it cannot: {error}") from error
