"""The W8A8 linears on a real GPU against the reference on the same device: every output, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

import baracuda
from baracuda import Activation, BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from baracuda.core.problem import Problem, scale_elements
from baracuda.plans.plan import SelectedPlan
from cases import LINEAR_CASES, Case, assert_same_bits, operands, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
TRITON, REFERENCE = BackendKind.TRITON, BackendKind.REFERENCE
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
    (300, 640, 8192),
    (1400, 1664, 4112),
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


def problem(
    op: QuantizeKind,
    shape: tuple[int, int, int],
    element: ElementKind,
    mode: DynamicRangeMode,
    activation: Activation = Activation.NONE,
) -> Problem:
    low, stored = -127 if mode is DynamicRangeMode.SYMMETRIC else -128, scale_elements(element)[0]
    return Problem(
        op, shape, element, ElementKind.S8, low, 127, mode=mode, scale_element=stored, nonlinearity=activation
    )


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


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_every_case_of_the_matrix_has_the_bits_of_the_reference(case) -> None:
    assert_matches(case)


#: One shape for each way out: few tokens, folded and not, both tile schedules, tiles in parts, portable.
WAYS_OUT = [(1, 4104, 1024), (2, 1024, 8192), (16, 1024, 8192), (33, 4104, 528), (300, 1032, 272), (600, 512, 8192)]
WAYS_OUT += [(1400, 1664, 4112), (127, 131, 137)]


EPILOGUES = [(Activation.NONE, True), (Activation.RELU, False), (Activation.GELU, True), (Activation.SILU, False)]


@pytest.mark.parametrize("activation, residual", EPILOGUES)
@pytest.mark.parametrize("shape", WAYS_OUT, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("op", LINEARS, ids=lambda op: op.value)
def test_an_epilogue_has_the_bits_of_the_reference(op, shape, activation, residual) -> None:
    for element, scale, data in FORMS if activation is Activation.GELU else FORMS[:1]:
        p = problem(op, shape, element, DynamicRangeMode.SYMMETRIC, activation)
        assert_matches(Case(p, data, scale, residual=residual))


@pytest.mark.parametrize("activation", [Activation.RELU, Activation.GELU, Activation.SILU], ids=lambda kind: kind.value)
@pytest.mark.parametrize("element", [ElementKind.F32, ElementKind.F64], ids=lambda kind: kind.value)
def test_an_activation_has_the_bits_of_the_reference_over_the_whole_range(element, activation) -> None:
    """With nothing to sum, the output is the activation of the bias: of each of the 2**32 f32, or of random doubles."""
    n, op = 2**26, QuantizeKind.SMOOTHQUANT_LINEAR
    p = problem(op, (1, n, 0), element, DynamicRangeMode.SYMMETRIC, activation)
    plans = [SelectedPlan(p, DEVICE, PlanPreference(prefer_backend=kind)) for kind in (TRITON, REFERENCE)]
    empty = torch.empty(n, 0, dtype=torch.int8, device=DEVICE)
    results = [torch.empty(1, n, dtype=element.dtype, device=DEVICE) for _ in plans]
    for bias in every_f32(n) if element is ElementKind.F32 else random_doubles(n):
        for plan, out in zip(plans, results, strict=True):
            plan.launch((empty[:1], 1.0, None, empty, 1.0, bias, None, None, None, out), plan.allocate_workspace())
        assert torch.equal(*(out.view(torch.int32) for out in results))


def every_f32(n: int) -> Iterator[torch.Tensor]:
    for first in range(-(2**31), 2**31, n):
        yield torch.arange(first, first + n, device=DEVICE, dtype=torch.int64).to(torch.int32).view(torch.float32)


def random_doubles(n: int) -> Iterator[torch.Tensor]:
    for spread in (1.0, 30.0):
        yield torch.randn(n, device=DEVICE, dtype=torch.float64) * spread


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.U8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("m", [3, 130])
def test_sums_beyond_int32_are_exact(kind, m) -> None:
    k, n = 140_000, 24
    p = Problem(QuantizeKind.SMOOTHQUANT_LINEAR, (m, n, k), ElementKind.F32, kind, kind.q_min, kind.q_max)
    act = torch.full((m, k), kind.q_max if kind is ElementKind.U8 else kind.q_min, dtype=kind.dtype, device=DEVICE)
    weight = torch.full((n, k), -128, dtype=torch.int8, device=DEVICE)
    results = []
    for backend in (BackendKind.TRITON, BackendKind.REFERENCE):
        plan = SelectedPlan(p, DEVICE, PlanPreference(prefer_backend=backend))
        out = torch.zeros(m, n, device=DEVICE)
        plan.launch((act, 1.0, None, weight, 1.0, None, None, None, None, out), plan.allocate_workspace())
        results.append(out)
    assert torch.equal(*results)
    assert abs(float(results[0][0, 0])) > 2**31


def packed_problem(op: QuantizeKind, m: int, n: int, k: int, group: int, element: ElementKind) -> Problem:
    return Problem(op, (m, n, k), element, ElementKind.S8, -127, 127, weight=ElementKind.S4, weight_group=group)


#: N, K, group: whole tiles and parts, groups smaller and larger than a step, and one that is no power of two.
PACKED = [(1032, 4096, 128), (264, 1536, 0), (520, 1024, 32), (136, 2048, 512), (4104, 768, 96), (72, 14336, 64)]
#: Few tokens whose warps share out K: many tiles, and warps with fewer chunks than others.
PACKED += [(8456, 4096, 128), (136, 6208, 64), (24, 16384, 0)]
#: Few tokens over two parts of K.
PARTS = (2888, 8224, 32)
PACKED += [PARTS]


@pytest.mark.parametrize("n, k, group", PACKED)
@pytest.mark.parametrize("op", LINEARS, ids=lambda op: op.value)
def test_a_packed_weight_has_the_bits_of_the_reference_for_any_number_of_tokens(op, n, k, group) -> None:
    for m in (1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 129, 300):
        p = packed_problem(op, m, n, k, group, ElementKind.BF16)
        assert SelectedPlan(p, DEVICE).sku().kernel == "hopper"
        assert_matches(Case(p))


@pytest.mark.parametrize(
    "m, n, k, group", [(1, 1032, 1024, 128), (16, 1032, 1024, 128), (300, 1032, 1024, 128), (13, *PARTS)]
)
@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.F32], ids=lambda kind: kind.value)
def test_a_packed_weight_takes_every_epilogue(element, m, n, k, group) -> None:
    for activation in Activation:
        p = replace(packed_problem(LINEARS[0], m, n, k, group, element), nonlinearity=activation)
        assert_matches(Case(p, "edges", residual=True))


def test_few_tokens_of_a_long_packed_weight_are_multiplied_in_parts() -> None:
    for m, parts in ((8, False), (9, True), (16, True), (17, False)):
        p = packed_problem(LINEARS[0], m, *PARTS, ElementKind.BF16)
        assert ("K in 2" in SelectedPlan(p, DEVICE).sku().epilogue) == parts, m


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_packed_weight_and_many_tokens_have_the_same_bits_at_every_launch(group) -> None:
    case = Case(packed_problem(LINEARS[1], 2048, 4096, 4096, group, ElementKind.BF16))
    plan = SelectedPlan(case.problem, DEVICE, PlanPreference(prefer_backend=TRITON))
    values = operands(case, DEVICE)
    reference = SelectedPlan(case.problem, DEVICE, PlanPreference(prefer_backend=REFERENCE))
    reference.launch(values, reference.allocate_workspace())
    expected, room = values[-1].clone(), plan.allocate_workspace()
    for _ in range(30):
        values[-1].fill_(77)
        plan.launch(values, room)
        assert torch.equal(values[-1], expected)


#: Element, weight, group, zero points, type of the scales.
WEIGHT_ONLY = [
    (ElementKind.BF16, ElementKind.S4, 128, False, torch.bfloat16),
    (ElementKind.BF16, ElementKind.S4, 32, False, torch.float32),
    (ElementKind.F16, ElementKind.U4, 64, True, torch.float16),
    (ElementKind.BF16, ElementKind.S8, 128, True, torch.float32),
    (ElementKind.F16, ElementKind.S8, 0, False, torch.float32),
]


def weight_only_inputs(m, n, k, form):
    element, weight, group, zero_point, scale = form
    generator = torch.Generator(DEVICE).manual_seed(n)
    x = torch.randn(m, k, generator=generator, device=DEVICE).to(element.dtype)
    stored = torch.randint(0, 256, (n, k // 2 if weight.is_packed else k), generator=generator, device=DEVICE)
    segments = (n, k // group if group else 1)
    scales = ((torch.rand(segments, generator=generator, device=DEVICE) + 0.1) * 0.01).to(scale)
    zeros = torch.randint(-20, 20, segments, generator=generator, device=DEVICE, dtype=torch.int32)
    return x, stored.to(torch.uint8).view(weight.dtype), scales, zeros if zero_point else None


def weight_only_output(m, n, k, form, inputs):
    element, weight, group, *_ = form
    op = QuantizeKind.WEIGHT_ONLY_LINEAR
    p = Problem(op, (m, n, k), element, ElementKind.S8, -128, 127, weight=weight, weight_group=group)
    plan = SelectedPlan(p, DEVICE, PlanPreference(prefer_backend=TRITON))
    return plan, plan.compute((*inputs, None, None))[0]


@pytest.mark.parametrize("form", WEIGHT_ONLY, ids=str)
@pytest.mark.parametrize("n, k", [(264, 1024), (1032, 4096), (4096, 14336)])
def test_a_weight_only_linear_is_near_the_exact_result_and_a_row_keeps_its_bits_in_every_batch(n, k, form) -> None:
    inputs = weight_only_inputs(300, n, k, form)
    x, stored, scales, zeros = inputs
    plan, whole = weight_only_output(300, n, k, form, inputs)
    assert plan.sku().kernel == "weight_only_hopper" and plan.precision_guarantee().batch_invariant
    integers = baracuda.unpack_int4(stored, form[1], k) if form[1].is_packed else stored
    integers = integers.view(*scales.shape, -1).double() - (0 if zeros is None else zeros[:, :, None])
    weight = (integers * scales.double()[:, :, None]).view(n, k)
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    promised = plan.precision_guarantee().relative_error
    bound = promised * size + torch.finfo(x.dtype).eps / 2 * exact.abs() * (1 + promised)
    assert bool(((whole.double() - exact).abs() <= bound).all())
    for m in (1, 2, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 299):
        _, part = weight_only_output(m, n, k, form, (x[300 - m :], *inputs[1:]))
        assert torch.equal(part, whole[300 - m :]), m


@pytest.mark.parametrize("n, k", [(264, 1024), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
@pytest.mark.parametrize("form", [form for form in WEIGHT_ONLY if form[1].is_packed], ids=str)
def test_few_tokens_of_a_weight_only_linear_have_the_bits_of_many(n, k, form) -> None:
    """mma.sync and wgmma add up the same 16 products with the same bits, whatever their order."""
    inputs = weight_only_inputs(300, n, k, form)
    _, whole = weight_only_output(300, n, k, form, inputs)
    for m in range(1, 17):
        plan, part = weight_only_output(m, n, k, form, (inputs[0][:m], *inputs[1:]))
        ring = (m > 1 and n * k > 2**25) or (m > 8 and (n, k) == (4096, 4096))
        assert ("chunks ahead" in plan.sku().epilogue) != ring
        assert torch.equal(part, whole[:m]), m


def test_a_weight_written_by_the_kernel_before_is_read_as_written() -> None:
    """The weight's copies start before that kernel ends only where it is known not to write the weight."""
    for op, stored in product(LINEARS, (ElementKind.S8, ElementKind.S4)):
        p = problem(op, (1, 4096, 4096), ElementKind.BF16, DynamicRangeMode.SYMMETRIC)
        case = Case(replace(p, weight=stored))
        plan = SelectedPlan(case.problem, DEVICE, PlanPreference(prefer_backend=TRITON))
        values = operands(case, DEVICE)
        at = 1 if op is QuantizeKind.QUANTIZED_LINEAR else 3
        weight, scale = values[at], torch.ones((), device=DEVICE)
        wanted = weight.clone()
        floats = (baracuda.unpack_int4(weight, stored, 4096) if stored.is_packed else weight).float()
        room = plan.allocate_workspace()
        plan.launch(values, room)
        expected = values[-1].clone()
        for _ in range(20):
            weight.zero_()
            values[-1].fill_(77)
            baracuda.quantize(floats, scale, dtype=stored, out=weight)
            plan.launch(values, room)
            assert torch.equal(weight, wanted) and torch.equal(values[-1], expected)


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
    *inputs, _, _, output = operands(case, DEVICE)
    shifted = torch.empty(output.numel() + 1, dtype=output.dtype, device=DEVICE)[1:].view_as(output)
    odd = torch.randn(output.numel() + 1, device=DEVICE).to(output.dtype)[1:].view_as(output)
    room = torch.empty(plan.workspace_size(), dtype=torch.uint8, device=DEVICE)
    for residual in (None, odd):
        aligned = None if residual is None else residual.clone()
        plan.launch((*inputs, aligned, None, output), room)
        plan.launch((*inputs, residual, None, shifted), room)
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
