"""Where the elements of a tensor lie: strides, rows and extents."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from torch import Tensor

from .scope import Shape


def contiguous_strides(shape: Shape) -> Shape:
    """The strides torch gives to a contiguous tensor, an empty one included."""
    return tuple(accumulate((max(size, 1) for size in shape[:0:-1]), mul, initial=1))[::-1] if shape else ()


def row_stride(value: Tensor) -> int | None:
    """The distance between the rows of a tensor whose last axis is dense and whose rows are evenly spaced, or None."""
    shape, strides = value.shape, value.stride()
    if not shape or (strides[-1] != 1 and shape[-1] > 1):
        return None
    expected: int | None = None
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return None
        if expected is None:
            row = stride
        expected = stride * size
    return shape[-1] if expected is None else row


def overlaps_itself(value: Tensor) -> bool:
    """Whether two elements may share an address: an axis steps no further than the shorter-stepping axes reach."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def extent(value: Tensor) -> int:
    """The bytes from the first element to behind the last."""
    if value.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()
