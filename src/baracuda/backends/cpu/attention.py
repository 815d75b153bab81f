"""Attention by one native call with one order of summation: see csrc/attention.hpp."""

from __future__ import annotations

import torch
from torch import Tensor

from . import MISSING

if MISSING is None:
    from ... import _cpu

#: Whether the CPU multiplies matrices of bf16 in a unit of their own, which torch's attention of a prompt uses.
HAS_MATRIX_UNIT = torch.cpu._is_amx_tile_supported()
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def declines(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str | None:
    """Why the kernel does not compute it; None where it does."""
    if MISSING is not None:
        return MISSING
    if query.device.type != "cpu":
        return f"the kernel runs on the CPU, not on {query.device.type}"
    if query.dtype not in _FLOATS or not query.dtype is key.dtype is value.dtype:
        return f"expected f16, bf16 or f32 for all, got {query.dtype}, {key.dtype} and {value.dtype}"
    if not query.ndim == key.ndim == value.ndim == 4:
        return f"expected four axes, got {query.ndim}, {key.ndim} and {value.ndim}"
    (batch, heads, tokens, d), (_, shared, keys, _) = query.shape, key.shape
    if key.shape != (batch, shared, keys, d) or value.shape[:3] != key.shape[:3] or not shared or heads % shared:
        return f"expected keys and values that fit, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
    if mask is not None and (
        mask.dtype is not torch.bool
        or mask.ndim != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] != 1
        or mask.shape[2] not in (1, tokens)
        or mask.shape[3] != keys
    ):
        wanted = [batch, 1, tokens, keys]
        return f"expected a mask of bools {wanted}, got {mask.dtype} {list(mask.shape)}"
    return None


def is_faster(query: Tensor) -> bool:
    """Whether the kernel takes less time than torch's: not for prompts in bf16 where the CPU has a matrix unit."""
    return query.dtype is not torch.bfloat16 or not HAS_MATRIX_UNIT or query.shape[2] == 1


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool = False
) -> Tensor:
    """softmax(query @ key.T * scale) @ value as `[batch, tokens, heads, d]`, of `[batch, heads, tokens, d]` each.

    Several heads of queries may share one of keys. `mask` says which keys a token attends to; without one it attends
    to all, or with `causal` token t to the keys 0 to t. A token that attends to none gets zeros.
    """
    rows = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (query, key, value)]
    batch, heads, tokens, d = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1])
    _cpu.attend((*rows, mask, out), causal, d**-0.5 if scale is None else scale)
    return out
