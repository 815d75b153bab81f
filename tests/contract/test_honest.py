"""Claims against reality: every cell the registry claims is run on awkward shapes, every refusal is asked for.

The claims are read from the registry, never written down here. Without a GPU this covers the compiled kernels and the
reference; TRITON_INTERPRET=1 adds the Triton kernels in their interpreter; a GPU adds them on the device. Where a run
costs most, each cell meets one awkward layout, in turn, instead of all of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guards import guarded, untouched
from torch import Tensor

from baracuda import (
    Arithmetic,
    BackendKind,
    BaracudaError,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    Plan,
    PlanPreference,
    QuantizeKind,
    Scope,
    Unsupported,
    WorkspaceTooSmall,
)
from baracuda.backends.matrix import Cell, cells
from baracuda.backends.registry import BACKENDS, candidates
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.core.types import OpCategory
from cases import Case, assert_same_bits, operands

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
# numpy, which the interpreter computes with, remarks on every 0/0 and overflow of the edge cases.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Layout = tuple[tuple[int, ...], Scope]
#: Scalars, ones, primes, empties, odd packed tails, axes in the middle.
AWKWARD: dict[str, list[Layout]] = {
    "tensor": [(shape, PerTensor()) for shape in ((), (0,), (1,), (3, 0, 2), (7, 19), (2, 3, 5), (1, 257))],
    "channel": [
        ((1, 1), PerChannel(0)),
        ((5, 13), PerChannel(0)),
        ((3, 1, 7), PerChannel(1)),
        ((11, 3), PerChannel(-1)),
        ((0, 3), PerChannel(1)),
        ((3, 0), PerChannel(0)),
    ],
    "token": [(shape, PerToken()) for shape in ((1, 1), (7, 31), (4, 0), (0, 5), (2, 3, 17), (13, 1))],
    "group": [
        ((3, 5), PerGroup(1)),
        ((3, 21), PerGroup(7)),
        ((6, 7), PerGroup(3, axis=0)),
        ((2, 15, 3), PerGroup(5, axis=1)),
        ((3, 0), PerGroup(4)),
        ((1, 13), PerGroup(13)),
    ],
}
LINEARS = [(1, 1, 1), (1, 7, 64), (3, 5, 0), (0, 4, 8), (4, 0, 8), (5, 17, 31), (5, 24, 48), (33, 70, 129)]
DATA = ["ordinary", "edges", "bits", "zeros"]


# -- the same values in other memory -----------------------------------------------------------------------------


def apart(x: Tensor) -> Tensor:
    """Rows further apart than they are long."""
    return x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))[..., : x.shape[-1]].copy_(x) if x.ndim else x


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.ndim >= 2 else x


def unaligned(x: Tensor) -> Tensor:
    """Dense, and one element behind where an allocation starts."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


FORMS: list[Callable[[Tensor], Tensor]] = [torch.clone, apart, transposed, unaligned]


# -- a plan for any problem --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lowered:
    """A descriptor that is its own problem, so that ops without a named plan are asked the same way."""

    lowered: Problem

    def problem(self, op: QuantizeKind) -> Problem:
        return self.lowered


def select(problem: Problem, device: torch.device, preference: PlanPreference) -> Any:
    plan: Any = type("AnyPlan", (Plan,), {"op": problem.op})
    return plan.select(Lowered(problem), preference, device=device)


def arguments(case: Case, device: torch.device, form: Callable[[Tensor], Tensor] = torch.clone) -> SimpleNamespace:
    names = [operand.name for operand in OPS[case.problem.op].operands]
    values = [form(v.to(device)) if isinstance(v, Tensor) else v for v in operands(case)]
    return SimpleNamespace(**dict(zip(names, values, strict=True)))


def outputs(case: Case, args: SimpleNamespace) -> dict[str, Tensor]:
    found = {o.name: getattr(args, o.name) for o in OPS[case.problem.op].operands if o.output}
    return {name: value.detach().cpu().clone() for name, value in found.items() if value is not None}


def reference(case: Case) -> dict[str, Tensor]:
    args = arguments(case, CPU)
    select(case.problem, CPU, PlanPreference(prefer_backend=BackendKind.REFERENCE)).run(args)
    return outputs(case, args)


# -- the walk ----------------------------------------------------------------------------------------------------

