"""Which linear goes to which kernel, and what a plan says about it; asked before Triton is imported."""

from __future__ import annotations

import torch

from ....core.errors import Unsupported
from ....core.optable import epilogue_formula
from ....core.problem import Problem, activation_problem
from ....core.types import Arithmetic, BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from ...registry import choose
from .. import devices
from ..tune import processors_of
from . import tune

LINEARS = frozenset({QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR})


def declines(p: Problem, device: torch.device) -> str | None:
    """Why the portable kernel does not take a problem."""
    if (reason := devices.declines(p, device)) is not None:
        return reason
    if p.weight_group:
        return "takes no integer group factors"
    if p.op is QuantizeKind.QUANTIZED_LINEAR:
        try:
            choose(activation_problem(p), device, PlanPreference(prefer_backend=BackendKind.TRITON))
        except Unsupported as reasons:
            return f"the activations cannot be quantized: {reasons}"
    return None


def hopper_declines(p: Problem, device: torch.device) -> str | None:
    """Why the sm_90 kernels do not take a problem."""
    if (reason := declines(p, device)) is not None:
        return reason
    m, n, k = p.shape
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "uses instructions of sm_90 alone"
    if p.element is ElementKind.F64:
        return "multiplies scales in f32; f64 goes through the portable kernel"
    if p.quantized is not ElementKind.S8 or p.weight is not ElementKind.S8:
        return f"takes s8 activations and weights, got {p.quantized.value} and {p.weight.value}"
    if k > p.accumulator_limit:
        return f"sums in int32, exact up to K = {p.accumulator_limit}; K = {k} goes through the portable kernel"
    if not (m and n and k) or k % 16 or n * p.element.dtype.itemsize % 16:
        return f"the copy engine needs rows of a multiple of 16 bytes, got K = {k} and N = {n} of {p.element.value}"
    return None


def fuses(p: Problem) -> bool:
    """Whether every program of the sm_90 kernel for few tokens quantizes the activations for itself."""
    return (
        p.op is QuantizeKind.QUANTIZED_LINEAR
        and p.shape[0] <= tune.FUSED_TOKENS
        and p.element.bits == 16
        and p.mode is DynamicRangeMode.SYMMETRIC
        and p.arithmetic is Arithmetic.DIVIDE
        and p.scale_element is ElementKind.F32
    )


def describe_matmul(p: Problem, device: torch.device) -> str:
    return f"{epilogue_formula(p)}; {tune.portable(p.shape[0])}"


def describe_hopper(p: Problem, device: torch.device) -> str:
    m, n, k = p.shape
    if fuses(p):
        schedule = f"{tune.fused(n, k, processors_of(device))}, quantizes on the way"
    elif m <= tune.SKINNY_TOKENS and p.mode is DynamicRangeMode.SYMMETRIC:
        schedule = str(tune.skinny(m, n, k, processors_of(device)))
    else:
        cut = p.mode is DynamicRangeMode.SYMMETRIC
        schedule = str(tune.pingpong(m, n, k, p.element.dtype.itemsize, processors_of(device), cut))
    return f"{epilogue_formula(p)}; {schedule}; matmul where an address is not a multiple of 16"
