"""The row sums of an integer weight, which linears over asymmetric activations need beside it."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..core.packing import unpack_int4
from ..core.types import ElementKind


class RowSums:
    """Sums a weight once for each of its states: a state is a tensor and its version, so no change goes unseen that
    torch itself sees. One through `.data` or NumPy is behind its back: assign the weight again after it.

    Copies start empty, so nothing of this is saved or moved: what is loaded or moved is another tensor.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def __call__(self, weight: Tensor, kind: ElementKind, size: int) -> Tensor | None:
        """The int32 sums of the rows of `size` elements, or None where a weight's state cannot be told or kept.

        Such are tensors without a version, tensors being traced, and memory that belongs to a CUDA graph.
        """
        if torch.compiler.is_compiling() or type(weight) is not Tensor or weight.is_inference():
            return None
        known = self._known
        if known is not None and known[0]() is weight and known[1] == weight._version:
            return known[2]
        if weight.is_meta or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        with torch.inference_mode(False):  # what is kept must serve outside of it, too
            whole = unpack_int4(weight, kind, size) if kind.is_packed else weight
            sums = whole.sum(dim=1, dtype=torch.int32)
        self._known = weakref.ref(weight), weight._version, sums
        return sums

    def __reduce__(self) -> tuple[type[RowSums], tuple[()]]:
        return RowSums, ()
