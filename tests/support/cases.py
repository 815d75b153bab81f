"""The one matrix of cases, op x scope x dtype x shape x data, that every backend is run through, bit for bit.

`CASES` lists them; `run(case, backend)` computes one on a backend; `assert_same_bits` compares. A backend agrees with
the contract when `run(case, backend)` has the bits of `run(case, BackendKind.REFERENCE)` for every case.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baracuda import (
    Activation,
    Arithmetic,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    NormStyle,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
    Scope,
)
from baracuda.backends.registry import Value
from baracuda.core.optable import OPS, Operand
from baracuda.core.problem import Problem, fake_storage, scale_elements
from baracuda.core.types import FLOATS, INTEGERS, MAX_ZERO_POINT, OpCategory
from baracuda.plans.plan import SelectedPlan

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Every scope on shapes that meet it in a different way: empty, single, odd, first, middle and last axes.
LAYOUTS: list[tuple[tuple[int, ...], Scope]] = [
    ((), PerTensor()),
    ((0,), PerTensor()),
    ((1,), PerTensor()),
    ((7, 19), PerTensor()),
    ((3, 5, 64), PerTensor()),
    ((6, 33), PerChannel(0)),
    ((3, 5, 8), PerChannel(1)),
    ((2, 4, 3, 5), PerChannel(-2)),
    ((17, 9), PerChannel(-1)),
    ((0, 3), PerChannel(1)),
    ((5, 64), PerToken()),
    ((2, 3, 47), PerToken()),
    ((4, 0), PerToken()),
    ((9, 1), PerToken()),
    ((3, 32), PerGroup(8)),
    ((2, 15), PerGroup(5)),
    ((2, 12, 5), PerGroup(4, axis=1)),
    ((6, 7), PerGroup(3, axis=0)),
    ((4, 6), PerGroup(1)),
    ((3, 0), PerGroup(4)),
]
#: Fewer, larger ones: more than one block, tile or thread, with ragged ends.
LARGE_LAYOUTS: list[tuple[tuple[int, ...], Scope]] = [
    ((131, 1031), PerTensor()),
    ((37, 4099), PerToken()),
    ((5, 67, 301), PerChannel(1)),
    ((2051, 67), PerChannel(1)),
    ((31, 4096), PerGroup(128)),
    ((3, 256, 133), PerGroup(64, axis=1)),
]
ELEMENTWISE = [kind for kind, row in OPS.items() if row.elementwise]
DYNAMIC = [QuantizeKind.DYNAMIC_QUANTIZE, QuantizeKind.CHOOSE_QPARAMS, QuantizeKind.DYNAMIC_FAKE_QUANTIZE]
#: m, n, k: ones, primes, zeros, and both sides of the tiles kernels like.
LINEAR_SHAPES = [(1, 1, 1), (1, 7, 64), (3, 5, 0), (0, 4, 8), (4, 0, 8), (5, 17, 31), (16, 64, 128), (33, 70, 129)]
LINEAR_SHAPES += [(2, 3, 1)]


@dataclass(frozen=True)
class Case:
    """A problem and how its operands are made: `data` names a recipe in `floats`, the others a form."""

    problem: Problem
    data: str = "ordinary"
    scale: str = "tensor"
    zero_point: str = "tensor"
    row_strided: bool = False
    residual: bool = False

    def __str__(self) -> str:
        p = self.problem
        size = "x".join(map(str, p.shape)) or "scalar"
        parts = [p.op.value, size, p.scope.name, p.element.value, p.quantized.value, f"{p.q_min}..{p.q_max}"]
        parts += [p.mode.value, p.arithmetic.value, p.scale_element.value, self.data, self.scale, self.zero_point]
        parts += ["zero"] * p.include_zero + ["rows"] * self.row_strided
        if OPS[p.op].category is OpCategory.FUSED:
            parts += [p.nonlinearity.value, p.norm.value, str(p.eps)] + ["adds"] * p.adds + ["halves"] * p.halves
        return "-".join([*parts, *([p.nonlinearity.value] if is_linear(self) else []), *["residual"] * self.residual])


def _elementwise_cases(layouts: list[tuple[tuple[int, ...], Scope]]) -> Iterator[Case]:
    pick = random.Random(0).choice
    for op, (shape, scope), element, kind in itertools.product(ELEMENTWISE, layouts, FLOATS, INTEGERS):
        low, high = pick([(kind.q_min, kind.q_max)] * 3 + [(kind.q_min + 1, kind.q_max - 3)])
        stores_nothing = op in (QuantizeKind.FAKE_QUANTIZE, QuantizeKind.FAKE_QUANTIZE_BACKWARD)
        storage = fake_storage(low, high) if stores_nothing else kind
        arithmetic = pick([Arithmetic.DIVIDE, Arithmetic.DIVIDE, Arithmetic.RECIPROCAL])
        yield Case(
            Problem(op, shape, element, storage, low, high, scope, arithmetic=arithmetic),
            pick(["ordinary", "edges", "bits", "ties"]),
            pick(["tensor", "number", "input_type"]),
            pick(["tensor", "none", "number", "large"]),
            pick([False, False, True]) and len(shape) >= 2,
        )


def _dynamic_cases(layouts: list[tuple[tuple[int, ...], Scope]]) -> Iterator[Case]:
    pick = random.Random(1).choice
    for op, (shape, scope), element, kind, mode in itertools.product(
        DYNAMIC, layouts, FLOATS, INTEGERS, DynamicRangeMode
    ):
        low = -kind.q_max if kind.q_min < 0 and mode is DynamicRangeMode.SYMMETRIC else kind.q_min
        arithmetic = pick([Arithmetic.DIVIDE] * 3 + [Arithmetic.RECIPROCAL])
        stored = pick([scale_elements(element)[0], scale_elements(element)[-1]])
        include_zero = pick([False, False, True]) and mode is DynamicRangeMode.ASYMMETRIC
        yield Case(
            Problem(op, shape, element, kind, low, kind.q_max, scope, mode, arithmetic, stored, include_zero),
            pick(["ordinary", "ordinary", "zeros", "poison", "subnormal", "constant", "bits", "offset"]),
            row_strided=pick([False, False, True]) and len(shape) >= 2,
        )


def _linear_cases() -> Iterator[Case]:
    pick = random.Random(2).choice
    for op, shape, element, kind, weight, mode in itertools.product(
        (QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR),
        LINEAR_SHAPES,
        FLOATS,
        (ElementKind.S8, ElementKind.U8),
        (ElementKind.S8, ElementKind.S4),
        DynamicRangeMode,
    ):
        low = -127 if kind is ElementKind.S8 and mode is DynamicRangeMode.SYMMETRIC else kind.q_min
        stored, activation = scale_elements(element)[0], pick([Activation.NONE, *Activation])
        problem = Problem(
            op, shape, element, kind, low, kind.q_max,
            mode=mode, scale_element=stored, weight=weight, nonlinearity=activation,
        )  # fmt: skip
        data, scale = pick(["ordinary", "ordinary", "poison", "edges"]), pick(["tensor", "number", "input_type"])
        strides = pick([False, False, True]) and op is QuantizeKind.QUANTIZED_LINEAR
        yield Case(problem, data, scale, row_strided=strides, residual=pick([False, True]))


def _epilogue_cases() -> Iterator[Case]:
    """Every activation with and without a residual: ones, a prime each, nothing to sum, more than a tile of columns."""
    for op, shape, element, activation, residual, data in itertools.product(
        (QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR),
        [(1, 1, 1), (7, 13, 0), (3, 131, 67)],
        FLOATS,
        Activation,
        (False, True),
        ("ordinary", "edges"),
    ):
        stored = scale_elements(element)[0]
        problem = Problem(op, shape, element, ElementKind.S8, -127, 127, scale_element=stored, nonlinearity=activation)
        yield Case(problem, data, residual=residual)


def _group_cases() -> Iterator[Case]:
    """s4 weights whose groups have integer factors, 0 and those beyond four bits included."""
    pick = random.Random(4).choice
    for op, (shape, group), element, kind, mode in itertools.product(
        (QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR),
        [
            ((1, 1, 32), 32),
            ((3, 5, 64), 32),
            ((1, 64, 256), 128),
            ((17, 33, 192), 64),
            ((40, 20, 256), 256),
            ((2, 9, 99), 33),
        ],
        FLOATS,
        (ElementKind.S8, ElementKind.U8),
        DynamicRangeMode,
    ):
        low = -127 if kind is ElementKind.S8 and mode is DynamicRangeMode.SYMMETRIC else kind.q_min
        problem = Problem(
            op, shape, element, kind, low, kind.q_max, mode=mode, scale_element=scale_elements(element)[0],
            weight=ElementKind.S4, nonlinearity=pick([Activation.NONE, *Activation]), weight_group=group,
        )  # fmt: skip
        data, scale = pick(["ordinary", "ordinary", "poison"]), pick(["tensor", "number", "input_type"])
        yield Case(problem, data, scale, residual=pick([False, True]))


def _token_scale_cases() -> Iterator[Case]:
    """Linears over integers with a scale for each row."""
    pick = random.Random(5).choice
    for shape, element, kind, mode in itertools.product(
        LINEAR_SHAPES, FLOATS, (ElementKind.S8, ElementKind.U8), DynamicRangeMode
    ):
        problem = Problem(
            QuantizeKind.SMOOTHQUANT_LINEAR, shape, element, kind, kind.q_min, kind.q_max, PerToken(), mode,
            scale_element=scale_elements(element)[0], weight=pick([ElementKind.S8, ElementKind.S4]),
        )  # fmt: skip
        scale = pick(["tensor", "tensor", "number", "input_type"])
        yield Case(problem, pick(["ordinary", "edges"]), scale, residual=pick([False, True]))


#: Rows of norms and gated products: none, ones, primes, both sides of a vector, a tile and a block of the sums.
PRODUCER_SHAPES = [(3, 0), (0, 5), (1, 1), (9, 1), (4, 1), (7,), (2, 3, 47), (5, 64), (3, 1023), (2, 1025), (1, 4099)]
LARGE_PRODUCER_SHAPES = [(37, 576), (2, 8193), (1, 33000)]
NORMS = (QuantizeKind.NORM, QuantizeKind.NORM_QUANTIZE, QuantizeKind.NORM_DYNAMIC_QUANTIZE)
GATED = (QuantizeKind.GATED, QuantizeKind.GATED_QUANTIZE, QuantizeKind.GATED_DYNAMIC_QUANTIZE)


def _producer_cases(shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    pick = random.Random(6).choice
    for op, shape, element, kind in itertools.product((*NORMS, *GATED), shapes, FLOATS, INTEGERS):
        dynamic, plain = OPS[op].dynamic, op in (QuantizeKind.NORM, QuantizeKind.GATED)
        mode = pick(list(DynamicRangeMode)) if dynamic else DynamicRangeMode.SYMMETRIC
        low = -kind.q_max if dynamic and kind.q_min < 0 and mode is DynamicRangeMode.SYMMETRIC else kind.q_min
        problem = Problem(
            op, shape, element, kind, low, kind.q_max, PerToken() if dynamic or plain else PerTensor(), mode,
            pick([Arithmetic.DIVIDE, Arithmetic.DIVIDE, Arithmetic.RECIPROCAL]),
            pick([scale_elements(element)[0], scale_elements(element)[-1]]),
            pick([False, True]) and mode is DynamicRangeMode.ASYMMETRIC,
            nonlinearity=pick(list(Activation)) if op in GATED else Activation.NONE,
            norm=pick(list(NormStyle)),
            eps=pick([0.0, 1e-6, 1e-5]),
            adds=op in NORMS and pick([False, True]),
            halves=op in GATED and pick([False, True]),
        )  # fmt: skip
        yield Case(
            problem,
            pick(["ordinary", "ordinary", "edges", "bits", "poison", "subnormal", "zeros"]),
            pick(["tensor", "number", "input_type"]),
            pick(["tensor", "none", "number", "large"]),
            pick([False, True]) and len(shape) >= 2,
        )


LINEAR_CASES = list(_linear_cases())
GROUP_CASES = list(_group_cases())
CASES: list[Case] = [
    *_elementwise_cases(LAYOUTS),
    *_dynamic_cases(LAYOUTS),
    *_elementwise_cases(LARGE_LAYOUTS[:3]),
    *_dynamic_cases(LARGE_LAYOUTS),
    *LINEAR_CASES,
    *_epilogue_cases(),
    *_token_scale_cases(),
    *_producer_cases(PRODUCER_SHAPES),
    *_producer_cases(LARGE_PRODUCER_SHAPES),
]


# -- data --------------------------------------------------------------------------------------------------------

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, 127.5, -128.5, 1e-45, -1e-40, 2.0**-126, 6e-8, 65504.0, 3e38, -3e38]
EDGES += [float("inf"), float("-inf"), float("nan")]


def floats(data: str, shape: tuple[int, ...], element: ElementKind, seed: int) -> Tensor:
    """A float tensor by recipe, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    dtype = element.dtype
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if data == "bits":
        integer = BITS[dtype.itemsize]
        info = torch.iinfo(integer)
        return torch.randint(info.min, info.max, shape, generator=generator, dtype=integer).view(dtype)
    if data in ("edges", "poison"):
        edges = torch.tensor(EDGES, dtype=torch.float64)
        pick = torch.randint(0, len(EDGES), shape, generator=generator)
        often = 0.5 if data == "edges" else 0.02
        x = torch.where(torch.rand(shape, generator=generator) < often, edges[pick], x * 3)
    elif data == "ties":
        x = (torch.randint(-300, 300, shape, generator=generator) + 0.5) * 0.25
    elif data == "zeros":
        x = torch.where(torch.rand((*shape[:-1], 1) if shape else (), generator=generator) < 0.5, 0.0, x)
    elif data == "subnormal":
        x = x * {ElementKind.F16: 2.0**-22, ElementKind.F64: 2.0**-1060}.get(element, 2.0**-140)
    elif data == "constant":
        x = torch.full(shape, -3.7, dtype=torch.float64)
    elif data == "offset":
        x = x * 0.01 + 1000.0
    return x.to(dtype)


