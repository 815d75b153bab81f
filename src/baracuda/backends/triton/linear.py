"""The W8A8 linears on NVIDIA GPUs: quantize the activations where the op asks for it, then one GEMM with its epilogue.

Two kernels share this composition: `hopper` for sm_90 and sizes its copy engine can address, `matmul` for the rest.
Triton is imported when a problem is bound, not before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor

from ...errors import Unsupported
from ...problem import Problem, activation_problem
from ...types import (
    Arithmetic,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PlanPreference,
    QuantizeKind,
)
from ..registry import Kernel, Launch, Value, choose
from . import linear_tune as tune

#: out = epilogue(x, scale_a, zero_point, weight, scale_w, bias, weight_sum), with room for its own intermediate sums.
Gemm = Callable[[Tensor, Value, Value, Tensor, Value, Value, Value, Tensor, Tensor | None], None]

LINEARS = frozenset({QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR})
_ALIGNMENT = 256


# -- who takes what ----------------------------------------------------------------------------------------------


def _declines(p: Problem, device: torch.device) -> str | None:
    from . import declines as no_triton

    if (reason := no_triton(p, device)) is not None:
        return reason
    if p.shape[2] > p.accumulator_limit:
        return f"K = {p.shape[2]} can overflow the int32 sums; exact up to K = {p.accumulator_limit}"
    if p.op is QuantizeKind.QUANTIZED_LINEAR:
        try:
            _quantizer(p, device)
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
    if not (m and n and k) or k % 16 or n * p.element.dtype.itemsize % 16:
        return f"the copy engine needs rows of a multiple of 16 bytes, got K = {k} and N = {n} of {p.element.value}"
    return None


def _quantizer(p: Problem, device: torch.device) -> Kernel:
    return choose(activation_problem(p), device, PlanPreference(prefer_backend=BackendKind.TRITON))


# -- workspace ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Room:
    """One tensor inside the workspace."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        size = prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Scratch:
    """The workspace cut into tensors. The cuts are kept while it lives: making them costs more than a launch.

    Threads that share a plan bring workspaces of their own, so a workspace and its cuts are only ever seen together.
    """

    def __init__(self, rooms: dict[str, _Room]) -> None:
        self.rooms = rooms
        self._kept: tuple[weakref.ref[Tensor] | None, dict[str, Tensor]] = (None, {})

    @property
    def nbytes(self) -> int:
        return sum(room.nbytes for room in self.rooms.values())

    def __call__(self, workspace: Tensor | None) -> dict[str, Tensor]:
        if not self.rooms or workspace is None:
            return {}
        of, views = self._kept
        if of is None or of() is not workspace:
            flat, start, views = workspace.view(-1).view(torch.uint8), 0, {}
            for name, room in self.rooms.items():
                size = prod(room.shape) * room.dtype.itemsize
                views[name] = flat[start : start + size].view(room.dtype).view(room.shape)
                start += room.nbytes
            self._kept = weakref.ref(workspace, self._forget), views
        return views

    def _forget(self, of: object) -> None:
        if self._kept[0] is of:
            self._kept = None, {}


def _activation_rooms(p: Problem, device: torch.device) -> dict[str, _Room]:
    if p.op is not QuantizeKind.QUANTIZED_LINEAR:
        return {}
    m, _, k = p.shape
    rooms = {"q": _Room((m, k), p.quantized.dtype), "scale": _Room((m,), p.scale_element.dtype)}
    if p.mode is DynamicRangeMode.ASYMMETRIC:
        rooms["zero_point"] = _Room((m,), torch.int32)
    if needed := _quantizer(p, device).workspace(activation_problem(p), device):
        rooms["quantizer"] = _Room((needed,), torch.uint8)
    return rooms


def _hopper_rooms(p: Problem, device: torch.device) -> dict[str, _Room]:
    m, n, k = p.shape
    rooms = _activation_rooms(p, device)
    if p.mode is DynamicRangeMode.ASYMMETRIC:
        rooms["sums"] = _Room((n,), torch.int32)
    elif m <= tune.SKINNY_TOKENS:
        split = tune.skinny(m, n, k, _processors(device)).split
        if _fuses(p):
            split = max(split, tune.fused(m, n, k, _processors(device)).split)
        if split > 1:
            rooms["parts"] = _Room((split, m, n), torch.int32)
    return rooms


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# -- from operands to a GEMM -------------------------------------------------------------------------------------


