"""x.T @ x of tokens in bf16, by one native call: what the second moments of GPTQ are summed from."""

from __future__ import annotations

import torch
from torch import Tensor

from . import MISSING

if MISSING is None:
    from ... import _cpu

#: Columns that the compiled loop takes at a time.
_PANEL = 48


def serves(x: Tensor) -> bool:
    """Whether the compiled loop takes it: bf16 on a CPU that multiplies it."""
    return MISSING is None and x.device.type == "cpu" and x.dtype is torch.bfloat16 and bool(_cpu.has_gram())


def product(x: Tensor) -> Tensor:
    """The product of `[T, K]`, summed in f32 in the order of the tokens by one thread; zeros far above the diagonal."""
    x, (tokens, columns) = x.contiguous(), x.shape
    packed = torch.empty(-(-columns // _PANEL) * _PANEL * (tokens + 1), dtype=torch.bfloat16)
    made = torch.zeros(columns, columns)
    _cpu.gram(tokens, columns, x.data_ptr(), packed.data_ptr(), packed.numel(), made.data_ptr())
    return made
