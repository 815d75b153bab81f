"""Rows of a case: the same problem with some of its rows, whose results must have the bits they have in the batch."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch
from torch import Tensor

from baracuda import BackendKind, ElementKind, PerGroup, PlanPreference, QuantizeKind
from baracuda.backends.registry import Value
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.core.types import FLOATS
from baracuda.plans.plan import SelectedPlan
from cases import CASES, GROUP_CASES, Case, assert_same_bits, is_linear, operands

Results = dict[str, Tensor]
#: What the other rows of a batch are set to.
NEIGHBOURS = (float("nan"), float("inf"), 0.0, 1e30, -1e-30)
#: How large a random case may be.
MOST_ELEMENTS, MOST_PRODUCTS = 100_000, 3_000_000


def unit(problem: Problem) -> int:
    """The least number of rows that is a problem of its own: a group along the first axis is not cut."""
    scope = problem.scope
    along = isinstance(scope, PerGroup) and scope.axis in (0, -len(problem.shape))
    return scope.size if along else 1  # type: ignore[attr-defined]


def has_rows(problem: Problem) -> bool:
    """Whether there are rows to take some of, with something in them."""
    return len(problem.shape) >= 2 and problem.shape[0] >= 2 * unit(problem) and 0 not in problem.shape[:2]


def by_row(problem: Problem) -> dict[str, bool]:
    """For each operand, whether its first axis runs over the rows: whether more rows give it another shape."""
    more = replace(problem, shape=(problem.shape[0] + unit(problem), *problem.shape[1:]))
    return {row.name: row.shape(problem) != row.shape(more) for row in OPS[problem.op].operands}


def pick(problem: Problem, name: str, value: Value, rows: Tensor) -> Value:
    """The part of an operand or a result that belongs to these rows, in memory of its own."""
    if not isinstance(value, Tensor):
        return value
    if not by_row(problem)[name]:
        return value.clone()
    step = problem.shape[0] // value.shape[0]  # more than one row for each index: groups along the first axis
    return value.index_select(0, (rows[::step] // step).to(value.device))


def launch(plan: SelectedPlan, values: tuple[Value, ...]) -> Results:
    """What a plan makes of these operands, the outputs among them: by name, on the CPU."""
    if plan.kernel.strides == "contiguous":
        values = tuple(v.contiguous() if isinstance(v, Tensor) else v for v in values)
    plan.launch(values, torch.full((plan.workspace_size(),), 0xA5, dtype=torch.uint8, device=plan.device))
    named = zip(OPS[plan.problem.op].operands, values, strict=True)
    return {row.name: v.cpu() for row, v in named if row.output and isinstance(v, Tensor)}


def neighbours(problem: Problem, values: tuple[Value, ...], rows: Tensor, number: float) -> tuple[Value, ...]:
    """The operands, with every float of the rows that are not among these set to a number."""
    others, rowwise = torch.ones(problem.shape[0], dtype=torch.bool), by_row(problem)
    found: list[Value] = []
    others[rows] = False
    for operand, value in zip(OPS[problem.op].operands, values, strict=True):
        if isinstance(value, Tensor) and rowwise[operand.name] and not operand.output and value.is_floating_point():
            step = problem.shape[0] // value.shape[0]
            changed = value.contiguous().clone()
            changed[others[::step].to(value.device)] = number
            found.append(changed)
        else:
            found.append(value)
    return tuple(found)


def require_independent_rows(
    case: Case, rows: Tensor, number: float | None, device: torch.device, backend: BackendKind | None = None
) -> None:
    """Raise where these rows, alone and in this order, differ from the same rows of the batch.

    With a number, the batch's other rows are set to it.
    """
    problem, preference = case.problem, PlanPreference(prefer_backend=backend)
    values, names = operands(case, device), [row.name for row in OPS[problem.op].operands]
    alone = replace(problem, shape=(len(rows), *problem.shape[1:]))
    few = tuple(pick(problem, name, value, rows) for name, value in zip(names, values, strict=True))
    if number is not None:
        values = neighbours(problem, values, rows, number)
    batch = launch(SelectedPlan(problem, device, preference), values)
    rowwise = by_row(problem)
    wanted = {name: pick(problem, name, value, rows) for name, value in batch.items() if rowwise[name]}
    got = launch(SelectedPlan(alone, device, preference), few)
    what = f"{case}, rows {rows[:8].tolist()} of {problem.shape[0]}, neighbours {number}"
    assert_same_bits({name: got[name] for name in wanted}, wanted, what)  # type: ignore[arg-type]


def some_rows(problem: Problem, draw: random.Random) -> Tensor:
    """One row, a run of rows, or rows in any order; whole groups where they run along the first axis."""
    each, total = unit(problem), problem.shape[0] // unit(problem)
    start = draw.randrange(total)
    chosen = draw.choice(
        [
            [start],
            list(range(start, draw.randint(start, total - 1) + 1)),
            draw.sample(range(total), draw.randint(1, total)),
        ]
    )
    return torch.tensor([i * each + j for i in chosen for j in range(each)])


ROW_CASES = [case for case in [*CASES, *GROUP_CASES] if has_rows(case.problem)]


def random_case(draw: random.Random) -> Case:
    """A case of the matrix, or a weight-only linear, with sizes of its own: up to 300 rows, sometimes thousands."""
    rows = draw.choice([draw.randint(2, 40), draw.randint(2, 40), draw.randint(2, 300), draw.choice([512, 1024, 2048])])
    if draw.random() < 0.15:
        return _weight_only(draw, rows)
    case = draw.choice(ROW_CASES)
    problem = case.problem
    shape: tuple[int, ...]
    if is_linear(case):
        k = problem.weight_group * draw.randint(1, 6) if problem.weight_group else draw.randint(1, 600)
        shape = (rows, draw.randint(1, max(2, MOST_PRODUCTS // (rows * k))), k)
    else:
        inner, last = math.prod(problem.shape[1:-1]), problem.shape[-1]
        if not isinstance(problem.scope, PerGroup):
            last = min(draw.choice([last, draw.randint(1, 3000)]), max(1, MOST_ELEMENTS // (rows * inner)))
        rows = min(rows, max(2, MOST_ELEMENTS // max(1, inner * last)))
        rows = max(2, rows // unit(problem)) * unit(problem)
        shape = (rows, *problem.shape[1:-1], last)
    return replace(case, problem=replace(problem, shape=shape))


def _weight_only(draw: random.Random, rows: int) -> Case:
    group = draw.choice([0, 0, 32, 64, 128, 5, 48])
    k = group * draw.randint(1, 8) if group else draw.randint(1, 600)
    shape = (rows, draw.randint(1, max(2, MOST_PRODUCTS // (rows * k))), k)
    problem = Problem(
        QuantizeKind.WEIGHT_ONLY_LINEAR, shape, draw.choice(FLOATS), ElementKind.S8, -128, 127,
        weight=draw.choice([ElementKind.S8, ElementKind.S4, ElementKind.U4]), weight_group=group,
    )  # fmt: skip
    return Case(problem, residual=draw.random() < 0.5)
