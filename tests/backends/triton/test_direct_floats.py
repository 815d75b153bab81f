"""The sm_90 weight-only linear for the fewest tokens: its PTX interpreted, a row's bits those of the other kernels."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from launched import Launched, interpreted, linear
from ptx import machine
from ptxas import assembled
from torch import Tensor

from baracuda import Activation, QuantizeKind
from baracuda.backends.triton.linear import support, tune, tune_floats
from baracuda.core.problem import Problem

pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

#: So few that programs have several tiles.
PROCESSORS = 2


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched.afresh(monkeypatch, tmp_path_factory, PROCESSORS)


def problem(m: int, n: int, k: int, group: int, weight: str = "s4", element: str = "bf16") -> Problem:
    return linear(QuantizeKind.WEIGHT_ONLY_LINEAR, m, n, k, weight, group, element)


def operands_of(p: Problem, zero_points: bool = False, wide: bool = False, ends: bool = False) -> list[Any]:
    """The operands of 16 tokens; the scales in f32 if they are `wide`."""
    (_, n, k), dtype = p.shape, p.element.dtype
    generator = torch.Generator().manual_seed(n + k)
    x = torch.randn(16, k, generator=generator).to(dtype)
    stored = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8).view(p.weight.dtype)
    segments = (n, k // p.weight_group if p.weight_group else 1)
    scales = ((torch.rand(segments, generator=generator) + 0.1) * 0.01).to(torch.float32 if wide else dtype)
    zeros = torch.randint(-20, 20, segments, generator=generator, dtype=torch.int32) if zero_points else None
    bias = torch.randn(n, generator=generator).to(dtype) if ends else None
    residual = torch.randn(16, n, generator=generator).to(dtype) if ends else None
    return [x, stored, scales, zeros, bias, residual]


def output(launched: Launched, p: Problem, given: list[Any], names: list[str]) -> Tensor:
    """What the kernels `names` make of the first tokens."""
    m, n, _ = p.shape
    x, *rest, residual = given
    x, residual = (None if value is None else value[:m].clone() for value in (x, residual))
    out = torch.full((m, n), 77.0, dtype=p.element.dtype)
    assert interpreted(launched, p, (x, *rest, residual, out)) == names
    return out


def assert_bits_of_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, p: Problem, given: list[Any], tokens: tuple[int, ...]
) -> None:
    """Rows are those of the kernel with a ring, which multiplies by warp groups, for every number of tokens."""
    _, n, k = p.shape
    with monkeypatch.context() as patch:
        patch.setattr(support, "direct_floats", lambda *_: None)
        split = tune.weight_only_split(n, k, PROCESSORS)
        ring = ["gemm_few_floats", *["sum_parts"] * (split > 1)]
        wanted = output(launched, replace(p, shape=(16, n, k)), given, ring)
        # Of up to 8 tokens the activations are reordered, of more the weights are decoded in their order.
        few = output(launched, replace(p, shape=(7, n, k)), given, ring)
    assert torch.equal(few.view(torch.int16), wanted[:7].view(torch.int16))
    assert bool(wanted.isfinite().all()) and bool((wanted != 0).any())
    for m in tokens:
        got = output(launched, replace(p, shape=(m, n, k)), given, ["gemm_direct_floats"])
        assert torch.equal(got.view(torch.int16), wanted[:m].view(torch.int16)), m


#: N, K, group, tokens: K within a chunk, in one, two and four parts, with parts that differ, and several turns.
SIZES = [
    (24, 32, 0, (1, 9)),
    (24, 128, 0, (1, 16)),
    (24, 416, 32, (3, 12)),
    (40, 512, 128, (1, 3, 8, 16)),
    (264, 512, 64, (2, 11)),
    (24, 2048, 128, (5, 16)),
    (136, 2176, 0, (7,)),
    (24, 2560, 256, (1, 10)),
    (40, 4096, 128, (2, 8)),
    (40, 4096, 32, (1,)),
    (24, 4352, 64, (4, 7)),
]


@pytest.mark.parametrize("n, k, group, tokens", SIZES)
def test_a_row_has_the_bits_of_the_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, n: int, k: int, group: int, tokens: tuple[int, ...]
) -> None:
    p = problem(1, n, k, group)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p), tokens)


@pytest.mark.parametrize("n, k", [(264, 512), (264, 2048)])
def test_programs_keep_to_their_rows_in_any_order(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, n: int, k: int
) -> None:
    """A warp without a tile computes something, too, and must not store it where another program has."""
    p = problem(1, n, k, 128)
    monkeypatch.setattr(machine, "in_order", lambda programs: reversed(range(programs)))
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p), (3,))


@pytest.mark.parametrize("depth, groups, programs", [(4, 0, 1), (3, 1, 1), (5, 1, 2)])
def test_any_depth_has_the_bits_of_the_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, depth: int, groups: int, programs: int
) -> None:
    """Also where the last step of a part is longer than what is left of it."""
    p = problem(1, 56, 2560, 128)
    chosen = tune_floats.direct_floats
    monkeypatch.setattr(support, "direct_floats", lambda *sizes: chosen(*sizes, depth, groups, programs))
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p), (2, 9))


def test_a_row_has_the_same_bits_for_every_number_of_tokens(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(1, 72, 1024, 128)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p), tuple(range(1, 17)))


@pytest.mark.parametrize("weight, element, zero_points, wide", [
    ("s4", "f16", False, False), ("u4", "bf16", True, False), ("u4", "f16", False, True), ("s4", "bf16", True, True),
])  # fmt: skip
@pytest.mark.parametrize("k, group", [(1024, 128), (2048, 32), (320, 0)])
def test_every_weight_has_the_bits_of_the_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, weight: str, element: str, zero_points: bool, wide: bool,
    k: int, group: int,
) -> None:  # fmt: skip
    p = problem(1, 40, k, group, weight, element)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p, zero_points, wide), (3, 16))


@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("nonlinearity", [Activation.NONE, Activation.GELU, Activation.SILU])
def test_every_end_has_the_bits_of_the_other_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, nonlinearity: Activation, k: int
) -> None:
    p = replace(problem(1, 40, k, 128), nonlinearity=nonlinearity)
    assert_bits_of_other_kernels(launched, monkeypatch, p, operands_of(p, ends=True), (2, 9))


@pytest.mark.parametrize("m, k, group", [(3, 1024, 128), (8, 4096, 64), (16, 2048, 64)])
def test_kernels_that_do_not_overlap_have_the_same_bits(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, m: int, k: int, group: int
) -> None:
    from baracuda.backends.triton import launch as module

    p = problem(m, 40, k, group)
    given = operands_of(p)
    overlapping = output(launched, p, given, ["gemm_direct_floats"])
    before, _, after = launched.ptx[0].partition("griddepcontrol.wait")
    assert "cp.async.bulk.prefetch.L2" in before and "ld.global" not in before and "ld.global.v4" in after
    monkeypatch.setattr(module, "PDL_IN_GRAPHS", 10**9)
    apart = output(launched, p, given, ["gemm_direct_floats"])
    assert "griddepcontrol" not in launched.ptx[1]
    assert torch.equal(overlapping.view(torch.int16), apart.view(torch.int16))


def test_scales_at_any_address_are_read_one_by_one(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(1, 40, 1024, 128)
    given = operands_of(p)
    room = torch.zeros(given[2].numel() + 1, dtype=torch.bfloat16)
    room[1:] = given[2].view(-1)
    assert_bits_of_other_kernels(launched, monkeypatch, p, given, (3,))
    given[2] = room[1:].view(given[2].shape)
    assert_bits_of_other_kernels(launched, monkeypatch, p, given, (3,))


def test_parts_that_lie_apart_are_added_up_by_a_second_kernel(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(1, 40, 2048, 128)
    given = operands_of(p)
    wanted = output(launched, replace(p, shape=(16, 40, 2048)), given, ["gemm_direct_floats"])
    monkeypatch.setattr(tune_floats, "SHARED", 48 * 1024)
    got = output(launched, replace(p, shape=(16, 40, 2048)), given, ["gemm_direct_floats", "sum_parts"])
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("n, k", SHAPES)
def test_words_come_straight_into_registers_and_none_of_them_spills(m: int, n: int, k: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from baracuda.backends.triton.linear.hopper import binding, direct_floats_launch
    from baracuda.backends.triton.linear.hopper.floats import FloatForm

    tile = tune_floats.direct_floats(m, n, k, 128, 132)
    if tile is None:
        assert n * k > 2**25 or (m > 8 and (n, k) == (4096, 4096)), "there the kernel with a ring is faster"
        return
    forms, kinds = binding.term_forms(None, None, None, None, 1)
    kinds = kinds._replace(scale="none", weight_scale="none")
    form = FloatForm(True, True, 128, True, "prefetch")
    source = direct_floats_launch.direct_floats_source(
        tile, form, torch.bfloat16, forms, kinds, n, k, "*bf16", "*u8"
    )  # fmt: skip
    options = {"enable_fp_fusion": False, "num_warps": tile.warps, "launch_pdl": True}
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options=options | {"maxnreg": tile.thread_registers}
    )
    assert not assembled(compiled).spills
    assert compiled.metadata.shared <= tile.shared <= tune_floats.SHARED
    # Two rows' words of each chunk, for the first step and while a step is multiplied.
    loads = re.findall(r"ld\.global\.v4\.b32", compiled.asm["ptx"])
    assert len(loads) >= 2 * tile.depth * (1 if tile.once else 2)
    assert len(re.findall(r"mma\.sync\S+m16n8k16\S+bf16", compiled.asm["ptx"])) == 8 * tile.depth * max(
        1, tile.tokens // 8
    )
    assert "fma.rn.bf16" not in compiled.asm["ptx"] and "fma.rn.f32" not in compiled.asm["ptx"]
    # What one exchange needs: no detour by way of shared memory, hence no barrier between the threads of a program.
    assert compiled.asm["ptx"].count("shfl.sync.bfly") == 8 * tile.depth
    assert not tile.apart


@pytest.mark.parametrize("m", range(1, 18))
@pytest.mark.parametrize("n, k", [*SHAPES, (8, 32), (264, 2176), (57344, 8192), (8192, 28672), (1032, 4096)])
def test_programs_have_all_rows_and_warps_all_of_k(m: int, n: int, k: int) -> None:
    for group in (0, 32, 64, 96, 128, 256):
        tile = tune_floats.direct_floats(m, n, k, group, 132)
        if tile is None:
            ring_is_faster = m > 8 and tune.weight_only_split(n, k, 132) > 2
            fits = group != 96 and 2 * k * 8 <= tune_floats.SHARED / 2
            assert m > (1 if n * k > 2**25 else 16) or ring_is_faster or not fits
            continue
        assert m <= 8 or tile.split <= 2
        assert m <= tile.tokens <= 16 and tile.shared <= tune_floats.SHARED
        assert tile.split == tune.weight_only_split(n, k, 132)
        assert tile.split == 1 or tile.part * 128 % tune.PART_OF_K == 0
        assert (tile.split - 1) * tile.part * 128 < k <= tile.split * tile.part * 128
        assert tile.steps * tile.depth >= tile.part and tile.steps * tile.depth % tile.fill == 0
        assert tile.whole == (tile.split * tile.steps * tile.depth * 128 == k)
        assert tile.depth % tile.together == 0 and tile.warps <= 16
        shares = tile.grid(n, 132) * tile.parts // tile.split
        assert tile.grid(n, 132) <= 132 and tile.one_turn == ((n + 15) // 16 <= shares * tile.groups)
