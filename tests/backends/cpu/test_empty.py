"""Tensors with axes of length 0: every operation, scope and rank, bit for bit with the reference.

Nothing is read and no element is written; an empty segment still has parameters (scale 1, zero point 0 or q_min) or
gradients (0). The compiled kernels run here on every instruction set. The Triton kernels run in the interpreter
(TRITON_INTERPRET=1 pytest tests/backends/cpu/test_empty.py) or, where there is one, on a CUDA device.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator

import pytest
import torch

from baracuda import BackendKind, DynamicRangeMode, ElementKind, PerChannel, PerGroup, PerTensor, PerToken, Scope
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem, fake_storage, scale_elements
from baracuda.core.types import FLOATS, INTEGERS, OpCategory, QuantizeKind
from cases import Case, assert_same_bits, run

pytestmark = [
    pytest.mark.usefixtures("restored"),
    # numpy, which the interpreter computes with, remarks on every overflow of the edge cases.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

LENGTHS = (3, 5, 2, 4, 6)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TARGETS = [
    pytest.param(BackendKind.CPU, "cpu", id="compiled"),
    pytest.param(
        BackendKind.TRITON, "cpu", id="interpreter",
        marks=pytest.mark.skipif(not INTERPRETED, reason="interprets kernels: TRITON_INTERPRET=1"),
    ),
    pytest.param(
        BackendKind.TRITON, "cuda:0", id="gpu",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]  # fmt: skip


def shapes(rank: int) -> Iterator[tuple[int, ...]]:
    """Every choice of axes to be empty, but none."""
    for axes in itertools.product((False, True), repeat=rank):
        if any(axes):
            yield tuple(0 if empty else n for n, empty in zip(LENGTHS, axes, strict=False))


def scopes(shape: tuple[int, ...]) -> Iterator[Scope]:
    yield from (PerTensor(), PerToken())
    for axis, n in enumerate(shape):
        yield PerChannel(axis)
        yield PerGroup(n or 2, axis)
        yield PerGroup(1, axis)


def cases(op: QuantizeKind, rank: int) -> Iterator[Case]:
    pick = random.Random(rank).choice
    for shape in shapes(rank):
        for scope in scopes(shape):
            element, kind, mode = pick(FLOATS), pick(INTEGERS), pick(list(DynamicRangeMode))
            if "FAKE_QUANTIZE" in op.name and not OPS[op].dynamic:
                kind = fake_storage(kind.q_min, kind.q_max)
            symmetric = mode is DynamicRangeMode.SYMMETRIC
            low = -kind.q_max if symmetric and kind.q_min < 0 and OPS[op].dynamic else kind.q_min
            stored = pick(scale_elements(element))
            problem = Problem(op, shape, element, kind, low, kind.q_max, scope, mode=mode, scale_element=stored)
            yield Case(problem, scale=pick(["tensor", "number", "input_type"]), zero_point=pick(["tensor", "none"]))


def assert_like_reference(case: Case, backend: BackendKind, device: str) -> None:
    expected = run(case, BackendKind.REFERENCE)
    if backend is not BackendKind.CPU:
        assert_same_bits(run(case, backend, device), expected, case)
        return
    from baracuda import _cpu

    for isa in _cpu.isas():
        _cpu.use_isa(isa)
        assert_same_bits(run(case, backend), expected, f"{isa}: {case}")


@pytest.mark.parametrize(("backend", "device"), TARGETS)
@pytest.mark.parametrize("rank", range(1, 6))
@pytest.mark.parametrize(
    "op", [op for op, row in OPS.items() if row.category is OpCategory.QUANTIZATION], ids=lambda op: op.value
)
def test_empty_axes(op: QuantizeKind, rank: int, backend: BackendKind, device: str) -> None:
    every = list(cases(op, rank))
    for case in every if backend is BackendKind.CPU else every[:: 1 + len(every) // 40]:
        assert_like_reference(case, backend, device)


@pytest.mark.parametrize(("backend", "device"), TARGETS)
@pytest.mark.parametrize(
    "op", [QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR], ids=lambda op: op.value
)
def test_empty_linears(op: QuantizeKind, backend: BackendKind, device: str) -> None:
    pick = random.Random(0).choice
    for shape, element, kind, weight, mode in itertools.product(
        shapes(3), FLOATS, (ElementKind.S8, ElementKind.U8), (ElementKind.S8, ElementKind.S4), DynamicRangeMode
    ):
        stored = scale_elements(element)[0]
        problem = Problem(
            op, shape, element, kind, kind.q_min, kind.q_max, mode=mode, scale_element=stored, weight=weight
        )
        if backend is BackendKind.CPU or pick(range(8)) == 0:
            assert_like_reference(Case(problem, residual=pick([False, True])), backend, device)


@pytest.mark.parametrize("mode", DynamicRangeMode)
def test_an_empty_segment_has_a_scale_of_one(mode: DynamicRangeMode) -> None:
    problem = Problem(
        QuantizeKind.DYNAMIC_QUANTIZE, (0, 5, 2), ElementKind.F32, ElementKind.S8, -127, 127, PerChannel(1), mode=mode
    )
    outputs = run(Case(problem), BackendKind.CPU)
    assert outputs["scale_out"].tolist() == [1.0] * 5
    if mode is DynamicRangeMode.ASYMMETRIC:
        assert outputs["zero_point_out"].tolist() == [-127] * 5
    assert outputs["output"].shape == (0, 5, 2)