def operands(case: Case, device: torch.device | str = "cpu") -> tuple[Value, ...]:
    """The operands of a case in launch order; outputs are poisoned, so that an unwritten element shows."""
    p, seed = case.problem, zlib.crc32(str(case).encode())
    values: list[Value] = []
    for i, operand in enumerate(OPS[p.op].operands):
        values.append(_operand(case, operand, seed + i))
    return tuple(v.to(device) if isinstance(v, Tensor) else v for v in values)


def _operand(case: Case, operand: Operand, seed: int) -> Value:
    p = case.problem
    shape, kinds, name = operand.shape(p), operand.elements(p), operand.name
    generator = torch.Generator().manual_seed(seed)
    if operand.output:
        if name == "sum_out" and not p.adds:
            return None
        if (
            name != "sum_out"
            and operand.optional
            and (p.mode is DynamicRangeMode.SYMMETRIC or name.endswith("scratch"))
        ):
            return None
        return torch.full(shape, 77, dtype=kinds[0].dtype)
    if name in ("scale", "act_scale", "weight_scale"):
        if case.scale == "number" and operand.number is not None:
            return 0.25 if name == "scale" else 0.013
        kind = kinds[-1] if case.scale == "input_type" else kinds[0]
        scale = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.5 + 2.0**-6
        if case.data == "bits":
            scale = scale * 2.0 ** torch.randint(-130, 120, shape, generator=generator)
        if case.data == "edges" and scale.numel() > 1:
            scale.view(-1)[0] = 0.0
            scale.view(-1)[-1] = float("nan")
        return scale.to(kind.dtype)
    if name == "weight_zero_point":
        return torch.randint(p.weight.q_min, p.weight.q_max + 1, shape, generator=generator, dtype=torch.int32)
    if name in ("zero_point", "act_zero_point"):
        return _zero_point(case, name, shape, generator)
    if name == "residual" and not case.residual:
        return None
    if (name == "addend" and not p.adds) or (name == "up" and p.halves):
        return None
    if name in ("norm_weight", "norm_bias"):
        kind = kinds[-1] if case.scale == "input_type" else kinds[0]
        return floats("ordinary", shape, kind, seed) if seed % 4 else None
    if name == "weight_factor" and not p.weight_group:
        return None
    if name in ("bias", "weight_sum"):
        # Where there is nothing to sum, the bias is all that an activation gets to see.
        data = "edges" if p.shape[2] == 0 else "ordinary"
        return floats(data, shape, kinds[0], seed) if name == "bias" and seed % 3 else None
    if kinds[0].is_float:
        x = floats(case.data, shape, kinds[0], seed)
        return strided(x) if case.row_strided else x
    info = torch.iinfo(kinds[0].dtype)
    return torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=torch.int64).to(kinds[0].dtype)


