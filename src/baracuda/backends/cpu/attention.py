"""Attention by one native call with one order of summation: see csrc/attention.hpp."""

from __future__ import annotations

import torch
from torch import Tensor

from . import MISSING

__all__ = ["HAS_MATRIX_UNIT", "MISSING", "attend"]

if MISSING is None:
    from ... import _cpu

#: Whether the CPU multiplies matrices of bf16 in a unit of their own, which torch's attention of a prompt uses.
HAS_MATRIX_UNIT = torch.cpu._is_amx_tile_supported()


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool = False
) -> Tensor:
    """As `backends.attention.attend`, of operands that it does not decline."""
    rows = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (query, key, value)]
    batch, heads, tokens, d = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1])
    _cpu.attend((*rows, mask, out), causal, d**-0.5 if scale is None else scale)
    return out
