"""Each Triton kernel compiled for sm_90 without a GPU: what its PTX must not contain, and how wide its accesses are."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baracuda import (
    Arithmetic,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantizeKind,
    Scope,
)
from baracuda.core.problem import Problem

TRITON = pytest.importorskip("triton").__version__
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels, does not interpret"
)

SHAPE = (4096, 8192)
CPU = torch.device("cpu")
POINTERS = {ElementKind.F16: "*fp16", ElementKind.BF16: "*bf16", ElementKind.F32: "*fp32", ElementKind.F64: "*fp64"}
POINTERS |= {ElementKind.S8: "*i8", ElementKind.U8: "*u8", ElementKind.S4: "*u8", ElementKind.U4: "*u8"}
SCOPES = [PerTensor(), PerToken(), PerGroup(128), PerChannel(1), PerGroup(128, axis=0)]
FLOATS = [ElementKind.BF16, ElementKind.F32, ElementKind.F64]
BACKWARD = (
    QuantizeKind.QUANTIZE_BACKWARD,
    QuantizeKind.DEQUANTIZE_BACKWARD,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD,
)


def compiled(step: object, forms: Sequence[str], capability: int = 90) -> Any:
    from triton.backends.compiler import GPUTarget

    from baracuda.backends.triton.launch import Step, compile_kernel

    assert isinstance(step, Step)
    target, aligned = GPUTarget("cuda", capability, 32), True
    return compile_kernel(step.kernel, forms, step.sizes, step.constants, step.build, target, aligned)


def ptx_of(step: object, forms: Sequence[str]) -> str:
    """Of a kernel that touches memory only when the kernel before it has ended."""
    made = compiled(step, forms)
    assert_waits(made)
    text: str = made.asm["ptx"]
    return text


def assert_stays_with_its_threads(step: Any, forms: Sequence[str]) -> None:
    """Loads and stores agree on which thread has what: shared memory is for ranges, not for tiles."""
    tile = tile_of(step)
    elements = tile.parts * tile.lines * tile.columns
    assert compiled(step, forms).metadata.shared < elements // 2


def is_wide(step: Any) -> bool:
    return any(getattr(value, "wide", False) for value in step.constants.values())


def tile_of(step: Any) -> Any:
    return (step.constants.get("SCAN") or step.constants["SPEC"]).tile


def instructions(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"^\s*(?:@\S+\s+)?([a-z][\w.:]+)", ptx, re.MULTILINE))


def elementwise_ptx(
    op: QuantizeKind, scope: Scope, element: ElementKind, kind: ElementKind, arithmetic: Arithmetic
) -> str:
    from baracuda.backends.triton.elementwise.launch import elementwise_step

    p = Problem(op, SHAPE, element, kind, kind.q_min, kind.q_max, scope, arithmetic=arithmetic)
    scale = POINTERS[element.math]
    float_, stored = POINTERS[element], POINTERS[kind]
    forms = {
        QuantizeKind.QUANTIZE: [float_, "constexpr", scale, "*i32", stored],
        QuantizeKind.DEQUANTIZE: [stored, "constexpr", scale, "*i32", float_],
        QuantizeKind.FAKE_QUANTIZE: [float_, "constexpr", scale, "*i32", float_],
        QuantizeKind.DEQUANTIZE_BACKWARD: ["constexpr", float_, scale, "*i32", float_],
    }.get(op, [float_, float_, scale, "*i32", float_])
    return ptx_of(elementwise_step(p, CPU), forms)


def assert_waits(made: Any) -> None:
    """A kernel launched before the one in front of it has ended waits for that end before it touches memory."""
    ptx = made.asm["ptx"]
    if made.metadata.launch_pdl:
        before, _, after = ptx.partition("griddepcontrol.wait")
        assert not re.search(r"\b(ld|st|atom|red|cp)\.(global|async|reduce)", before) and "bra" not in before
        assert "griddepcontrol.launch_dependents" in after
    else:
        assert "griddepcontrol" not in ptx


def assert_exact(ptx: str) -> None:
    """No approximate division, no flushed subnormals."""
    for word in ("div.full", "div.approx", "rcp.approx", ".ftz"):
        assert word not in ptx, word


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("scope", SCOPES, ids=str)
@pytest.mark.parametrize(
    "op", [k for k in QuantizeKind if k in BACKWARD or k.value in ("quantize", "dequantize", "fake_quantize")]
)
def test_elementwise_kernels_are_exact_and_access_memory_in_vectors(
    op: QuantizeKind, scope: Scope, element: ElementKind
) -> None:
    ptx = elementwise_ptx(op, scope, element, ElementKind.S8, Arithmetic.DIVIDE)
    assert_exact(ptx)
    counts = instructions(ptx)
    # Beside a float vector of 4 to 16 bytes the 8-bit side of strided or short segments is 2 or 4 bytes wide.
    narrow = r"|b32|b16" if scope in (PerGroup(128), PerChannel(1), PerGroup(128, axis=0)) else ""
    assert any(re.match(rf"ld\.global\.(v[248]{narrow})", name) for name in counts)
    assert any(re.match(rf"st\.global\.(cs\.)?(v[248]{narrow})", name) for name in counts)
    fused = sum(n for name, n in counts.items() if name.startswith("fma"))
    divides = op not in (QuantizeKind.DEQUANTIZE, QuantizeKind.DEQUANTIZE_BACKWARD)
    assert (fused > 0) == divides


@pytest.mark.parametrize("scope", [PerToken(), PerChannel(1), PerGroup(32)], ids=str)
def test_gradients_and_what_is_four_times_its_input_are_streamed_if_they_do_not_fit_in_the_cache(
    scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baracuda.backends.triton import tune

    def streams(op: QuantizeKind, element: ElementKind, kind: ElementKind) -> bool:
        names = instructions(elementwise_ptx(op, scope, element, kind, Arithmetic.DIVIDE))
        (found,) = {name.startswith("st.global.cs") for name in names if name.startswith("st.global")}
        return found

    for element in FLOATS:
        written = math.prod(SHAPE) * element.dtype.itemsize
        monkeypatch.setattr(tune, "cache_of", lambda device, nbytes=written: nbytes)
        assert not streams(QuantizeKind.DEQUANTIZE, element, ElementKind.U4)
        assert not streams(QuantizeKind.FAKE_QUANTIZE_BACKWARD, element, ElementKind.S8)
        monkeypatch.setattr(tune, "cache_of", lambda device, nbytes=written: nbytes - 1)
        assert streams(QuantizeKind.DEQUANTIZE, element, ElementKind.S8) == (element is not ElementKind.BF16)
        assert streams(QuantizeKind.DEQUANTIZE, element, ElementKind.U4)
        assert streams(QuantizeKind.FAKE_QUANTIZE_BACKWARD, element, ElementKind.S8)
        assert not streams(QuantizeKind.DEQUANTIZE_BACKWARD, element, ElementKind.S8)
        assert not streams(QuantizeKind.FAKE_QUANTIZE, element, ElementKind.S8)
        assert not streams(QuantizeKind.QUANTIZE, element, ElementKind.S8)


@pytest.mark.parametrize("element", FLOATS)
def test_the_reciprocal_arithmetic_contracts_nothing(element: ElementKind) -> None:
    ptx = elementwise_ptx(QuantizeKind.QUANTIZE, PerToken(), element, ElementKind.S8, Arithmetic.RECIPROCAL)
    assert_exact(ptx)
    assert not any(name.startswith("fma") for name in instructions(ptx))


def test_a_division_costs_two_fused_steps_per_element_in_both_of_its_ways() -> None:
    from baracuda.backends.triton.elementwise.launch import elementwise_step

    p = Problem(QuantizeKind.QUANTIZE, SHAPE, ElementKind.BF16, ElementKind.S8, -128, 127, PerToken())
    step = elementwise_step(p, CPU)
    assert step is not None
    counts = instructions(ptx_of(step, ["*bf16", "constexpr", "*fp32", "constexpr", "*i8"]))
    per_thread = tile_of(step).lines * tile_of(step).columns // (32 * step.build.warps)
    assert counts["fma.rn.f32"] == 2 * 2 * per_thread
    assert counts["rcp.rn.f32"] == 2
    assert counts["div.rn.f32"] == 0


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.S4])
@pytest.mark.parametrize("shape", [(64, 512), (64, 511), SHAPE])
def test_kernels_use_programmatic_dependent_launch_where_it_exists_and_pays(
    shape: tuple[int, int], kind: ElementKind
) -> None:
    from baracuda.backends.triton.elementwise.launch import elementwise_step

    forms = ["*bf16", "constexpr", "*fp32", "constexpr", "*i8"]
    scattered = ["*bf16", "*fp32", "constexpr", "*i8"]
    for op in (QuantizeKind.QUANTIZE, QuantizeKind.DEQUANTIZE):
        p = Problem(op, shape, ElementKind.BF16, kind, kind.q_min, kind.q_max, PerToken())
        step = elementwise_step(p, CPU)
        assert step is not None
        arguments = scattered if step.kernel.__name__ == "scattered" else forms
        arguments = arguments if op is QuantizeKind.QUANTIZE else [arguments[-1], *arguments[1:-1], arguments[0]]
        made = compiled(step, arguments)
        assert_waits(made)
        assert made.metadata.launch_pdl == (op is QuantizeKind.QUANTIZE or shape != SHAPE)
        for capability in (80, 100):
            other = compiled(step, arguments, capability)
            assert_waits(other)
            assert not other.metadata.launch_pdl


def test_many_programs_that_move_little_do_without_programmatic_dependent_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As fast as they can start together, or spread evenly: by the figures in docs/explanation/performance.md."""
    from baracuda.backends.triton import tune
    from baracuda.backends.triton.dynamic import launch as dynamic
    from baracuda.backends.triton.elementwise.launch import elementwise_step

    def pdl(
        op: QuantizeKind, rows: int, element: ElementKind, kind: ElementKind, scope: Scope, again: bool = False
    ) -> bool:
        p = Problem(op, (rows, 8192), element, kind, -kind.q_max, kind.q_max, scope)
        config = dynamic.range_config(p, CPU) if op in dynamic_ops else None
        if config is None:
            step = elementwise_step(p, CPU, again=again)
        else:
            step = (dynamic.partial_step if config.chunks else dynamic.whole_step)(p, config, CPU)
        assert step is not None
        return step.build.pdl

    monkeypatch.setattr(tune, "processors_of", lambda device: 132)
    dynamic_ops = (QuantizeKind.DYNAMIC_QUANTIZE, QuantizeKind.CHOOSE_QPARAMS)
    f32, bf16, s8, s4 = ElementKind.F32, ElementKind.BF16, ElementKind.S8, ElementKind.S4
    assert pdl(QuantizeKind.QUANTIZE, 16384, bf16, s8, PerToken())
    assert pdl(QuantizeKind.DYNAMIC_QUANTIZE, 16384, bf16, s8, PerGroup(128))
    assert pdl(QuantizeKind.CHOOSE_QPARAMS, 16384, bf16, s8, PerTensor())
    assert pdl(QuantizeKind.CHOOSE_QPARAMS, 16384, bf16, s8, PerGroup(128))
    assert pdl(QuantizeKind.DEQUANTIZE, 2048, f32, s8, PerToken())
    assert not pdl(QuantizeKind.DEQUANTIZE, 2048, f32, s4, PerToken())
    for op, element, kind, scope in [
        (QuantizeKind.QUANTIZE, f32, s4, PerToken()),
        (QuantizeKind.DEQUANTIZE, bf16, s8, PerToken()),
    ]:
        assert pdl(op, 512, element, kind, scope) and not pdl(op, 16384, element, kind, scope)
    assert not pdl(QuantizeKind.CHOOSE_QPARAMS, 16384, bf16, s8, PerChannel(1)), "all at once, evenly"
    assert pdl(QuantizeKind.QUANTIZE, 512, bf16, s8, PerTensor(), again=True)
    assert not pdl(QuantizeKind.QUANTIZE, 2048, bf16, s8, PerTensor(), again=True), "read from the cache in no time"


