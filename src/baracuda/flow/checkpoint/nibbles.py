"""4-bit integers as compressed-tensors packs them, eight in an int32: offset by 8, the first in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import FlowError


def unpack_rows(words: Tensor, rows: int) -> Tensor:
    """uint8 `[rows, columns]` of int32 `[rows / 8, columns]`, as zero points are packed."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    each = (words.unsqueeze(1) >> shifts[:, None]) & 15
    return each.flatten(0, 1)[:rows].to(torch.uint8)


def in_order(words: Tensor, order: Tensor) -> Tensor:
    """The packed columns of a weight, int32 `[N, K / 8]`, in another order."""
    packed = words.view(torch.uint8)
    pairs = torch.stack((packed & 15, packed >> 4), -1).flatten(1).index_select(1, order)
    return (pairs[:, 0::2] | pairs[:, 1::2] << 4).view(torch.int32)


def order_of_groups(g_idx: Tensor, size: int, where: str) -> Tensor | None:
    """The columns sorted by group, which `g_idx` gives for each of them; None where they are sorted as they lie.

    Writers put -1 where they have not reordered anything.
    """
    if bool((g_idx < 0).any()):
        return None
    groups, last = g_idx.numel() // size, int(g_idx.max()) if g_idx.numel() else -1
    counts = torch.bincount(g_idx.long()) if last < groups else None  # the memory it takes grows with the last group
    if counts is None or counts.numel() != groups or not bool((counts == size).all()):
        found = f"a group {last}" if counts is None else (
            f"{counts.numel()} groups of {int(counts.min())} to {int(counts.max())}"
        )  # fmt: skip
        raise FlowError(
            f"{where}: expected {groups} groups of {size} columns each in weight_g_idx, got {found}; make the "
            "checkpoint again without act-order, or load it with transformers"
        )
    order = torch.argsort(g_idx, stable=True)
    return None if bool((order[1:] > order[:-1]).all()) else order
