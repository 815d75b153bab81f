"""The W8A8 linears on NVIDIA GPUs: quantize the activations where the op asks for it, then one GEMM with its epilogue.

Two kernels share this composition: `hopper` for sm_90 and sizes its copy engine can address, `matmul` for the rest.
Triton is imported when a problem is bound, not before.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.errors import Unsupported
from ....core.optable import epilogue_formula
from ....core.problem import Problem, activation_problem
from ....core.types import Arithmetic, BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from ...registry import Kernel, Launch, Value, choose
from ..elementwise.tune import processors_of
from ..sources import Either, Part, Source
from . import tune

LINEARS = frozenset({QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR})
_ALIGNMENT = 256


# -- who takes what ----------------------------------------------------------------------------------------------


def _declines(p: Problem, device: torch.device) -> str | None:
    from .. import declines as no_triton

    if (reason := no_triton(p, device)) is not None:
        return reason
    if p.weight_group:
        return "takes no integer group factors"
    if p.op is QuantizeKind.QUANTIZED_LINEAR:
        try:
            choose(activation_problem(p), device, PlanPreference(prefer_backend=BackendKind.TRITON))
        except Unsupported as reasons:
            return f"the activations cannot be quantized: {reasons}"
    return None


def _hopper_declines(p: Problem, device: torch.device) -> str | None:
    if (reason := _declines(p, device)) is not None:
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


# -- workspace ---------------------------------------------------------------------------------------------------


class Rooms(dict[str, Part]):
    """The workspace, cut into parts with names."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def cut(self, name: str, dtype: torch.dtype, *sizes: int) -> None:
        self[name] = Part(self.nbytes, dtype, prod(sizes))
        self.nbytes += -(-prod(sizes) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _activation_rooms(p: Problem, device: torch.device) -> Rooms:
    rooms = Rooms()
    if p.op is QuantizeKind.QUANTIZED_LINEAR:
        from ..dynamic.launch import workspace

        m, _, k = p.shape
        rooms.cut("q", p.quantized.dtype, m, k)
        rooms.cut("scale", p.scale_element.dtype, m)
        if p.mode is DynamicRangeMode.ASYMMETRIC:
            rooms.cut("zero_point", torch.int32, m)
        rooms.cut("quantizer", torch.uint8, workspace(activation_problem(p), device))
    return rooms


def _hopper_rooms(p: Problem, device: torch.device) -> Rooms:
    m, n, k = p.shape
    rooms = _activation_rooms(p, device)
    if p.mode is DynamicRangeMode.ASYMMETRIC:
        rooms.cut("sums", torch.int32, n)
    elif m <= tune.SKINNY_TOKENS:
        split = tune.skinny(m, n, k, processors_of(device)).split
        if _fuses(p):
            split = max(split, tune.fused(n, k, processors_of(device)).split)
        if split > 1:
            rooms.cut("parts", torch.int32, split, m, n)
    else:
        processors = processors_of(device)
        tile = tune.tile(m, n, k, p.element.dtype.itemsize, processors, cut=True)
        if tile.tail > 1:
            rest = tile.tiles(m, n) - tile.whole(m, n, processors)
            rooms.cut("parts", torch.int32, rest, tile.tail, tile.m, tile.n)
    return rooms


# -- from operands to a GEMM -------------------------------------------------------------------------------------


class Factors(NamedTuple):
    """Where the arguments of a GEMM with its epilogue come from."""

    x: Source
    scale: Source
    zero_point: Source
    weight: Source
    weight_scale: Source
    bias: Source
    weight_sum: Source
    residual: Source
    output: Source


def _factors(p: Problem, rooms: Rooms) -> Factors:
    """The rows of the two linears in the GEMM's order; what the first one leaves to us is in the workspace."""
    if p.op is QuantizeKind.SMOOTHQUANT_LINEAR:
        return Factors(0, 1, 2, 3, 4, 5, 6, 7, 9)
    q, scale = Either(7, rooms["q"]), Either(8, rooms["scale"])
    return Factors(q, scale, rooms.get("zero_point"), 1, 2, 3, 4, 5, 9)


def _quantized_first(p: Problem, device: torch.device, rooms: Rooms, gemm: Launch) -> Launch:
    """The whole linear: the activations quantized where the op asks for it, then the GEMM."""
    if p.op is QuantizeKind.SMOOTHQUANT_LINEAR:
        return gemm
    from ..dynamic.launch import dynamic
    from ..launch import in_turn

    f = _factors(p, rooms)
    quantize = dynamic(activation_problem(p), device, (0, f.scale, f.zero_point, f.x), rooms["quantizer"].offset)
    return in_turn(quantize, gemm)


def by_zero_point(zero_point: Source, without: Launch, with_it: Launch) -> Launch:
    """The launch for a zero point that is there, or for one that is None or the number 0."""
    if not isinstance(zero_point, int):
        return without if zero_point is None else with_it

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        value = operands[zero_point]
        absent = value is None or (isinstance(value, int) and value == 0)
        (without if absent else with_it)(operands, workspace)

    return launch


def _nothing(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
    """An empty output asks for no launch."""


def _bind_portable(p: Problem, device: torch.device) -> Launch:
    m, n, _ = p.shape
    if m == 0:
        return _nothing
    rooms = _activation_rooms(p, device)
    # Whoever gave scratch reads the activations, even where no weight does.
    return _quantized_first(p, device, rooms, _portable_gemm(p, device, _factors(p, rooms)) if n else _nothing)


def _portable_gemm(p: Problem, device: torch.device, f: Factors) -> Launch:
    from ..launch import Build, Step
    from .kernels import matmul

    m, n, k = p.shape
    config = tune.portable(m)
    shift = 128 if p.quantized is ElementKind.U8 else 0
    constants = {
        "PER_TOKEN": p.op is QuantizeKind.QUANTIZED_LINEAR,
        "CENTRED": bool(shift) or p.mode is DynamicRangeMode.ASYMMETRIC,
        "SHIFT": shift,
        "PACKED": p.weight.is_packed,
        "F64": p.element is ElementKind.F64,
        "Q_MIN": p.quantized.q_min,
        "Q_MAX": p.quantized.q_max,
        "ACTIVATION": p.nonlinearity.value,
        "CHUNK": _chunk(p.accumulator_limit, p, config.k),
        "BM": config.m,
        "BN": config.n,
        "BK": config.k,
    }
    programs = -(-m // config.m) * -(-n // config.n)

    def bound(zero_point: Source, constants: dict[str, Any]) -> Launch:
        build = Build(config.warps, config.stages)
        step = Step(matmul, programs, {"M": m, "N": n, "K": k}, constants, device, build)
        factors = (f.x, f.weight, f.output, f.scale, f.weight_scale, f.bias)
        return step.bound(*factors, zero_point, f.weight_sum, f.residual)

    # A zero point that comes with a symmetric problem (a tensor: its value is not known here) still counts.
    limit = replace(p, mode=DynamicRangeMode.ASYMMETRIC).accumulator_limit
    centred = {**constants, "CENTRED": True, "CHUNK": _chunk(limit, p, config.k)}
    return by_zero_point(f.zero_point, bound(None, constants), bound(f.zero_point, centred))


def _chunk(limit: int, p: Problem, step: int) -> int:
    """How much of the stored weight is summed in int32 at a time: whole steps, as many as stay exact; 0: all of it."""
    if p.shape[2] <= limit:
        return 0
    return (limit // 2 if p.weight.is_packed else limit) // step * step


def _bind_hopper(p: Problem, device: torch.device) -> Launch:
    from .hopper_launch import fused_gemm, hopper_gemm

    rooms = _hopper_rooms(p, device)
    factors = _factors(p, rooms)
    gemm = hopper_gemm(p, device, factors, rooms, _portable_gemm(p, device, factors))
    apart = _quantized_first(p, device, rooms, gemm)
    if not _fuses(p):
        return apart
    fused = fused_gemm(p, device, factors, rooms, apart)

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        (fused if operands[7] is None else apart)(operands, workspace)  # act_q_scratch is a result where it is given

    return launch


def _fuses(p: Problem) -> bool:
    """Whether every program quantizes the activations for itself."""
    return (
        p.op is QuantizeKind.QUANTIZED_LINEAR
        and p.shape[0] <= tune.FUSED_TOKENS
        and p.element.bits == 16
        and p.mode is DynamicRangeMode.SYMMETRIC
        and p.arithmetic is Arithmetic.DIVIDE
        and p.scale_element is ElementKind.F32
    )


# -- what plans see ----------------------------------------------------------------------------------------------


def _describe_portable(p: Problem, device: torch.device) -> str:
    return f"{epilogue_formula(p)}; {tune.portable(p.shape[0])}"


def _describe_hopper(p: Problem, device: torch.device) -> str:
    m, n, k = p.shape
    if _fuses(p):
        schedule = f"{tune.fused(n, k, processors_of(device))}, quantizes on the way"
    elif m <= tune.SKINNY_TOKENS and p.mode is DynamicRangeMode.SYMMETRIC:
        schedule = str(tune.skinny(m, n, k, processors_of(device)))
    else:
        cut = p.mode is DynamicRangeMode.SYMMETRIC
        schedule = str(tune.tile(m, n, k, p.element.dtype.itemsize, processors_of(device), cut))
    return f"{epilogue_formula(p)}; {schedule}; matmul where an address is not a multiple of 16"


def _arch(device: torch.device) -> str:
    from .. import arch

    return arch(device)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="hopper",
        backend=BackendKind.TRITON,
        ops=LINEARS,
        declines=_hopper_declines,
        bind=_bind_hopper,
        workspace=lambda p, device: _hopper_rooms(p, device).nbytes,
        arch=_arch,
        epilogue=_describe_hopper,
    ),
    Kernel(
        name="matmul",
        backend=BackendKind.TRITON,
        ops=LINEARS,
        declines=_declines,
        bind=_bind_portable,
        workspace=lambda p, device: _activation_rooms(p, device).nbytes,
        arch=_arch,
        epilogue=_describe_portable,
    ),
)
