"""What the code answers about itself: the op matrix, the guarantees, the named plans, the command line."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
import typer

import baracuda
from baracuda import BackendKind, ElementKind, Plan, PrecisionGuarantee
from baracuda.backends.matrix import SCOPES, Cell, cells
from baracuda.backends.registry import BACKENDS, contract
from baracuda.flow.run import verdict
from baracuda_cli import app

from .markdown import table

JOINT = "\N{NO-BREAK SPACE}"
#: One letter for each backend in the matrix.
LETTERS = {BackendKind.TRITON: "T", BackendKind.CPU: "C", BackendKind.REFERENCE: "R"}


def op_matrix() -> str:
    """A row for each op, or more where scopes differ; per float type the backends that take all its integer types."""
    asked = _both_devices()
    groups: dict[tuple[str, str], list[tuple[Cell, set[BackendKind]]]] = defaultdict(list)
    for cell, serving in asked:
        groups[f"`{cell.problem.op.value}`", cell.scope_name].append((cell, serving))
    floats = list(dict.fromkeys(cell.problem.element.value for cell, _ in asked))
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (op, scope), group in groups.items():
        integers = JOINT.join(dict.fromkeys(cell.problem.quantized.value for cell, _ in group))
        columns = [_letters([s for cell, s in group if cell.problem.element.value == name]) for name in floats]
        alike[op, *columns, integers].append(scope)
    rows = [
        [op, "every" if len(scopes) == len(SCOPES) else ", ".join(scopes), *answers]
        for (op, *answers), scopes in alike.items()
    ]
    return table(["operation", "scopes", *floats, "integers"], rows)


def matrix_counts() -> str:
    asked = _both_devices()
    counts = ", ".join(
        f"{sum(backend in serving for _, serving in asked)} by {backend.value}" for backend in reversed(BACKENDS)
    )
    return f"{len(asked)} cells, each a problem asked of the registry: {counts}."


def _letters(servings: list[set[BackendKind]]) -> str:
    return JOINT.join(
        letter if all(backend in serving for serving in servings) else "·" for backend, letter in LETTERS.items()
    )


def _both_devices() -> list[tuple[Cell, set[BackendKind]]]:
    """Each cell with the backends that take it on a CPU tensor or a CUDA tensor."""
    with _a_gpu():
        cuda = list(cells(torch.device("cuda", 0)))
    pairs = zip(cells(torch.device("cpu")), cuda, strict=True)
    return [(cell, _serving(cell) | _serving(other)) for cell, other in pairs]


def _serving(cell: Cell) -> set[BackendKind]:
    return {backend for backend, reason in cell.answers.items() if reason is None}


@contextmanager
def _a_gpu() -> Iterator[None]:
    """The question "who would take this on an sm_90 GPU" has an answer on machines without one."""
    with (
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.version.cuda", "12"),
        patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
    ):
        yield


def guarantees() -> str:
    """What every kernel that takes it guarantees for each cell of the matrix, alike ones in one row."""
    found: dict[PrecisionGuarantee, dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell, serving in _both_devices():
        if serving:
            found[contract(cell.problem)][cell.problem.op.value].append(cell)
    rows = []
    for guarantee, ops in found.items():
        floats = {cell.problem.element for group in ops.values() for cell in group}
        listed = ", ".join(op.replace("_", "_<wbr>") for op in ops)
        if not guarantee.batch_invariant:  # by their scopes, which the operations of a row have in common
            listed += f" by {', '.join(dict.fromkeys(c.scope_name for group in ops.values() for c in group))}"
        order = JOINT.join(kind.value for kind in ElementKind if kind in floats)
        yes = [
            "yes" if v else "no"
            for v in (
                guarantee.deterministic,
                guarantee.bit_stable_on_same_hardware,
                guarantee.batch_invariant,
                guarantee.split_invariant,
            )
        ]
        reference = "yes" if guarantee.matches_reference else "but the last bit"
        rows.append([listed, order, guarantee.math_precision.value, guarantee.accumulator.value, *yes, reference])
    header = [
        "operations",
        "types",
        "math",
        "sums",
        "deterministic",
        "bit-stable",
        "batch-invariant",
        "split-invariant",
        "reference",
    ]
    return table(header, rows)


def plans() -> str:
    """Every named plan with its descriptor and arguments, under the names the package exports."""
    links = [[f"[`{name}`][baracuda.{name}]" for name in row] for row in named_plans()]
    return table(["plan", "descriptor", "arguments"], links)


def plan_aliases() -> str:
    """The further names under which a plan's descriptor and arguments are exported."""
    found: dict[str, list[str]] = defaultdict(list)
    for plan, *used in named_plans():
        for suffix, name in zip(("Descriptor", "Args"), used, strict=True):
            alias = plan.removesuffix("Plan") + suffix
            if getattr(baracuda, alias).__name__ != name:
                raise ValueError(f"{alias} is not {name}")
            if alias != name:
                found[name].append(f"`{alias}`")
    return table(["class", "also exported as"], [[f"`{name}`", " ".join(aliases)] for name, aliases in found.items()])


