"""The Triton linears without a GPU, as far as their PTX: the sm_90 kernels, and the portable one."""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from dataclasses import replace

import pytest
import torch
from ptxas import assembled

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from baracuda import Activation, DynamicRangeMode, ElementKind, QuantizeKind
from baracuda.backends import nonlinearity as recipe
from baracuda.backends.triton.launch import POINTERS, Build, compile_kernel
from baracuda.backends.triton.linear import kernels as linear_kernels
from baracuda.backends.triton.linear import launch as linear
from baracuda.backends.triton.linear import tune as linear_tune
from baracuda.backends.triton.linear.hopper import binding, direct_launch, few_launch, packed_launch
from baracuda.backends.triton.linear.hopper import launch as hopper_launch
from baracuda.backends.triton.linear.hopper.few import Form
from baracuda.backends.triton.linear.hopper.floats import FloatForm
from baracuda.backends.triton.linear.kernels import Epilogue, Matmul, Shape, Terms
from baracuda.core.problem import Problem

HOPPER = GPUTarget("cuda", 90, 32)
#: Bytes of shared memory that a program may have.
LIMIT = 227 * 1024
VECTOR = torch.zeros(4)
TILES = [linear_tune.pingpong(m, 14336, 4096, 2, 132, cut=True) for m in (256, 4096)]


def compile_tile(tile, out=torch.bfloat16, bias=None, zero_point=None, nonlinearity=Activation.NONE, residual=None):
    forms, kinds = binding.term_forms(VECTOR, zero_point, VECTOR, bias, 0, residual, nonlinearity)
    source = hopper_launch.gemm_source(tile, out, forms, kinds)
    return triton.compile(source, target=HOPPER, options={"enable_fp_fusion": False, "num_warps": tile.warps})


#: Divisions in place, and steps in which one rounding is as good as two, of each element.
FUSED_STEPS = {Activation.GELU: 4 + 2, Activation.SILU: 4 + 2}


def assert_nonlinearity_rounds(ptx, nonlinearity) -> None:
    """Nothing is approximate but the start of the divisions, nothing contracted but what has the same bits."""
    counts = Counter(re.findall(r"^\s*([a-z][\w.]+)", ptx, re.MULTILINE))
    divisions = counts.pop("rcp.approx.ftz.f32", 0)
    assert (divisions > 0) == (nonlinearity in FUSED_STEPS)
    assert counts["fma.rn.f32"] == divisions * FUSED_STEPS.get(nonlinearity, 0)
    for word in ("div.full", "div.rn", "approx", "tanh", ".ftz"):
        assert not [name for name in counts if word in name], word


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_tile_runs_on_the_integer_tensor_cores_and_the_copy_engine(tile) -> None:
    compiled = compile_tile(tile)
    ptx = compiled.asm["ptx"]
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.s32\.s8\.s8", ptx)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::(cluster|cta)\.global", ptx)  # Triton 3.6, 3.7
    assert "cp.async.bulk.tensor.2d.global.shared::cta" in ptx
    assert compiled.metadata.shared <= LIMIT


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_epilogue_of_a_tile_multiplies_and_adds_in_separate_roundings(tile) -> None:
    ptx = compile_tile(tile, bias=VECTOR).asm["ptx"]
    assert "fma.rn.f32" not in ptx
    assert "mul.rn.f32" in ptx
    assert "add.rn.f32" in ptx


@pytest.mark.parametrize("nonlinearity", [Activation.RELU, Activation.GELU, Activation.SILU])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_nonlinearities_and_residuals_of_a_tile_round_step_by_step_and_fit(tile, nonlinearity) -> None:
    compiled = compile_tile(tile, bias=VECTOR, nonlinearity=nonlinearity, residual=VECTOR.bfloat16())
    ptx = compiled.asm["ptx"]
    assert_nonlinearity_rounds(ptx, nonlinearity)
    assert "ld.global.b16" not in ptx, "the residual comes in pairs of columns"
    assert compiled.metadata.shared <= LIMIT


@pytest.mark.parametrize(
    "zero_point, nonlinearity",
    [(None, Activation.NONE), (VECTOR.int(), Activation.NONE), (None, Activation.GELU), (None, Activation.SILU)],
    ids=["symmetric", "asymmetric", "gelu", "silu"],
)
def test_the_epilogue_of_a_large_problem_spills_no_registers(zero_point, nonlinearity) -> None:
    report = assembled(compile_tile(TILES[-1], bias=VECTOR, zero_point=zero_point, nonlinearity=nonlinearity))
    assert not report.spills and not report.serialized


