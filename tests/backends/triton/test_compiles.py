"""The GPU kernels that plans take compile with the installed Triton, for every architecture that they claim.

Nothing runs here. A compiler that aborts ends the process, and with it the test.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from fake_cuda import build
from launched import GPU, Launched

from baracuda import Activation, BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind, Unsupported
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan
from cases import CASES, GROUP_CASES, Case, operands

pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

#: Bytes of shared memory that a program may have.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
WEIGHTS = [(ElementKind.S8, 0), (ElementKind.S4, 0), (ElementKind.S4, 64)]


def one_of_each_kind() -> list[Case]:
    """A case of each operation, mode and weight of the matrix, with something in it, and weight-only linears."""
    draw, kinds = random.Random(8), defaultdict(list)
    for case in [*CASES, *GROUP_CASES]:
        p = case.problem
        if 0 not in p.shape:
            kinds[p.op, p.mode, p.weight, p.weight_group > 0].append(case)
    weights = [(rows, *weight) for rows in (1, 17, 300) for weight in WEIGHTS]
    weight_only = [
        Problem(
            QuantizeKind.WEIGHT_ONLY_LINEAR, (rows, 256, 1024), ElementKind.BF16, ElementKind.S8, -128, 127,
            weight=weight, weight_group=group,
        )
        for rows, weight, group in weights
    ]  # fmt: skip
    return [*map(draw.choice, kinds.values()), *map(Case, weight_only)]


def compile_for(case: Case) -> None:
    """Take the plan's kernel on the GPU that is not there, and launch it."""
    plan = SelectedPlan(case.problem, GPU, PlanPreference(prefer_backend=BackendKind.TRITON))
    assert plan.sku().backend is BackendKind.TRITON
    workspace = torch.empty(max(plan.workspace_size(), 1), dtype=torch.uint8)
    plan.kernel.bind(case.problem, GPU)(operands(case), workspace)


@pytest.mark.parametrize("rows", [17, 300])
@pytest.mark.parametrize("weight, group", WEIGHTS, ids=str)
@pytest.mark.parametrize("mode", list(DynamicRangeMode), ids=lambda mode: mode.value)
def test_linears_compile_for_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any, mode: DynamicRangeMode, weight: ElementKind, group: int,
    rows: int,
) -> None:  # fmt: skip
    launched, ends = Launched(build(tmp_path_factory), monkeypatch), (Activation.NONE, Activation.SILU)
    for element, nonlinearity, (n, k) in product((ElementKind.BF16, ElementKind.F32), ends, ((33, 192), (1032, 1024))):
        p = Problem(
            QuantizeKind.QUANTIZED_LINEAR, (rows, n, k), element, ElementKind.S8, -127, 127, mode=mode, weight=weight,
            weight_group=group, nonlinearity=nonlinearity,
        )  # fmt: skip
        compile_for(Case(p))
    assert len(launched.compiled) >= 8


@pytest.mark.parametrize("arch", list(SHARED))
def test_every_operation_compiles_for_every_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any, arch: int
) -> None:
    launched = Launched(build(tmp_path_factory), monkeypatch, arch=arch)
    for case in one_of_each_kind():
        before = len(launched.compiled)
        compile_for(case)
        for compiled in launched.compiled[before:]:
            assert f".target sm_{arch}" in compiled.asm["ptx"] and compiled.metadata.shared <= SHARED[arch], case
        assert len(launched.compiled) > before, case


@pytest.mark.parametrize("op", [QuantizeKind.QUANTIZE, QuantizeKind.SMOOTHQUANT_LINEAR], ids=lambda op: op.value)
def test_a_kernel_that_this_triton_does_not_compile_is_an_error_with_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any, op: QuantizeKind
) -> None:
    import triton

    def fail(*_: object, **__: object) -> None:
        try:
            raise AttributeError("'shared_memory_descriptor' has no attribute 'reinterpret'\nbehind it")
        except AttributeError as error:
            raise RuntimeError("at 3:4: what stands around it") from error

    Launched(build(tmp_path_factory), monkeypatch)
    monkeypatch.setattr(triton, "compile", fail)
    case = next(c for c in CASES if c.problem.op is op and 0 not in c.problem.shape)
    with pytest.raises(
        Unsupported, match=rf"Triton {triton.__version__} does not compile .* for sm_90: 'shared_"
    ) as raised:
        compile_for(case)
    assert "behind it" not in str(raised.value) and "3.6 to 3.9" in str(raised.value)
