"""The named plans and the mechanism under them: select, ask, run; and how little a new scope or op takes."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import oracles
import pytest
import torch
from plan_table import BY_NAME, LAYOUTS, ROWS, Row, floats
from torch import Tensor

import baracuda
from baracuda import (
    Activation,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    MathPrecision,
    OpCategory,
    Plan,
    PlanPreference,
    QuantizeKind,
    Scope,
)
from baracuda.backends import registry
from baracuda.backends.registry import NO_KERNEL, Kernel, Value
from baracuda.core.optable import OPS, Operand, OpRow
from baracuda.core.problem import Problem
from baracuda.core.scope import Shape, View
from baracuda.plans.plan import SelectedPlan
from cases import CASES

NAMES = [
    f"{op}{scope}{backward}"
    for op in ("Quantize", "Dequantize")
    for scope in ("PerTensor", "PerChannel", "PerToken", "PerGroup")
    for backward in ("", "Backward")
]
NAMES += ["FakeQuantize", "FakeQuantizeBackward", "DynamicRangeQuantize", "QuantizedLinear", "SmoothQuantLinear"]
every_plan = pytest.mark.parametrize("row", ROWS, ids=str)


def test_there_are_the_21_plans_of_the_original_each_with_its_descriptor_and_arguments() -> None:
    assert len(NAMES) == 21
    assert sorted(BY_NAME) == sorted(NAMES)
    for name in NAMES:
        for part in ("Plan", "Descriptor", "Args"):
            assert f"{name}{part}" in baracuda.__all__
            assert isinstance(getattr(baracuda, f"{name}{part}"), type)
        assert issubclass(getattr(baracuda, f"{name}Plan"), Plan)
        assert getattr(baracuda, f"{name}Plan").__doc__


@every_plan
@pytest.mark.parametrize(
    "preference", [PlanPreference(prefer_backend=BackendKind.REFERENCE), None], ids=["reference", "chosen"]
)
def test_a_plan_selects_and_runs_to_the_bits_of_the_formulas(row: Row, preference: PlanPreference | None) -> None:
    plan = row.plan.select(row.describe(), preference)
    args = row.args()
    assert plan.can_implement(args)
    plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
    names = [operand.name for operand in OPS[plan.op].operands]
    expected = oracles.expected(plan.problem, dict(zip(names, plan.operands(args), strict=True)))
    assert set(expected) == set(row.outputs)
    for name in row.outputs:
        assert (oracles.bits_of(getattr(args, name)) == expected[name]).all()


def function_results(row: Row, args: Any) -> dict[str, Tensor] | None:
    """What the functional API makes of a plan's arguments; None where it has no function."""
    scope = next((scope for name, _, _, scope in LAYOUTS if name in row.name), baracuda.PerTensor())
    match row.name.removesuffix("Backward").split("Per")[0], row.name.endswith("Backward"):
        case "Quantize", False:
            return {"output": baracuda.quantize(args.input, args.scale, args.zero_point, scope=scope)}
        case "Dequantize", False:
            return {"output": baracuda.dequantize(args.input, args.scale, args.zero_point, scope=scope)}
        case "FakeQuantize", False:
            return {"output": baracuda.fake_quantize(args.input, args.scale, args.zero_point)}
        case "FakeQuantize", True:
            x = args.input.clone().requires_grad_()
            baracuda.fake_quantize(x, args.scale, args.zero_point).backward(args.grad_output)
            return {"grad_input": x.grad}
        case "DynamicRangeQuantize", False:
            q, scale, zero_point = baracuda.dynamic_quantize(args.input, mode="asymmetric")
            return {"output": q, "scale_out": scale, "zero_point_out": zero_point}
        case "QuantizedLinear", False:
            return {"output": baracuda.quantized_linear(args.activation, args.weight_q, args.weight_scale, args.bias)}
        case "SmoothQuantLinear", False:
            return {
                "output": baracuda.smoothquant_linear(args.act_q, args.weight_q, 0.25, args.weight_scale, args.bias)
            }
    return None


