"""The Triton kernels on a CUDA device: the bits of the reference for every case, in graphs, on streams, at any size."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from index_split import assert_indices_are_split_as_python_divides
from torch import Tensor

from baracuda import (
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
    Scope,
)
from baracuda.backends.triton import tune as common
from baracuda.backends.triton.elementwise import tune
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.core.types import OpCategory
from baracuda.plans.plan import SelectedPlan
from cases import CASES, Case, assert_same_bits, is_linear, operands, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda:0"
TRITON = PlanPreference(prefer_backend=BackendKind.TRITON)


def _groups() -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in CASES:
        if not is_linear(case):
            p = case.problem
            groups[f"{p.op.value}-{'x'.join(map(str, p.shape)) or 'scalar'}-{p.scope}"].append(case)
    return groups


GROUPS = _groups()
SCOPES = [PerTensor(), PerChannel(0), PerChannel(1), PerChannel(2), PerToken(), PerGroup(8), PerGroup(3, axis=1)]


def _plan_and_operands(case: Case) -> tuple[SelectedPlan, tuple[object, ...], Tensor]:
    plan = SelectedPlan(case.problem, torch.device(DEVICE), TRITON)
    values = tuple(v.contiguous() if isinstance(v, Tensor) else v for v in operands(case, DEVICE))
    return plan, values, torch.empty(max(plan.workspace_size(), 1), dtype=torch.uint8, device=DEVICE)


def _outputs(case: Case, values: tuple[object, ...]) -> dict[str, Tensor]:
    rows = OPS[case.problem.op].operands
    return {o.name: v.cpu() for o, v in zip(rows, values, strict=True) if o.output and isinstance(v, Tensor)}


@pytest.mark.parametrize("group", GROUPS)
def test_the_device_has_the_bits_of_the_reference_and_of_the_cpu(group: str) -> None:
    for case in GROUPS[group]:
        expected = run(case, BackendKind.REFERENCE)
        assert_same_bits(run(case, BackendKind.TRITON, DEVICE), expected, case)
        assert_same_bits(run(case, BackendKind.CPU), expected, case)


def _plans() -> list[Case]:
    """Every op, scope and mode once, so every schedule; norms and gated products have tests of their own."""
    cases = []
    for op, row in OPS.items():
        if row.category is not OpCategory.QUANTIZATION:
            continue
        for scope in SCOPES:
            for mode in DynamicRangeMode if row.dynamic else [DynamicRangeMode.SYMMETRIC]:
                low = -127 if mode is DynamicRangeMode.SYMMETRIC else -128
                cases.append(Case(Problem(op, (4, 9, 40), ElementKind.BF16, ElementKind.S8, low, 127, scope, mode)))
    return cases


@pytest.mark.parametrize("case", _plans(), ids=str)
def test_every_plan_is_captured_in_a_graph_and_replayed(case: Case) -> None:
    plan, values, workspace = _plan_and_operands(case)
    plan.launch(values, workspace)  # compiles
    stream = torch.cuda.Stream(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        plan.launch(values, workspace)
    for operand, value in zip(OPS[case.problem.op].operands, values, strict=True):
        if operand.output and isinstance(value, Tensor):
            value.fill_(77)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(_outputs(case, values), run(case, BackendKind.REFERENCE), case)


def test_a_launch_goes_to_the_current_stream() -> None:
    case = Case(Problem(QuantizeKind.QUANTIZE, (64, 4096), ElementKind.F32, ElementKind.S8, -128, 127, PerToken()))
    plan, values, workspace = _plan_and_operands(case)
    plan.launch(values, workspace)
    x, target = values[0], values[3]
    assert isinstance(x, Tensor) and isinstance(target, Tensor)
    expected, source = target.clone(), x.clone()
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        x.fill_(1e30)
        torch.cuda._sleep(50_000_000)
        x.copy_(source)  # a launch on another stream would not wait for this
        plan.launch(values, workspace)
    stream.synchronize()
    assert torch.equal(target, expected)


class Chain:
    """Plans that read what the one before has just written, and write what it has just read, round after round."""

    def __init__(self, device: torch.device, rows: int) -> None:
        torch.manual_seed(rows)
        self.x = torch.randn(rows, 1024).to(torch.bfloat16).to(device)
        self.noise = [torch.randn(rows, 1024).to(torch.bfloat16).to(device) for _ in range(3)]
        self.y, self.z = torch.empty_like(self.x), torch.empty_like(self.x)
        q, packed = torch.empty(self.x.shape, dtype=torch.int8, device=device), torch.empty(rows, 512).to(device).byte()
        scale, zero_point = torch.empty((), device=device), torch.empty((), dtype=torch.int32, device=device)
        scales = torch.empty(1024, device=device)
        whole, last = PerTensor(), PerChannel(1)
        dynamic, dequantize = QuantizeKind.DYNAMIC_QUANTIZE, QuantizeKind.DEQUANTIZE
        self.steps = [
            self.step(device, dynamic, whole, ElementKind.S8, (self.x, scale, zero_point, q)),
            self.step(device, dequantize, whole, ElementKind.S8, (q, scale, zero_point, self.y)),
            self.step(device, dynamic, last, ElementKind.S4, (self.y, scales, None, packed)),
            self.step(device, dequantize, last, ElementKind.S4, (packed, scales, None, self.z)),
            self.step(
                device,
                QuantizeKind.FAKE_QUANTIZE_BACKWARD,
                whole,
                ElementKind.S8,
                (self.x, self.z, scale, zero_point, self.y),
            ),
        ]

    def step(
        self,
        device: torch.device,
        op: QuantizeKind,
        scope: PerTensor | PerChannel,
        kind: ElementKind,
        values: tuple[object, ...],
    ) -> tuple[SelectedPlan, tuple[object, ...], Tensor | None]:
        asymmetric = scope == PerTensor()
        mode = DynamicRangeMode.ASYMMETRIC if asymmetric else DynamicRangeMode.SYMMETRIC
        low = kind.q_min if asymmetric else -kind.q_max
        p = Problem(op, tuple(self.x.shape), ElementKind.BF16, kind, low, kind.q_max, scope, mode)
        plan = SelectedPlan(p, device)
        return plan, values, plan.allocate_workspace()

    def run(self, rounds: int) -> None:
        for i in range(rounds):
            for plan, values, workspace in self.steps:
                plan.launch(values, workspace)
            torch.add(self.y, self.noise[i % 3], out=self.x)


@pytest.mark.parametrize("rows", [1, 64, 1024, 9000])
def test_a_kernel_launched_with_pdl_waits_for_the_one_before_it(rows: int) -> None:
    expected = Chain(torch.device("cpu"), rows)
    expected.run(30)
    eager, replayed = Chain(torch.device(DEVICE), rows), Chain(torch.device(DEVICE), rows)
    eager.run(30)
    torch.cuda.synchronize()
    assert torch.equal(eager.x.cpu().view(torch.int16), expected.x.view(torch.int16))
    kept = replayed.x.clone()
    replayed.run(1)  # compiles
    replayed.x.copy_(kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.run(3)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed.x.cpu().view(torch.int16), expected.x.view(torch.int16))


def test_a_graph_joins_two_streams_before_a_kernel_that_reads_from_both() -> None:
    shape, device = (4096, 1024), torch.device(DEVICE)
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    y, dx = torch.empty_like(x), torch.empty_like(x)
    scale = torch.rand(shape[0], device=device) * 0.02 + 0.001

    def plan(op: QuantizeKind) -> SelectedPlan:
        return SelectedPlan(Problem(op, shape, ElementKind.F32, ElementKind.S8, -128, 127, PerToken()), device)

    forward, backward = plan(QuantizeKind.FAKE_QUANTIZE), plan(QuantizeKind.FAKE_QUANTIZE_BACKWARD)
    side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()

    def both() -> None:
        main = torch.cuda.current_stream(device)
        side.wait_stream(main)
        forward.launch((x, scale, None, y))
        with torch.cuda.stream(side):
            dx.zero_()  # no kernel: a memset
            forward.launch((dy, scale, None, dx))
        main.wait_stream(side)
        backward.launch((y, dx, scale, None, dy))

    kept = dy.clone()
    both()
    torch.cuda.synchronize()
    expected = dy.clone()
    dy.copy_(kept)
    with torch.cuda.graph(graph):
        both()
    for _ in range(20):
        y.fill_(1e30)
        dx.fill_(77.0)
        dy.copy_(kept)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(dy, expected)


def test_a_launch_allocates_nothing() -> None:
    case = Case(Problem(QuantizeKind.DYNAMIC_QUANTIZE, (64, 512), ElementKind.F32, ElementKind.S8, -127, 127))
    plan, values, workspace = _plan_and_operands(case)
    plan.launch(values, workspace)
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    plan.launch(values, workspace)
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.S4], ids=lambda kind: kind.value)
@pytest.mark.parametrize("op", [QuantizeKind.QUANTIZE, QuantizeKind.DYNAMIC_QUANTIZE], ids=lambda op: op.value)
@pytest.mark.parametrize("shift", [1, 3])
def test_operands_at_odd_addresses_give_the_same_bits(shift: int, op: QuantizeKind, kind: ElementKind) -> None:
    mode = DynamicRangeMode.ASYMMETRIC
    case = Case(Problem(op, (16, 256), ElementKind.BF16, kind, kind.q_min, kind.q_max, PerToken(), mode))
    plan, values, workspace = _plan_and_operands(case)
    x, *others, out = values
    assert isinstance(x, Tensor) and isinstance(out, Tensor)
    moved_x = torch.empty(x.numel() + shift, dtype=x.dtype, device=DEVICE)[shift:].view(x.shape).copy_(x)
    moved_out = torch.empty(out.numel() + shift, dtype=out.dtype, device=DEVICE)[shift:].view(out.shape)
    moved = (moved_x, *others, moved_out)
    plan.launch(moved, workspace)
    assert_same_bits(_outputs(case, moved), run(case, BackendKind.REFERENCE), case)


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.S4], ids=lambda kind: kind.value)
@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].elementwise], ids=lambda op: op.value)
def test_programs_that_walk_far_have_the_bits_of_the_cpu(op: QuantizeKind, kind: ElementKind) -> None:
    p = Problem(op, (40_009, 1046), ElementKind.BF16, kind, kind.q_min, kind.q_max, PerChannel(1))
    processors = common.processors_of(torch.device(DEVICE))
    assert tune.columns(p.view, 2, processors, work=common.Work.GRADIENT, packed=kind.is_packed).repeats > 1
    assert_same_bits(run(Case(p), BackendKind.TRITON, DEVICE), run(Case(p), BackendKind.CPU), p)


@pytest.mark.parametrize("scope", [PerToken(), PerChannel(1)], ids=str)
@pytest.mark.parametrize("op", [QuantizeKind.DEQUANTIZE, QuantizeKind.FAKE_QUANTIZE_BACKWARD], ids=lambda op: op.value)
def test_outputs_that_leave_the_cache_first_have_the_bits_of_the_cpu(
    op: QuantizeKind, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "cache_of", lambda device: 0)
    p = Problem(op, (1029, 1046), ElementKind.BF16, ElementKind.S4, -8, 7, scope)
    assert_same_bits(run(Case(p), BackendKind.TRITON, DEVICE), run(Case(p), BackendKind.CPU), p)


@pytest.mark.parametrize("scope", [PerTensor(), PerToken(), PerChannel(1)], ids=str)
def test_more_than_two_to_the_31_elements_work(scope: PerTensor | PerToken | PerChannel) -> None:
    shape = (2**31 // 4096 + 3, 4096)
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    p = Problem(QuantizeKind.DYNAMIC_QUANTIZE, shape, ElementKind.BF16, ElementKind.S8, -127, 127, scope)
    plan = SelectedPlan(p, torch.device(DEVICE), TRITON)
    x = torch.randn(shape[0], 1, dtype=torch.bfloat16, device=DEVICE) * torch.ones_like(
        torch.empty(1, shape[1], dtype=torch.bfloat16, device=DEVICE)
    )
    x[:, 0] = 5.0
    x[-1] = torch.linspace(-5, 5, shape[1], dtype=torch.bfloat16, device=DEVICE)
    scale = torch.empty(p.segment_shape, device=DEVICE)
    q = torch.full(shape, 77, dtype=torch.int8, device=DEVICE)
    workspace = torch.empty(max(plan.workspace_size(), 1), dtype=torch.uint8, device=DEVICE)
    plan.launch((x, scale, None, q), workspace)
    step = scale.view(-1, 1) if isinstance(scope, PerToken) else scale
    for rows in (slice(0, 64), slice(shape[0] // 2, shape[0] // 2 + 64), slice(shape[0] - 64, shape[0])):
        part = step[rows] if isinstance(scope, PerToken) else step
        expected = torch.round(x[rows].float() / part).clamp(-127, 127).to(torch.int8)
        assert torch.equal(q[rows], expected)


@pytest.mark.parametrize(
    ("shape", "scope"),
    [((2**31 + 4096, 2), PerToken()), ((4, 2**30), PerGroup(4, axis=0)), ((256, 2**24), PerChannel(1))],
    ids=str,
)
def test_strides_and_numbers_of_segments_beyond_31_bits_work(shape: tuple[int, int], scope: Scope) -> None:
    if torch.cuda.mem_get_info()[0] < 32 * 2**30:
        pytest.skip("needs 32 GiB of free device memory")
    p = Problem(QuantizeKind.DYNAMIC_QUANTIZE, shape, ElementKind.BF16, ElementKind.S8, -127, 127, scope)
    plan = SelectedPlan(p, torch.device(DEVICE), TRITON)
    along = 1 if isinstance(scope, PerToken) else 0
    values = torch.arange(1, shape[along] + 1, dtype=torch.bfloat16, device=DEVICE)
    x = values.view([-1, 1] if along == 0 else [1, -1]).expand(shape).contiguous()
    scale = torch.empty(p.segment_shape, device=DEVICE)
    q = torch.full(shape, 77, dtype=torch.int8, device=DEVICE)
    workspace = torch.empty(max(plan.workspace_size(), 1), dtype=torch.uint8, device=DEVICE)
    plan.launch((x, scale, None, q), workspace)
    wanted = torch.round(values.float() / scale.flatten()[0]).to(torch.int8)
    assert scale.min() == scale.max() == values.max().float() / 127
    for i, each in enumerate(wanted):
        assert bool((q.select(along, i) == each).all()), i


SCALES = [
    1.0,
    0.1,
    3.0,
    1 / 3,
    0.0078125,
    0.99999994,
    1.0000001,
    1.9999999,
    5.877e-39,
    1e-45,
    3e-38,
    1.7e38,
    7e-31,
    1e31,
]
ZERO_POINTS = [None, 0, 7, -128, 2**21 + 1, 2**22, 2**22 - 1023, 2**23 - 5, -(2**24 - 256), 2**24 - 257]


def _every_float(chunk: int) -> Tensor:
    size = 2**27
    low = -(2**31) + chunk * size
    return torch.arange(low, low + size, dtype=torch.int64, device=DEVICE).to(torch.int32).view(torch.float32)


def _compare(p: Problem, x: Tensor, scale: object, zero_point: object) -> None:
    device = torch.device(DEVICE)
    got, expected = (torch.empty(p.shape, dtype=p.quantized.dtype, device=device) for _ in range(2))
    SelectedPlan(p, device, TRITON).launch((x, scale, zero_point, got))
    reference = SelectedPlan(p, device, PlanPreference(prefer_backend=BackendKind.REFERENCE))
    reference.launch((x, scale, zero_point, expected))
    different = got != expected
    if different.any():
        first = x[different][0]
        raise AssertionError(f"{int(different.sum())} differ at scale {scale}, zero point {zero_point}, x = {first!r}")


@pytest.mark.parametrize("chunk", range(32))
def test_every_f32_is_divided_exactly(chunk: int) -> None:
    x = _every_float(chunk)
    p = Problem(QuantizeKind.QUANTIZE, tuple(x.shape), ElementKind.F32, ElementKind.S8, -128, 127)
    generator = torch.Generator().manual_seed(chunk)
    random = (torch.rand(6, generator=generator) + 0.5) * 2.0 ** torch.randint(-12, 4, (6,), generator=generator)
    for i, scale in enumerate([*SCALES, *random.tolist()]):
        _compare(p, x, scale, ZERO_POINTS[(i + chunk) % len(ZERO_POINTS)])


@pytest.mark.parametrize("chunk", range(32))
def test_every_f32_gradient_is_divided_exactly(chunk: int) -> None:
    """torch divides two CUDA tensors with IEEE rounding; only a division by a number goes through its reciprocal."""
    dy = _every_float(chunk)
    x, out = torch.zeros_like(dy), torch.empty_like(dy)
    p = Problem(QuantizeKind.QUANTIZE_BACKWARD, tuple(dy.shape), ElementKind.F32, ElementKind.S8, -128, 127)
    plan = SelectedPlan(p, torch.device(DEVICE), TRITON)
    for scale in SCALES:
        plan.launch((x, dy, scale, None, out))
        expected = dy / torch.full_like(dy, scale)
        expected = torch.where(expected.isnan(), float("nan"), expected)
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32)), scale


@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.BF16])
def test_every_16_bit_float_is_quantized_exactly_at_many_scales(element: ElementKind) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16).view(element.dtype)
    generator = torch.Generator(DEVICE).manual_seed(0)
    bits32 = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=generator, device=DEVICE, dtype=torch.int64)
    scale = bits32.to(torch.int32).view(torch.float32).clone()
    scale[:8] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3e38])
    x = every.expand(4096, -1).contiguous()
    zero_point = torch.randint(-(2**24), 2**24, (4096,), generator=generator, device=DEVICE, dtype=torch.int32)
    p = Problem(QuantizeKind.QUANTIZE, tuple(x.shape), element, ElementKind.U8, 0, 255, PerToken())
    for start in range(0, 4096, 1024):
        rows = slice(start, start + 1024)
        part = Problem(p.op, (1024, 2**16), element, p.quantized, 0, 255, PerToken())
        _compare(part, x[rows], scale[rows].clone(), zero_point[rows].clone())
        _compare(part, x[rows], scale[rows].clone(), None)


def test_indices_are_split_as_python_divides() -> None:
    assert_indices_are_split_as_python_divides("cuda")