@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 4096), (4096, 4096)])
def test_every_output_type_fits_the_shared_memory_of_its_tile(shape, out) -> None:
    tile = linear_tune.pingpong(*shape, 4096, out.itemsize, 132, cut=True)
    compiled = compile_tile(tile, out, VECTOR, VECTOR.int())
    assert compiled.metadata.shared <= LIMIT


def compile_few(m, n, k, weight, group, early="copy", nonlinearity=Activation.NONE):
    tile = linear_tune.few(m, n, k, weight.is_packed, group, 132)
    residual = VECTOR.bfloat16() if nonlinearity is Activation.GELU else None
    forms, kinds = binding.term_forms(VECTOR, None, VECTOR, None, 1, residual, nonlinearity)
    source = few_launch.few_source(tile, Form(weight.is_packed, group, early), torch.bfloat16, forms, kinds, n)
    options = {"enable_fp_fusion": False, "num_warps": tile.warps, "launch_pdl": early != "no"}
    options |= {"maxnreg": tile.thread_registers} if weight.is_packed and tile.wgmma else {}
    return tile, triton.compile(source, target=HOPPER, options=options)


FEW = [(1, ElementKind.S8, 0), (8, ElementKind.S8, 0), (64, ElementKind.S8, 0)]
FEW += [(1, ElementKind.S4, 0), (1, ElementKind.S4, 128), (16, ElementKind.S4, 32), (16, ElementKind.S4, 512)]
FEW += [(8, ElementKind.S4, 128), (32, ElementKind.S4, 64), (64, ElementKind.S4, 128)]


@pytest.mark.parametrize("m, weight, group", FEW)
@pytest.mark.parametrize("n", [4096, 14336])
def test_the_kernel_for_few_tokens_fits_as_often_as_its_tile_says(m, n, weight, group) -> None:
    tile, compiled = compile_few(m, n, 4096, weight, group)
    ptx = compiled.asm["ptx"]
    product = r"wgmma\.mma_async\S+\.s32\.s8\.s8" if tile.wgmma else r"mma\.sync\S+\.s32\.s8\.s8\.s32"
    assert re.search(product, ptx)
    assert (compiled.metadata.shared + 1024) * tile.programs <= LIMIT + 1024
    # A word of four weights takes a multiplication, an addition and two bit operations with factors.
    assert ("mad.lo.u32" in ptx) == bool(group)


@pytest.mark.parametrize("early", ["copy", "prefetch", "no"])
def test_only_weights_are_read_before_the_previous_kernel_has_ended(early) -> None:
    _, compiled = compile_few(1, 4096, 4096, ElementKind.S8, 0, early, Activation.GELU)
    ptx = compiled.asm["ptx"]
    before, waits, after = ptx.partition("griddepcontrol.wait")
    assert bool(waits) == (early != "no") and compiled.metadata.launch_pdl == bool(waits)
    assert ("griddepcontrol.launch_dependents" in before) == bool(waits)
    if waits:
        assert not re.search(r"(ld|st)\.global", before) and "bra" not in before.partition("griddepcontrol")[2]
        assert ("cp.async.bulk.tensor" in before) == (early == "copy")
        assert ("cp.async.bulk.prefetch.L2" in before) == (early == "prefetch")
        assert "cp.async.bulk.tensor" in after
    assert "div.full" not in ptx and "rcp.approx.ftz.f32" in ptx


def compile_direct(m, n, k, group, early="copy"):
    tile = linear_tune.direct(m, n, k, group)
    forms, kinds = binding.term_forms(VECTOR, None, VECTOR, None, 1)
    form = Form(True, group, early, direct_launch.together(tile, k) if group else 1)
    source = direct_launch.direct_source(tile, form, torch.bfloat16, forms, kinds, n, k)
    options = {"enable_fp_fusion": False, "num_warps": tile.warps, "launch_pdl": early != "no"}
    return tile, triton.compile(source, target=HOPPER, options=options | {"maxnreg": tile.thread_registers})


DIRECT = [(1, 28672, 4096, 128), (16, 6144, 4096, 128), (16, 4096, 4096, 64), (5, 576, 576, 64), (9, 264, 1536, 0)]


