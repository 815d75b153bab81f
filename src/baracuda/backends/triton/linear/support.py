"""Which linear goes to which kernel, and what a plan says about it; asked before Triton is imported."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....core.errors import Unsupported
from ....core.optable import epilogue_formula
from ....core.problem import Problem, activation_problem
from ....core.types import (
    Arithmetic,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PlanPreference,
    PrecisionGuarantee,
    QuantizeKind,
)
from ...registry import choose, contract
from .. import devices
from ..tune import processors_of
from . import tune
from .tune_floats import DirectFloats, direct_floats

LINEARS = frozenset({QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR})
WEIGHT_ONLY = frozenset({QuantizeKind.WEIGHT_ONLY_LINEAR})


def declines(p: Problem, device: torch.device) -> str | None:
    """Why the portable kernel does not take a problem."""
    if (reason := devices.declines(p, device)) is not None:
        return reason
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
    if p.quantized is not ElementKind.S8:
        return f"takes s8 activations, got {p.quantized.value}"
    limit = min(p.accumulator_limit, (2**31 - 1) // (max(-p.q_min, p.q_max) * 128))
    if k > limit:
        return f"sums in int32, exact up to K = {limit}; K = {k} goes through the portable kernel"
    stored, rows = (k // 2, "K / 2") if p.weight.is_packed else (k, "K")
    if not (m and n and k) or stored % 16 or n * p.element.dtype.itemsize % 16:
        found = f"{rows} = {stored} and N = {n} of {p.element.value}"
        return f"the copy engine needs rows of a multiple of 16 bytes, got {found}"
    return _packed_declines(p) if p.weight.is_packed else None


def _packed_declines(p: Problem) -> str | None:
    _, n, k = p.shape
    if p.mode is DynamicRangeMode.ASYMMETRIC:
        return "multiplies a packed weight with symmetric activations; these go through the portable kernel"
    if k % 32:
        return f"the copy engine needs rows of a multiple of 16 bytes, got K / 2 = {k / 2:g}"
    if p.weight_group % 32:
        return f"decodes 32 weights at a time: groups of {p.weight_group} go through the portable kernel"
    if n * k // 32 >= 2**31:
        return f"has 32-bit offsets of factors, got N = {n} and K = {k}"
    return None


def weight_only_declines(p: Problem, device: torch.device) -> str | None:
    """Why the portable weight-only kernel does not take a problem."""
    if p.element is ElementKind.F64:
        return "sums in f32, got f64"
    return devices.declines(p, device)


def weight_only_hopper_declines(p: Problem, device: torch.device) -> str | None:
    """Why the sm_90 weight-only kernel does not take a problem."""
    if (reason := weight_only_declines(p, device)) is not None:
        return reason
    m, n, k = p.shape
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "uses instructions of sm_90 alone"
    if p.element.bits != 16:
        return f"multiplies 16-bit floats; {p.element.value} goes through the portable kernel"
    stored, each = (k // 2, 32) if p.weight.is_packed else (k, 16)
    if not (m and n and k) or k % each or n % 8:
        return f"the copy engine needs rows of a multiple of 16 bytes, got {stored} bytes of K and N = {n}"
    if p.weight_group % each:
        return f"decodes {each} weights at a time: groups of {p.weight_group} go through the portable kernel"
    if n * (k // p.weight_group if p.weight_group else 1) >= 2**31:
        return f"has 32-bit offsets of scales, got N = {n} and K = {k}"
    return None


def weight_only_guarantee(p: Problem) -> PrecisionGuarantee:
    """The contract's, and where the weight is rounded to 16 bits that rounding on top: half a unit in the last place of
    each product."""
    made = contract(p)
    rounding = torch.finfo(p.element.dtype).eps / 2 if p.element.bits == 16 else 0.0
    return replace(made, relative_error=made.relative_error + rounding * (1 + made.relative_error))


def weight_only_tile(p: Problem, device: torch.device) -> tune.Packed | tune.Few | DirectFloats:
    (m, n, k), packed = p.shape, p.weight.is_packed
    if packed and (direct := direct_floats(m, n, k, p.weight_group, processors_of(device))) is not None:
        return direct
    few = tune.few_floats(m, n, k, processors_of(device)) if packed else None
    if few is not None and tune.few_takes_groups(few, p.weight_group):
        return few
    return tune.weight_only(m, n, k, packed, processors_of(device))


def few_tile(p: Problem, device: torch.device) -> tune.Few | tune.Direct | None:
    """The tile of a linear with few tokens; None where the problem goes to a kernel for many."""
    if p.mode is DynamicRangeMode.ASYMMETRIC:
        return None
    m, n, k = p.shape
    if p.weight.is_packed and (direct := tune.direct(m, n, k, p.weight_group)) is not None:
        return direct
    tile = tune.few(m, n, k, p.weight.is_packed, p.weight_group, processors_of(device))
    return tile if tile is not None and tune.few_takes_groups(tile, p.weight_group) else None


def quantizing_tile(p: Problem, device: torch.device) -> tune.Direct | None:
    """The tile of a linear whose GEMM quantizes the activations itself; None where a kernel before does it."""
    if p.op is not QuantizeKind.QUANTIZED_LINEAR or p.arithmetic is not Arithmetic.DIVIDE:
        return None
    (m, _, k), tile = p.shape, few_tile(p, device)
    if isinstance(tile, tune.Direct) and tune.direct_quantizes(tile, m, k, p.element.dtype.itemsize):
        return tile
    return None


def describe_matmul(p: Problem, device: torch.device) -> str:
    return f"{epilogue_formula(p)}; {tune.portable(p.shape[0]).schedule}"


def describe_hopper(p: Problem, device: torch.device) -> str:
    m, n, k = p.shape
    few, quantizing = few_tile(p, device), quantizing_tile(p, device)
    if quantizing is not None:
        schedule = f"{quantizing.schedule}; quantizes its tokens, unless they are asked for"
    elif few is not None:
        schedule = few.schedule
    elif p.weight.is_packed:
        schedule = tune.packed(m, n, k, p.element.dtype.itemsize, processors_of(device)).schedule
    else:
        cut = p.mode is DynamicRangeMode.SYMMETRIC
        schedule = tune.pingpong(m, n, k, p.element.dtype.itemsize, processors_of(device), cut).schedule
    return f"{epilogue_formula(p)}; {schedule}; matmul where an address is not a multiple of 16"


def describe_weight_only(p: Problem, device: torch.device) -> str:
    return f"{epilogue_formula(p)}; {tune.WEIGHT_ONLY.schedule}"


def describe_weight_only_hopper(p: Problem, device: torch.device) -> str:
    tile = weight_only_tile(p, device)
    return f"{epilogue_formula(p)}; {tile.schedule}; weight_only where an address is not a multiple of 16"
