"""The sm_90 launches without a GPU: which kernels a linear becomes, and that each argument meets its parameter."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baracuda import Activation, ElementKind, QuantizeKind
from baracuda.problem import Problem

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiled kernels alone have sources")

#: A shape for each way out, and the kernels of its GEMM.
WAYS_OUT = [
    ((1, 4104, 1024), ["gemm_skinny"]),
    ((2, 1024, 8192), ["gemm_skinny", "sum_parts"]),
    ((16, 1024, 8192), ["gemm_skinny", "sum_parts"]),
    ((33, 4104, 528), ["gemm_skinny"]),
    ((300, 1032, 272), ["gemm"]),
    ((600, 512, 8192), ["gemm"]),
]
CPU = torch.device("cpu")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every launch as the kernel's name and its arguments by parameter; nothing is compiled."""
    from baracuda.backends.triton import hopper_launch, linear, linear_launch

    calls: list[tuple[str, dict[str, Any]]] = []

    class Recorder:
        def __init__(self, source: Any, options: object, device: object) -> None:
            self.kernel = source.fn

        def tensor_map(self, i: int, tensor: torch.Tensor) -> list[Any]:
            return [tensor]

        def __call__(self, programs: int, arguments: list[Any]) -> None:
            calls.append((self.kernel.__name__, dict(zip(self.kernel.arg_names, arguments, strict=True))))

    def quantize(operands: object, workspace: object) -> None:
        calls.append(("quantize", {}))

    quantizer = SimpleNamespace(workspace=lambda p, device: 0, bind=lambda p, device: quantize)
    for module in (hopper_launch, linear_launch):
        monkeypatch.setattr(module, "Program", Recorder)
    monkeypatch.setattr(linear, "_quantizer", lambda p, device: quantizer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return calls


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("op", [QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR])
@pytest.mark.parametrize("shape, kernels", WAYS_OUT)
def test_every_argument_of_a_launch_meets_its_parameter(
    shape: tuple[int, int, int], kernels: list[str], op: QuantizeKind, adds: bool, launched: list[Any]
) -> None:
    from baracuda.backends.triton import linear

    m, n, k = shape
    p = Problem(op, shape, ElementKind.BF16, ElementKind.S8, -127, 127, activation=Activation.GELU)
    weight, scale, bias = torch.zeros(n, k, dtype=torch.int8), torch.ones(n), torch.ones(n)
    out = torch.zeros(m, n, dtype=torch.bfloat16)
    weights = (weight, scale, bias, None, torch.zeros_like(out) if adds else None)
    dynamic = op is QuantizeKind.QUANTIZED_LINEAR
    x = torch.zeros(m, k, dtype=torch.bfloat16 if dynamic else torch.int8)
    operands = (x, *weights, None, None, out) if dynamic else (x, 0.5, None, *weights, out)
    (kernel, _) = linear.KERNELS
    kernel.bind(p, CPU)(operands, torch.zeros(kernel.workspace(p, CPU) + 1, dtype=torch.uint8))
    assert [name for name, _ in launched] == (["quantize"] if dynamic and m > 2 else []) + kernels
    residual = weights[-1]
    for name, given in launched:
        if name.startswith("gemm"):
            assert (given["M"], given["N"], given["K"]) == shape
            assert given["sw_ptr"] == scale.data_ptr()
            assert given["bias_ptr"] == bias.data_ptr()
            assert given["residual_ptr"] == (0 if residual is None else residual.data_ptr())
            assert any(value is weight for value in given.values())
        if name == "sum_parts":
            assert given["out_ptr"] == out.data_ptr()
            assert given["residual_ptr"] == (None if residual is None else residual.data_ptr())