@pytest.mark.parametrize("m, n, k, group", DIRECT)
def test_weights_come_straight_into_registers_one_tile_ahead(m, n, k, group) -> None:
    tile, compiled = compile_direct(m, n, k, group)
    report = assembled(compiled)
    assert report.stored <= 16 and report.loaded <= 16
    assert (compiled.metadata.shared + 1024) * tile.programs <= LIMIT + 1024
    assert f"ld.global.v{tile.k // 16}.b32" in compiled.asm["ptx"], "a thread reads all its bytes of a row at once"
    assert re.search(r"mma\.sync\S+\.s32\.s8\.s8\.s32", compiled.asm["ptx"])


@pytest.mark.parametrize("early", ["copy", "prefetch", "no"])
def test_a_weight_comes_into_registers_early_only_where_it_may(early) -> None:
    _, compiled = compile_direct(1, 4096, 4096, 128, early)
    before, waits, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert bool(waits) == (early != "no")
    if waits:
        assert ("ld.global.v4" in before) == (early == "copy") and "st.global" not in before
        assert ("cp.async.bulk.prefetch.L2" in before) == (early == "prefetch")
        assert ".cg" not in before and "ld.global.cg" in after, "the activations are another kernel's"


@pytest.mark.parametrize("m", [1, 8, 9, 16])
@pytest.mark.parametrize("n, k", [(4096, 4096), (28672, 4096), (4096, 14336), (8, 64), (136, 3136), (8, 4096)])
@pytest.mark.parametrize("group", [0, 64, 128])
def test_warps_share_out_all_of_k_and_programs_all_tiles(m, n, k, group) -> None:
    span = group or 128
    tile = linear_tune.direct(m, n, k, group)
    if k % span or k > 4096 or (m > 8 and n * k > 2**25):
        assert tile is None
        return
    covered = tile.chunks * tile.warps * span
    assert m <= tile.tokens and k <= covered and tile.whole == (k == covered)
    assert 0 < tile.grid(n, 132) <= 132 * tile.programs
    # A warp's sum of weights times 16 and factors is exact in int32.
    assert 15 * 16 * 8 * 128 * tile.chunks * span < 2**31


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("n, k", [(4096, 4096), (28672, 4096), (4096, 14336), (8, 16), (8, 48), (136, 4112)])
def test_rows_are_folded_no_further_than_the_copy_engine_can_address(m, n, k) -> None:
    for packed, group in ((False, 0), (True, 0), (True, 32), (True, 128)):
        if (packed and k % 32) or (group and k % group):
            continue
        tile = linear_tune.few(m, n, k, packed, group, 132)
        if tile is None:  # decoding warps are faster
            assert packed and m > 16 and n * k > 2**25
            continue
        assert m * tile.fold <= tile.tokens and k % (tile.fold * (32 if packed else 16)) == 0
        assert not group or k // tile.fold % group == 0
        assert 0 < tile.grid(n, 132) <= 132 * tile.programs


def compile_decoding(source, tile):
    options = {"enable_fp_fusion": False, "num_warps": 4, "launch_pdl": True, "maxnreg": tile.thread_registers}
    return triton.compile(source, target=HOPPER, options=options)


@pytest.mark.parametrize("out", [torch.float16, torch.float32])
@pytest.mark.parametrize("m, group", [(64, 0), (100, 128), (256, 96), (2048, 32)])
def test_packed_weights_are_decoded_between_the_copies_and_the_products(m, group, out) -> None:
    tile = linear_tune.packed(m, 14336, 4096, out.itemsize, 132)
    forms, kinds = binding.term_forms(VECTOR, None, VECTOR, VECTOR, 1)
    form = Form(True, group, "copy")
    compiled = compile_decoding(packed_launch.packed_source(tile, form, torch.int8, out, forms, kinds), tile)
    ptx = compiled.asm["ptx"]
    assert re.search(r"wgmma\.mma_async\S+\.s32\.s8\.s8", ptx)
    assert compiled.metadata.shared <= LIMIT
    assert ("mad.lo.u32" in ptx) == bool(group)


#: Tokens, weight, its group, the type of activations, whether scales have it, whether there are zero points.
FLOATS = [
    (1, ElementKind.S4, 128, torch.bfloat16, True, False),
    (16, ElementKind.U4, 64, torch.float16, True, True),
    (64, ElementKind.S8, 0, torch.bfloat16, False, False),
    (300, ElementKind.S4, 32, torch.bfloat16, True, False),
]


def compile_weight_only(m, weight, group, element, same_type, zero_point, n=4096, k=4096):
    tile = linear_tune.weight_only(m, n, k, weight.is_packed, 132)
    forms, kinds = binding.term_forms(None, None, None, None, 1)
    kinds = kinds._replace(scale="none", weight_scale="none")
    plain = weight.is_packed and same_type and not zero_point
    form = FloatForm(weight.is_packed, weight is not ElementKind.U4, group, plain, "prefetch")
    scale, zeros = POINTERS[element if same_type else torch.float32], "*i32" if zero_point else "*u8"
    source = packed_launch.packed_source(tile, form, element, element, forms, kinds, scale, zeros)
    return tile, compile_decoding(source, tile)


