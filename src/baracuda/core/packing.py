"""Packed 4-bit storage: two elements a byte along the last axis, the even index in the low nibble."""

from __future__ import annotations

import torch
from torch import Tensor

from .arrays import as_tensor
from .errors import InvalidProblem
from .types import ElementKind

__all__ = [
    "pack_int4",
    "unpack_int4",
]


def pack_int4(q: Tensor, element: ElementKind | torch.dtype | str = "s4") -> Tensor:
    """Pack integers of s4's or u4's range into uint8; an odd last axis is padded with 0.

    Values on the CPU are checked. Elsewhere that would wait for the device: there the low four bits are taken.
    """
    kind, q = _packed_kind(element), as_tensor(q, "pack_int4: q")
    if q.dtype.is_floating_point or q.dtype.is_complex or q.dtype is torch.bool:
        raise InvalidProblem(f"pack_int4: expected an integer tensor, got {q.dtype}; quantize it first")
    if q.device.type == "cpu" and q.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in q.aminmax())
        if low < kind.q_min or high > kind.q_max:
            raise InvalidProblem(
                f"pack_int4: expected values of {kind.value}, in [{kind.q_min}, {kind.q_max}], got [{low}, {high}]; "
                "clamp them first"
            )
    if q.ndim == 0:
        return (q & 15).to(torch.uint8)
    if q.shape[-1] % 2:
        q = torch.nn.functional.pad(q, (0, 1))
    nibbles = (q & 15).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: Tensor, element: ElementKind | torch.dtype | str = "s4", size: int | None = None) -> Tensor:
    """Undo `pack_int4`: int8 for s4, uint8 for u4. `size` is the unpacked last axis, when it is odd."""
    kind, packed = _packed_kind(element), as_tensor(packed, "unpack_int4: packed")
    if packed.dtype is not torch.uint8:
        raise InvalidProblem(f"unpack_int4: expected a uint8 tensor of packed pairs, got {packed.dtype}")
    if packed.ndim == 0:
        nibbles = packed & 15
    else:
        full = 2 * packed.shape[-1]
        if size is not None and (size not in (full, full - 1) or isinstance(size, float)):
            raise InvalidProblem(
                f"unpack_int4: expected size {full} or {full - 1} for {packed.shape[-1]} bytes in a row, got {size}"
            )
        nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :size]
    if kind is ElementKind.U4:
        return nibbles
    return (nibbles ^ 8).to(torch.int8) - 8


def _packed_kind(element: ElementKind | torch.dtype | str) -> ElementKind:
    kind = ElementKind.of(element, "element")
    if not kind.is_packed:
        raise InvalidProblem(f"expected a packed element, 's4' or 'u4', got {kind.value!r}")
    return kind
