"""The sm_90 GEMMs from operands to the device: which of them, in which form, with which arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ...problem import Problem
from ...types import DynamicRangeMode, QuantizeKind
from ..registry import Launch, Value
from . import linear_tune as tune
from .hopper import gemm
from .hopper_skinny import gemm_skinny
from .linear_kernels import sum_parts, sum_rows
from .linear_launch import ALIGNMENT, REMEMBERED, Program, Step, bits, pointer_form

_GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.int8: gl.int8}
#: A program, its grid and its arguments.
Prepared = tuple[Program, int, list[Any]]


class Remembered:
    """Calls `prepare` once for each set of addresses and numbers, and launches what it made."""

    def __init__(self, prepare: Callable[..., Prepared]) -> None:
        self._prepare = prepare
        self._known: dict[tuple[object, ...], Prepared] = {}

    def __call__(self, *operands: Value) -> None:
        key: list[object] = []
        for value in operands:
            if isinstance(value, Tensor):
                key += (value.data_ptr(), value.dtype)
            else:
                key.append(value)
        prepared = self._known.get(tuple(key))
        if prepared is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            prepared = self._known[tuple(key)] = self._prepare(*operands)
        program, programs, arguments = prepared
        program(programs, arguments)


def descriptor_form(dtype: torch.dtype, block: list[int]) -> str:
    element = _GLUON[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return f"tensordesc<{pointer_form(dtype)[1:]}{block},{layout!r}>"


def _shape_of(value: Value, per_token: bool = False) -> str:
    return "number" if not isinstance(value, Tensor) else "vector" if per_token or value.dim() else "scalar"


def scale_forms(
    scale: Value, zero_point: Value, weight_scale: Value, bias: Value, axis: int
) -> tuple[dict[str, str], tuple[object, ...]]:
    """The forms of the epilogue's arguments, and the constant that tells the kernel which of them to read."""
    forms = {
        "sa_ptr": pointer_form(scale.dtype) if isinstance(scale, Tensor) else "*fp32",
        "sa": "fp32",
        "sw_ptr": pointer_form(weight_scale.dtype) if isinstance(weight_scale, Tensor) else "*fp32",
        "sw": "fp32",
        "bias_ptr": pointer_form(bias.dtype) if isinstance(bias, Tensor) else "*fp32",
        "zp_ptr": "*i32",
        "zp": "i32",
        "sum_ptr": "*i32",
    }
    zero = "none" if zero_point is None else _shape_of(zero_point)
    return forms, (_shape_of(scale), _shape_of(weight_scale), bias is not None, zero, axis)


def scale_arguments(scale: Value, zero_point: Value, weight_scale: Value, bias: Value, weight_sum: Value) -> list[Any]:
    return [
        *_pointer_and_number(scale, 0.0),
        *_pointer_and_number(weight_scale, 0.0),
        _pointer_and_number(bias, 0)[0],
        *_pointer_and_number(zero_point, 0),
        _pointer_and_number(weight_sum, 0)[0],
    ]


def _pointer_and_number(value: Value, absent: float) -> tuple[int, float | int]:
    if isinstance(value, Tensor):
        return value.data_ptr(), absent
    return 0, absent if value is None else value


