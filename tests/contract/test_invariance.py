"""A row's result does not depend on the batch around it: its size, its place, its neighbours, threads or a trace."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rows import NEIGHBOURS, ROW_CASES, random_case, require_independent_rows, some_rows
from torch import Tensor

import baracuda
from baracuda import BackendKind, PerChannel, PerGroup, PerTensor, PlanPreference, QuantizeKind, Scope
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan
from cases import Case

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETING else "cpu")
N, K = 40, 96
#: Every number of rows up to 300, then the powers of two; the interpreter is a thousand times slower.
SIZES = [*range(1, 301), *(2**i for i in range(9, 14))] if not INTERPRETING else [1, 2, 16, 17, 33]
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


def tokens(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Integers with a scale for each row, as fused norms and gated products hand them on."""
    weight, scale = integers(generator, N, K), scales(generator, N)

    def product(x: Tensor) -> Tensor:
        made = baracuda.dynamic_quantize(x, scope=baracuda.PerToken())
        return baracuda.smoothquant_linear(made.q, weight, made.scale, scale, dtype=x.dtype)

    return product


def weight_only(generator: torch.Generator, kind: str = "s4") -> Callable[[Tensor], Tensor]:
    weight, scale = integers(generator, N, K, low=-8, high=8), scales(generator, N, K // 32)
    weight = baracuda.pack_int4(weight) if kind == "s4" else weight
    return lambda x: baracuda.weight_only_linear(x, weight, scale, weight_element=kind)  # type: ignore[arg-type]


def normed(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    weight = scales(generator, K)
    return lambda x: baracuda.rms_norm(x, weight)


def layer_normed(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    weight, bias = scales(generator, K), scales(generator, K)
    return lambda x: torch.cat(baracuda.layer_norm(x, weight, bias, residual=x * 0.5), -1)


def norm_quantized(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    weight = scales(generator, K)
    return lambda x: all_bytes(baracuda.norm_quantize(x, weight, residual=x * 0.5))


def gate(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    return lambda x: baracuda.gated(x, activation="silu")


def gate_quantized(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    return lambda x: all_bytes(baracuda.gated_quantize(x, x.flip(-1), activation="gelu", mode="asymmetric"))


def all_bytes(made: Any) -> Tensor:
    """What an op that quantizes returns, as bytes side by side in each row."""
    found = [made.q, made.scale.unsqueeze(-1), made.zero_point, made.sum]
    found[2] = None if found[2] is None else found[2].unsqueeze(-1)
    return torch.cat([each.contiguous().view(torch.uint8) for each in found if each is not None], -1)


OPS = [
    Op("w8a8", w8a8),
    Op("w8a8-bf16", w8a8, torch.bfloat16),
    Op("w8a8-asymmetric", lambda generator: w8a8(generator, mode="asymmetric")),
    Op("w8a8-gelu", lambda generator: w8a8(generator, activation="gelu")),
    Op("w4a8", w4a8),
    Op("static", static),
    Op("tokens", tokens),
    Op("weight-only", weight_only),
    Op("weight-only-s8", lambda generator: weight_only(generator, "s8")),
    Op("weight-only-bf16", weight_only, torch.bfloat16),
    Op("norm", normed),
    Op("layer-norm", layer_normed),
    Op("norm-quantize", norm_quantized, torch.bfloat16),
    Op("gated", gate),
    Op("gated-quantize", gate_quantized),
]
#: All tests of an op in one process: there, its GPU kernels are compiled once (with xdist's `--dist loadgroup`).
EACH_OP = pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.xdist_group(op.name), id=op.name) for op in OPS]
)


def rows(op: Op, count: int) -> Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(1)).to(DEVICE, op.dtype)


def made(op: Op) -> Callable[[Tensor], Tensor]:
    return op.make(torch.Generator().manual_seed(0))


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@EACH_OP
def test_the_number_of_rows_changes_no_bit(op: Op) -> None:
    function, x = made(op), rows(op, max(SIZES))
    whole = function(x)
    for count in SIZES:
        assert same(function(x[:count].contiguous()), whole[:count]), count


@EACH_OP
def test_each_row_alone_is_the_row_in_a_batch(op: Op) -> None:
    function, x = made(op), rows(op, 17 if INTERPRETING else 300)
    whole = function(x)
    for i in range(0, len(x), 8 if INTERPRETING else 1):
        assert same(function(x[i : i + 1].clone()), whole[i : i + 1]), i


@EACH_OP
def test_the_place_of_a_row_and_its_neighbours_change_no_bit(op: Op) -> None:
    function, x = made(op), rows(op, 17 if INTERPRETING else 300)
    whole = function(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert same(function(x[order]), whole[order])
    for number in (torch.nan, torch.inf, None):
        others = x.clone()
        others[1::2] = number if number is not None else rows(op, len(x)).flip(0)[1::2] * 1000
        if number is not None:
            others[3::4] = -number
        assert same(function(others)[0::2].contiguous(), whole[0::2].contiguous()), number


@pytest.mark.skipif(INTERPRETING, reason="the interpreter has one thread, and no graph")
@EACH_OP
def test_threads_and_a_trace_change_no_bit(op: Op) -> None:
    function, x = made(op), rows(op, 130)
    whole, threads = function(x), torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            assert same(function(x), whole), count
    finally:
        torch.set_num_threads(threads)
    with ThreadPoolExecutor(4) as pool:  # at once, each its own rows
        parts = [slice(i, i + 1 + i % 7) for i in range(0, 120, 3)]
        for part, found in zip(parts, pool.map(lambda part: function(x[part].clone()), parts), strict=True):
            assert same(found, whole[part]), part
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert same(compiled(x), whole) and same(compiled(x[:1]), whole[:1])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@EACH_OP
def test_cuda_graphs_and_streams_change_no_bit(op: Op) -> None:
    function, x = made(op), rows(op, 130)
    whole = function(x)
    for count in (1, 17, 64, 130):
        kept = torch.zeros_like(x[:count])
        function(kept)  # compiles, and finds its plan
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = function(kept)
        kept.copy_(x[:count])
        graph.replay()
        assert same(y, whole[:count]), count
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    torch.cuda.synchronize()
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            found.append(function(x[i : i + 1 + i % 5]))
    torch.cuda.synchronize()
    assert all(same(y, whole[i : i + 1 + i % 5]) for i, y in enumerate(found))


# -- what plans promise, over the whole matrix -------------------------------------------------------------------

BACKENDS = [BackendKind.CPU, BackendKind.REFERENCE] if DEVICE.type == "cpu" else [BackendKind.TRITON]
BACKENDS = [BackendKind.TRITON] if INTERPRETING else BACKENDS


#: Ops whose promise not every kernel gives, or of which the matrix has no rows.
SOME_PROMISE = {QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD, QuantizeKind.WEIGHT_ONLY_LINEAR}


def promised_and_kept(case: Case, draw: random.Random, backend: BackendKind) -> bool:
    """Whether the plan of a case promises that no row depends on the others; raises where it does not keep that."""
    try:
        plan = SelectedPlan(case.problem, DEVICE, PlanPreference(prefer_backend=backend))
    except baracuda.Unsupported:  # it declines this one
        return False
    if not plan.precision_guarantee().batch_invariant:
        return False
    number = draw.choice([None, *NEIGHBOURS])
    require_independent_rows(case, some_rows(case.problem, draw), number, DEVICE, backend)
    return True


@pytest.mark.parametrize("op", list(dict.fromkeys(case.problem.op for case in ROW_CASES)), ids=lambda op: op.value)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)
def test_every_kind_of_plan_that_promises_it_keeps_it(backend: BackendKind, op: QuantizeKind) -> None:
    """A few cases of every scope and weight of the matrix."""
    draw, kinds = random.Random(op.value), defaultdict(list)
    for case in ROW_CASES:
        p = case.problem
        if p.op is op and (not INTERPRETING or p.shape[0] * p.shape[-1] < 600):
            kinds[type(p.scope), p.weight, p.weight_group > 0].append(case)
    cases = [case for group in kinds.values() for case in draw.sample(group, 1 if INTERPRETING else 4)]
    kept = [promised_and_kept(case, draw, backend) for case in cases]
    assert any(kept) or op in SOME_PROMISE


@pytest.mark.skipif(INTERPRETING, reason="the interpreter is too slow")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)
def test_random_plans_that_promise_it_keep_it(backend: BackendKind, seed: int) -> None:
    draw = random.Random(seed)
    kept = [promised_and_kept(random_case(draw), draw, backend) for _ in range(5)]
    assert any(kept)


ACROSS: list[tuple[Scope, bool]] = [
    (PerTensor(), False),
    (PerChannel(1), False),
    (PerChannel(0), True),
    (PerChannel(-2), True),
    (PerGroup(2, axis=0), False),
    (PerGroup(2, axis=1), True),
    (baracuda.PerToken(), True),
]


@pytest.mark.parametrize(("scope", "promised"), ACROSS, ids=str)
def test_a_range_across_rows_promises_nothing_and_breaks_it(scope: Scope, promised: bool) -> None:
    """Rows beside ones a hundred times as large: where the plan says that they matter, they do."""
    low = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pair = torch.stack([low[0], low[1] * 100, low[2], low[3] * 100])
    for op in (QuantizeKind.DYNAMIC_QUANTIZE, QuantizeKind.DYNAMIC_FAKE_QUANTIZE):
        problem = Problem(op, (4, 6), baracuda.ElementKind.F32, baracuda.ElementKind.S8, -127, 127, scope)
        plan = SelectedPlan(problem, DEVICE)
        assert plan.precision_guarantee().batch_invariant is promised
        calm, wild = (plan.compute((x,))[-1] for x in (low, pair))
        assert calm is not None and wild is not None
        assert same(calm[0::2].contiguous(), wild[0::2].contiguous()) is promised
    learned = replace(problem, op=QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD)
    assert SelectedPlan(learned, DEVICE).precision_guarantee().batch_invariant is promised


def test_a_function_that_depends_on_the_batch_is_noticed() -> None:
    x = rows(OPS[0], 8)
    assert not same((x - x.mean(0))[:3], x[:3] - x[:3].mean(0))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)
def test_every_plan_of_a_linear_promises_it(backend: BackendKind) -> None:
    preference = PlanPreference(prefer_backend=backend)
    for m in (1, 3, 64, 8192):
        plan = baracuda.QuantizedLinearPlan.select(
            baracuda.QuantizedLinearDescriptor(m, N, K), preference=preference, device=DEVICE
        )
        promised = plan.precision_guarantee()
        assert plan.sku().backend is backend
        assert promised.batch_invariant and promised.split_invariant and promised.matches_reference
