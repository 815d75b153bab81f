"""The whole case matrix against formulas written a second time, in NumPy: the reference has these bits."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch

import cases
from baracuda import BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan


def assert_matches_numpy(problem: Problem, operands: tuple[object, ...], outputs: dict[str, torch.Tensor]) -> None:
    names = [operand.name for operand in OPS[problem.op].operands]
    expected = oracles.expected(problem, dict(zip(names, operands, strict=True)))
    assert outputs.keys() == expected.keys()
    for name, want in expected.items():
        got = oracles.bits_of(outputs[name])
        assert got.shape == want.shape
        different = np.argwhere(got != want)
        if len(different):
            at = tuple(different[0])
            pytest.fail(
                f"{name} differs in {len(different)} places, first at {at}: got {got[at]:#x}, expected {want[at]:#x}"
            )


@pytest.mark.parametrize("case", [*cases.CASES, *cases.GROUP_CASES], ids=str)
def test_the_reference_has_the_bits_of_the_numpy_formulas(case: cases.Case) -> None:
    assert_matches_numpy(case.problem, cases.operands(case), cases.run(case, BackendKind.REFERENCE))


@pytest.mark.parametrize("mode", DynamicRangeMode)
@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.F64])
def test_the_scratch_of_a_linear_receives_the_quantized_activations(
    mode: DynamicRangeMode, element: ElementKind
) -> None:
    m, n, k = 5, 3, 40
    low = -127 if mode is DynamicRangeMode.SYMMETRIC else -128
    scale_element = ElementKind.F64 if element is ElementKind.F64 else ElementKind.F32
    problem = Problem(
        QuantizeKind.QUANTIZED_LINEAR,
        (m, n, k),
        element,
        ElementKind.S8,
        low,
        127,
        mode=mode,
        scale_element=scale_element,
    )
    x = cases.floats("ordinary", (m, k), element, 1)
    weight = torch.randint(-128, 128, (n, k), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    weight_scale = torch.tensor([0.5, 0.01, 3.0], dtype=scale_element.dtype)
    act_q, act_scale = torch.full((m, k), 77, dtype=torch.int8), torch.full((m,), 77, dtype=scale_element.dtype)
    output = torch.full((m, n), 77, dtype=element.dtype)
    operands = (x, weight, weight_scale, None, None, None, None, act_q, act_scale, output)
    SelectedPlan(problem, torch.device("cpu"), PlanPreference(prefer_backend=BackendKind.REFERENCE)).launch(operands)
    outputs = {"act_q_scratch": act_q, "act_scale_scratch": act_scale, "output": output}
    assert_matches_numpy(problem, operands, outputs)