@pytest.mark.parametrize("case", FLOATS, ids=str)
def test_weight_only_linears_multiply_16_bit_floats_from_shared_memory(case) -> None:
    tile, compiled = compile_weight_only(*case)
    ptx, name = compiled.asm["ptx"], "bf16" if case[3] is torch.bfloat16 else "f16"
    assert re.search(rf"wgmma\.mma_async\S+k16\.f32\.{name}\.{name}", ptx)
    assert (compiled.metadata.shared + 1024) * tile.programs <= LIMIT + 1024
    plain = case[1].is_packed and not case[5]
    assert (f"mul.rn.{name}x2" in ptx) == plain and (f"cvt.rn.{name}x2.f32" in ptx) == (not plain or not tile.apart)
    assert "fma.rn" not in ptx


@pytest.mark.parametrize(
    "m, group, plain", [(1, 128, True), (8, 64, False), (16, 32, True), (32, 0, True), (64, 128, True)]
)
def test_few_tokens_multiply_weights_that_were_decoded_in_registers(m, group, plain) -> None:
    tile = linear_tune.few_floats(m, 4096, 4096, 132)
    forms, kinds = binding.term_forms(None, None, None, None, 1)
    kinds = kinds._replace(scale="none", weight_scale="none")
    form = FloatForm(True, plain, group, plain, "prefetch")
    scale, zeros = ("*bf16", "*u8") if plain else ("*fp32", "*i32")
    source = few_launch.few_floats_source(tile, form, torch.bfloat16, forms, kinds, 4096, scale, zeros)
    options = {"enable_fp_fusion": False, "num_warps": tile.warps, "launch_pdl": True}
    compiled = triton.compile(source, target=HOPPER, options=options | {"maxnreg": tile.thread_registers})
    ptx = compiled.asm["ptx"]
    assert re.search(rf"wgmma\.mma_async\S+m64n{tile.tokens}k16\.f32\.bf16\.bf16 \{{[^}}]*\}}, \{{", ptx)
    assert (compiled.metadata.shared + 1024) * tile.programs <= LIMIT + 1024
    assert ("mul.rn.bf16x2" in ptx) == plain and "fma.rn" not in ptx
    assert assembled(compiled).stored <= 8  # two words in Triton 3.6


