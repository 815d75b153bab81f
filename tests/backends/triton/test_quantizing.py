"""The sm_90 linears that quantize their tokens: one kernel, its PTX interpreted, down to the output's bits."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from launched import GPU, Launched, assert_reference_bits
from ptxas import assembled

from baracuda import Activation, Arithmetic, DynamicRangeMode, ElementKind, QuantizeKind
from baracuda.backends.triton.linear import support
from baracuda.core.problem import Problem, scale_elements
from cases import floats

triton = pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

KERNEL = "gemm_direct"
#: Bytes of shared memory of a multiprocessor.
SHARED = 228 * 1024


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched.afresh(monkeypatch, tmp_path_factory, 1)


def problem(m: int, n: int, k: int, weight: str = "s8", group: int = 0, element: str = "bf16") -> Problem:
    kind, shape = ElementKind.of(element), (m, n, k)
    p = Problem(QuantizeKind.QUANTIZED_LINEAR, shape, kind, ElementKind.S8, -127, 127, weight=ElementKind.of(weight))
    return replace(p, weight_group=group)


#: Warps without work, and warps that all have the same; groups of half a chunk's length.
DIRECT = [(1, 64, 64), (1, 1152, 128), (2, 1152, 64), (3, 4096, 128), (4, 4096, 0)]


@pytest.mark.parametrize("m, k, group", DIRECT)
def test_the_direct_gemm_quantizes_its_tokens_with_the_bits_of_the_reference(
    launched: Launched, m: int, k: int, group: int
) -> None:
    assert assert_reference_bits(launched, problem(m, 40, k, "s4", group)) == [KERNEL]


def with_rows(data: str, m: int, k: int, element: ElementKind) -> torch.Tensor:
    """Tokens of a kind of data, so that among several there is a row of zeros and one with an infinity."""
    x = floats(data, (m, k), element, 7)
    if m > 2:
        x[0] = 0.0
        x[1] = floats("ordinary", (k,), element, 8)
        x[1, k // 3] = float("-inf")
    return x


@pytest.mark.parametrize("data", ["edges", "poison", "zeros", "subnormal", "bits", "ties", "constant"])
@pytest.mark.parametrize("element", ["bf16", "f16", "f32"])
def test_tokens_of_any_numbers_have_the_bits_of_the_reference(launched: Launched, element: str, data: str) -> None:
    for m in (1, 4):
        for scale in scale_elements(ElementKind.of(element)):
            p = replace(problem(m, 24, 1152, "s4", 128, element), scale_element=scale)
            assert assert_reference_bits(launched, p, activation=with_rows(data, m, 1152, p.element)) == [KERNEL]


def test_infinities_nan_and_zeros_alone_have_the_bits_of_the_reference(launched: Launched) -> None:
    for number in (0.0, -0.0, float("inf"), float("nan"), 3e38, 1e-40):
        x = torch.zeros(1, 256).bfloat16()
        x[0, 200] = number
        assert_reference_bits(launched, problem(1, 24, 256, "s4", 128), activation=x)


@pytest.mark.parametrize("low, high", [(-128, 127), (-127, 127), (-100, 50), (0, 127)])
def test_every_range_of_integers_has_the_bits_of_the_reference(launched: Launched, low: int, high: int) -> None:
    for scale in scale_elements(ElementKind.F16):
        p = replace(problem(2, 24, 576, "s4", 64, "f16"), q_min=low, q_max=high, scale_element=scale)
        assert_reference_bits(launched, p)


ENDS = [
    ("bf16", Activation.GELU, "tensor", 1),
    ("f16", Activation.SILU, "number", 3),
    ("f32", Activation.RELU, "input_type", 2),
    ("bf16", Activation.NONE, "number", 4),
]


@pytest.mark.parametrize("element, nonlinearity, scale, m", ENDS)
def test_every_end_of_the_linear_has_the_bits_of_the_reference(
    launched: Launched, element: str, nonlinearity: Activation, scale: str, m: int
) -> None:
    n = 72
    p = replace(problem(m, n, 1152, "s4", 128, element), nonlinearity=nonlinearity)
    for data in ("ordinary", "edges"):
        bias = floats(data, (n,), ElementKind.F32 if element == "f32" else p.element, 1)
        given: dict[str, Any] = {"bias": bias, "residual": floats(data, (m, n), p.element, 2)}
        assert assert_reference_bits(launched, p, scale, **given) == [KERNEL]


def test_who_asks_for_the_quantized_activations_gets_two_kernels(launched: Launched) -> None:
    p = problem(2, 24, 576, "s4", 64)
    scratch = {
        "act_q_scratch": torch.full((2, 576), 77, dtype=torch.int8),
        "act_scale_scratch": torch.full((2,), 77.0),
    }
    for names in (["act_q_scratch"], ["act_scale_scratch"], list(scratch)):
        assert assert_reference_bits(launched, p, **{name: scratch[name] for name in names}) == ["rows", KERNEL]


def test_what_cannot_be_read_in_vectors_takes_two_kernels(launched: Launched) -> None:
    x = floats("ordinary", (2 * 576 + 1,), ElementKind.BF16, 3)[1:].view(2, 576)
    assert x.data_ptr() % 16
    assert assert_reference_bits(launched, problem(2, 24, 576, "s4", 64), activation=x) == ["rows", KERNEL]


def test_other_linears_take_two_kernels(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(2, 24, 576, "s4", 64)
    others = [replace(p, arithmetic=Arithmetic.RECIPROCAL), problem(5, 24, 576, "s4", 64)]
    for other in others:
        assert support.quantizing_tile(other, GPU) is None
        assert assert_reference_bits(launched, other) == ["rows", KERNEL]
    asymmetric = replace(problem(2, 24, 576), mode=DynamicRangeMode.ASYMMETRIC, q_min=-128)
    assert support.quantizing_tile(asymmetric, GPU) is None
    assert "quantizes its tokens" in support.describe_hopper(p, GPU)
    for other in (problem(1, 24, 576), problem(1, 24, 4224, "s4", 128), problem(1, 24, 576, "s4", 32)):
        assert support.quantizing_tile(other, GPU) is None
        assert assert_reference_bits(launched, other) == ["rows", "gemm_few"]
        assert "quantizes" not in support.describe_hopper(other, GPU)


def test_the_weight_is_fetched_no_further_than_l2_while_anything_runs_that_may_write_it(launched: Launched) -> None:
    assert_reference_bits(launched, problem(1, 24, 576, "s4", 64))
    before, waits, after = launched.ptx[0].partition("griddepcontrol.wait")
    assert waits and "griddepcontrol.launch_dependents" in before
    assert "cp.async.bulk.prefetch.L2" in before
    assert "cp.async.bulk.tensor" not in before and not re.search(r"(ld|st)\.global", before)
    # Then the weight first, and what takes time while it comes.
    found = re.search(r"ld\.global\.v\d\.b32", after)
    assert found and found.start() < after.index("ld.global.cg")


def test_kernels_that_do_not_overlap_have_the_bits_of_the_reference(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baracuda.backends.triton import launch as module

    monkeypatch.setattr(module, "PDL_IN_GRAPHS", 10**9)
    for m in (1, 3):
        assert assert_reference_bits(launched, problem(m, 72, 1152, "s4", 64)) == [KERNEL]
    assert "griddepcontrol" not in launched.ptx[0] + launched.ptx[1]


@pytest.mark.parametrize("n, k", [(6144, 4096), (4096, 4096), (28672, 4096)])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_tokens_and_weights_fit_as_often_as_the_tile_says_and_spill_nothing(
    launched: Launched, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(m, n, k, "s4", 128)
    monkeypatch.setattr(torch.cuda.get_device_properties(GPU), "multi_processor_count", 132)
    tile = support.quantizing_tile(p, GPU)
    assert tile is not None
    compiled = compile_alone(launched, p)
    report = assembled(compiled)
    assert not report.spills and report.registers <= tile.thread_registers
    assert (compiled.metadata.shared + 1024) * tile.programs <= SHARED
    assert "ld.global.cg.v" in compiled.asm["ptx"]


def compile_alone(launched: Launched, p: Problem) -> Any:
    """The kernel of a problem, compiled and given to the driver, on operands that nobody reads."""
    from baracuda.backends.triton import KERNELS

    kernel = next(kernel for kernel in KERNELS if p.op in kernel.ops)
    m, n, k = p.shape
    stored = torch.empty(n, k, dtype=torch.int8) if not p.weight.is_packed else None
    weight = stored if stored is not None else torch.empty(n, k // 2, dtype=torch.uint8).view(p.weight.dtype)
    factor = torch.empty(n, k // p.weight_group, dtype=torch.uint8) if p.weight_group else None
    x, out = torch.empty(m, k, dtype=p.element.dtype), torch.empty(m, n, dtype=p.element.dtype)
    workspace = torch.empty(max(kernel.workspace(p, GPU), 1), dtype=torch.uint8)
    kernel.bind(p, GPU)((x, weight, torch.empty(n), None, None, None, factor, None, None, out), workspace)
    return launched.compiled[-1]
