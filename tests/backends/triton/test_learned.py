"""The learned backward, compiled for the CPU and in Triton's interpreter: the reference's bits, sums included."""

from __future__ import annotations

import os

import pytest
import torch
from learned import FULL_BLOCKS, assert_alike, problems, run

from baracuda import BackendKind, PerChannel, PerTensor, Scope
from baracuda.backends.formulas import segment_sums
from baracuda.core.problem import Problem
from baracuda.core.scope import View
from cases import LARGE_LAYOUTS, LAYOUTS

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
#: Segments of more than one block: in a run, in several runs, strided with few and with many neighbours.
SEVERAL_BLOCKS: list[tuple[tuple[int, ...], Scope]] = [
    ((8211,), PerTensor()),
    ((2, 3, 8193), PerChannel(1)),
    ((40, 3, 5), PerChannel(1)),
    ((1100, 5), PerChannel(1)),
    ((70, 131), PerChannel(1)),
]
#: More blocks than the last sum has lanes.
MANY_BLOCKS: list[tuple[tuple[int, ...], Scope]] = [((1100, 3, 2), PerChannel(1))]

if INTERPRETER:
    INTERPRETED = [next(problems(MANY_BLOCKS)), *problems([*LAYOUTS, *SEVERAL_BLOCKS, *FULL_BLOCKS])]

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @pytest.mark.parametrize("p", INTERPRETED, ids=lambda p: f"{p.shape}-{p.scope}-{p.element.value}")
    def test_interpreted_kernels_have_the_bits_of_the_reference(p: Problem) -> None:
        assert_alike(p, run(p, BackendKind.TRITON), run(p, BackendKind.REFERENCE))

else:
    from baracuda import _cpu

    @pytest.mark.parametrize("isa", _cpu.isas())
    def test_compiled_kernels_have_the_bits_of_the_reference_on_any_number_of_threads(isa: str) -> None:
        before, threads = _cpu.isa(), torch.get_num_threads()
        try:
            _cpu.use_isa(isa)
            for p in problems([*LAYOUTS, *LARGE_LAYOUTS, *SEVERAL_BLOCKS, *MANY_BLOCKS]):
                expected = run(p, BackendKind.REFERENCE)
                for count in (1, 3):
                    torch.set_num_threads(count)
                    assert_alike(p, run(p, BackendKind.CPU), expected)
        finally:
            _cpu.use_isa(before)
            torch.set_num_threads(threads)

    def test_sums_follow_the_order_of_the_contract() -> None:
        """Spelled out with loops: lanes in order from zero, halved, then the blocks as one more block."""
        values = torch.randn(2, 1, 8300, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

        def halved(lanes: list[float]) -> float:
            half = len(lanes) // 2
            return lanes[0] if half == 0 else halved([a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)])

        def block(terms: list[float]) -> float:
            lanes = [0.0] * 1024
            for i, term in enumerate(terms):
                lanes[i % 1024] += term
            return halved(lanes)

        runs = values.view(2, 8300).tolist()
        expected = block([block(cut) for run in runs for cut in (run[:8192], run[8192:])])
        assert segment_sums(values, View(2, 1, 8300, 1)).item() == expected
        assert expected != values.sum().item()