def _zero_point(case: Case, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Value:
    p = case.problem
    if name == "act_zero_point":
        return 5 if p.mode is DynamicRangeMode.ASYMMETRIC else None
    if case.zero_point in ("none", "number"):
        return None if case.zero_point == "none" else p.q_min + 3
    low, high = (-(2**25), 2**25) if case.zero_point == "large" else (p.q_min - 2, p.q_max + 3)
    zero_point = torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    if case.zero_point == "large" and zero_point.numel() > 2:
        zero_point.view(-1)[:2] = torch.tensor([MAX_ZERO_POINT, -MAX_ZERO_POINT])
    return zero_point


def strided(x: Tensor) -> Tensor:
    """The same values in rows that are further apart than they are long."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def run(case: Case, backend: BackendKind, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The outputs of a case on a backend, by name."""
    device = torch.device(device)
    plan = SelectedPlan(case.problem, device, PlanPreference(prefer_backend=backend))
    values = operands(case, device)
    if plan.kernel.strides == "contiguous":
        values = tuple(v.contiguous() if isinstance(v, Tensor) else v for v in values)
    workspace = torch.full((plan.workspace_size(),), 0xA5, dtype=torch.uint8, device=device)
    plan.launch(values, workspace)
    rows = OPS[case.problem.op].operands
    return {o.name: v.cpu() for o, v in zip(rows, values, strict=True) if o.output and isinstance(v, Tensor)}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BITS[x.dtype.itemsize])


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        different = bits(got[name]) != bits(wanted)
        if different.any():
            where = different.nonzero()[0].tolist() if different.ndim else []
            raise AssertionError(
                f"{what}: {name} differs in {int(different.sum())} of {different.numel()}, first at {where}: "
                f"got {got[name][tuple(where)]!r}, expected {wanted[tuple(where)]!r}"
            )


def is_linear(case: Case) -> bool:
    return OPS[case.problem.op].category is OpCategory.GEMM
