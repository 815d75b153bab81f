"""Launches without a GPU: kernels compiled for sm_90, a driver that records, and PTX that says what was expected."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from launched import Launched

from baracuda import Activation, DynamicRangeMode, ElementKind, PerChannel, PerTensor, PerToken, QuantizeKind, Scope
from baracuda.backends.registry import Kernel
from baracuda.core.optable import OPS, needed
from baracuda.core.problem import Problem
from baracuda.core.types import OpCategory

pytest.importorskip("triton")
_host = pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

GPU = torch.device("cuda", 0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched.afresh(monkeypatch, tmp_path_factory)


def tensors(p: Problem, **given: Any) -> tuple[Any, ...]:
    """Operands as the row asks for them, but for those given; optional ones are left out."""
    values = []
    for operand in OPS[p.op].operands:
        if operand.name in given:
            values.append(given[operand.name])
        elif not needed(p, operand):
            values.append(None)
        else:
            values.append(torch.zeros(operand.shape(p), dtype=operand.elements(p)[0].dtype))
    return tuple(values)


def kernel_of(p: Problem) -> Kernel:
    from baracuda.backends.triton import KERNELS

    return next(kernel for kernel in KERNELS if p.op in kernel.ops)


def launch(p: Problem, values: tuple[Any, ...]) -> None:
    """On the GPU that is not there, from tensors that are elsewhere."""
    kernel = kernel_of(p)
    workspace = torch.empty(max(kernel.workspace(p, GPU), 1), dtype=torch.uint8)
    bound = kernel.bind(p, GPU)
    bound(values, workspace)
    bound(values, workspace)


def fused_scope(op: QuantizeKind) -> Scope:
    return PerTensor() if op in (QuantizeKind.NORM_QUANTIZE, QuantizeKind.GATED_QUANTIZE) else PerToken()


@pytest.mark.parametrize("scope", [PerTensor(), PerToken(), PerChannel(1)], ids=str)
@pytest.mark.parametrize("op", [op for op, row in OPS.items() if "linear" not in op.value], ids=lambda op: op.value)
def test_every_kernel_is_given_the_parameters_it_declares(launched: Launched, op: QuantizeKind, scope: Scope) -> None:
    modes = list(DynamicRangeMode) if OPS[op].dynamic else [DynamicRangeMode.SYMMETRIC]
    if OPS[op].category is OpCategory.FUSED and scope != fused_scope(op):
        pytest.skip("norms and gated products have one scope each")
    for mode in modes:
        p = Problem(op, (64, 24), ElementKind.BF16, ElementKind.S8, -127, 127, scope, mode)
        launch(p, tensors(p))
        launch(p, tensors(p, **dict.fromkeys(kernel_of(p).spares(p, GPU))))
        if not OPS[op].dynamic:
            launch(p, tensors(p, scale=0.5, zero_point=3))
    launched.check()


@pytest.mark.parametrize(("needed_version", "pdl"), [(13000, 1), (13010, 0)])
def test_kernels_use_programmatic_dependent_launch_where_the_driver_captures_it_into_graphs(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, needed_version: int, pdl: int
) -> None:
    from baracuda.backends.triton import launch as module

    assert launched.fake.driver.version == 13000
    monkeypatch.setattr(module, "PDL_IN_GRAPHS", needed_version)
    p = Problem(QuantizeKind.QUANTIZE, (64, 24), ElementKind.BF16, ElementKind.S8, -127, 127)
    launch(p, tensors(p))
    assert launched.fake.record.early == pdl


@pytest.mark.parametrize("m", [1, 8, 300])
@pytest.mark.parametrize("mode", list(DynamicRangeMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "op", [QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR], ids=lambda op: op.value
)
def test_every_gemm_is_given_the_parameters_it_declares(
    launched: Launched, op: QuantizeKind, mode: DynamicRangeMode, m: int
) -> None:
    p = Problem(op, (m, 256, 4096), ElementKind.BF16, ElementKind.S8, -127, 127, mode=mode)
    bias = torch.zeros(256, dtype=torch.bfloat16)
    static = op is QuantizeKind.SMOOTHQUANT_LINEAR
    numbers = {"act_scale": 0.5, "act_zero_point": 3 if mode is DynamicRangeMode.ASYMMETRIC else 0} if static else {}
    launch(p, tensors(p, bias=bias))
    launch(p, tensors(p, bias=bias, weight_scale=0.25, **numbers))
    ends = replace(p, nonlinearity=Activation.GELU)
    launch(ends, tensors(ends, residual=torch.zeros(m, 256, dtype=torch.bfloat16)))
    launched.check()


def test_a_quantization_hands_over_its_operands(launched: Launched) -> None:
    p = Problem(QuantizeKind.QUANTIZE, (64, 24), ElementKind.F32, ElementKind.S8, -128, 127, PerToken())
    values = tensors(p, zero_point=-7)
    launched.fake.set(10, 0, 0)
    launch(p, values)
    record = launched.fake.record
    x, scale, _, out = values
    assert list(record.values[:4]) == [x.data_ptr(), scale.data_ptr(), 2**32 - 7, out.data_ptr()]
    assert list(record.values[4:12]) == [64, 24, 64, 1, 2**64 - 2**31 + 1, 0, 0, 0]  # sizes, no scratch


def test_a_kernel_is_compiled_once_for_operands_of_a_kind(launched: Launched) -> None:
    from baracuda.backends.triton.elementwise.launch import elementwise

    p = Problem(QuantizeKind.QUANTIZE, (64, 24), ElementKind.F32, ElementKind.S8, -128, 127)
    bound = elementwise(p, GPU)
    for scale in (0.5, 0.25, torch.tensor(0.5), torch.tensor(2.0)):
        bound(tensors(p, scale=scale), None)
    assert len(launched.kernels) == 2


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.S4], ids=lambda kind: kind.value)
@pytest.mark.parametrize("op", [QuantizeKind.QUANTIZE, QuantizeKind.DYNAMIC_QUANTIZE], ids=lambda op: op.value)
def test_an_output_is_stored_in_words_unless_its_address_is_odd(
    launched: Launched, op: QuantizeKind, kind: ElementKind
) -> None:
    p = Problem(op, (64, 128), ElementKind.BF16, kind, kind.q_min, kind.q_max, PerToken(), DynamicRangeMode.ASYMMETRIC)
    values = tensors(p, zero_point=torch.zeros(64, dtype=torch.int32)) if op is QuantizeKind.QUANTIZE else tensors(p)
    out = values[-1]
    odd = torch.empty(out.numel() + 1, dtype=out.dtype)[1:].view(out.shape)
    launch(p, values)
    launch(p, (*values[:-1], odd))
    stores = [set(re.findall(r"st\.global\.(v?\d?\.?b\d+)", ptx)) for ptx in launched.ptx]
    assert "b8" not in stores[0] and "b8" in stores[1], stores


@pytest.mark.parametrize("m", [8, 300])
@pytest.mark.parametrize("odd", [None, "act_q", "weight_q", "residual", "output"])
def test_a_linear_goes_where_its_sku_says_by_the_addresses_it_is_given(
    launched: Launched, odd: str | None, m: int
) -> None:
    from baracuda.backends.triton import KERNELS

    p = Problem(QuantizeKind.SMOOTHQUANT_LINEAR, (m, 256, 4096), ElementKind.BF16, ElementKind.S8, -128, 127)
    given = dict(zip((o.name for o in OPS[p.op].operands), tensors(p), strict=True))
    given["residual"] = torch.zeros(m, 256, dtype=torch.bfloat16)
    if odd is not None:
        given[odd] = torch.zeros(given[odd].numel() + 1, dtype=given[odd].dtype)[1:].view(given[odd].shape)
    launch(p, tuple(given.values()))
    by_copy_engine = {"matrix" in kernel.parameters() for kernel, _ in launched.kernels[:1]}
    assert by_copy_engine == {odd is None}
    linears = [kernel for kernel in KERNELS if p.op in kernel.ops]
    assert [kernel.name for kernel in linears] == ["hopper", "matmul"]
    epilogue = linears[0].epilogue(p, GPU)
    assert epilogue is not None and epilogue.endswith("; matmul where an address is not a multiple of 16")
