"""The Triton kernels of attention as compiled for sm_90: one order of every product, and room for several programs."""

from __future__ import annotations

import os
import re

import pytest
from ptxas import assembled

triton = pytest.importorskip("triton")
pytest.importorskip("baracuda._host", reason="the compiled module is missing")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402

from baracuda.backends.triton import launch  # noqa: E402
from baracuda.backends.triton.attention import kernels, tune  # noqa: E402
from baracuda.backends.triton.attention.kernels import Sizes, Strides  # noqa: E402
from baracuda.backends.triton.attention.launch import EVERY, SEEN  # noqa: E402


def compiled(group: int, width: int, parts: int, causal: bool, masked: bool) -> triton.compiler.CompiledKernel:
    tile, rows = tune.heads(group, width, width), Strides(128 * width, 16 * width, width)
    mask = Strides(64, 0, 0) if masked else Strides(0, 0, 0)
    sizes = {"q": rows, "k": rows, "v": rows, "mask": mask, "mask_step": 2 * masked, "least": SEEN if masked else EVERY}
    sizes["sizes"] = Sizes(8, group, 2, 64 * parts, parts, width, width)
    forms = ["*fp16", "*fp16", "*fp16", "*u8", "*fp16", "*fp32" if parts > 1 else "constexpr"]
    constants = {"SCALE": 0.125, "CAUSAL": causal, "TILE": tile}
    build = launch.Build(tile.warps, tile.stages, pdl=False)
    return launch.compile_kernel(kernels.attend, forms, sizes, constants, build, GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("group, width", [(3, 64), (4, 128), (1, 256)])
def test_every_form_of_the_kernel_multiplies_in_one_order(group: int, width: int) -> None:
    """Which keys and columns an instruction takes follows from the layout of its operands: `kWidth`."""
    found = set()
    for parts, causal, masked in (
        (1, False, False),
        (1, True, False),
        (2, False, False),
        (1, False, True),
        (3, False, True),
    ):
        made = compiled(group, width, parts, causal, masked)
        products = re.findall(r"tt\.dot .*", made.asm["ttgir"])
        layouts = re.findall(r"#mma = .*", made.asm["ttgir"])
        assert len(products) == 2 and all(product.count("kWidth") == 2 for product in products)
        found.add((*(re.sub(r"%\w+|loc\(.*", "", product) for product in products), *layouts))
        assert "fma.rn.f32" not in made.asm["ptx"]
    assert len(found) == 1, found


@pytest.mark.parametrize("group, width", [(4, 128), (8, 256)])
@pytest.mark.parametrize("parts", [1, 2])
def test_it_spills_nothing_and_three_programs_share_a_multiprocessor(group: int, width: int, parts: int) -> None:
    made = compiled(group, width, parts, False, True)
    report = assembled(made)
    assert not report.spills and report.registers <= 168
    assert (made.metadata.shared + 1024) * 3 <= 228 * 1024
    assert "cp.async" in made.asm["ptx"], "the next keys are on their way while these are multiplied"
