"""Triton kernels for NVIDIA GPUs (sm_80 and later); with TRITON_INTERPRET=1 the same kernels run on CPU tensors.

Each family of kernels has a folder: `kernels` run on the device, `launch` binds problems to them, `tune` chooses their
tiles. The arithmetic of all of them is in `numerics`. Nothing here imports Triton before a problem on such a device
asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ...core.problem import GATED, NORMS, Problem
from ...core.types import BackendKind, QuantizeKind
from ..registry import Kernel
from .devices import arch, declines
from .linear import support as linear


def _later(module: str, function: str) -> Callable[[Problem, torch.device], Any]:
    """A function of a module that imports Triton; the module is imported when the function is first called."""

    def call(problem: Problem, device: torch.device) -> Any:
        return getattr(import_module(f".{module}", __name__), function)(problem, device)

    return call


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
        bind=_later("elementwise.launch", "elementwise"),
        arch=arch,
        narrows=True,
    ),
    Kernel(
        name="dynamic",
        backend=BackendKind.TRITON,
        ops=frozenset({QuantizeKind.DYNAMIC_QUANTIZE, QuantizeKind.CHOOSE_QPARAMS, QuantizeKind.DYNAMIC_FAKE_QUANTIZE}),
        declines=declines,
        bind=_later("dynamic.launch", "dynamic"),
        workspace=_later("dynamic.launch", "workspace"),
        arch=arch,
        narrows=True,
        spares=_later("dynamic.launch", "spares"),
    ),
    Kernel(
        name="learned",
        backend=BackendKind.TRITON,
        ops=frozenset({QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD}),
        declines=declines,
        bind=_later("learned.launch", "learned"),
        workspace=_later("learned.launch", "workspace"),
        arch=arch,
        spares=lambda problem, device: ("grad_zero_point",),
    ),
    Kernel(
        name="producer",
        backend=BackendKind.TRITON,
        ops=NORMS | GATED,
        declines=declines,
        bind=_later("producers.launch", "producer"),
        workspace=_later("producers.launch", "workspace"),
        arch=arch,
    ),
    Kernel(
        name="hopper",
        backend=BackendKind.TRITON,
        ops=linear.LINEARS,
        declines=linear.hopper_declines,
        bind=_later("linear.hopper.launch", "hopper"),
        workspace=_later("linear.hopper.launch", "workspace"),
        arch=arch,
        epilogue=linear.describe_hopper,
    ),
    Kernel(
        name="matmul",
        backend=BackendKind.TRITON,
        ops=linear.LINEARS,
        declines=linear.declines,
        bind=_later("linear.launch", "matmul"),
        workspace=_later("linear.launch", "workspace"),
        arch=arch,
        epilogue=linear.describe_matmul,
    ),
    Kernel(
        name="weight_only_hopper",
        backend=BackendKind.TRITON,
        ops=linear.WEIGHT_ONLY,
        declines=linear.weight_only_hopper_declines,
        bind=_later("linear.hopper.launch", "hopper_weight_only"),
        workspace=_later("linear.hopper.launch", "weight_only_workspace"),
        arch=arch,
        epilogue=linear.describe_weight_only_hopper,
        guarantee=linear.weight_only_guarantee,
    ),
    Kernel(
        name="weight_only",
        backend=BackendKind.TRITON,
        ops=linear.WEIGHT_ONLY,
        declines=linear.weight_only_declines,
        bind=_later("linear.weight_only_launch", "portable"),
        arch=arch,
        epilogue=linear.describe_weight_only,
        guarantee=linear.weight_only_guarantee,
    ),
)
