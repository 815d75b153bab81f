"""Problems and operands of the learned backward, and the comparison that suits its sums."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from baracuda import (
    Arithmetic,
    BackendKind,
    ElementKind,
    PerChannel,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
    Scope,
)
from baracuda.core.problem import Problem
from baracuda.core.types import FLOATS
from baracuda.plans.plan import SelectedPlan
from cases import bits, floats

#: Segments of nothing but full blocks: one, several, side by side, strided.
FULL_BLOCKS: list[tuple[tuple[int, ...], Scope]] = [
    ((6, 1024), PerChannel(0)),
    ((3, 4096), PerChannel(0)),
    ((16384,), PerTensor()),
    ((2, 4, 8192), PerChannel(1)),
    ((64, 32), PerToken()),
    ((128, 128), PerChannel(1)),
]


def problems(layouts: list[tuple[tuple[int, ...], Scope]]) -> Iterator[Problem]:
    op, pick = QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD, random.Random(0).choice
    for shape, scope in layouts:
        for element in FLOATS:
            kind = pick([ElementKind.S8, ElementKind.U8])
            yield Problem(op, shape, element, kind, kind.q_min, kind.q_max, scope, arithmetic=pick(list(Arithmetic)))


def run(p: Problem, backend: BackendKind, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    device, pick = torch.device(device), random.Random(zlib.crc32(str(p).encode())).choice
    x = floats(pick(["ordinary", "edges", "ties", "bits"]), p.shape, p.element, 1) * pick([1, 30])
    dy, shape = floats("ordinary", p.shape, p.element, 2), p.segment_shape
    generator = torch.Generator().manual_seed(3)
    scale: Tensor | float = torch.rand(shape, generator=generator).to(p.element.math.dtype) * 0.5 + 0.01
    zero_point: Tensor | None = torch.randint(-130, 130, shape, generator=generator, dtype=torch.int32)
    scale, zero_point = pick([scale, scale, 0.25, scale * 2.0**-110]), pick([zero_point, zero_point, None])
    plan = SelectedPlan(p, device, PlanPreference(prefer_backend=backend))
    inputs = tuple(v.to(device) if isinstance(v, Tensor) else v for v in (x, dy, scale, zero_point))
    outputs, fewer = plan.compute(inputs), plan.only("grad_input", "grad_scale").compute(inputs)
    assert (fewer[2] is None) is (backend is BackendKind.TRITON)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(outputs, fewer, strict=True) if b is not None)
    return tuple(output.cpu() for output in outputs)


def assert_alike(p: Problem, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, ours, theirs in zip(("dx", "grad_scale", "grad_zero_point"), got, expected, strict=True):
        assert torch.equal(bits(ours), bits(theirs)), f"{p}: {name}: {ours} is not {theirs}"
