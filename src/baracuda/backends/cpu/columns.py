"""Columns of a weight, rounded one after the other by one native call: the inner loop of GPTQ."""

from __future__ import annotations

import torch
from torch import Tensor

from . import MISSING

if MISSING is None:
    from ... import _cpu


def serves(*tensors: Tensor) -> bool:
    """Whether the compiled loop takes these: f32 on the CPU, each column contiguous."""
    return MISSING is None and all(
        t.device.type == "cpu" and t.dtype is torch.float32 and t.stride(-1) == 1 for t in tensors
    )


def round_columns(
    values: Tensor,
    factor: Tensor,
    scale: Tensor,
    groups: Tensor,
    low: int,
    high: int,
    integers: Tensor,
    passed: Tensor,
) -> None:
    """Round `[count, rows]` values in order, in one thread; each error is handed on to the values behind it.

    `factor` `[count, count]` says how much of the error of column i, over its own factor, column j takes.
    """
    count, rows = values.shape
    assert values.is_contiguous() and integers.is_contiguous() and passed.is_contiguous() and scale.is_contiguous()
    _cpu.round_columns(
        count,
        rows,
        factor.stride(0),
        low,
        high,
        values.data_ptr(),
        factor.data_ptr(),
        scale.data_ptr(),
        groups.data_ptr(),
        integers.data_ptr(),
        passed.data_ptr(),
    )
