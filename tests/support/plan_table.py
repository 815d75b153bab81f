"""One good problem for each of 21 named plans: its descriptor and its arguments, to run or to spoil."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import baracuda
from baracuda import PerChannel, PerGroup, PerTensor, PerToken, Scope

#: name of the scope, what the descriptor calls its sizes, the shape they mean, the scope they mean.
LAYOUTS: list[tuple[str, dict[str, Any], tuple[int, ...], Scope]] = [
    ("PerTensor", {"numel": 24}, (24,), PerTensor()),
    ("PerChannel", {"shape": (2, 3, 4), "axis": 1}, (2, 3, 4), PerChannel(1)),
    ("PerToken", {"n": 4, "d": 6}, (4, 6), PerToken()),
    ("PerGroup", {"outer_size": 4, "axis_size": 6, "group_size": 3}, (4, 6), PerGroup(3)),
]
POISON = 77


@dataclass(frozen=True)
class Row:
    """`arguments()` makes fresh ones each time; outputs among them are poisoned."""

    name: str
    descriptor: dict[str, Any]
    arguments: Callable[[], dict[str, Any]]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def plan(self) -> Any:
        return getattr(baracuda, f"{self.name}Plan")

    def describe(self, **changes: Any) -> Any:
        return getattr(baracuda, f"{self.name}Descriptor")(**{**self.descriptor, **changes})

    def args(self, **changes: Any) -> Any:
        return getattr(baracuda, f"{self.name}Args")(**{**self.arguments(), **changes})


def floats(*shape: int) -> Tensor:
    return torch.linspace(-9.3, 11.7, max(1, torch.Size(shape).numel())).view(shape)


def integers(*shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 37 % 256 - 128).to(torch.int8).view(shape)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, POISON, dtype=dtype)


def _static(scope: Scope, shape: tuple[int, ...]) -> dict[str, Any]:
    at = scope.scale_shape(shape)
    count = torch.Size(at).numel()
    return {
        "scale": torch.linspace(0.05, 0.4, count).view(at),
        "zero_point": (torch.arange(count, dtype=torch.int32) * 5 - 7).view(at),
    }


def _rows() -> list[Row]:
    rows = []
    for name, sizes, shape, scope in LAYOUTS:
        f32_to_s8 = {**sizes, "q_min": -128, "q_max": 127, "input_element": "f32", "output_element": "s8"}
        s8_to_f32 = {**f32_to_s8, "input_element": "s8", "output_element": "f32"}

        def quantize(shape: Any = shape, scope: Any = scope) -> dict[str, Any]:
            return {"input": floats(*shape), **_static(scope, shape), "output": poisoned(shape, torch.int8)}

        def dequantize(shape: Any = shape, scope: Any = scope) -> dict[str, Any]:
            return {"input": integers(*shape), **_static(scope, shape), "output": poisoned(shape, torch.float32)}

        def quantize_back(shape: Any = shape, scope: Any = scope) -> dict[str, Any]:
            grads = {"grad_output": floats(*shape).flip(0), "grad_input": poisoned(shape, torch.float32)}
            return {"input": floats(*shape), **_static(scope, shape), **grads}

        def dequantize_back(make: Any = quantize_back, shape: Any = shape) -> dict[str, Any]:
            return {**make(), "input": integers(*shape)}

        rows += [
            Row(f"Quantize{name}", f32_to_s8, quantize, ("output",)),
            Row(f"Dequantize{name}", s8_to_f32, dequantize, ("output",)),
            Row(f"Quantize{name}Backward", f32_to_s8, quantize_back, ("grad_input",)),
            Row(f"Dequantize{name}Backward", s8_to_f32, dequantize_back, ("grad_input",)),
        ]
    return rows


def _fake() -> dict[str, Any]:
    return {"input": floats(24), **_static(PerTensor(), (24,)), "output": poisoned((24,), torch.float32)}


def _fake_back() -> dict[str, Any]:
    grads = {"grad_output": floats(24).flip(0), "grad_input": poisoned((24,), torch.float32)}
    return {"input": floats(24), **_static(PerTensor(), (24,)), **grads}


def _dynamic() -> dict[str, Any]:
    outputs = {"scale_out": poisoned((4,), torch.float32), "zero_point_out": poisoned((4,), torch.int32)}
    return {"input": floats(4, 6), **outputs, "output": poisoned((4, 6), torch.int8)}


def _weights() -> dict[str, Any]:
    return {
        "weight_q": integers(3, 6),
        "weight_scale": torch.tensor([0.1, 0.02, 0.3]),
        "bias": torch.tensor([1.0, 2.0, 3.0]),
    }


def _quantized_linear() -> dict[str, Any]:
    return {"activation": floats(4, 6), **_weights(), "output": poisoned((4, 3), torch.float32)}


def _smoothquant_linear() -> dict[str, Any]:
    return {"act_q": integers(4, 6), **_weights(), "output": poisoned((4, 3), torch.float32)}


ROWS = [
    *_rows(),
    Row("FakeQuantize", {"numel": 24, "q_min": -128, "q_max": 127, "input_element": "f32"}, _fake, ("output",)),
    Row(
        "FakeQuantizeBackward",
        {"numel": 24, "q_min": -128, "q_max": 127, "input_element": "f32"},
        _fake_back,
        ("grad_input",),
    ),
    Row(
        "DynamicRangeQuantize",
        {"n": 4, "d": 6, "q_min": -128, "q_max": 127, "mode": baracuda.DynamicRangeMode.ASYMMETRIC},
        _dynamic,
        ("scale_out", "zero_point_out", "output"),
    ),
    Row("QuantizedLinear", {"m": 4, "c_out": 3, "k": 6}, _quantized_linear, ("output",)),
    Row("SmoothQuantLinear", {"m": 4, "n": 3, "k": 6, "act_scale": 0.25}, _smoothquant_linear, ("output",)),
]
BY_NAME = {row.name: row for row in ROWS}
