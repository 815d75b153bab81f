"""What autocast makes of the input of a linear."""

from __future__ import annotations

import torch
from torch import Tensor


def under_autocast(x: Tensor) -> Tensor:
    """What autocast makes of a linear's input."""
    dtype = autocast_dtype(x)
    return x if x.dtype is dtype else x.type(dtype)  # x.to(dtype) in two thirds of the time


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The type autocast computes a matrix product of x in; x's own without autocast."""
    if x.is_meta:  # autocast does not know meta tensors
        return x.dtype
    device = "cuda" if x.is_cuda else x.device.type  # x.is_cuda takes a fifth of the time of x.device
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device)
