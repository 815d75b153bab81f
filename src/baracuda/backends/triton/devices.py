"""Which devices the Triton kernels run on; asked before Triton is imported."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from ...core.host import MISSING
from ...core.problem import Problem

#: The oldest architecture with bf16 conversions and NaN-propagating maxima in hardware.
OLDEST = (8, 0)


def declines(problem: Problem, device: torch.device) -> str | None:
    """Why these kernels do not take a problem on `device`."""
    return cannot_run(device)


def cannot_run(device: torch.device) -> str | None:
    """Why these kernels cannot run on `device`."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not (interpreting and device.type == "cpu"):
        return f"Triton kernels take CUDA tensors; this one is on {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if MISSING and not interpreting:
        return MISSING
    if device.type == "cuda":
        if not torch.cuda.is_available() or torch.version.cuda is None:
            return "torch sees no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            needed, found = (".".join(map(str, version)) for version in (OLDEST, capability))
            return f"needs compute capability {needed} or newer, {device} has {found}"
    return None


def arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
