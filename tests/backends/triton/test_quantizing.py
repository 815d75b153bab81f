"""The sm_90 linears that quantize their tokens: one kernel, its PTX interpreted, down to the output's bits."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from fake_cuda import build
from launched import Launched, assert_reference_bits

from baracuda import ElementKind, QuantizeKind
from baracuda.backends.triton.linear import support
from baracuda.core.problem import Problem
from cases import floats

pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    fake = build(tmp_path_factory)
    fake.set(0, 0, 0)
    return Launched(fake, monkeypatch, processors=1)


def problem(m: int, n: int, k: int, weight: str = "s8", group: int = 0, element: str = "bf16") -> Problem:
    shape, float_type = (m, n, k), ElementKind.of(element)
    p = Problem(
        QuantizeKind.QUANTIZED_LINEAR, shape, float_type, ElementKind.S8, -127, 127, weight=ElementKind.of(weight)
    )
    return replace(p, weight_group=group)


FEW = [
    (1, 72, 288, "s8", 0),
    (1, 72, 4096, "s8", 0),
    (2, 136, 1152, "s8", 0),
    (3, 72, 1152, "s8", 0),
    (4, 72, 4096, "s8", 0),
    (1, 72, 288, "s4", 32),
    (1, 72, 1152, "s4", 64),
    (2, 72, 1152, "s4", 128),
    (3, 72, 4096, "s4", 0),
    (4, 136, 4096, "s4", 128),
]


@pytest.mark.parametrize("m, n, k, weight, group", FEW)
def test_the_gemm_for_few_tokens_quantizes_them_with_the_bits_of_the_reference(
    launched: Launched, m: int, n: int, k: int, weight: str, group: int
) -> None:
    assert assert_reference_bits(launched, problem(m, n, k, weight, group)) == ["gemm_few"]


@pytest.mark.parametrize("m, k, group", [(1, 1152, 128), (2, 1152, 64), (3, 4096, 128), (4, 4096, 0), (1, 14336, 128)])
def test_the_direct_gemm_quantizes_its_tokens_with_the_bits_of_the_reference(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, m: int, k: int, group: int
) -> None:
    monkeypatch.setattr(support, "TAKES_DIRECT", True)
    assert assert_reference_bits(launched, problem(m, 40, k, "s4", group)) == ["gemm_direct"]