DEVICES = [
    pytest.param(CPU, id="cpu"),
    pytest.param(
        torch.device("cuda", 0),
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
on_every_device = pytest.mark.parametrize("device", DEVICES)
every_op = pytest.mark.parametrize("op", list(QuantizeKind), ids=lambda op: op.value)


def variants(cell: Cell) -> Iterator[Problem]:
    """What the matrix leaves open for a cell: the arithmetic, and the weight of a linear."""
    linear = OPS[cell.problem.op].category is OpCategory.GEMM
    weights = (ElementKind.S8, ElementKind.S4) if linear else (ElementKind.S8,)
    for arithmetic, weight in itertools.product(Arithmetic, weights):
        yield replace(cell.problem, arithmetic=arithmetic, weight=weight)


def awkward(problem: Problem) -> list[Problem]:
    if OPS[problem.op].category is OpCategory.GEMM:
        return [replace(problem, shape=shape) for shape in LINEARS]
    layouts = AWKWARD[problem.scope.name]
    if OPS[problem.op].category is OpCategory.FUSED:
        layouts = [(shape, scope) for shape, scope in layouts if shape]  # rows want a last axis
    return [replace(problem, shape=shape, scope=scope) for shape, scope in layouts]


def walk(op: QuantizeKind, device: torch.device) -> Iterator[tuple[Case, Callable[[Tensor], Tensor], Problem]]:
    """Cases of an op with the form their tensors take, and the cell's own problem, which the registry was asked."""
    sampled, turn = INTERPRETING or device.type == "cuda", 0
    for cell in cells(device):
        if cell.problem.op is not op:
            continue
        for problem in variants(cell):
            layouts = awkward(problem)
            for chosen in [layouts[turn % len(layouts)]] if sampled else layouts:
                turn += 1
                form = FORMS[turn // 5 % len(FORMS)]
                data = DATA[turn // 3 % len(DATA)]
                if op is QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD and data == "bits":
                    data = "ties"  # where f64 overflows, the order of a sum decides between inf and NaN
                yield (
                    Case(chosen, data, ["tensor", "number", "input_type"][turn % 3]),
                    form,
                    problem,
                )


@on_every_device
@every_op
def test_what_is_claimed_is_computed(op: QuantizeKind, device: torch.device) -> None:
    """A kernel that takes the cell's problem takes its awkward shapes; can_implement says what run then does."""
    claims = 0
    for case, form, cell in walk(op, device):
        expected = None
        for backend in BACKENDS:
            preference = PlanPreference(prefer_backend=backend)
            if all(reason is not None for _, reason in candidates(cell, device, preference)):
                continue
            claims += 1
            plan = select(case.problem, device, preference)
            assert plan.sku().backend is backend
            args = arguments(case, device, form)
            support = plan.can_implement(args)
            workspace, behind = guarded(plan.workspace_size(), device)
            if not support:
                before = outputs(case, args)
                with pytest.raises(BaracudaError) as raised:
                    plan.run(args, workspace)
                assert str(raised.value) == support.reason
                assert_same_bits(outputs(case, args), before, case)
                assert form in (apart, transposed), f"{case}: {support.reason}"
                args = arguments(case, device)
                assert plan.can_implement(args), case
            plan.run(args, workspace)
            expected = expected or reference(case)
            agree(plan, outputs(case, args), expected, case, args)
            if claims % 7 == 0 and plan.precision_guarantee().deterministic:
                again = arguments(case, device)
                plan.run(again, workspace)
                assert_same_bits(outputs(case, again), outputs(case, args), case)
            assert untouched(behind), f"{case}: wrote behind its {plan.workspace_size()} bytes of workspace"
    assert claims > 0


def agree(plan: Any, got: dict[str, Tensor], expected: dict[str, Tensor], case: Case, args: SimpleNamespace) -> None:
    """As much as the plan's guarantee says: every bit, or of sums in f64 what their order cannot change."""
    if plan.precision_guarantee().matches_reference:
        return assert_same_bits(got, expected, case)
    if case.problem.op is QuantizeKind.WEIGHT_ONLY_LINEAR:
        return agree_within(plan, got["output"], expected["output"], case, args)
    sums = {name: value for name, value in expected.items() if name in ("grad_scale", "grad_zero_point")}
    assert_same_bits({"grad_input": got["grad_input"]}, {"grad_input": expected["grad_input"]}, case)
    for name, value in sums.items():
        slack = (
            largest(args.grad_output) * max(1000.0, largest(args.scale)) * case.problem.view.segment_length * 2.0**-50
        )
        torch.testing.assert_close(
            got[name], value, rtol=2e-7, atol=slack, equal_nan=True, msg=lambda text, n=name: f"{case}: {n}: {text}"
        )
    return None


def agree_within(plan: Any, got: Tensor, expected: Tensor, case: Case, args: SimpleNamespace) -> None:
    """Within the stated share of the absolute products, and a rounding of the output; of rows that are finite."""
    p, x, scale = case.problem, args.activation.cpu().double(), args.weight_scale.cpu().double()
    steps = 2 * (p.weight.q_max - p.weight.q_min)
    most = steps * float(scale.abs().nan_to_num(0.0, 0.0).max()) if scale.numel() else 0.0
    finite = x.isfinite().all(dim=1)[:, None] & expected.cpu().isfinite()
    products = x.abs().nan_to_num(0.0, 0.0).sum(dim=1, keepdim=True) * most
    info = torch.finfo(p.element.dtype)
    rounding = info.eps * expected.cpu().double().abs() + info.smallest_normal
    bound = plan.precision_guarantee().relative_error * products + rounding
    close = (got.cpu().double() - expected.cpu().double()).abs() <= bound
    assert bool((close | ~finite).all()), case


def largest(value: Tensor | float) -> float:
    finite = torch.as_tensor(value).double().flatten()
    return float(finite[finite.isfinite()].abs().max()) if finite.isfinite().any() else 0.0


@on_every_device
@every_op
def test_what_is_declined_is_declined_with_its_reason(op: QuantizeKind, device: torch.device) -> None:
    """`cells`, what `baracuda info` prints, gives the reasons with which `select` then raises."""
    for cell in cells(device):
        if cell.problem.op is not op:
            continue
        assert set(cell.answers) == set(BACKENDS)
        for backend, reason in cell.answers.items():
            preference = PlanPreference(prefer_backend=backend)
            if reason is None:
                assert select(cell.problem, device, preference).sku().backend is backend
                continue
            assert reason.strip()
            with pytest.raises(Unsupported) as raised:
                select(cell.problem, device, preference)
            assert reason in {why for name, why in raised.value.reasons.items() if name.split(".")[0] == backend.value}
            assert reason in str(raised.value)


@on_every_device
@every_op
def test_a_workspace_of_the_stated_size_suffices_and_one_byte_less_is_refused(
    op: QuantizeKind, device: torch.device
) -> None:
    """That it suffices, the walk shows with guard bytes; here the refusals, and the limit a caller can set."""
    for case, _, _ in walk(op, device):
        for backend in BACKENDS:
            try:
                plan = select(case.problem, device, PlanPreference(prefer_backend=backend))
            except Unsupported:
                continue
            size = plan.workspace_size()
            if size == 0:
                continue
            args = arguments(case, device)
            before = outputs(case, args)
            with pytest.raises(WorkspaceTooSmall) as raised:
                plan.run(args, guarded(size, device)[0][:-1])
            assert (raised.value.needed, raised.value.got) == (size, size - 1)
            assert_same_bits(outputs(case, args), before, case)
            assert select(case.problem, device, PlanPreference(size, backend)).workspace_size() == size
            refused = f"needs {size} bytes of workspace, max_workspace_bytes is {size - 1}"
            try:  # a slower way may need less
                assert select(case.problem, device, PlanPreference(size - 1, backend)).workspace_size() < size
            except Unsupported as error:
                assert refused in str(error)


@on_every_device
@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("weight", [ElementKind.S8, ElementKind.S4], ids=lambda kind: kind.value)
def test_sums_are_exact_at_the_last_k_a_kernel_takes(weight: ElementKind, beyond: int, device: torch.device) -> None:
    """All products as large as they can be: who claims the longest sum must hold it, who cannot must say so."""
    limit = Problem(
        QuantizeKind.SMOOTHQUANT_LINEAR, (1, 1, 1), ElementKind.F64, ElementKind.S8, -128, 127, weight=weight
    ).accumulator_limit
    k = limit + beyond
    problem = Problem(
        QuantizeKind.SMOOTHQUANT_LINEAR, (1, 2, k), ElementKind.F64, ElementKind.S8, -128, 127, weight=weight
    )
    least = torch.full((1, k), -128, dtype=torch.int8)
    packed = torch.full((2, (k + 1) // 2), 0x88, dtype=torch.uint8)
    weight_q = packed if weight.is_packed else torch.full((2, k), -128, dtype=torch.int8)
    taken = set()
    for kernel, reason in candidates(problem, device, PlanPreference()):
        if kernel.backend is BackendKind.TRITON and INTERPRETING:
            continue  # minutes of interpretation
        if reason is not None:
            continue
        taken.add(kernel.backend)
        plan = select(problem, device, PlanPreference(prefer_backend=kernel.backend))
        out = torch.zeros(1, 2, dtype=torch.float64, device=device)
        given = {"act_q": least.to(device), "act_scale": 1.0, "weight_q": weight_q.to(device), "weight_scale": 1.0}
        names = (operand.name for operand in OPS[problem.op].operands)
        args = SimpleNamespace(**dict.fromkeys(names) | given | {"output": out})
        plan.run(args, guarded(plan.workspace_size(), device)[0])
        assert out.tolist() == [[-128.0 * weight.q_min * k] * 2], plan
    assert taken == {BackendKind.CPU if device == CPU else BackendKind.TRITON, BackendKind.REFERENCE}
