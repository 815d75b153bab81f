"""The sm_90 linear for the fewest tokens and packed weights: its PTX interpreted, down to the output's bits."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from launched import Launched, assert_reference_bits, linear

from baracuda import Activation, ElementKind, PerToken, QuantizeKind
from baracuda.backends.triton.linear import tune
from baracuda.core.problem import Problem
from cases import floats

pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

#: So few that programs have several tiles.
PROCESSORS = 2
#: Activations given as integers: the kernel before may have written the weight. Or made right before: it has not.
GIVEN, MADE = QuantizeKind.SMOOTHQUANT_LINEAR, QuantizeKind.QUANTIZED_LINEAR


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched.afresh(monkeypatch, tmp_path_factory, PROCESSORS)


def problem(m: int, n: int, k: int, group: int, op: QuantizeKind = GIVEN, element: str = "bf16") -> Problem:
    return linear(op, m, n, k, "s4", group, element)


#: K, group: warps without work, chunks that come one, two and four to a warp's factor, an odd number of chunks, and
#: warps that all have the same.
CHUNKS = [(128, 0), (64, 64), (128, 128), (1152, 0), (1152, 64), (1152, 128), (2048, 128), (4096, 128)]


@pytest.mark.parametrize("k, group", CHUNKS)
@pytest.mark.parametrize("m", [8, 16])
def test_the_direct_linear_has_the_bits_of_the_reference(launched: Launched, m: int, k: int, group: int) -> None:
    for n in (24, 136):
        assert assert_reference_bits(launched, problem(m, n, k, group)) == ["gemm_direct"]


def test_any_number_of_tokens_and_rows_has_the_bits_of_the_reference(launched: Launched) -> None:
    for m in range(1, 17):
        assert_reference_bits(launched, problem(m, (8, 24, 72, 136)[m % 4], 1152, 128))
    assert_reference_bits(launched, problem(3, 32, 1152, 128))


def test_longer_k_and_many_rows_of_many_tokens_take_the_other_kernel() -> None:
    assert tune.direct(8, 28672, 4096, 128) and tune.direct(16, 8192, 4096, 128)
    assert not tune.direct(1, 4096, 4224, 128) and not tune.direct(16, 28672, 4096, 128)


def test_the_largest_sums_are_exact(launched: Launched) -> None:
    for m, byte in ((5, 0x88), (13, 0x88), (5, 0x77)):
        x = torch.full((m, 4096), -128, dtype=torch.int8)
        weight = torch.full((40, 2048), byte, dtype=torch.uint8).view(ElementKind.S4.dtype)
        factor = torch.full((40, 32), 15, dtype=torch.uint8)
        assert_reference_bits(launched, problem(m, 40, 4096, 128), act_q=x, weight_q=weight, weight_factor=factor)


@pytest.mark.parametrize("m, k", [(5, 1152), (16, 1152), (16, 4096)])
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_activations_that_are_quantized_right_before_have_the_bits_of_the_reference(
    launched: Launched, element: str, m: int, k: int
) -> None:
    """The weight is read before the kernel that quantizes the activations ends."""
    names = assert_reference_bits(launched, problem(m, 72, k, 128, MADE, element))
    assert names[1] == "gemm_direct" and "ld.global.v4" in launched.ptx[1].partition("griddepcontrol.wait")[0]


def test_kernels_that_do_not_overlap_have_the_bits_of_the_reference(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baracuda.backends.triton import launch as module

    monkeypatch.setattr(module, "PDL_IN_GRAPHS", 10**9)
    assert_reference_bits(launched, problem(3, 72, 1152, 64))
    assert "griddepcontrol" not in launched.ptx[0]


ENDS = [
    ("bf16", Activation.GELU, "tensor", 3, 1152),
    ("f16", Activation.SILU, "number", 16, 1152),
    ("f32", Activation.RELU, "input_type", 3, 1152),
    ("f32", Activation.GELU, "tensor", 16, 4096),
    ("bf16", Activation.SILU, "number", 16, 4096),
]


@pytest.mark.parametrize("element, nonlinearity, scale, m, k", ENDS)
@pytest.mark.parametrize("per_token", [False, True], ids=["per_tensor", "per_token"])
def test_every_end_of_the_linear_has_the_bits_of_the_reference(
    launched: Launched, element: str, nonlinearity: Activation, scale: str, m: int, k: int, per_token: bool
) -> None:
    n = 72
    p = replace(problem(m, n, k, 128, element=element), nonlinearity=nonlinearity)
    p = replace(p, scope=PerToken()) if per_token else p
    for data in ("ordinary", "edges"):
        bias = floats(data, (n,), ElementKind.F32 if element == "f32" else p.element, 1)
        residual = floats(data, (m, n), p.element, 2)
        given: dict[str, Any] = {"bias": bias, "residual": residual}
        if scale == "tensor":
            given["weight_scale"] = floats("ordinary", (n,), ElementKind.F32, 3).abs() * 2.0**-10
        assert_reference_bits(launched, p, scale, **given)
