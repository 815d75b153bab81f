"""The sm_90 linears for many tokens, whose warps have parts of their own: their PTX interpreted, down to the bits."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from launched import Launched, assert_reference_bits, interpreted, linear
from torch import Tensor

from baracuda import Activation, ElementKind, QuantizeKind
from baracuda.backends.triton.linear import support, tune
from baracuda.core.packing import unpack_int4

pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

GIVEN, MADE, FLOAT = QuantizeKind.SMOOTHQUANT_LINEAR, QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.WEIGHT_ONLY_LINEAR


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched.afresh(monkeypatch, tmp_path_factory, 1)


#: M, N, K, group, element: one tile and several, K of a few steps and one that ends within one, every piece.
PACKED = [
    (300, 136, 256, 128, "bf16"),
    (257, 264, 416, 32, "f16"),
    (100, 136, 640, 0, "bf16"),
    (300, 72, 256, 64, "f32"),
]


@pytest.mark.parametrize("m, n, k, group, element", PACKED)
@pytest.mark.parametrize("op", [GIVEN, MADE], ids=lambda op: op.value)
def test_a_packed_weight_has_the_bits_of_the_reference(
    launched: Launched, op: QuantizeKind, m: int, n: int, k: int, group: int, element: str
) -> None:
    names = assert_reference_bits(launched, linear(op, m, n, k, "s4", group, element))
    assert names[-1] == "gemm_packed"


@pytest.mark.parametrize("m, n, k, element", [(300, 136, 256, "bf16"), (129, 264, 400, "f32")])
@pytest.mark.parametrize("op", [GIVEN, MADE], ids=lambda op: op.value)
def test_a_whole_weight_has_the_bits_of_the_reference(
    launched: Launched, op: QuantizeKind, m: int, n: int, k: int, element: str
) -> None:
    names = assert_reference_bits(launched, linear(op, m, n, k, "s8", 0, element))
    assert names[-1] == "gemm"


@pytest.mark.parametrize("split, apart", [(2, True), (2, False)], ids=["apart", "in turn"])
def test_parts_of_k_add_up_to_the_bits_of_the_reference(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, split: int, apart: bool
) -> None:
    """By a second kernel, or in the program that has them all, which keeps the sums of the parts before in memory."""
    tile = replace(tune.packed(100, 136, 640, 2, 1), split=split, apart=apart)
    monkeypatch.setattr(tune, "packed", lambda *_: tile)
    names = assert_reference_bits(launched, linear(GIVEN, 100, 136, 640, "s4", 128))
    assert names == ["gemm_packed", "sum_parts"][: 1 + apart]


@pytest.mark.parametrize("scale", ["tensor", "number"])
@pytest.mark.parametrize("nonlinearity", [Activation.NONE, Activation.GELU], ids=lambda a: a.value)
def test_every_end_has_the_bits_of_the_reference(launched: Launched, scale: str, nonlinearity: Activation) -> None:
    """Scales that come ahead of their piece, beside a bias and a residual that do not."""
    p = replace(linear(GIVEN, 300, 136, 256, "s4", 128), nonlinearity=nonlinearity)
    generator = torch.Generator().manual_seed(1)
    bias, residual = (torch.randn(size, generator=generator).bfloat16() for size in ((136,), (300, 136)))
    assert assert_reference_bits(launched, p, scale, bias=bias, residual=residual) == ["gemm_packed"]


@pytest.mark.parametrize("group", [0, 32, 128])
def test_a_row_of_a_weight_only_linear_has_the_bits_that_it_has_among_few(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    monkeypatch.setattr(support, "direct_floats", lambda *_: None)
    generator, (n, k) = torch.Generator().manual_seed(0), (72, 256)
    x = torch.randn(300, k, generator=generator).bfloat16()
    weight = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = ((torch.rand(n, k // group if group else 1, generator=generator) + 0.1) * 0.01).bfloat16()
    made = {}
    for m, kernel in ((16, "gemm_few_floats"), (300, "gemm_packed")):
        out = torch.full((m, n), 77.0).bfloat16()
        values = (x[:m].clone(), weight, scales, None, None, None, out)
        assert interpreted(launched, linear(FLOAT, m, n, k, "s4", group), values) == [kernel]
        made[m] = out.view(torch.int16)
    assert torch.equal(made[300][:16], made[16])
    exact = x.double() @ dequantized(weight, scales, k).T
    assert torch.allclose(made[300].view(torch.bfloat16).double(), exact, rtol=2**-6, atol=2**-6)


def dequantized(weight: Tensor, scales: Tensor, k: int) -> Tensor:
    q = unpack_int4(weight, ElementKind.S4, k).double()
    return q * scales.double().repeat_interleave(k // scales.shape[1], dim=1)
