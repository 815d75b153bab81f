"""The sm_90 linears for few tokens, with copies of TMA: their PTX interpreted, down to the output's bits."""

from __future__ import annotations

import os

import pytest
import torch
from launched import CPU, Launched, assert_reference_bits, interpreted, linear

from baracuda import BackendKind, PlanPreference, QuantizeKind
from baracuda.backends.triton.linear import tune
from baracuda.core.optable import OPS
from baracuda.core.packing import unpack_int4
from baracuda.plans.plan import SelectedPlan
from cases import Case, operands

pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

GIVEN, MADE, FLOAT = QuantizeKind.SMOOTHQUANT_LINEAR, QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.WEIGHT_ONLY_LINEAR


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    monkeypatch.setattr(tune, "direct", lambda *_: None)  # which has tests of its own
    return Launched.afresh(monkeypatch, tmp_path_factory, 1)


#: M, N, K, weight, group: products of warps and of warp groups, K within a step, in steps and folded.
FEW = [
    (3, 328, 528, "s8", 0),
    (16, 72, 1024, "s8", 0),
    (40, 72, 272, "s8", 0),
    (3, 328, 576, "s4", 32),
    (1, 72, 512, "s4", 0),
    (5, 72, 512, "s4", 128),
    (8, 72, 1152, "s4", 64),
    (16, 72, 1152, "s4", 128),
    (16, 72, 1024, "s4", 512),
    (32, 72, 512, "s4", 128),
]


@pytest.mark.parametrize("m, n, k, weight, group", FEW)
@pytest.mark.parametrize("op", [GIVEN, MADE], ids=lambda op: op.value)
def test_the_linear_for_few_tokens_has_the_bits_of_the_reference(
    launched: Launched, op: QuantizeKind, m: int, n: int, k: int, weight: str, group: int
) -> None:
    names = assert_reference_bits(launched, linear(op, m, n, k, weight, group))
    assert names[-1] == "gemm_few"


@pytest.mark.parametrize("op", [GIVEN, MADE], ids=lambda op: op.value)
@pytest.mark.parametrize("k, group, fold", [(1088, 32, 1), (1280, 128, 2), (1152, 0, 1)])
def test_parts_of_k_add_up_to_the_bits_of_the_reference(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, op: QuantizeKind, k: int, group: int, fold: int
) -> None:
    """The last part is shorter, and ends within a step."""
    tile = tune.Few(16 * fold, 64, 64, 3, 2, fold, split=3)
    monkeypatch.setattr(tune, "few", lambda *_: tile)
    names = assert_reference_bits(launched, linear(op, 13, 72, k, "s4", group))
    assert names[-2:] == ["gemm_few", "sum_parts"]


@pytest.mark.parametrize("m, n, k, group", [(3, 72, 512, 128), (16, 72, 1024, 32)])
@pytest.mark.parametrize("kernel", ["gemm_few_floats", "gemm_direct_floats"])
def test_the_weight_only_linear_for_few_tokens_is_within_its_stated_distance(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, kernel: str, m: int, n: int, k: int, group: int
) -> None:
    from baracuda.backends.triton.linear import support
    from baracuda.backends.triton.linear.support import weight_only_guarantee

    if kernel == "gemm_few_floats":
        monkeypatch.setattr(support, "direct_floats", lambda *_: None)
    p = linear(FLOAT, m, n, k, "s4", group)
    values, exact = (operands(Case(p, scale="input_type")) for _ in range(2))
    names = interpreted(launched, p, values)
    assert names[0] == kernel
    plan = SelectedPlan(p, CPU, PlanPreference(prefer_backend=BackendKind.REFERENCE))
    plan.launch(exact, plan.allocate_workspace())
    given = dict(zip((operand.name for operand in OPS[FLOAT].operands), exact, strict=True))
    q = unpack_int4(given["weight_q"], p.weight, k).double()
    scale = given["weight_scale"].double().repeat_interleave(group, dim=1)
    zeros = given["weight_zero_point"]
    q = q if zeros is None else q - zeros.repeat_interleave(group, dim=1)
    size = values[0].double().abs() @ (q * scale).abs().T
    wanted = exact[-1].double()
    bound = weight_only_guarantee(p).relative_error * size + torch.finfo(torch.bfloat16).eps * (wanted.abs() + 1)
    assert bool(((values[-1].double() - wanted).abs() <= bound).all())
