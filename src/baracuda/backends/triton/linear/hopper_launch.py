"""The sm_90 GEMMs from operands to the device: which of them, in which form, with which arguments."""

from __future__ import annotations

import struct
from typing import Any, cast

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from .... import _host
from ....core.problem import Problem
from ....core.types import Activation, DynamicRangeMode, QuantizeKind
from ...registry import Launch, Value
from ..elementwise.tune import processors_of
from ..launch import ALIGNMENT, POINTERS, Step, finish_parameters, launching, loaded
from ..sources import Either, Part
from . import tune
from .hopper import gemm
from .hopper_skinny import gemm_skinny
from .kernels import sum_parts, sum_rows, sum_tail
from .launch import Factors, Rooms, by_zero_point

_GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.int8: gl.int8}

#: The arguments of both GEMMs in the order of `Factors`, and the room for the sums of K's parts.
X, SCALE, ZERO_POINT, WEIGHT, WEIGHT_SCALE, BIAS, WEIGHT_SUM, RESIDUAL, OUTPUT, ROOM = range(10)
#: Those the copy engine reads and writes, or threads do in vectors.
VECTORS = (X, WEIGHT, RESIDUAL, OUTPUT)


def descriptor_form(dtype: torch.dtype, block: list[int]) -> str:
    element = _GLUON[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return f"tensordesc<{POINTERS[dtype][1:]}{block},{layout!r}>"


def _shape_of(value: Value) -> str:
    return "number" if not isinstance(value, Tensor) else "vector" if value.dim() else "scalar"


def scale_forms(
    scale: Value,
    zero_point: Value,
    weight_scale: Value,
    bias: Value,
    axis: int,
    residual: Value = None,
    activation: Activation = Activation.NONE,
) -> tuple[dict[str, str], tuple[object, ...]]:
    """The forms of the epilogue's arguments, and the constant that tells the kernel what to do with them."""
    forms = {
        "sa_ptr": POINTERS[scale.dtype] if isinstance(scale, Tensor) else "*fp32",
        "sa": "fp32",
        "sw_ptr": POINTERS[weight_scale.dtype] if isinstance(weight_scale, Tensor) else "*fp32",
        "sw": "fp32",
        "bias_ptr": POINTERS[bias.dtype] if isinstance(bias, Tensor) else "*fp32",
        "zp_ptr": "*i32",
        "zp": "i32",
        "sum_ptr": "*i32",
        "residual_ptr": POINTERS[residual.dtype] if isinstance(residual, Tensor) else "*fp32",
    }
    zero = "none" if zero_point is None else _shape_of(zero_point)
    scales = (_shape_of(scale), _shape_of(weight_scale), bias is not None, zero, axis)
    return forms, (*scales, activation.value, residual is not None)


def epilogue_parameters(kernel: _host.Kernel) -> None:
    """Addresses and numbers in the order of `scale_forms`; of each pair, the one that did not come is 0."""
    for argument in (SCALE, WEIGHT_SCALE):
        kernel.address(argument)
        kernel.number(argument, "f32")
    kernel.address(BIAS)
    kernel.address(ZERO_POINT)
    kernel.number(ZERO_POINT, "i32")
    kernel.address(WEIGHT_SUM)
    kernel.address(RESIDUAL)


def matrix(kernel: _host.Kernel, argument: int, meta: dict[str, Any], rows: int, columns: int) -> None:
    """A descriptor's parameters: the map for the copy engine, then the matrix's sizes and strides."""
    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    kernel.matrix(argument, element, meta["swizzle"], meta["elem_size"], rows, columns, *meta["block_size"])
    for value in (rows, columns, columns, 1):
        kernel.constant(value)


def compiled(source: GluonASTSource, options: dict[str, object]) -> Any:
    target = triton.runtime.driver.active.get_current_target()
    return triton.compile(source, target=target, options={"enable_fp_fusion": False, **options})


def gemm_source(
    tile: tune.Tile, out: torch.dtype, forms: dict[str, str], epilogue: tuple[object, ...]
) -> GluonASTSource:
    signature = {
        "a_desc": descriptor_form(torch.int8, [tile.m, tile.k]),
        "b_desc": descriptor_form(torch.int8, [tile.n, tile.k]),
        "c_desc": descriptor_form(out, [tile.m, tile.n // tile.pieces]),
        "partial_ptr": "*i32",
        **forms,
        **dict.fromkeys(("M", "N", "K"), "i32"),
    }
    constants = {
        "STAGES": tile.stages,
        "ORDER": (tile.group, tile.across, tile.tail),
        "EAGER": tile.eager,
        "EPILOGUE": epilogue,
    }
    # The residual is read in pairs of columns.
    names = list(signature)
    divisible = {"residual_ptr": ALIGNMENT, "partial_ptr": ALIGNMENT, "N": ALIGNMENT // out.itemsize}
    attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in divisible.items()}
    return GluonASTSource(gemm, signature | dict.fromkeys(constants, "constexpr"), constants, attributes)


def skinny_source(
    config: tune.Skinny, out: torch.dtype, forms: dict[str, str], epilogue: tuple[object, ...], n: int, quantize: bool
) -> GluonASTSource:
    signature = {
        "x_desc": descriptor_form(torch.int8, [config.tokens, config.k]),
        "w_desc": descriptor_form(torch.int8, [config.rows, config.k]),
        "x_ptr": POINTERS[out],
        "out_ptr": POINTERS[out],
        "partial_ptr": "*i32",
        "scale_out_ptr": "*fp32",
        **forms,
        **dict.fromkeys(("q_min", "q_max"), "fp32"),
        **dict.fromkeys(("M", "N", "K"), "i32"),
    }
    names = list(signature)
    divisible = dict.fromkeys(("x_ptr", "out_ptr", "partial_ptr", "K"), ALIGNMENT) | {"N": min(ALIGNMENT, n & -n)}
    attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in divisible.items()}
    constants = {
        "BT": config.tokens,
        "STAGES": config.stages,
        "SPLIT": config.split,
        "TILES": config.tiles,
        "QUANTIZE": quantize,
        "EPILOGUE": epilogue,
    }
    return GluonASTSource(gemm_skinny, signature | dict.fromkeys(constants, "constexpr"), constants, attributes)


def tile_options(tile: tune.Tile) -> dict[str, object]:
    return {"num_warps": tile.warps}


def hopper_gemm(p: Problem, device: torch.device, f: Factors, rooms: Rooms, portable: Launch) -> Launch:
    """The GEMM of a problem on sm_90; operands the copy engine cannot address go to the portable kernel."""
    m, n, k = p.shape
    plain = f._replace(zero_point=None)
    if p.mode is DynamicRangeMode.SYMMETRIC:
        if m <= tune.SKINNY_TOKENS:
            symmetric = _skinny(p, device, plain, rooms, portable)
        else:
            symmetric = _large(p, device, plain, rooms, portable, cut=True)
        return by_zero_point(f.zero_point, symmetric, portable)
    given = cast(int, f.weight_sum)
    multiply = _large(p, device, f._replace(weight_sum=Either(given, rooms["sums"])), rooms, portable)
    add_up = Step(sum_rows, n, {"N": n, "K": k}, {"BK": 1024}, device).bound(f.weight, rooms["sums"])

    def centred(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        if operands[given] is None:
            add_up(operands, workspace)
        multiply(operands, workspace)

    return by_zero_point(f.zero_point, _large(p, device, plain, rooms, portable), centred)


def _large(p: Problem, device: torch.device, f: Factors, rooms: Rooms, portable: Launch, cut: bool = False) -> Launch:
    m, n, k = p.shape
    processors = processors_of(device)
    tile = tune.tile(m, n, k, p.element.dtype.itemsize, processors, cut)
    programs = tile.programs(m, n, processors)
    room = rooms["parts"] if tile.tail > 1 else None
    then = None if room is None else _tail(p, device, f, room, tile, tile.whole(m, n, processors))

    def prepare(arguments: list[Value], aligned: bool) -> _host.Kernel | None:
        if not aligned:
            return None
        _, scale, zero_point, _, weight_scale, bias, _, residual, *_ = arguments
        forms, epilogue = scale_forms(scale, zero_point, weight_scale, bias, 0, residual, p.nonlinearity)
        made = compiled(gemm_source(tile, p.element.dtype, forms, epilogue), tile_options(tile))
        kernel, (x, weight, output) = loaded(made, programs), made.metadata.tensordesc_meta
        matrix(kernel, X, x, m, k)
        matrix(kernel, WEIGHT, weight, n, k)
        matrix(kernel, OUTPUT, output, m, n)
        kernel.address(ROOM)
        epilogue_parameters(kernel)
        return finish_parameters(kernel, m, n, k)

    return launching(device, (*f, room), prepare, VECTORS, then, portable)


def _tail(p: Problem, device: torch.device, f: Factors, room: Part, tile: tune.Tile, whole: int) -> Launch:
    """Adds up the parts of the tiles that were cut."""
    m, n, _ = p.shape
    lines = 16
    constants = {
        "PER_TOKEN": p.op is QuantizeKind.QUANTIZED_LINEAR,
        "ACTIVATION": p.nonlinearity.value,
        "GROUP": tile.group,
        "ACROSS": tile.across,
        "TAIL": tile.tail,
        "BM": tile.m,
        "BN": tile.n,
        "LINES": lines,
    }
    programs = (tile.tiles(m, n) - whole) * (tile.m // lines)
    step = Step(sum_tail, programs, {"M": m, "N": n, "whole": whole}, constants, device)
    return step.bound(room, f.output, f.scale, f.weight_scale, f.bias, f.residual)


# -- few tokens --------------------------------------------------------------------------------------------------


def _skinny(p: Problem, device: torch.device, f: Factors, rooms: Rooms, portable: Launch) -> Launch:
    m, n, k = p.shape
    return _streaming(p, device, f, rooms, portable, tune.skinny(m, n, k, processors_of(device)), quantize=False)


def fused_gemm(p: Problem, device: torch.device, f: Factors, rooms: Rooms, apart: Launch) -> Launch:
    """Floats in, floats out, one launch: every program quantizes the few rows for itself."""
    _, n, k = p.shape
    config = tune.fused(n, k, processors_of(device))
    return _streaming(p, device, f._replace(x=0), rooms, apart, config, quantize=True)


def _streaming(
    p: Problem, device: torch.device, f: Factors, rooms: Rooms, otherwise: Launch, config: tune.Skinny, quantize: bool
) -> Launch:
    """The kernel that streams the weight past a few tokens, and the one that adds up K's parts where it is split."""
    m, n, k = p.shape
    programs = _streaming_grid(config, n, device)
    room = rooms["parts"] if config.split > 1 else None
    then = None
    if room is not None:
        per_token, activation = p.op is QuantizeKind.QUANTIZED_LINEAR, p.nonlinearity.value
        constants = {"PER_TOKEN": per_token, "ACTIVATION": activation, "SPLIT": config.split, "BN": 512}
        add_up = Step(sum_parts, m * -(-n // 512), {"M": m, "N": n}, constants, device)
        then = add_up.bound(room, f.output, f.scale, f.weight_scale, f.bias, f.residual)

    def prepare(arguments: list[Value], aligned: bool) -> _host.Kernel | None:
        if not aligned:
            return None
        _, scale, zero_point, _, weight_scale, bias, _, residual, *_ = arguments
        forms, epilogue = scale_forms(scale, zero_point, weight_scale, bias, 1, residual, p.nonlinearity)
        if quantize:
            epilogue = ("given", *epilogue[1:])
        source = skinny_source(config, p.element.dtype, forms, epilogue, n, quantize)
        made = compiled(source, {"num_warps": 4})
        kernel, (x, weight) = loaded(made, programs), made.metadata.tensordesc_meta
        if quantize:  # it reads x by itself, and has no use for a map of quantized rows
            matrix(kernel, WEIGHT, x, n, k)
        else:
            matrix(kernel, X, x, m, k)
        matrix(kernel, WEIGHT, weight, n, k)
        kernel.address(X)
        kernel.address(OUTPUT)
        kernel.address(ROOM)
        kernel.address(SCALE)
        epilogue_parameters(kernel)
        for limit in (p.q_min, p.q_max):
            kernel.constant(int.from_bytes(struct.pack("<f", limit), "little"))
        return finish_parameters(kernel, m, n, k)

    return launching(device, (*f, room), prepare, VECTORS, then, otherwise)


def _streaming_grid(config: tune.Skinny, n: int, device: torch.device) -> int:
    units = -(-n // config.rows) * config.split * config.tiles
    rounds = -(-units // (config.programs * processors_of(device)))
    return -(-units // rounds)
