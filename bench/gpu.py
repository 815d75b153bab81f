"""The memory-bound ops on a GPU: bytes per second of each op x scope x element, as a share of the copy ceiling.

Bytes are counted once per input and output; a dynamic range over segments too long to hold reads its input twice, and
so does the count (`reads`). The ceiling is what a copy moves just before the rows of an operation and element. Every
result is compared with the reference before it is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from baracuda import (
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
    Scope,
)
from baracuda.core.optable import OPS, packed_shape
from baracuda.core.problem import Problem, scale_elements
from baracuda.core.types import INTEGERS, OpCategory
from baracuda.plans.plan import SelectedPlan

from ._gpu_peers import PEERS
from .common import arguments, per_call, write_json

SCOPES: dict[str, Scope] = {
    "tensor": PerTensor(),
    "token": PerToken(),
    "channel 0": PerChannel(0),
    "channel -1": PerChannel(-1),
    "group 128": PerGroup(128),
    "group 128 axis 0": PerGroup(128, axis=0),
}
#: A share this near to its bar is timed for longer, whichever side it is on.
CLOSE = 0.02
#: Scopes whose segments are strided in memory.
STRIDED = ("channel -1", "group 128 axis 0")
BACKWARDS = (
    QuantizeKind.QUANTIZE_BACKWARD,
    QuantizeKind.DEQUANTIZE_BACKWARD,
    QuantizeKind.FAKE_QUANTIZE_BACKWARD,
)


@dataclass
class Timed:
    """A problem and how long it took."""

    op: str
    scope: str
    element: str
    quantized: str
    shape: tuple[int, ...]
    microseconds: float


@dataclass
class Line(Timed):
    """One measurement beside the copy ceiling."""

    terabytes: float
    share: float
    bar: float
    peers: dict[str, float]


def problems(shape: tuple[int, ...], quick: bool) -> Iterator[tuple[str, Problem]]:
    """The matrix: every op, scope, element and output; `quick` leaves out what behaves alike. No problem reads less
    than `shape` of 16-bit floats: what a launch costs by itself counts the same for all."""
    for element in (ElementKind.BF16, ElementKind.F32, ElementKind.F16, ElementKind.F64):
        if quick and element in (ElementKind.F16,):
            continue
        for op in QuantizeKind:
            row = OPS[op]
            if not (row.elementwise or row.dynamic) or row.category is not OpCategory.QUANTIZATION:
                continue
            for scope_name, scope in SCOPES.items():
                for kind in _kinds(op, quick):
                    rows = _rows(shape[0], op, element, kind)
                    modes = tuple(DynamicRangeMode) if row.dynamic else (DynamicRangeMode.SYMMETRIC,)
                    for mode in modes:
                        low = kind.q_min + (mode is DynamicRangeMode.SYMMETRIC and kind.q_min < 0 and row.dynamic)
                        yield (
                            scope_name,
                            Problem(
                                op,
                                (rows, *shape[1:]),
                                element,
                                kind,
                                low,
                                kind.q_max,
                                scope,
                                mode,
                                scale_element=scale_elements(element)[0],
                            ),
                        )


def _rows(rows: int, op: QuantizeKind, element: ElementKind, kind: ElementKind) -> int:
    """As many as are read like `rows` of 16-bit floats, or of f32."""
    if op is QuantizeKind.DEQUANTIZE:
        return rows * (4 if kind.is_packed else 2)
    return rows // 2 if element is ElementKind.F64 else rows


def _kinds(op: QuantizeKind, quick: bool) -> tuple[ElementKind, ...]:
    floats_out = (QuantizeKind.FAKE_QUANTIZE, QuantizeKind.DYNAMIC_FAKE_QUANTIZE, QuantizeKind.CHOOSE_QPARAMS)
    if op in BACKWARDS or op in floats_out:
        return (ElementKind.S8,)
    if quick:
        return (ElementKind.S8, ElementKind.S4)
    return INTEGERS


def operands(p: Problem, device: torch.device) -> tuple[Any, ...]:
    """Random operands: data across the whole quantized range, a scale per segment and, elementwise, a zero point."""
    values: list[Any] = []
    for operand in OPS[p.op].operands:
        shape, kind = operand.shape(p), operand.elements(p)[0]
        if operand.output:
            symmetric = operand.optional and p.mode is DynamicRangeMode.SYMMETRIC
            values.append(None if symmetric else torch.empty(shape, dtype=kind.dtype, device=device))
        elif operand.name == "scale":
            values.append(torch.rand(shape, dtype=kind.dtype, device=device) * 0.02 + 0.01)
        elif operand.name == "zero_point":
            values.append(torch.randint(p.q_min, p.q_max + 1, shape, dtype=torch.int32, device=device))
        elif kind.is_float:
            values.append(torch.randn(shape, dtype=kind.dtype, device=device))
        elif p.op is QuantizeKind.DEQUANTIZE_BACKWARD:
            values.append(None)
        else:
            info = torch.iinfo(kind.dtype)
            values.append(torch.randint(info.min, info.max + 1, shape, dtype=kind.dtype, device=device))
    return tuple(values)


def moved(p: Problem) -> int:
    """The bytes an op must move: each input read once, each output written once, and a second read where it must."""
    numel, size = p.view.numel, p.element.dtype.itemsize
    stored = prod(packed_shape(p.shape, p.quantized)) * p.quantized.dtype.itemsize
    static = not OPS[p.op].dynamic and p.op is not QuantizeKind.DEQUANTIZE_BACKWARD
    has_zero_point = static or p.mode is DynamicRangeMode.ASYMMETRIC
    segments = p.view.segments * (p.scale_element.dtype.itemsize + 4 * has_zero_point)
    if p.op is QuantizeKind.FAKE_QUANTIZE:
        return 2 * numel * size + segments
    if p.op is QuantizeKind.DEQUANTIZE_BACKWARD:
        return 2 * numel * size + segments
    if p.op in BACKWARDS:
        return 3 * numel * size + segments
    if p.op is QuantizeKind.CHOOSE_QPARAMS:
        return numel * size + segments
    # What must be read together: a segment, or the neighbours that share a 32-byte sector with it. Where that is more
    # than a multiprocessor holds, the range is known only after the data has gone by.
    bundle = p.view.segment_length * (32 if p.view.inner > 1 else size)
    reads = 2 if OPS[p.op].dynamic and bundle > 2**17 else 1
    return reads * numel * size + (numel * size if p.op is QuantizeKind.DYNAMIC_FAKE_QUANTIZE else stored) + segments


def microseconds(call: Callable[[], object], repeats: int = 8, batches: int = 7) -> float:
    """The median over batches of the mean time of one call, on the device."""
    for _ in range(2 * repeats):
        call()
    times = []
    for _ in range(batches):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times)


def copy_ceiling(device: torch.device, gibibytes: int = 1) -> float:
    """Bytes per microsecond of a device-to-device copy, read plus written."""
    source = torch.randint(0, 255, (gibibytes * 2**30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source))


def verify(p: Problem, plan: SelectedPlan, values: tuple[Any, ...], workspace: Tensor | None) -> None:
    """Compare with the reference on the same device; its memory is freed before anything is timed."""
    outputs = [i for i, operand in enumerate(OPS[p.op].operands) if operand.output and values[i] is not None]
    for i in outputs:
        values[i].fill_(77)
    plan.launch(values, workspace)
    reference = SelectedPlan(p, plan.device, PlanPreference(prefer_backend=BackendKind.REFERENCE))
    expected = tuple(torch.empty_like(v) if i in outputs else v for i, v in enumerate(values))
    reference.launch(expected)
    for i in outputs:
        if not torch.equal(values[i].reshape(-1).view(torch.uint8), expected[i].reshape(-1).view(torch.uint8)):
            wrong = (values[i] != expected[i]).sum().item()
            raise SystemExit(f"{p}: {OPS[p.op].operands[i].name} differs from the reference in {wrong} elements")


def measure(name: str, p: Problem, ceiling: float, device: torch.device, peers: bool, check: bool = True) -> Line:
    plan = SelectedPlan(p, device, PlanPreference(prefer_backend=BackendKind.TRITON))
    values = operands(p, device)
    size = plan.workspace_size()
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    if check:
        verify(p, plan, values, workspace)
    bar = 0.85 if name in STRIDED or p.element is ElementKind.F64 else 0.95
    elapsed = microseconds(lambda: plan._launch(values, workspace))
    if abs(moved(p) / elapsed / ceiling - bar) < CLOSE:
        elapsed = microseconds(lambda: plan._launch(values, workspace), batches=51)
    found = {peer: microseconds(call) for peer, call in _peer_calls(p, values).items()} if peers else {}
    rate = moved(p) / elapsed
    mode = "" if p.mode is DynamicRangeMode.SYMMETRIC else " asymmetric"
    return Line(
        p.op.value + mode,
        name,
        p.element.value,
        p.quantized.value,
        p.shape,
        elapsed,
        rate / 1e6,
        rate / ceiling,
        bar,
        found,
    )


def compile_ahead(chosen: list[Problem], jobs: int, peers: bool) -> None:
    """Run every problem once in other processes: what they compile, the one that measures finds in the caches."""
    # Workers compile beside each other; more processes in each would only wait.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "1"
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(partial(_run_once, peers=peers), chosen))


def _run_once(p: Problem, peers: bool) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()  # what the problem before has left: workers share the device's memory
    plan = SelectedPlan(p, device, PlanPreference(prefer_backend=BackendKind.TRITON))
    values = operands(p, device)
    plan.launch(values, plan.allocate_workspace())
    for call in _peer_calls(p, values).values() if peers else ():
        call()
    torch.cuda.synchronize(device)


def _peer_calls(p: Problem, values: tuple[Any, ...]) -> dict[str, Callable[[], object]]:
    """Who else computes the same, ready to be called."""
    made = {peer: make(p, values) for peer, make in PEERS.items()}
    return {peer: call for peer, call in made.items() if call is not None}


def host_microseconds(device: torch.device) -> float:
    """Host time of one checked launch of a small quantize plan."""
    p = Problem(QuantizeKind.QUANTIZE, (8, 128), ElementKind.BF16, ElementKind.S8, -128, 127, PerToken())
    plan, values = SelectedPlan(p, device), operands(p, device)
    return 1e6 * per_call(lambda: plan.launch(values), 200, 20, lambda: torch.cuda.synchronize(device))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="4096 x 4096 and below against torch.compile instead")
    parser.add_argument("--only", default="", help="substrings of 'op|scope|element|quantized' to keep, by commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile the kernels before the timing")
    parser.add_argument("--no-peers", action="store_true", help="ours alone: torch.compile takes a second for each row")
    seconds = "begin no peer after these; with --small, no row"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=seconds)
    parser.add_argument("--no-check", action="store_true", help="time without comparing with the reference first")


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments("gpu", argv, "leave out f16, u8, u4 and the peers", _options)
    if not torch.cuda.is_available():
        raise SystemExit("bench gpu: torch sees no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    if options.small:
        from . import _gpu_small

        _gpu_small.main(options, device)
        return
    start = time.monotonic()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    host = host_microseconds(device)
    print(f"host time of a checked launch: {host:.1f} us")
    peers = not options.quick and not options.no_peers
    lines, ceilings = [], []
    chosen = [
        (name, p)
        for name, p in problems((16384, 8192), options.quick)
        if all(part in _label(name, p) for part in options.only.split(","))
    ]
    if options.jobs > 1:
        compile_ahead([p for _, p in chosen], options.jobs, peers)
    for _, alike in groupby(chosen, lambda row: (row[1].op, row[1].element)):
        ceilings.append(copy_ceiling(device))  # again and again: the card's clocks move
        for name, p in alike:
            in_time = time.monotonic() - start < options.seconds
            line = measure(name, p, ceilings[-1], device, peers and in_time, not options.no_check)
            lines.append(line)
            print(_row(line), flush=True)
    host = min(host, host_microseconds(device))
    below = [line for line in lines if line.share < line.bar]
    copies = sorted(rate / 1e6 for rate in ceilings)
    print(f"{len(lines) - len(below)} of {len(lines)} at or above their bar of the copy ceiling")
    print(f"copies between the rows: {copies[0]:.2f} to {copies[-1]:.2f} TB/s ({time.monotonic() - start:.0f} s)")
    rates = {"copy_terabytes": statistics.median(copies), "host_microseconds": host}
    write_json(options.json, {**about(device), **rates, "lines": lines})


def about(device: torch.device) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"device": torch.cuda.get_device_name(device), "versions": versions, "date": date.today().isoformat()}


def _label(name: str, p: Problem) -> str:
    return f"{p.op.value}|{name}|{p.element.value}|{p.quantized.value}|{p.mode.value}"


def _row(line: Line) -> str:
    """One printed row; `!` marks a miss of the bar."""
    peers = " ".join(f"{name} {time / line.microseconds:.2f}x" for name, time in line.peers.items())
    miss = "!" if line.share < line.bar else " "
    text = f"{miss} {line.op:34s}{line.scope:18s}{line.element:5s}{line.quantized:4s}"
    return f"{text}{line.microseconds:9.1f} us {line.terabytes:6.2f} TB/s {line.share:6.1%}  {peers}"