def test_a_tile_that_names_its_registers_gets_no_more() -> None:
    from baracuda.backends.triton.elementwise.launch import elementwise_step

    p = Problem(QuantizeKind.QUANTIZE, SHAPE, ElementKind.BF16, ElementKind.S4, -8, 7, PerToken())
    assert ".maxnreg 48" in ptx_of(elementwise_step(p, CPU), ["*bf16", "constexpr", "*fp32", "constexpr", "*u8"])


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.S4])
@pytest.mark.parametrize("element", FLOATS)
def test_packed_groups_stay_with_their_threads(element: ElementKind, kind: ElementKind) -> None:
    from baracuda.backends.triton.elementwise.launch import elementwise_step

    p = Problem(QuantizeKind.QUANTIZE, SHAPE, element, kind, kind.q_min, kind.q_max, PerGroup(128))
    forms = [POINTERS[element], "constexpr", POINTERS[element.math], "*i32", POINTERS[kind]]
    assert_stays_with_its_threads(elementwise_step(p, CPU), forms)


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.U4])
@pytest.mark.parametrize("mode", list(DynamicRangeMode))
@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("scope", [*SCOPES, PerChannel(0)], ids=str)
def test_dynamic_kernels_are_exact(
    scope: Scope, element: ElementKind, mode: DynamicRangeMode, kind: ElementKind
) -> None:
    from baracuda.backends.triton.dynamic import launch as dynamic
    from baracuda.backends.triton.dynamic import tune

    low = -kind.q_max if kind.q_min < 0 and mode is DynamicRangeMode.SYMMETRIC else kind.q_min
    stored = element.math
    p = Problem(QuantizeKind.DYNAMIC_QUANTIZE, SHAPE, element, kind, low, kind.q_max, scope, mode, scale_element=stored)
    config = tune.dynamic(p.view, element.dtype.itemsize, 132)
    symmetric = mode is DynamicRangeMode.SYMMETRIC
    scale, zero_point = POINTERS[stored], "constexpr" if symmetric else "*i32"
    lowest = "constexpr" if symmetric else scale
    if config.chunks:
        assert_exact(ptx_of(dynamic.partial_step(p, config, CPU), [POINTERS[element], lowest, scale]))
        assert_exact(ptx_of(dynamic.finish_step(p, config, CPU), [lowest, scale, scale, zero_point]))
    else:
        step, forms = dynamic.whole_step(p, config, CPU), [POINTERS[element], scale, zero_point, POINTERS[kind]]
        assert_stays_with_its_threads(step, forms)
        ptx = ptx_of(step, forms)
        assert_exact(ptx)
        assert re.search(r"ld\.global\.(L1::\S+\.)?v[248]", ptx)


