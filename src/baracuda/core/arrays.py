"""The arguments of callers: arrays of other libraries, taken without a copy, and scales as numbers or tensors."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .errors import InvalidProblem
from .scope import Shape
from .types import MAX_ZERO_POINT

#: A tensor, or anything that speaks DLPack: NumPy, CuPy and JAX arrays.
Array = Any


def as_tensor(value: Any, name: str) -> Tensor:
    """A torch tensor over the same memory. Read-only or reversed NumPy arrays, which torch cannot hold, are copied."""
    if isinstance(value, Tensor):
        if value.is_nested:
            raise InvalidProblem(f"{name}: expected a dense tensor, got a nested one; call .to_padded_tensor(0.0)")
        if value.layout is not torch.strided:
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


def segment_values(
    shape: Shape, scale: Array | float, zero_point: Array | int | None, *, learned: bool = False, keep: bool = False
) -> tuple[Any, Any]:
    """Scale and zero point as kernels take them. A learned zero point is a float, kept where its gradient is."""
    zero_point = segment_value(shape, zero_point, "zero_point")
    if isinstance(zero_point, Tensor) and zero_point.dtype is not torch.int32:
        if zero_point.dtype.is_floating_point and learned:
            if not keep:
                zero_point = zero_point.round().clamp(-MAX_ZERO_POINT, MAX_ZERO_POINT).to(torch.int32)
        elif zero_point.dtype.is_floating_point or zero_point.dtype in (torch.bool, torch.uint64):
            raise InvalidProblem(
                f"zero_point: expected an integer tensor, up to int64, got {zero_point.dtype}; convert it with "
                ".to(torch.int32)"
            )
        else:
            zero_point = zero_point.long().clamp(-MAX_ZERO_POINT, MAX_ZERO_POINT).to(torch.int32)
    return segment_value(shape, scale, "scale"), zero_point


def segment_value(shape: Shape, value: Array | float | None, name: str) -> Any:
    """A number, or a tensor of the scales' shape: axes of length 1 may be kept or left out."""
    if value is None or type(value) is float or type(value) is int:
        return value
    if isinstance(value, Real):
        return value
    tensor = as_tensor(value, name)
    if tensor.shape != shape and [n for n in tensor.shape if n != 1] == [n for n in shape if n != 1]:
        return tensor.reshape(shape)
    return tensor
