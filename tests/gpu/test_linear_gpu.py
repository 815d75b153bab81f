"""The W8A8 linears on a real GPU against the reference on the same device: every output, bit for bit."""

from __future__ import annotations

import pytest
import torch

from baracuda import BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from baracuda.plan import SelectedPlan
from baracuda.problem import Problem, scale_elements
from cases import CASES, Case, assert_same_bits, is_linear, operands, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
LINEARS = (QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR)
#: Ones, zeros, primes, sizes on both sides of every tile and schedule, K = 16385 and M > 65535.
SHAPES = [
    (1, 1, 1),
    (0, 16, 16),
    (16, 0, 16),
    (7, 16, 0),
    (127, 131, 137),
    (1031, 1033, 1039),
    (1, 14336, 512),
    (3, 272, 1040),
    (4, 1024, 4096),
    (5, 512, 528),
    (16, 1024, 4096),
    (17, 264, 512),
    (33, 1000, 4096),
    (64, 4104, 2048),
    (65, 136, 144),
    (256, 512, 1024),
    (300, 1032, 272),
    (700, 1544, 2064),
    (1000, 1536, 4096),
    (600, 512, 8192),
    (2100, 2056, 1040),
    (4097, 8200, 48),
    (3, 8, 16385),
    (130, 24, 16385),
    (16, 64, 16400),
    (70000, 48, 32),
]
#: Element, form of the scales, data.
FORMS = [
    (ElementKind.BF16, "tensor", "ordinary"),
    (ElementKind.F16, "input_type", "edges"),
    (ElementKind.F32, "number", "poison"),
]


def problem(op: QuantizeKind, shape: tuple[int, int, int], element: ElementKind, mode: DynamicRangeMode) -> Problem:
    low = -127 if mode is DynamicRangeMode.SYMMETRIC else -128
    return Problem(op, shape, element, ElementKind.S8, low, 127, mode=mode, scale_element=scale_elements(element)[0])


def assert_matches(case: Case) -> None:
    assert_same_bits(run(case, BackendKind.TRITON, DEVICE), run(case, BackendKind.REFERENCE, DEVICE), case)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0].value)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("op", LINEARS, ids=lambda op: op.value)
def test_a_linear_of_any_shape_has_the_bits_of_the_reference(op, shape, form) -> None:
    element, scale, data = form
    assert_matches(Case(problem(op, shape, element, DynamicRangeMode.SYMMETRIC), data, scale))


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("op", LINEARS, ids=lambda op: op.value)
def test_an_asymmetric_linear_of_any_shape_has_the_bits_of_the_reference(op, shape) -> None:
    assert_matches(Case(problem(op, shape, ElementKind.BF16, DynamicRangeMode.ASYMMETRIC)))


@pytest.mark.parametrize("case", [case for case in CASES if is_linear(case)], ids=str)
def test_every_case_of_the_matrix_has_the_bits_of_the_reference(case) -> None:
    assert_matches(case)


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (16, 4096, 4096), (256, 512, 1024)])
def test_a_linear_can_be_captured_in_a_graph_and_replayed_on_new_data(shape) -> None:
    case = Case(problem(QuantizeKind.QUANTIZED_LINEAR, shape, ElementKind.BF16, DynamicRangeMode.SYMMETRIC))
    plan = SelectedPlan(case.problem, DEVICE, PlanPreference(prefer_backend=BackendKind.TRITON))
    values = operands(case, DEVICE)
    room = torch.empty(plan.workspace_size(), dtype=torch.uint8, device=DEVICE)
    plan.launch(values, room)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch(values, room)
    values[0].mul_(-0.5)
    values[-1].fill_(77)
    graph.replay()
    replayed = values[-1].clone()
    plan.launch(values, room)
    assert torch.equal(replayed, values[-1])


def test_an_output_the_copy_engine_cannot_address_is_written_all_the_same() -> None:
    case = Case(problem(QuantizeKind.SMOOTHQUANT_LINEAR, (300, 256, 512), ElementKind.BF16, DynamicRangeMode.SYMMETRIC))
    plan = SelectedPlan(case.problem, DEVICE, PlanPreference(prefer_backend=BackendKind.TRITON))
    *inputs, output = operands(case, DEVICE)
    shifted = torch.empty(output.numel() + 1, dtype=output.dtype, device=DEVICE)[1:].view_as(output)
    room = torch.empty(plan.workspace_size(), dtype=torch.uint8, device=DEVICE)
    plan.launch((*inputs, output), room)
    plan.launch((*inputs, shifted), room)
    assert torch.equal(output, shifted)


def test_scratch_receives_the_quantized_activations_and_their_scales() -> None:
    shape = (2, 256, 512)
    case = Case(problem(QuantizeKind.QUANTIZED_LINEAR, shape, ElementKind.BF16, DynamicRangeMode.SYMMETRIC))
    results = []
    for backend in (BackendKind.TRITON, BackendKind.REFERENCE):
        plan = SelectedPlan(case.problem, DEVICE, PlanPreference(prefer_backend=backend))
        *head, _, _, output = operands(case, DEVICE)
        q = torch.zeros(2, 512, dtype=torch.int8, device=DEVICE)
        scale = torch.zeros(2, device=DEVICE)
        room = torch.empty(plan.workspace_size(), dtype=torch.uint8, device=DEVICE)
        plan.launch((*head, q, scale, output), room)
        results.append((q, scale, output))
    for mine, reference in zip(*results, strict=True):
        assert torch.equal(mine, reference)