def gemm_source(
    tile: tune.Tile, out: torch.dtype, forms: dict[str, str], epilogue: tuple[object, ...]
) -> GluonASTSource:
    signature = {
        "a_desc": descriptor_form(torch.int8, [tile.m, tile.k]),
        "b_desc": descriptor_form(torch.int8, [tile.n, tile.k]),
        "c_desc": descriptor_form(out, [tile.m, tile.n // tile.pieces]),
        **forms,
        **dict.fromkeys(("M", "N", "K"), "i32"),
    }
    constants = {"STAGES": tile.stages, "GROUP": tile.group, "EAGER": tile.eager, "EPILOGUE": epilogue}
    return GluonASTSource(gemm, signature | dict.fromkeys(constants, "constexpr"), constants)


def skinny_source(
    config: tune.Skinny, out: torch.dtype, forms: dict[str, str], epilogue: tuple[object, ...], n: int, quantize: bool
) -> GluonASTSource:
    signature = {
        "x_desc": descriptor_form(torch.int8, [config.tokens, config.k]),
        "w_desc": descriptor_form(torch.int8, [config.rows, config.k]),
        "x_ptr": pointer_form(out),
        "out_ptr": pointer_form(out),
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
        "QUANTIZE": quantize,
        "EPILOGUE": epilogue,
    }
    return GluonASTSource(gemm_skinny, signature | dict.fromkeys(constants, "constexpr"), constants, attributes)


def tile_options(tile: tune.Tile) -> dict[str, object]:
    return {"num_warps": tile.warps}


# -- large -------------------------------------------------------------------------------------------------------


def hopper_gemm(p: Problem, device: torch.device, scratch: Any, portable: Any) -> Any:
    """The GEMM of a problem on sm_90; operands the copy engine cannot address go to the portable kernel."""
    m, n, k = p.shape
    centred = p.mode is DynamicRangeMode.ASYMMETRIC
    few = m <= tune.SKINNY_TOKENS and not centred
    launch = _skinny(p, device, scratch) if few else _large(p, device)
    sums = Step(sum_rows, n, {"N": n, "K": k}, {"BK": 1024}, {"num_warps": 4}, device)

    def run(x, scale, zero_point, weight, weight_scale, bias, weight_sum, output, workspace) -> None:
        zero_point = None if isinstance(zero_point, int) and zero_point == 0 else zero_point
        unaligned = (x.data_ptr() | weight.data_ptr() | output.data_ptr()) % ALIGNMENT
        if unaligned or (zero_point is not None and not centred):
            portable(x, scale, zero_point, weight, weight_scale, bias, weight_sum, output, workspace)
            return
        if zero_point is not None and weight_sum is None:
            weight_sum = scratch(workspace)["sums"]
            sums(weight, weight_sum)
        launch(x, scale, zero_point, weight, weight_scale, bias, weight_sum, output, workspace)

    return run


def _large(p: Problem, device: torch.device) -> Any:
    m, n, k = p.shape
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tile = tune.tile(m, n, p.element.dtype.itemsize, processors)
    programs = min(processors, -(-m // tile.m) * -(-n // tile.n))
    compiled: dict[object, Program] = {}

    def prepare(x, scale, zero_point, weight, weight_scale, bias, weight_sum, output) -> Prepared:
        forms, epilogue = scale_forms(scale, zero_point, weight_scale, bias, 0)
        key = (tuple(forms.values()), epilogue)
        if key not in compiled:
            compiled[key] = Program(gemm_source(tile, p.element.dtype, forms, epilogue), tile_options(tile), device)
        program = compiled[key]
        maps = [*program.tensor_map(0, x), *program.tensor_map(1, weight), *program.tensor_map(2, output)]
        numbers = scale_arguments(scale, zero_point, weight_scale, bias, weight_sum)
        return program, programs, [*maps, *numbers, m, n, k, *[None] * 4]

    launch = Remembered(prepare)
    return lambda *operands: launch(*operands[:-1])


# -- few tokens --------------------------------------------------------------------------------------------------


class _Parts:
    """The int32 sums of K's parts and the launch that adds them up; nothing of either when K stays whole."""

    def __init__(self, p: Problem, config: tune.Skinny, scratch: Any, device: torch.device) -> None:
        m, n, _ = p.shape
        constants = {"PER_TOKEN": p.op is QuantizeKind.QUANTIZED_LINEAR, "SPLIT": config.split, "BN": 512}
        self.split, self.scratch = config.split, scratch
        self.step = Step(sum_parts, m * -(-n // 512), {"M": m, "N": n}, constants, {"num_warps": 4}, device)

    def room(self, workspace: Tensor | None) -> Tensor | None:
        return cast("Tensor", self.scratch(workspace)["parts"]) if self.split > 1 else None

    def add(self, parts: Tensor | None, output: Tensor, scale: Value, weight_scale: Value, bias: Value) -> None:
        if parts is not None:
            self.step(parts, output, bits(scale), bits(weight_scale), bias)


def _skinny_program(p: Problem, device: torch.device, config: tune.Skinny, quantize: bool) -> Callable[..., Program]:
    compiled: dict[object, Program] = {}

    def program(scale: Value, weight_scale: Value, bias: Value) -> Program:
        forms, epilogue = scale_forms(scale, None, weight_scale, bias, 1)
        if quantize:
            epilogue = ("given", *epilogue[1:])
        key = (tuple(forms.values()), epilogue)
        if key not in compiled:
            source = skinny_source(config, p.element.dtype, forms, epilogue, p.shape[1], quantize)
            compiled[key] = Program(source, {"num_warps": 4}, device)
        return compiled[key]

    return program


def _skinny_grid(config: tune.Skinny, n: int, device: torch.device) -> int:
    units = -(-n // config.rows) * config.split
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    rounds = -(-units // (config.programs * processors))
    return -(-units // rounds)


def _skinny(p: Problem, device: torch.device, scratch: Any) -> Any:
    m, n, k = p.shape
    config = tune.skinny(m, n, k, torch.cuda.get_device_properties(device).multi_processor_count)
    programs, parts = _skinny_grid(config, n, device), _Parts(p, config, scratch, device)
    program_for = _skinny_program(p, device, config, quantize=False)

    def prepare(x, scale, weight, weight_scale, bias, output, room) -> Prepared:
        program = program_for(scale, weight_scale, bias)
        maps = [*program.tensor_map(0, x), *program.tensor_map(1, weight)]
        outputs = [0, output.data_ptr(), 0 if room is None else room.data_ptr(), 0]
        numbers = scale_arguments(scale, None, weight_scale, bias, None)
        return program, programs, [*maps, *outputs, *numbers, 0.0, 0.0, m, n, k, *[None] * 5]

    launch = Remembered(prepare)

    def run(x, scale, zero_point, weight, weight_scale, bias, weight_sum, output, workspace) -> None:
        room = parts.room(workspace)
        launch(x, scale, weight, weight_scale, bias, output, room)
        parts.add(room, output, scale, weight_scale, bias)

    return run


def fused_gemm(p: Problem, device: torch.device, scratch: Any) -> Launch:
    """Floats in, floats out, one launch: every program quantizes the few rows for itself."""
    m, n, k = p.shape
    config = tune.fused(m, n, k, torch.cuda.get_device_properties(device).multi_processor_count)
    programs, parts = _skinny_grid(config, n, device), _Parts(p, config, scratch, device)
    program_for = _skinny_program(p, device, config, quantize=True)

    def prepare(x, scale, weight, weight_scale, bias, output, room) -> Prepared:
        program = program_for(scale, weight_scale, bias)
        maps = [*program.tensor_map(0, weight), *program.tensor_map(1, weight)]
        outputs = [x.data_ptr(), output.data_ptr(), 0 if room is None else room.data_ptr(), scale.data_ptr()]
        numbers = scale_arguments(scale, None, weight_scale, bias, None)
        return program, programs, [*maps, *outputs, *numbers, float(p.q_min), float(p.q_max), m, n, k, *[None] * 5]

    launch = Remembered(prepare)

    def run(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, weight, weight_scale, bias, _, _, scale, output = cast("tuple[Tensor, ...]", operands)
        scale = scratch(workspace)["scale"] if scale is None else scale
        room = parts.room(workspace)
        launch(x, scale, weight, weight_scale, bias, output, room)
        parts.add(room, output, scale, weight_scale, bias)

    return run
