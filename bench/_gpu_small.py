"""4096 x 4096 and below, where a launch and its first bytes count: ours beside torch.compile's kernel for the formula.

What is timed is the device alone. Both are replayed from CUDA graphs, in turns, so that neither the host nor a noisy
moment decides. Every call of a graph has operands of its own, as many sets as fill the L2 cache twice: inputs come from
memory and outputs go there, for both; a kernel fed with what it has just read would be timed at the cache's rate. Where
in memory they lie matters, too: what is close is timed over operands in several places. Every result of ours is
compared with the reference first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from baracuda import BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem, scale_elements
from baracuda.plans.plan import SelectedPlan

from ._gpu_peers import formula
from .common import write_json
from .gpu import SCOPES, Timed, _label, about, compile_ahead, operands, verify

SHAPES = [(4096, 4096), (1024, 4096), (256, 4096)]
CHOSEN_SCOPES = ("tensor", "token", "channel -1", "group 128")
STATIC = (
    QuantizeKind.QUANTIZE,
    QuantizeKind.DEQUANTIZE,
    QuantizeKind.FAKE_QUANTIZE,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD,
)
#: What two runs of the same kernel may differ by.
NOISE = 0.02
MOST_SETS = 128
#: In how many places two kernels are timed that are too close to say which is faster.
PLACES = 7


@dataclass
class Line(Timed):
    """One measurement; a `ratio` above 1 is how much faster ours is."""

    compiled_microseconds: float
    ratio: float = field(init=False)

    def __post_init__(self) -> None:
        self.ratio = self.compiled_microseconds / self.microseconds

    def __str__(self) -> str:
        size, mark = "x".join(map(str, self.shape)), "!" if self.ratio < 1 else " "
        text = f"{mark} {size:11s}{self.op:28s}{self.scope:12s}{self.element:5s}{self.quantized:4s}"
        return (
            f"{text}{self.microseconds:8.2f} us, torch.compile {self.compiled_microseconds:8.2f} us {self.ratio:6.2f}x"
        )


def problems() -> Iterator[tuple[str, Problem]]:
    """The large shape of both elements first: the rows to have, if not all can be had."""
    ops = [(op, DynamicRangeMode.SYMMETRIC) for op in STATIC]
    ops += [(QuantizeKind.DYNAMIC_QUANTIZE, mode) for mode in DynamicRangeMode]
    for shape, element, (op, mode), name in product(SHAPES, (ElementKind.BF16, ElementKind.F32), ops, CHOSEN_SCOPES):
        low = -127 if OPS[op].dynamic and mode is DynamicRangeMode.SYMMETRIC else -128
        stored = scale_elements(element)[0]
        yield name, Problem(op, shape, element, ElementKind.S8, low, 127, SCOPES[name], mode, scale_element=stored)


def label(name: str, p: Problem) -> str:
    return f"{'x'.join(map(str, p.shape))}|{_label(name, p)}"


def set_count(nbytes: int, cache: int) -> int:
    """As many sets of operands as fill the cache twice, within reason."""
    return min(max(-(-2 * cache // nbytes), 4), MOST_SETS)


def operand_sets(p: Problem, first: tuple[Any, ...], device: torch.device) -> list[tuple[Any, ...]]:
    """These operands and others like them, which together fill the cache twice."""
    nbytes = sum(value.nbytes for value in first if isinstance(value, Tensor))
    more = set_count(nbytes, torch.cuda.get_device_properties(device).L2_cache_size) - 1
    return [first, *(operands(p, device) for _ in range(more))]


def captured(
    call: Callable[[tuple[Any, ...]], object], sets: list[tuple[Any, ...]]
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one call for each set. What they return is kept: memory given back would be written again at once."""
    for _ in range(3):
        call(sets[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(values) for values in sets]
    return graph, kept


def in_turns(graphs: Sequence[torch.cuda.CUDAGraph], calls: int, rounds: int = 11) -> list[float]:
    """The median microseconds of a call in each graph.

    Each goes twice and is timed the second time: what then still has to leave the cache, it has written itself."""
    times: list[list[float]] = [[] for _ in graphs]
    for turn in range(rounds + 2):
        for graph, taken in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                taken.append(start.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(taken) for taken in times]


def ready(p: Problem, device: torch.device) -> tuple[SelectedPlan, Callable[..., object], int]:
    """Our plan, torch's function, compiled when it is called, and how many operands that takes."""
    found = formula(p)
    assert found is not None
    torch._dynamo.reset()
    plan = SelectedPlan(p, device, PlanPreference(prefer_backend=BackendKind.TRITON))
    return plan, torch.compile(found[0], dynamic=False), found[1]


def measure(name: str, p: Problem, device: torch.device, check: bool = True) -> Line:
    plan, compiled, count = ready(p, device)
    workspace = plan.allocate_workspace()
    kept: list[object] = []  # what is here, the next operands are not

    def timed(first: tuple[Any, ...]) -> list[float]:
        sets = operand_sets(p, first, device)
        ours = captured(lambda values: plan._launch(values, workspace), sets)
        theirs = captured(lambda values: compiled(*values[:count]), sets)
        kept.extend((sets, ours, theirs))
        return in_turns([ours[0], theirs[0]], len(sets))

    first = operands(p, device)
    if check:
        verify(p, plan, first, workspace)
    mine, other = timed(first)
    if abs(other / mine - 1) < 2 * NOISE:
        places = [timed(operands(p, device)) for _ in range(PLACES)]
        mine, other = map(statistics.median, zip(*places, strict=True))
    mode = "" if p.mode is DynamicRangeMode.SYMMETRIC else " asymmetric"
    return Line(p.op.value + mode, name, p.element.value, p.quantized.value, p.shape, mine, other)


def summary(lines: Sequence[Line], asked: int) -> str:
    slower = [line for line in lines if line.ratio < 1]
    beyond = sum(line.ratio < 1 - NOISE for line in slower)
    text = f"{len(slower)} of {len(lines)} slower than torch.compile, {beyond} by more than {NOISE:.0%}"
    if ratios := [line.ratio for line in lines]:
        text += f"; least {min(ratios):.2f}x, median {statistics.median(ratios):.2f}x"
    return text + (f"; {asked - len(lines)} rows were not begun in time" if len(lines) < asked else "")


def main(options: argparse.Namespace, device: torch.device) -> None:
    start = time.monotonic()
    chosen = [(name, p) for name, p in problems() if all(part in label(name, p) for part in options.only.split(","))]
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, L2 {cache / 2**20:.0f} MiB, read past it")
    if options.jobs > 1:
        compile_ahead([p for _, p in chosen], options.jobs, peers=True)
        print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    lines: list[Line] = []
    for name, p in chosen:
        if time.monotonic() - start > options.seconds:
            break
        lines.append(measure(name, p, device, not options.no_check))
        torch.cuda.empty_cache()
        print(lines[-1], flush=True)
    print(summary(lines, len(chosen)), f"({time.monotonic() - start:.0f} s)")
    write_json(options.json, {**about(device), "cache_bytes": cache, "lines": lines})
