"""The sm_90 weight-only linear for the fewest tokens: its PTX interpreted, a row's bits those of the other kernels."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import build
from launched import Launched, interpreted
from torch import Tensor

from baracuda import Activation, ElementKind, QuantizeKind
from baracuda.backends.triton.linear import support, tune
from baracuda.core.problem import Problem

pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

#: So few that programs have several tiles.
PROCESSORS = 2


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    fake = build(tmp_path_factory)
    fake.set(0, 0, 0)
    return Launched(fake, monkeypatch, PROCESSORS)


def problem(m: int, n: int, k: int, group: int, weight: str = "s4", element: str = "bf16") -> Problem:
    p = Problem(
        QuantizeKind.WEIGHT_ONLY_LINEAR, (m, n, k), ElementKind.of(element), ElementKind.S8, -128, 127,
        weight=ElementKind.of(weight),
    )  # fmt: skip
    return replace(p, weight_group=group)


def operands_of(p: Problem, zero_points: bool = False, wide: bool = False, ends: bool = False) -> list[Any]:
    """The operands of 16 tokens; the scales in f32 if they are `wide`."""
    (_, n, k), dtype = p.shape, p.element.dtype
    generator = torch.Generator().manual_seed(n + k)
    x = torch.randn(16, k, generator=generator).to(dtype)
    stored = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8).view(p.weight.dtype)
    segments = (n, k // p.weight_group if p.weight_group else 1)
    scales = ((torch.rand(segments, generator=generator) + 0.1) * 0.01).to(torch.float32 if wide else dtype)
    zeros = torch.randint(-20, 20, segments, generator=generator, dtype=torch.int32) if zero_points else None
    bias = torch.randn(n, generator=generator).to(dtype) if ends else None
    residual = torch.randn(16, n, generator=generator).to(dtype) if ends else None
    return [x, stored, scales, zeros, bias, residual]


def output(launched: Launched, p: Problem, given: list[Any], names: list[str]) -> Tensor:
    """What the kernels `names` make of the first tokens."""
    m, n, _ = p.shape
    x, *rest, residual = given
    x, residual = (None if value is None else value[:m].clone() for value in (x, residual))
    out = torch.full((m, n), 77.0, dtype=p.element.dtype)
    assert interpreted(launched, p, (x, *rest, residual, out)) == names
    return out


def assert_bits_of_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, p: Problem, given: list[Any], tokens: tuple[int, ...]
) -> None:
    """Rows are those of the kernel with a ring, which multiplies by warp groups, for every number of tokens."""
    _, n, k = p.shape
    with monkeypatch.context() as patch:
        patch.setattr(support, "TAKES_DIRECT_FLOATS", False)
        split = tune.weight_only_split(n, k, PROCESSORS)
        p16 = replace(p, shape=(16, n, k))
        wanted = output(launched, p16, given, ["gemm_few_floats", *["sum_parts"] * (split > 1)])
    assert bool(wanted.isfinite().all()) and bool((wanted != 0).any())
    for m in tokens:
        got = output(launched, replace(p, shape=(m, n, k)), given, ["gemm_direct_floats"])
        assert torch.equal(got.view(torch.int16), wanted[:m].view(torch.int16)), m


#: N, K, group, tokens: K within a chunk, in one, two and four parts, with parts that differ, and several turns.
SIZES = [
    (24, 32, 0, (1, 9)),
    (24, 128, 0, (1, 16)),
    (24, 416, 32, (3, 12)),
    (40, 512, 128, (1, 3, 8, 16)),
    (264, 512, 64, (2, 11)),
    (24, 2048, 128, (5, 16)),
    (136, 2176, 0, (7,)),
    (24, 2560, 256, (1, 10)),
    (40, 4096, 128, (2, 9)),
    (40, 4096, 32, (1,)),
    (24, 4352, 64, (4, 13)),
]


@pytest.mark.parametrize("n, k, group, tokens", SIZES)
def test_a_row_has_the_bits_of_the_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, n: int, k: int, group: int, tokens: tuple[int, ...]
) -> None:
    p = problem(1, n, k, group)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p), tokens)


def test_a_row_has_the_same_bits_for_every_number_of_tokens(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(1, 72, 1024, 128)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p), tuple(range(1, 17)))


@pytest.mark.parametrize("weight, element, zero_points, wide", [
    ("s4", "f16", False, False), ("u4", "bf16", True, False), ("u4", "f16", False, True), ("s4", "bf16", True, True),
])  # fmt: skip
@pytest.mark.parametrize("k, group", [(1024, 128), (2048, 32), (320, 0)])
def test_every_weight_has_the_bits_of_the_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, weight: str, element: str, zero_points: bool, wide: bool,
    k: int, group: int,
) -> None:  # fmt: skip
    p = problem(1, 40, k, group, weight, element)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p, zero_points, wide), (3, 16))


@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("nonlinearity", [Activation.NONE, Activation.GELU, Activation.SILU])
def test_every_end_has_the_bits_of_the_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, nonlinearity: Activation, k: int
) -> None:
    p = replace(problem(1, 40, k, 128), nonlinearity=nonlinearity)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p, ends=True), (2, 9))