@pytest.mark.parametrize(
    "n, k, parts",
    [(4096, 14336, 4), (4096, 4096, 4), (6144, 4096, 2), (8192, 8192, 2), (14336, 4096, 1), (8, 512, 1)],
)
def test_the_parts_of_a_float_sum_depend_on_the_weight_alone(n, k, parts) -> None:
    for m in (1, 16, 17, 64, 65, 128, 129, 2048):
        tile = linear_tune.weight_only(m, n, k, True, 132)
        few = linear_tune.few_floats(m, n, k, 132)
        assert m > 32 if few is None else few.split == parts
        assert tile.split == parts and linear_tune.PART_OF_K % (2 * tile.k) == 0
    assert (parts - 1) * -(-k // parts // linear_tune.PART_OF_K) * linear_tune.PART_OF_K < k


@pytest.mark.parametrize("n, k, parts", [(14336, 4096, 1), (8192, 8192, 2), (4096, 14336, 4)])
def test_a_program_that_adds_up_parts_in_turn_keeps_its_products_in_registers(n, k, parts) -> None:
    tile, compiled = compile_weight_only(2048, ElementKind.S4, 128, torch.bfloat16, True, False, n, k)
    assert (tile.split, tile.apart) == (parts, False)
    report = assembled(compiled)
    assert not report.spills and not report.serialized


@pytest.mark.parametrize("group, floats", [(32, False), (64, True)])
def test_a_stored_stage_is_released_after_what_was_read_from_it_is_stored(group, floats) -> None:
    """bar.sync does not wait for loads under way: only a store that depends on them shows that they have ended."""
    if floats:
        _, compiled = compile_weight_only(2048, ElementKind.S4, group, torch.bfloat16, True, False)
    else:
        tile = linear_tune.packed(2048, 4096, 4096, 2, 132)
        forms, kinds = binding.term_forms(VECTOR, None, VECTOR, None, 1)
        source = packed_launch.packed_source(
            tile, Form(True, group, "copy", 4), torch.int8, torch.bfloat16, forms, kinds, "*i32"
        )
        compiled = compile_decoding(source, tile)
    text = compiled.asm["ptx"].replace("shared::cta", "shared")
    names = re.findall(r"(ld\.shared\.v4|st\.shared\.v4|mbarrier\.arrive\.shared)", text)
    reads = [i for i, name in enumerate(names) if name == "ld.shared.v4"]
    assert reads
    for i in reads:
        after = names[i + 1 :]
        assert after.index("st.shared.v4") < after.index("mbarrier.arrive.shared")


@pytest.mark.parametrize("shape, tail", [((8192, 8192, 8192), 16), ((2048, 6144, 4096), 1), ((256, 4096, 14336), 2)])
def test_tiles_behind_the_last_full_round_are_cut_where_all_parts_run_at_once(shape, tail) -> None:
    m, n, k = shape
    tile = linear_tune.pingpong(m, n, k, 2, 132, cut=True)
    rest = tile.tiles(m, n) - tile.whole(m, n, 132)
    assert tile.tail == tail
    assert rest * tail <= tile.programs(m, n, 132) <= 132
    assert linear_tune.pingpong(m, n, k, 2, 132).tail == 1


def test_the_parts_of_a_tile_are_added_and_finished_step_by_step() -> None:
    forms = ("*i32", "*bf16", Terms("*fp32", "*fp32", "*fp32", "constexpr"))
    tile = replace(linear_tune.PINGPONG, across=True, tail=3)
    constants = {"EPILOGUE": Epilogue(per_token=True, nonlinearity="gelu"), "TILE": tile, "LINES": 16}
    sizes = {"M": 1400, "N": 1664, "whole": 132}
    ptx = compile_kernel(linear_kernels.sum_tail, forms, sizes, constants, Build(), HOPPER).asm["ptx"]
    assert_nonlinearity_rounds(ptx, Activation.GELU)
    assert "ld.global.v4" in ptx


LIMITS = [("s8", "symmetric", 131071), ("u8", "symmetric", 65793), ("s8", "asymmetric", 65793)]


@pytest.mark.parametrize("kind, mode, limit", [*LIMITS, ("u8", "asymmetric", 65793)])
def test_sums_are_cut_where_32_bits_would_not_hold_them(kind, mode, limit) -> None:
    kind, mode = ElementKind.of(kind), DynamicRangeMode(mode)

    def problem(k, weight=ElementKind.S8):
        op = QuantizeKind.SMOOTHQUANT_LINEAR
        shape = (1, 1, k)
        return Problem(op, shape, ElementKind.F32, kind, kind.q_min, kind.q_max, mode=mode, weight=weight)

    p = problem(limit)
    assert p.accumulator_limit == limit
    assert linear._chunk(limit, p, 128) == 0
    assert linear._chunk(limit, problem(limit + 1), 128) == limit // 128 * 128
    packed = problem(10**7, ElementKind.S4)
    assert linear._chunk(packed.accumulator_limit, packed, 64) == packed.accumulator_limit // 2 // 64 * 64


@pytest.mark.parametrize("f64, nonlinearity, chunk", [(False, "silu", 0), (True, "gelu", 0), (False, "none", 131008)])
def test_the_portable_kernel_rounds_step_by_step_and_keeps_the_digits_of_its_coefficients(
    f64, nonlinearity, chunk
) -> None:
    element = "*fp64" if f64 else "*fp32"
    forms = ("*i8", "*i8", "constexpr", element, Terms("i64", element, element, element), "constexpr", "constexpr")
    epilogue = Epilogue(per_token=False, nonlinearity=nonlinearity, f64=f64)
    tile = linear_tune.Portable(16, 64, 128, 4, 4)
    spec = Matmul(epilogue, tile, False, 0, False, 0, -128, 127, chunk)
    sizes = {"shape": Shape(16, 4096, 140000)}
    ptx = compile_kernel(linear_kernels.matmul, forms, sizes, {"SPEC": spec}, Build(), HOPPER).asm["ptx"]
    if f64:
        assert "div.rn.f64" in ptx
        assert "fma.rn.f" not in ptx
    else:
        assert_nonlinearity_rounds(ptx, Activation(nonlinearity))
    assert ("add.s64" in ptx) or not chunk
    if nonlinearity == "gelu":
        coefficient = struct.pack(">d", recipe.F64.upper[-3]).hex().upper()
        assert f"0d{coefficient}" in ptx