def _compose(p: Problem, device: torch.device, gemm: Gemm, scratch: _Scratch, fused: Launch | None = None) -> Launch:
    """The launch of a linear whose GEMM is `gemm`; `fused` replaces both steps unless act_q_scratch is asked for."""
    if p.shape[0] == 0 or p.shape[1] == 0:
        return lambda operands, workspace: None
    if p.op is QuantizeKind.SMOOTHQUANT_LINEAR:

        def smoothquant(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
            x, scale, zero_point, weight, weight_scale, bias, weight_sum, output = cast("tuple[Tensor, ...]", operands)
            gemm(x, scale, zero_point, weight, weight_scale, bias, weight_sum, output, workspace)

        return smoothquant

    quantize = _quantizer(p, device).bind(activation_problem(p), device)

    def quantized(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, weight, weight_scale, bias, weight_sum, q, scale, output = cast("tuple[Tensor, ...]", operands)
        if fused is not None and q is None:
            fused(operands, workspace)
            return
        rooms = scratch(workspace)
        q = rooms["q"] if q is None else q
        scale = rooms["scale"] if scale is None else scale
        zero_point = rooms.get("zero_point")
        quantize((x, scale, zero_point, q), rooms.get("quantizer"))
        gemm(q, scale, zero_point, weight, weight_scale, bias, weight_sum, output, workspace)

    return quantized


def _bind_portable(p: Problem, device: torch.device) -> Launch:
    return _compose(p, device, _portable_gemm(p, device), _Scratch(_activation_rooms(p, device)))


def _portable_gemm(p: Problem, device: torch.device) -> Gemm:
    from .linear_kernels import matmul
    from .linear_launch import Step, bits

    m, n, k = p.shape
    config = tune.portable(m, n, k)
    shift = 128 if p.quantized is ElementKind.U8 else 0
    constants = {
        "PER_TOKEN": p.op is QuantizeKind.QUANTIZED_LINEAR,
        "CENTRED": bool(shift) or p.mode is DynamicRangeMode.ASYMMETRIC,
        "SHIFT": shift,
        "PACKED": p.weight.is_packed,
        "F64": p.element is ElementKind.F64,
        "Q_MIN": p.quantized.q_min,
        "Q_MAX": p.quantized.q_max,
        "BM": config.m,
        "BN": config.n,
        "BK": config.k,
    }
    programs = -(-m // config.m) * -(-n // config.n)
    options: dict[str, object] = {"num_warps": config.warps, "num_stages": config.stages}
    plain = Step(matmul, programs, {"M": m, "N": n, "K": k}, constants, options, device)
    # A zero point that comes with a symmetric problem (a tensor: its value is not known here) still counts.
    off_centre = Step(matmul, programs, {"M": m, "N": n, "K": k}, {**constants, "CENTRED": True}, options, device)

    def gemm(x, scale, zero_point, weight, weight_scale, bias, weight_sum, output, workspace) -> None:
        zero_point = None if isinstance(zero_point, int) and zero_point == 0 else zero_point
        step = plain if zero_point is None else off_centre
        step(x, weight, output, bits(scale), bits(weight_scale), bias, zero_point, weight_sum)

    return gemm


def _bind_hopper(p: Problem, device: torch.device) -> Launch:
    from .hopper_launch import fused_gemm, hopper_gemm

    m = p.shape[0]
    scratch = _Scratch(_hopper_rooms(p, device))
    portable = _portable_gemm(p, device)
    gemm = hopper_gemm(p, device, scratch, portable)
    fused = fused_gemm(p, device, scratch) if _fuses(p) else None
    return _compose(p, device, gemm, scratch, fused) if m else _compose(p, device, portable, scratch)


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


def _formula(p: Problem) -> str:
    centred = " - zero_point * weight_sum" if p.mode is DynamicRangeMode.ASYMMETRIC else ""
    return f"((acc{centred}) * scale_a) * scale_w + bias" if centred else "(acc * scale_a) * scale_w + bias"


def _describe_portable(p: Problem, device: torch.device) -> str:
    return f"{_formula(p)}; {tune.portable(*p.shape)}"


def _describe_hopper(p: Problem, device: torch.device) -> str:
    m, n, k = p.shape
    if _fuses(p):
        schedule = f"{tune.fused(m, n, k, _processors(device))}, quantizes on the way"
    elif m <= tune.SKINNY_TOKENS and p.mode is DynamicRangeMode.SYMMETRIC:
        schedule = str(tune.skinny(m, n, k, _processors(device)))
    else:
        schedule = str(tune.tile(m, n, k, p.element.dtype.itemsize, _processors(device)))
    return f"{_formula(p)}; {schedule}"


def _arch(device: torch.device) -> str:
    from . import arch

    return arch(device)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="hopper",
        backend=BackendKind.TRITON,
        ops=LINEARS,
        declines=_hopper_declines,
        bind=_bind_hopper,
        workspace=lambda p, device: _Scratch(_hopper_rooms(p, device)).nbytes,
        arch=_arch,
        epilogue=_describe_hopper,
    ),
    Kernel(
        name="matmul",
        backend=BackendKind.TRITON,
        ops=LINEARS,
        declines=_declines,
        bind=_bind_portable,
        workspace=lambda p, device: _Scratch(_activation_rooms(p, device)).nbytes,
        arch=_arch,
        epilogue=_describe_portable,
    ),
)
