"""Triton kernels for NVIDIA GPUs (sm_80 and later); with TRITON_INTERPRET=1 the same kernels run on CPU tensors.

Nothing here imports Triton before a problem on such a device asks for it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from ...core.host import MISSING
from ...core.problem import Problem
from ...core.types import BackendKind, QuantizeKind
from ..registry import Kernel, Launch
from .linear.launch import KERNELS as LINEAR

#: The oldest architecture with bf16 conversions and NaN-propagating maxima in hardware.
OLDEST = (8, 0)


def declines(problem: Problem, device: torch.device) -> str | None:
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


def _bind_elementwise(problem: Problem, device: torch.device) -> Launch:
    from .elementwise.launch import elementwise

    return elementwise(problem, device)


def _bind_dynamic(problem: Problem, device: torch.device) -> Launch:
    from .dynamic.launch import dynamic

    return dynamic(problem, device)


def _dynamic_workspace(problem: Problem, device: torch.device) -> int:
    from .dynamic.launch import workspace

    return workspace(problem, device)


def _dynamic_spares(problem: Problem, device: torch.device) -> tuple[str, ...]:
    from .dynamic.launch import spares

    return spares(problem, device)


def _bind_learned(problem: Problem, device: torch.device) -> Launch:
    from .learned.launch import learned

    return learned(problem, device)


def _learned_workspace(problem: Problem, device: torch.device) -> int:
    from .learned.launch import workspace

    return workspace(problem, device)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="elementwise",
        backend=BackendKind.TRITON,
        ops=frozenset(
            {
                QuantizeKind.QUANTIZE,
                QuantizeKind.DEQUANTIZE,
                QuantizeKind.FAKE_QUANTIZE,
                QuantizeKind.QUANTIZE_BACKWARD,
                QuantizeKind.DEQUANTIZE_BACKWARD,
                QuantizeKind.FAKE_QUANTIZE_BACKWARD,
            }
        ),
        declines=declines,
        bind=_bind_elementwise,
        arch=arch,
        narrows=True,
    ),
    Kernel(
        name="dynamic",
        backend=BackendKind.TRITON,
        ops=frozenset({QuantizeKind.DYNAMIC_QUANTIZE, QuantizeKind.CHOOSE_QPARAMS, QuantizeKind.DYNAMIC_FAKE_QUANTIZE}),
        declines=declines,
        bind=_bind_dynamic,
        workspace=_dynamic_workspace,
        arch=arch,
        narrows=True,
        spares=_dynamic_spares,
    ),
    Kernel(
        name="learned",
        backend=BackendKind.TRITON,
        ops=frozenset({QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD}),
        declines=declines,
        bind=_bind_learned,
        workspace=_learned_workspace,
        arch=arch,
        spares=lambda problem, device: ("grad_zero_point",),
    ),
    *LINEAR,
)
