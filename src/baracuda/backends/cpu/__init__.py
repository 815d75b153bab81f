"""The CPU backend: compiled kernels for every operation, a matrix library for the sums of a linear."""

from __future__ import annotations

import torch

from ...core.problem import GATED, NORMS, Problem
from ...core.types import BackendKind, QuantizeKind
from ..registry import Kernel, Launch

try:
    from ... import _cpu
except ImportError as error:
    if "BARACUDA_ISA" in str(error):  # a wish that cannot be met; the module itself is there
        raise
    MISSING: str | None = f"the compiled module baracuda._cpu is missing ({error}): pip install ."
else:
    MISSING = None

#: Bytes of workspace that a thread keeps for its next call.
MOST_SCRATCH = 4 << 20


def _declines(problem: Problem, device: torch.device) -> str | None:
    return MISSING or (None if device.type == "cpu" else f"runs on the CPU, not on {device.type}")


def threads_in_use() -> str:
    """Whose threads the kernels share their work among."""
    return "none: not built" if MISSING else _cpu.threads()


def _arch(device: torch.device) -> str:
    return "not built" if MISSING else _cpu.isa()


def _bind(problem: Problem, device: torch.device) -> Launch:
    from . import elementwise  # needs the compiled module

    return elementwise.bind(problem)


def _workspace(problem: Problem, device: torch.device) -> int:
    from . import elementwise

    return elementwise.workspace(problem)


def _bind_linear(problem: Problem, device: torch.device) -> Launch:
    from . import linear

    return linear.bind(problem)


def _linear_workspace(problem: Problem, device: torch.device) -> int:
    from . import linear

    return linear.Layout(problem).size


def _linear_scratch(problem: Problem, device: torch.device) -> bool:
    from . import linear

    layout = linear.Layout(problem)
    return not layout.library and layout.size <= MOST_SCRATCH


def _bind_weight_only(problem: Problem, device: torch.device) -> Launch:
    from . import weight_only

    return weight_only.native_linear(problem).launch


def _weight_only_workspace(problem: Problem, device: torch.device) -> int:
    from . import weight_only

    return weight_only.native_linear(problem).workspace()


def _weight_only_scratch(problem: Problem, device: torch.device) -> bool:
    return _weight_only_workspace(problem, device) <= MOST_SCRATCH


def _bind_producer(problem: Problem, device: torch.device) -> Launch:
    from . import producers

    return producers.bind(problem)


_ELEMENTWISE = frozenset(
    {
        QuantizeKind.QUANTIZE,
        QuantizeKind.DEQUANTIZE,
        QuantizeKind.FAKE_QUANTIZE,
        QuantizeKind.QUANTIZE_BACKWARD,
        QuantizeKind.DEQUANTIZE_BACKWARD,
        QuantizeKind.FAKE_QUANTIZE_BACKWARD,
        QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD,
        QuantizeKind.DYNAMIC_QUANTIZE,
        QuantizeKind.CHOOSE_QPARAMS,
        QuantizeKind.DYNAMIC_FAKE_QUANTIZE,
    }
)
_LINEARS = frozenset({QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR})

KERNELS = (
    Kernel(
        name="vectors",
        backend=BackendKind.CPU,
        ops=_ELEMENTWISE,
        declines=_declines,
        bind=_bind,
        workspace=_workspace,
        arch=_arch,
        strides="rows",
    ),
    Kernel(
        name="linear",
        backend=BackendKind.CPU,
        ops=_LINEARS,
        declines=_declines,
        bind=_bind_linear,
        workspace=_linear_workspace,
        scratch=_linear_scratch,
        arch=_arch,
        strides="rows",
    ),
    Kernel(
        name="weight_only",
        backend=BackendKind.CPU,
        ops=frozenset({QuantizeKind.WEIGHT_ONLY_LINEAR}),
        declines=_declines,
        bind=_bind_weight_only,
        workspace=_weight_only_workspace,
        scratch=_weight_only_scratch,
        arch=_arch,
        strides="rows",
    ),
    Kernel(
        name="producer",
        backend=BackendKind.CPU,
        ops=NORMS | GATED,
        declines=_declines,
        bind=_bind_producer,
        arch=_arch,
        strides="rows",
    ),
)
