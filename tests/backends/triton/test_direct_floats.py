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
    """Rows of the kernel with decoding warps are those of this one for every number of tokens."""
    _, n, k = p.shape
    with monkeypatch.context() as patch:
        patch.setattr(support, "TAKES_DIRECT_FLOATS", False)
        patch.setattr(tune, "few_floats", lambda *sizes: None)
        split = tune.weight_only_split(n, k, PROCESSORS)
        p16 = replace(p, shape=(16, n, k))
        wanted = output(launched, p16, given, ["gemm_packed", *["sum_parts"] * (split > 1)])
    assert bool(wanted.isfinite().all()) and bool((wanted != 0).any())
    for m in tokens:
        got = output(launched, replace(p, shape=(m, n, k)), given, ["gemm_direct_floats"])
        assert torch.equal(got.view(torch.int16), wanted[:m].view(torch.int16)), m


@pytest.mark.parametrize("k, group", [(128, 0), (512, 128)])
def test_first(launched, monkeypatch, k, group) -> None:
    p = problem(1, 24, k, group)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p), (1, 3, 8, 16))