def named_plans() -> list[tuple[str, str, str]]:
    """The class names of every exported plan, its descriptor and its arguments."""
    exported = [getattr(baracuda, name) for name in baracuda.__all__]
    kinds = [kind for kind in exported if isinstance(kind, type) and issubclass(kind, Plan) and kind is not Plan]
    kinds.sort(key=list(vars(baracuda.plans.declarations).values()).index)
    return [(kind.__name__, *(used.__name__ for used in get_args(kind.__orig_bases__[0]))) for kind in kinds]


def _classes(column: int) -> Callable[[], str]:
    """The reference of each class in a column of the plans' table, once."""
    return lambda: "\n".join(f"::: baracuda.{name}" for name in dict.fromkeys(row[column] for row in named_plans()))


def element_kinds() -> str:
    rows = []
    for kind in ElementKind:
        span = "" if kind.is_float else f"{kind.q_min} to {kind.q_max}"
        packed = ", two to a byte" if kind.is_packed else ""
        rows.append([f"`{kind.name}`", f'`"{kind.value}"`', f"`{kind.dtype}`{packed}", span])
    return table(["member", "name", "stored as", "range"], rows)


def enumerations() -> str:
    """The other enumerations with their members: each can be given by its value."""
    kinds = [getattr(baracuda, name) for name in baracuda.__all__]
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) and kind is not ElementKind]
    return table(
        ["enumeration", "members"], [[f"`{e.__name__}`", ", ".join(f"`{member.name}`" for member in e)] for e in enums]
    )


def command_line() -> str:
    """Every command with its arguments and options, from the parser itself."""
    group: Any = typer.main.get_command(app)
    sections = []
    for name, command in group.commands.items():
        rows = []
        for parameter in command.params:
            if parameter.name == "help":
                continue
            argument = parameter.param_type_name == "argument"
            spelled = parameter.name.upper() if argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
            default = "required" if parameter.required else _default(parameter.default)
            rows.append([f"`{spelled}`", default, parameter.help])
        listed = table(["", "default", ""], rows)
        sections.append(f"## baracuda {name}\n\n{command.help}\n\n{listed}")
    return "\n\n".join(sections)


def _default(value: object) -> str:
    empty = value is None or value == () or not isinstance(value, str | int | float)
    return "" if empty else "off" if value is False else f"`{value}`"


def verdict_limits() -> str:
    """The limits of the report's verdict."""
    rows = []
    for criterion in (verdict.KL, verdict.AGREEMENT, verdict.PERPLEXITY, verdict.COSINE):
        sign = "at least" if criterion.least else "at most"
        limits = (f"{sign} {limit:{criterion.form}}" for limit in (criterion.good, criterion.fair))
        rows.append([criterion.name, *limits])
    return table(["figure", "good", "fair"], rows)


def architectures() -> str:
    """What `make architectures` found, by kind of model."""
    found = json.loads((Path(__file__).parents[2] / "tools" / "architectures.json").read_text())
    rows = []
    for family, title in found["families"].items():
        mine = [row for row in found["rows"] if row["family"] == family]
        works = [f"`{row['architecture']}`" for row in mine if row["outcome"] == "works"]
        rows.append([title, len(works), ", ".join(works)])
    refused = [
        [f"`{row['architecture']}`", row["reason"].partition(". Use another")[0]]
        for row in found["rows"]
        if row["outcome"] == "refused"
    ]
    return "\n\n".join(
        [
            f"transformers {found['transformers']}:",
            table(["kind of model", "work", "architectures"], rows, range(1, 2)),
            "Refused, with the reason:",
            table(["architecture", "reason"], refused),
            f"{found['not tried']} more have no small form that the tool's sizes make, and were not tried.",
        ]
    )


MAKERS: dict[str, Callable[[], str]] = {
    "architectures": architectures,
    "op_matrix": op_matrix,
    "matrix_counts": matrix_counts,
    "guarantees": guarantees,
    "plans": plans,
    "plan_aliases": plan_aliases,
    "plan_classes": _classes(0),
    "descriptor_classes": _classes(1),
    "argument_classes": _classes(2),
    "element_kinds": element_kinds,
    "enumerations": enumerations,
    "command_line": command_line,
    "verdict_limits": verdict_limits,
}