@every_plan
def test_a_plan_gives_the_bits_of_the_function(row: Row) -> None:
    args = row.args()
    results = function_results(row, args)
    if results is None:
        assert row.name.endswith("Backward")  # only fake_quantize is differentiable as a function
        return
    plan = row.plan.select(row.describe())
    plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
    for name in row.outputs:
        assert (oracles.bits_of(getattr(args, name)) == oracles.bits_of(results[name])).all()


@every_plan
@pytest.mark.parametrize("element", ["f32", "f64"])
def test_a_plan_says_what_it_is(row: Row, element: str) -> None:
    float_name = {"Quantize": "input_element", "Dequantize": "output_element", "FakeQuantize": "input_element"}.get(
        row.name.removesuffix("Backward").split("Per")[0],
        {"DynamicRangeQuantize": "input_element", "QuantizedLinear": "activation_element"}.get(
            row.name, "output_element"
        ),
    )
    plan = row.plan.select(row.describe(**{float_name: element}), PlanPreference(prefer_backend=BackendKind.REFERENCE))
    sku, guarantee = plan.sku(), plan.precision_guarantee()
    linear = row.name.endswith("Linear")
    assert plan.workspace_size() >= 0
    assert sku.op is plan.op
    assert sku.category is (OpCategory.GEMM if linear else OpCategory.QUANTIZATION)
    assert sku.element is ElementKind.of(element)
    assert sku.aux_element is ElementKind.S8
    assert sku.backend is BackendKind.REFERENCE
    assert sku.precision_guarantee == guarantee
    assert guarantee.math_precision is MathPrecision[element.upper()]
    assert guarantee.accumulator is (ElementKind.S32 if linear else ElementKind.of(element))
    assert guarantee.matches_reference
    assert guarantee.deterministic
    assert guarantee.bit_stable_on_same_hardware


#: With what the row describes, the longest K whose sums fit 32 bits.
LONGEST: list[tuple[str, dict[str, object], int]] = [
    ("QuantizedLinear", {}, 132104),
    ("QuantizedLinear", {"mode": DynamicRangeMode.ASYMMETRIC}, 65793),
    ("SmoothQuantLinear", {}, 131071),
    ("SmoothQuantLinear", {"act_zero_point": 3}, 65793),
]


@pytest.mark.parametrize("backend", [BackendKind.REFERENCE, BackendKind.CPU], ids=lambda kind: kind.value)
@pytest.mark.parametrize("name, changes, longest", LONGEST)
def test_a_linear_says_when_its_sums_need_more_than_32_bits(
    name: str, changes: dict[str, object], longest: int, backend: BackendKind
) -> None:
    row = BY_NAME[name]
    for k, held_in in ((longest, ElementKind.S32), (longest + 1, ElementKind.S64)):
        plan = row.plan.select(row.describe(k=k, **changes), PlanPreference(prefer_backend=backend))
        assert plan.precision_guarantee().accumulator is held_in
        assert plan.sku().precision_guarantee.accumulator is held_in


@every_plan
def test_a_plan_runs_again_and_again_to_the_same_bits(row: Row) -> None:
    """What the guarantee calls deterministic and bit stable."""
    plan = row.plan.select(row.describe())
    workspace = torch.empty(plan.workspace_size(), dtype=torch.uint8)
    first, second = row.args(), row.args()
    for args in (first, second):
        plan.run(args, workspace)
    for name in row.outputs:
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("name", ["QuantizePerToken", "FakeQuantizeBackward", "QuantizePerGroupBackward"])
def test_an_elementwise_output_may_be_its_own_input_where_the_types_agree(name: str) -> None:
    row = BY_NAME[name]
    plan = row.plan.select(row.describe())
    separate, shared = row.args(), row.args()
    if name.endswith("Backward"):
        shared.grad_input = shared.grad_output
        for args in (separate, shared):
            assert plan.can_implement(args)
            plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
        assert torch.equal(shared.grad_output, separate.grad_input)
    else:
        shared.output = shared.input.view(torch.int8)[:, : shared.output.shape[1]]
        assert not plan.can_implement(shared)