@pytest.mark.parametrize(("element", "scope"), [(ElementKind.F32, PerChannel(0)), (ElementKind.BF16, PerTensor())])
def test_the_learned_backward_divides_exactly_and_adds_up_its_lanes_where_they_are(
    element: ElementKind, scope: Scope
) -> None:
    """Lanes lie so that halving them first adds registers, then lanes of a warp, and crosses warps three times."""
    from baracuda.backends.triton.learned.launch import steps

    op, kind = QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD, ElementKind.S8
    p = Problem(op, (4096, 1024), element, kind, kind.q_min, kind.q_max, scope)
    step, second = steps(p, CPU)
    float_, sums = POINTERS[element], POINTERS[ElementKind.F32 if second is None else ElementKind.F64]
    ptx = ptx_of(step, [float_, float_, "*fp32", "constexpr", float_, sums, sums])
    if second is not None:
        assert_exact(ptx_of(second, ["*fp64", "*fp32", "*fp32", "*fp32"]))
    assert_exact(ptx)
    found = instructions(ptx)
    # Triton 3.8 and 3.9 take lanes through shared memory more often.
    barriers, exchanges = (8, 56) if TRITON.startswith(("3.6", "3.7")) else (23, 64)
    shuffles = sum(n for name, n in found.items() if name.startswith("shfl"))
    assert found["bar.sync"] <= barriers and shuffles <= exchanges, found


