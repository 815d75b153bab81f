"""The row sums of an integer weight, which linears over asymmetric activations need beside it."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..core.packing import unpack_int4
from ..core.types import ElementKind


class RowSums:
    """Computes the row sums of a weight once for each tensor and version, as torch counts versions.

    Torch does not count changes through `.data` or NumPy: assign the weight again after one. Copies start empty:
    the sums are neither saved nor moved with the module.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def __call__(self, weight: Tensor, kind: ElementKind, size: int) -> Tensor | None:
        """The int32 sums of the rows of `size` elements, or None where they cannot be cached.

        Such are tensors without a version, tensors being traced, and memory that belongs to a CUDA graph.
        """
        if torch.compiler.is_compiling() or type(weight) is not Tensor or weight.is_inference():
            return None
        known = self._known
        if known is not None and known[0]() is weight and known[1] == weight._version:
            return known[2]
        if weight.is_meta or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        with torch.inference_mode(False):  # the cached sums are also used outside of inference mode
            whole = unpack_int4(weight, kind, size) if kind.is_packed else weight
            sums = whole.sum(dim=1, dtype=torch.int32)
        if type(sums) is not Tensor:  # a mode of torch, FakeTensorMode say, has made it: it serves nobody else
            return None
        self._known = weakref.ref(weight), weight._version, sums
        return sums

    def __reduce__(self) -> tuple[type[RowSums], tuple[()]]:
        return RowSums, ()
