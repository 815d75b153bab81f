"""A row's result does not depend on the batch around it: its size, its place, its neighbours, threads or a trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import baracuda
from baracuda import BackendKind, PlanPreference
from baracuda.backends.registry import kernels
from baracuda.core.types import QuantizeKind

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu")
N, K = 40, 96
#: Every number of rows up to 300, then the powers of two; the interpreter is a thousand times slower.
SIZES = [*range(1, 301), *(2**i for i in range(9, 14))] if not INTERPRETING else [1, 2, 15, 16, 17, 33]
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), *[pytest.mark.gpu] * (DEVICE.type == "cuda")]


@dataclass(frozen=True)
class Op:
    """A function of rows whose plan promises batch invariance."""

    name: str
    make: Callable[[torch.Generator], Callable[[Tensor], Tensor]]
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.name


def integers(generator: torch.Generator, *shape: int, low: int = -127, high: int = 128) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int8).to(DEVICE)


def scales(generator: torch.Generator, *shape: int) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.1 + 0.01).to(DEVICE)


def w8a8(generator: torch.Generator, **options: object) -> Callable[[Tensor], Tensor]:
    weight, scale = integers(generator, N, K), scales(generator, N)
    return lambda x: baracuda.quantized_linear(x, weight, scale, **options)  # type: ignore[arg-type]


def w4a8(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    weight, scale = baracuda.pack_int4(integers(generator, N, K, low=-8, high=8)), scales(generator, N)
    factors = torch.randint(1, 16, (N, K // 32), generator=generator, dtype=torch.uint8).to(DEVICE)
    return lambda x: baracuda.quantized_linear(x, weight, scale, weight_element="s4", weight_factor=factors)


def static(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    weight, scale = integers(generator, N, K), scales(generator, N)
    return lambda x: baracuda.smoothquant_linear(baracuda.quantize(x, 0.05), weight, 0.05, scale, dtype=x.dtype)


def weight_only(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    weight, scale = baracuda.pack_int4(integers(generator, N, K, low=-8, high=8)), scales(generator, N, K // 32)
    return lambda x: baracuda.weight_only_linear(x, weight, scale, weight_element="s4")


def normed(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    weight = scales(generator, K)
    return lambda x: baracuda.rms_norm(x, weight)


OPS = [
    Op("w8a8", w8a8),
    Op("w8a8-bf16", w8a8, torch.bfloat16),
    Op("w8a8-asymmetric", lambda generator: w8a8(generator, mode="asymmetric")),
    Op("w8a8-gelu", lambda generator: w8a8(generator, activation="gelu")),
    Op("w4a8", w4a8),
    Op("static", static),
    Op("weight-only", weight_only),
    Op("norm", normed),
]


def rows(op: Op, count: int) -> Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(1)).to(DEVICE, op.dtype)


def made(op: Op) -> Callable[[Tensor], Tensor]:
    return op.make(torch.Generator().manual_seed(0))


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("op", OPS, ids=str)
def test_the_number_of_rows_changes_no_bit(op: Op) -> None:
    function, x = made(op), rows(op, max(SIZES))
    whole = function(x)
    for count in SIZES:
        assert same(function(x[:count].contiguous()), whole[:count]), count


@pytest.mark.parametrize("op", OPS, ids=str)
def test_the_place_of_a_row_and_its_neighbours_change_no_bit(op: Op) -> None:
    function, x = made(op), rows(op, 17 if INTERPRETING else 300)
    whole = function(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert same(function(x[order]), whole[order])
    poisoned = x.clone()
    poisoned[1::2] = torch.nan
    poisoned[3::4] = torch.inf
    assert same(function(poisoned)[0::2].contiguous(), whole[0::2].contiguous())


@pytest.mark.skipif(INTERPRETING, reason="the interpreter has one thread, and no graph")
@pytest.mark.parametrize("op", OPS, ids=str)
def test_threads_and_a_trace_change_no_bit(op: Op) -> None:
    function, x = made(op), rows(op, 130)
    whole, threads = function(x), torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            assert same(function(x), whole), count
    finally:
        torch.set_num_threads(threads)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert same(compiled(x), whole) and same(compiled(x[:1]), whole[:1])


def test_a_function_that_depends_on_the_batch_is_noticed() -> None:
    x = rows(OPS[0], 8)
    assert not same((x - x.mean(0))[:3], x[:3] - x[:3].mean(0))


@pytest.mark.parametrize("backend", [BackendKind.CPU, BackendKind.REFERENCE])
def test_every_plan_of_a_linear_promises_it(backend: BackendKind) -> None:
    for op in (QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR, QuantizeKind.WEIGHT_ONLY_LINEAR):
        assert any(op in kernel.ops for kernel in kernels(backend))
    plan = baracuda.QuantizedLinearPlan.select(
        baracuda.QuantizedLinearDescriptor(3, N, K), preference=PlanPreference(prefer_backend=backend)
    )
    guarantee = plan.precision_guarantee()
    assert guarantee.batch_invariant and guarantee.split_invariant and guarantee.matches_reference