@pytest.mark.parametrize(
    ("shape", "scope"), [(SHAPE, PerToken()), ((64, 300000), PerToken()), (SHAPE, PerGroup(128, axis=0))], ids=str
)
def test_scales_that_nobody_reads_are_not_stored(shape: tuple[int, int], scope: Scope) -> None:
    from baracuda.backends.triton.dynamic.launch import range_config, spares, whole_step

    p = Problem(QuantizeKind.DYNAMIC_FAKE_QUANTIZE, shape, ElementKind.BF16, ElementKind.S8, -127, 127, scope)
    assert spares(p, CPU) == ("scale_out", "zero_point_out")
    step, stores = whole_step(p, range_config(p, CPU), CPU), []
    for scale in ("*fp32", "constexpr"):
        counts = instructions(ptx_of(step, ["*bf16", scale, "constexpr", "*bf16"]))
        stores.append(sum(n for name, n in counts.items() if name.startswith("st.global")))
    assert 0 < stores[1] < stores[0]


@pytest.mark.parametrize(
    ("shape", "scope"),
    [
        ((2**31 + 4096, 2), PerToken()),
        ((4, 2**30), PerGroup(4, axis=0)),
        ((512, 2**24), PerChannel(1)),
        ((2**15, 2**17), PerTensor()),
    ],
    ids=str,
)
def test_offsets_beyond_31_bits_are_multiplied_in_64(
    shape: tuple[int, int], scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but `split_index`, whose product is that of an index of 31 bits, and the steps inside a block."""
    from baracuda.backends.triton import tune
    from baracuda.backends.triton.dynamic import launch as dynamic
    from baracuda.backends.triton.elementwise import launch as static
    from baracuda.backends.triton.learned import launch as learned

    monkeypatch.setattr(tune, "processors_of", lambda device: 132)
    bf16, s8 = ElementKind.BF16, ElementKind.S8
    p = Problem(QuantizeKind.DYNAMIC_QUANTIZE, shape, bf16, s8, -127, 127, scope)
    config = dynamic.range_config(p, CPU)
    if config.chunks:
        ranges = dynamic.partial_step(p, config, CPU), ["*bf16", "constexpr", "*fp32"]
    else:
        ranges = dynamic.whole_step(p, config, CPU), ["*bf16", "*fp32", "constexpr", "*i8"]
    p = Problem(QuantizeKind.DEQUANTIZE, shape, bf16, s8, -127, 127, scope)
    plain = static.elementwise_step(p, CPU), ["*i8", "constexpr", "*fp32", "constexpr", "*bf16"]
    p = Problem(QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD, shape, bf16, s8, -127, 127, scope)
    sums, _ = learned.steps(p, CPU)
    learning = sums, ["*bf16", "*bf16", "*fp32", "constexpr", "*bf16", "*fp64", "*fp64"]
    for step, forms in (ranges, plain, learning):
        assert step is not None and is_wide(step)
        found = re.findall(r"%([a-z]+)\w* = arith\.muli .*(?:: i32|xi32>)", compiled(step, forms).asm["ttir"])
        assert set(found) <= {"quotient", "rest", "element"}, (step.kernel, found)
