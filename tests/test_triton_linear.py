"""The Triton linears without a GPU: the portable kernel in the interpreter, the sm_90 kernels as far as their PTX."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
LIMIT = 227 * 1024

if INTERPRETER:
    from baracuda import BackendKind
    from cases import CASES, assert_same_bits, is_linear, run

    LINEARS = [case for case in CASES if is_linear(case)]

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @pytest.mark.parametrize("case", LINEARS, ids=str)
    def test_the_portable_linear_has_the_bits_of_the_reference(case) -> None:
        assert_same_bits(run(case, BackendKind.TRITON), run(case, BackendKind.REFERENCE), case)

else:
    import triton
    from triton.backends.compiler import GPUTarget

    from baracuda import ElementKind, QuantizeKind
    from baracuda.backends.triton import hopper_launch, linear_tune
    from baracuda.backends.triton.linear import KERNELS
    from baracuda.problem import Problem

    HOPPER = GPUTarget("cuda", 90, 32)
    VECTOR = torch.zeros(4)
    TILES = [linear_tune.TURNS, linear_tune.TALL]

    def test_the_portable_linears_have_the_bits_of_the_reference_in_the_interpreter() -> None:
        """Triton reads the variable when it is imported, so the interpreter gets a process of its own."""
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", __file__],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]

    def compile_tile(tile, out=torch.bfloat16, bias=None, zero_point=None):
        forms, epilogue = hopper_launch.scale_forms(VECTOR, zero_point, VECTOR, bias, 0)
        source = hopper_launch.gemm_source(tile, out, forms, epilogue)
        return triton.compile(
            source, target=HOPPER, options={"enable_fp_fusion": False, **hopper_launch.tile_options(tile)}
        )

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

    @pytest.mark.parametrize("out", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("shape", [(256, 4096, 4096), (4096, 4096, 4096), (2048, 4096, 14336)])
    def test_every_output_type_fits_the_shared_memory_of_its_tile(shape, out) -> None:
        tile = linear_tune.tile(*shape, out.itemsize, 132)
        compiled = compile_tile(tile, out, VECTOR, VECTOR.int())
        assert compiled.metadata.shared <= LIMIT

    @pytest.mark.parametrize("quantize", [False, True])
    @pytest.mark.parametrize("m", [1, 16])
    def test_the_kernel_for_few_tokens_divides_exactly_and_fits(m, quantize) -> None:
        choose = linear_tune.fused if quantize else linear_tune.skinny
        config = choose(m, 14336, 4096, 132)
        forms, epilogue = hopper_launch.scale_forms(VECTOR, None, VECTOR, None, 1)
        epilogue = ("given", *epilogue[1:]) if quantize else epilogue
        source = hopper_launch.skinny_source(config, torch.bfloat16, forms, epilogue, 14336, quantize)
        compiled = triton.compile(source, target=HOPPER, options={"enable_fp_fusion": False, "num_warps": 4})
        ptx = compiled.asm["ptx"]
        assert re.search(r"wgmma\.mma_async\S+\.s32\.s8\.s8", ptx)
        assert "div.full" not in ptx
        assert ("div.rn.f32" in ptx) == quantize
        assert (compiled.metadata.shared + 1024) * config.programs <= LIMIT + 1024

    @pytest.mark.parametrize("n, k", [(4096, 4096), (6144, 4096), (57344, 8192), (8, 16), (8192, 28672)])
    def test_a_split_of_k_leaves_each_part_some_work(n, k) -> None:
        config = linear_tune.skinny(16, n, k, 132)
        assert config.split == 1 or -(-k // config.k) // config.split >= 4

    def test_sums_that_could_overflow_are_declined_with_the_limit() -> None:
        problem = Problem(QuantizeKind.SMOOTHQUANT_LINEAR, (1, 1, 140000), ElementKind.F32, ElementKind.S8, -128, 127)
        device = torch.device("cuda", 0)
        reasons = [kernel.declines(problem, device) for kernel in KERNELS]
        assert all(reasons)
        if torch.cuda.is_available():
            assert all(str(problem.accumulator_limit) in str(reason) for reason in reasons)