# -- a new scope is one class, a new op is one row ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PerPairOfRows(Scope):
    """A toy: two neighbouring rows share a scale."""

    name = "pair"

    def view(self, shape: Shape) -> View:
        return View.of(1, shape[0] // 2, 2 * shape[1], 1)

    def scale_shape(self, shape: Shape) -> Shape:
        return (shape[0] // 2,)


def test_a_new_scope_is_one_class() -> None:
    x = floats(6, 5)
    q, scale, zero_point = baracuda.dynamic_quantize(x, scope=PerPairOfRows(), mode="asymmetric")
    assert zero_point is not None
    assert scale.shape == (3,)
    by_token = baracuda.dynamic_quantize(x.view(3, 10), mode="asymmetric")
    assert torch.equal(q, by_token.q.view(6, 5))
    assert torch.equal(scale, by_token.scale)
    back = baracuda.dequantize(q, scale, zero_point, scope=PerPairOfRows())
    assert torch.equal(back, baracuda.fake_quantize(x, scale, zero_point, scope=PerPairOfRows()))
    assert (back - x).abs().max() <= scale.max()


class ToyKind(Enum):
    HALVE = "halve"


@dataclass(frozen=True)
class HalveDescriptor:
    numel: int

    def problem(self, op: Any) -> Problem:
        return Problem(op, (self.numel,), ElementKind.F32, ElementKind.S8, -128, 127)


@dataclass
class HalveArgs:
    input: Tensor
    output: Tensor


HALVE_ROW = OpRow(
    (
        Operand("input", lambda p: (p.element,), lambda p: p.shape),
        Operand("output", lambda p: (p.element,), lambda p: p.shape, output=True),
    ),
    elementwise=True,
)


@pytest.fixture
def halve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A row in the op table and a kernel that needs 32 bytes of workspace, behind an ordinary plan."""

    def bind(problem: Problem, device: torch.device) -> Any:
        def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
            x, y = operands
            torch.mul(x, 0.5, out=y)

        return launch

    kernel = Kernel(
        "halve", BackendKind.CPU, frozenset({ToyKind.HALVE}), lambda p, d: "too long" if p.shape[0] > 9 else None, bind,
        workspace=lambda p, d: 32,
    )  # fmt: skip
    module = ModuleType("toy_backend")
    module.KERNELS = (kernel,)
    monkeypatch.setitem(sys.modules, "toy_backend", module)
    monkeypatch.setitem(registry.BACKENDS, BackendKind.CPU, "toy_backend")
    monkeypatch.setitem(OPS, ToyKind.HALVE, HALVE_ROW)

    class HalvePlan(Plan[HalveDescriptor, HalveArgs]):
        op = ToyKind.HALVE

    return HalvePlan


def test_a_new_op_is_one_row(halve: Any) -> None:
    plan = halve.select(HalveDescriptor(4))
    args = HalveArgs(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.empty(4))
    assert plan.can_implement(args)
    assert plan.sku().kernel == "halve"
    plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
    assert args.output.tolist() == [0.5, 1.0, 1.5, 2.0]
    assert (
        plan.can_implement(HalveArgs(args.input, torch.empty(5))).reason == "halve: output: expected shape [4], got [5]"
    )


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        (None, baracuda.WorkspaceTooSmall, "expected at least 32 bytes, got 0"),
        (torch.empty(31, dtype=torch.uint8), baracuda.WorkspaceTooSmall, "expected at least 32 bytes, got 31"),
        (torch.empty(64, dtype=torch.uint8)[1:], baracuda.InvalidProblem, "address divisible by 16"),
        (torch.empty(64, dtype=torch.uint8)[::2], baracuda.InvalidProblem, "expected a contiguous tensor"),
        (torch.empty(64, dtype=torch.uint8, device="meta"), baracuda.InvalidProblem, "on cpu, got .*meta"),
    ],
    ids=["none", "small", "misaligned", "strided", "elsewhere"],
)
def test_a_wrong_workspace_is_refused_before_anything_is_written(
    halve: Any, workspace: Tensor | None, error: type[Exception], message: str
) -> None:
    plan = halve.select(HalveDescriptor(4))
    output = torch.full((4,), 77.0)
    with pytest.raises(error, match=message) as raised:
        plan.run(HalveArgs(torch.ones(4), output), workspace)
    if isinstance(raised.value, baracuda.WorkspaceTooSmall):
        assert (raised.value.needed, raised.value.got) == (32, 0 if workspace is None else 31)
    assert output.tolist() == [77.0] * 4


@pytest.mark.parametrize("start", [0, 16, 48])
def test_a_workspace_over_an_argument_is_refused_before_anything_is_written(halve: Any, start: int) -> None:
    plan, room = halve.select(HalveDescriptor(4)), torch.full((80,), 7, dtype=torch.uint8)
    output = room[start : start + 16].view(torch.float32)
    if start == 48:
        plan.run(HalveArgs(torch.ones(4), output), room[:32])
        return
    with pytest.raises(baracuda.InvalidProblem, match="halve: the workspace overlaps output in memory; give it memory"):
        plan.run(HalveArgs(torch.ones(4), output), room[:32])
    assert room.tolist() == [7] * 80


def test_a_minus_that_torch_has_put_off_is_refused_by_plans() -> None:
    plan = baracuda.FakeQuantizePlan.select(baracuda.FakeQuantizeDescriptor(4, -128, 127, "f32"), device="cpu")
    plain, negative = torch.ones(4), torch._neg_view(torch.ones(4))
    for args in (
        baracuda.FakeQuantizeArgs(negative, 1.0, None, torch.empty(4)),
        baracuda.FakeQuantizeArgs(plain, 1.0, None, negative),
    ):
        assert "a view of its negative; call .resolve_neg()" in plan.can_implement(args).reason
        with pytest.raises(baracuda.InvalidProblem, match="a view of its negative"):
            plan.run(args)


def test_a_workspace_may_have_any_shape() -> None:
    desc = baracuda.QuantizedLinearDescriptor(m=16, c_out=32, k=64)
    plan = baracuda.QuantizedLinearPlan.select(desc, device="cpu")
    args = baracuda.QuantizedLinearArgs(
        torch.randn(16, 64), torch.ones(32, 64, dtype=torch.int8), 0.1, torch.empty(16, 32)
    )
    plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
    expected = args.output.clone()
    plan.run(args, torch.empty(2, plan.workspace_size(), dtype=torch.uint8))
    assert torch.equal(args.output, expected)


def test_a_stream_is_one_of_torchs(halve: Any) -> None:
    args = HalveArgs(torch.ones(4), torch.empty(4))
    with pytest.raises(baracuda.InvalidProblem, match="stream: expected Stream, got str"):
        halve.select(HalveDescriptor(4)).run(args, torch.empty(32, dtype=torch.uint8), stream="x")


def test_when_nothing_fits_every_reason_is_told(halve: Any) -> None:
    with pytest.raises(baracuda.Unsupported, match=r"cpu\.halve: too long") as raised:
        halve.select(HalveDescriptor(10))
    assert raised.value.reasons == {"cpu.halve": "too long", "triton": NO_KERNEL, "reference": NO_KERNEL}
    with pytest.raises(baracuda.Unsupported, match=r"needs 32 bytes of workspace, max_workspace_bytes is 31"):
        halve.select(HalveDescriptor(4), PlanPreference(max_workspace_bytes=31))
    assert halve.select(HalveDescriptor(4), PlanPreference(max_workspace_bytes=32))
    with pytest.raises(NotImplementedError, match=r"cpu\.halve: prefer_backend is REFERENCE"):
        halve.select(HalveDescriptor(4), PlanPreference(prefer_backend=BackendKind.REFERENCE))


def test_the_kinds_of_operation_and_the_rows_of_the_table_are_the_same() -> None:
    assert set(OPS) == set(QuantizeKind)


@pytest.mark.parametrize("backend", [BackendKind.REFERENCE, BackendKind.CPU])
def test_the_sku_of_a_linear_names_its_epilogue(backend: BackendKind) -> None:
    for name, change, wanted in (
        ("QuantizedLinear", {}, "(acc * scale_a) * scale_w + bias + residual"),
        ("SmoothQuantLinear", {"activation": Activation.GELU}, "gelu((acc * scale_a) * scale_w + bias) + residual"),
        (
            "SmoothQuantLinear",
            {"activation": Activation.RELU, "act_zero_point": 3},
            "relu(((acc - zero_point * weight_sum) * scale_a) * scale_w + bias) + residual",
        ),
    ):
        row = BY_NAME[name]
        plan = row.plan.select(row.describe(**change), PlanPreference(prefer_backend=backend))
        assert plan.sku().epilogue == wanted


def test_a_backend_is_preferred_by_its_name_as_by_itself() -> None:
    assert PlanPreference(prefer_backend="cpu") == PlanPreference(prefer_backend=BackendKind.CPU)  # type: ignore[arg-type]


def test_a_plan_is_selected_again_where_it_is_copied_to() -> None:
    desc = baracuda.QuantizePerTokenDescriptor(4, 8, -128, 127, "f32", "s8")
    plan = baracuda.QuantizePerTokenPlan.select(desc, PlanPreference(prefer_backend="reference"), device="cpu")
    x, q = torch.randn(4, 8), torch.empty(4, 8, dtype=torch.int8)
    for made in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert repr(made) == repr(plan)
        made.run(baracuda.QuantizePerTokenArgs(x, 0.1, 0, q))
        assert torch.equal(q, baracuda.quantize(x, 0.1))


def test_errors_come_out_of_other_processes() -> None:
    for error in (baracuda.WorkspaceTooSmall(8, 3), baracuda.Unsupported("no", {"cpu": "why"})):
        made = pickle.loads(pickle.dumps(error))
        assert str(made) == str(error) and vars(made) == vars(error)


def test_an_index_of_the_cpu_says_nothing_and_what_is_no_device_is_told() -> None:
    desc = baracuda.QuantizePerTokenDescriptor(8, 32, -128, 127, "f32", "s8")
    plan = baracuda.QuantizePerTokenPlan.select(desc, device="cpu:0")
    args = baracuda.QuantizePerTokenArgs(torch.randn(8, 48)[:, :32], 0.1, 0, torch.empty(8, 32, dtype=torch.int8))
    assert plan.can_implement(args)
    plan.run(args)
    with pytest.raises(baracuda.InvalidProblem, match=r"device: expected .cpu., .cuda. or .cuda:N., got 5\.0"):
        baracuda.QuantizePerTokenPlan.select(desc, device=5.0)  # type: ignore[arg-type]


def test_torch_sees_what_was_written() -> None:
    """As its own operators do, so that a gradient that needs the value from before is refused."""
    x = torch.tensor([0.3, 1.1], requires_grad=True)
    y = x * 2
    loss = y.square().sum()
    with torch.no_grad():
        baracuda.fake_quantize(y, 0.5, out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    desc = baracuda.QuantizePerTensorDescriptor(4, -128, 127, "f32", "s8")
    out = torch.zeros(4, dtype=torch.int8)
    args = baracuda.QuantizePerTensorArgs(torch.randn(4), 0.1, 0, out)
    baracuda.QuantizePerTensorPlan.select(desc, device="cpu").run(args)
    assert out._version == 1


@pytest.mark.parametrize("op", sorted({case.problem.op for case in CASES}, key=str), ids=str)
def test_a_plan_that_nobody_holds_is_freed(op: QuantizeKind) -> None:
    """The compiled module holds what it is given; Python's collector sees no cycle through it."""
    device = torch.device("cpu")
    plans = [SelectedPlan(case.problem, device) for case in CASES if case.problem.op is op][:200]
    alive = [weakref.ref(plan) for plan in plans]
    plans.clear()
    gc.collect()
    assert not any(each() is not None for each in alive)
