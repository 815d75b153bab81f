"""Linears beside bf16 cuBLAS, cuBLASLt int8 with a compiled epilogue, row-wise fp8 and torch's int4, in one run.

    python -m bench linear [--quick] [--jobs N] [--json FILE] [--plot FILE] [--budget SECONDS]

GEMM rows start from quantized activations, whole-linear rows from bf16; W4A8 is a GEMM row, W4A16 a whole linear, both
in groups of 128. Every output of ours is compared with the formula before it is timed. Times are medians with cold
caches; ratios within the run are what to quote.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from baracuda import (
    Activation,
    ElementKind,
    QuantizedLinearArgs,
    QuantizedLinearDescriptor,
    QuantizedLinearPlan,
    SmoothQuantLinearArgs,
    SmoothQuantLinearDescriptor,
    SmoothQuantLinearPlan,
)

from .common import captured
from .linear_four import FourBit, are_right, four_bit_contestants, torchs_int4
from .linear_table import BARS, Row, Shape, bar_table, epilogue_table, four_bit_table, plot, table

WEIGHTS = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate-up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B o": (8192, 8192),
    "70B gate-up": (57344, 8192),
    "70B down": (8192, 28672),
}
TOKENS = (1, 16, 64, 256, 2048, 8192)
SCALE_A = 0.017
#: Epilogues of which each is timed beside the plain one: activation, and whether a residual is added.
EPILOGUES = {
    "plain": (Activation.NONE, False),
    "relu": (Activation.RELU, False),
    "gelu": (Activation.GELU, False),
    "silu": (Activation.SILU, False),
    "residual": (Activation.NONE, True),
    "gelu + residual": (Activation.GELU, True),
}
EPILOGUE_SHAPES: list[Shape] = [(16, 14336, 4096), (256, 14336, 4096), (2048, 14336, 4096), (8192, 4096, 14336)]


class Timer:
    """Interleaved medians: every contestant once per round, the caches flushed before each.

    A shape gets its seconds, or behind the deadline just the few rounds a median needs.
    """

    def __init__(self, seconds: float, budget: float) -> None:
        self.seconds, self.deadline = seconds, time.perf_counter() + budget
        self.flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")

    def __call__(self, contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
        contestants = {name: captured(run) for name, run in contestants.items()}
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contestants}
        until = min(time.perf_counter() + self.seconds, self.deadline)
        while time.perf_counter() < until or len(next(iter(events.values()))) < 7:
            for name, run in contestants.items():
                pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                self.flush.zero_()
                pair[0].record()
                run()
                pair[1].record()
                events[name].append(pair)
            torch.cuda.synchronize()
        return {
            name: sorted(a.elapsed_time(b) * 1e3 for a, b in pairs)[len(pairs) // 2] for name, pairs in events.items()
        }


def integer_sums(q: Tensor, weight: Tensor) -> Tensor:
    """Exact int32 sums; cuBLASLt wants more than 16 rows."""
    m = q.shape[0]
    if m <= 16:
        q = torch.cat([q, q.new_zeros(32 - m, q.shape[1])])
    return torch._int_mm(q, weight.t())[:m]


# One compilation for all shapes: torch gives up compiling a function that it has compiled eight times.
@torch.compile(dynamic=True)
def _compiled_epilogue(acc: Tensor, scale_a: float, scale_w: Tensor) -> Tensor:
    return ((acc.float() * scale_a) * scale_w).to(torch.bfloat16)


def host_us(calls: int = 2000) -> float:
    """Host time of one `plan.run`: a linear so small that the device keeps up."""
    x = torch.randn(1, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randint(-127, 128, (256, 256), dtype=torch.int8, device="cuda")
    out = torch.empty(1, 256, device="cuda", dtype=torch.bfloat16)
    plan = QuantizedLinearPlan.select(
        QuantizedLinearDescriptor(1, 256, 256, activation_element=ElementKind.BF16), device="cuda"
    )
    args = QuantizedLinearArgs(x, weight, torch.rand(256, device="cuda"), out)
    room = torch.empty(plan.workspace_size(), dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 5):
            plan.run(args, room)
        best = min(best, (time.perf_counter() - start) / (calls // 5) * 1e6)
    return best


def epilogues_of(shape: Shape) -> dict[str, Callable[[], object]]:
    """The same GEMM under each epilogue."""
    m, n, k = shape
    q, weight = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device="cuda") for rows in (m, n))
    residual, out = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scale, contestants = torch.rand(n, device="cuda") * 1e-4, {}
    for name, (activation, adds) in EPILOGUES.items():
        described = SmoothQuantLinearDescriptor(
            m, n, k, SCALE_A, output_element=ElementKind.BF16, activation=activation
        )
        plan = SmoothQuantLinearPlan.select(described, device="cuda")
        args = SmoothQuantLinearArgs(q, weight, scale, out, residual=residual if adds else None)
        room = torch.empty(plan.workspace_size(), dtype=torch.uint8, device="cuda")
        contestants[name] = lambda plan=plan, args=args, room=room: plan.run(args, room)
    return contestants


def contestants_of(
    shape: Shape, x: Tensor, q: Tensor, out: Tensor, weight: Tensor, scale_w: Tensor
) -> tuple[dict[str, Callable[[], object]], str]:
    """Our GEMM and our whole linear, and what says which kernel the GEMM is."""
    m, n, k = shape
    static = SmoothQuantLinearPlan.select(
        SmoothQuantLinearDescriptor(m, n, k, SCALE_A, output_element=ElementKind.BF16), device="cuda"
    )
    static_args = SmoothQuantLinearArgs(q, weight, scale_w, out)
    static_room = torch.empty(static.workspace_size(), dtype=torch.uint8, device="cuda")
    dynamic = QuantizedLinearPlan.select(
        QuantizedLinearDescriptor(m, n, k, activation_element=ElementKind.BF16), device="cuda"
    )
    dynamic_args = QuantizedLinearArgs(x, weight, scale_w, out)
    dynamic_room = torch.empty(dynamic.workspace_size(), dtype=torch.uint8, device="cuda")
    contestants: dict[str, Callable[[], object]] = {
        "gemm": lambda: static.run(static_args, static_room),
        "linear": lambda: dynamic.run(dynamic_args, dynamic_room),
    }
    return contestants, f"{static.sku().kernel}: {static.sku().epilogue}"


def measure(name: str, shape: Shape, timer: Timer, wide: Tensor, weight: Tensor, scale_w: Tensor, four: FourBit) -> Row:
    m, n, k = shape
    row = Row(name, shape)
    # The same data for everybody, since power, and with it speed, depends on the bits.
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    q, _ = quantized_rows(x)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    contestants, row.kernel = contestants_of(shape, x, q, out, weight, scale_w)
    row.exact = _exact(contestants, q, x, weight, scale_w, out)
    four_bits = four_bit_contestants(shape, q, x, out, four, SCALE_A)
    row.exact = row.exact and are_right(four_bits, q, x, out, four, SCALE_A, integer_sums)
    contestants |= four_bits.calls | torchs_int4(x, four) | _peers(q, x, weight, wide, scale_w)
    row.us = timer(contestants | {"bf16": lambda: torch.nn.functional.linear(x, wide)})
    return row


def compile_ahead(shapes: list[Shape], jobs: int) -> None:
    """Run ours once in other processes: what they compile, the one that measures finds in Triton's cache."""
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        epilogues = pool.map(_run_epilogues_once, EPILOGUE_SHAPES)
        list(pool.map(_run_once, shapes))
        list(epilogues)


def _run_once(shape: Shape) -> None:
    m, n, k = shape
    torch.cuda.empty_cache()  # what the shape before has left: workers share the device's memory
    weight, q = (torch.zeros(rows, k, dtype=torch.int8, device="cuda") for rows in (n, m))
    x, out = (torch.zeros(m, columns, dtype=torch.bfloat16, device="cuda") for columns in (k, n))
    contestants, _ = contestants_of(shape, x, q, out, weight, torch.ones(n, device="cuda"))
    four = FourBit.zeros(n, k)
    for call in (contestants | four_bit_contestants(shape, q, x, out, four, SCALE_A).calls).values():
        call()


def _run_epilogues_once(shape: Shape) -> None:
    for call in epilogues_of(shape).values():
        call()


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of a dynamic, symmetric, per-row quantization in plain torch."""
    scale = x.abs().amax(1).float() / torch.tensor(127.0, device=x.device)
    q = torch.cat(
        [
            torch.round(part.float() / s[:, None]).to(torch.int8)
            for part, s in zip(x.split(2048), scale.split(2048), strict=True)
        ]
    )
    return q, scale


def _exact(
    contestants: dict[str, Callable[[], object]], q: Tensor, x: Tensor, weight: Tensor, scale_w: Tensor, out: Tensor
) -> bool:
    """Whether both of ours have the bits of the formula, computed piece by piece to spare memory."""
    good = True
    _, scale = quantized_rows(x)
    for name, scales in (("gemm", torch.full_like(scale, SCALE_A)), ("linear", scale)):
        out.fill_(77)
        contestants[name]()
        for rows in torch.arange(x.shape[0], device="cuda").split(2048):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            expected = ((integer_sums(q[part], weight).float() * scales[part, None]) * scale_w).to(torch.bfloat16)
            good = good and torch.equal(out[part], expected)
    return good


def _peers(q: Tensor, x: Tensor, weight: Tensor, wide: Tensor, scale_w: Tensor) -> dict[str, Callable[[], object]]:
    peers: dict[str, Callable[[], object]] = {}
    if q.shape[0] > 16:
        peers["int_mm"] = lambda: _compiled_epilogue(torch._int_mm(q, weight.t()), SCALE_A, scale_w)
    x8, w8 = x.to(torch.float8_e4m3fn), wide.to(torch.float8_e4m3fn)
    rows = torch.rand(x.shape[0], 1, device="cuda") + 0.1
    columns = scale_w[None, :].contiguous()
    peers["fp8"] = lambda: torch._scaled_mm(x8, w8.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True)
    return peers


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench linear", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="the shapes with a bar only")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile the kernels before the timing")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on one shape")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which a shape gets 7 rounds only")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench linear: needs a CUDA device", file=sys.stderr)
        return 1
    shapes = [("bar", shape) for shape in BARS]
    if not options.quick:
        shapes += [(name, (m, *weight)) for name, weight in WEIGHTS.items() for m in TOKENS]
    if options.jobs > 1:
        compile_ahead([shape for _, shape in shapes], options.jobs)
    timer, rows = Timer(options.seconds, options.budget), []
    for (n, k), group in itertools.groupby(shapes, key=lambda named: named[1][1:]):
        wide = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        weight, scale_w = quantized_rows(wide)
        four = FourBit.of(wide)
        for name, shape in group:
            rows.append(row := measure(name, shape, timer, wide, weight, scale_w, four))
            times = ", ".join(f"{contestant} {us:.1f}" for contestant, us in row.us.items())
            print(f"{name} {shape}: {times} us", file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    run = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "host_us": host_us(),
        "rows": [asdict(row) for row in rows],
        "epilogues": [{"shape": shape, "us": timer(epilogues_of(shape))} for shape in EPILOGUE_SHAPES],
    }
    print(table(rows), four_bit_table(rows), epilogue_table(run), bar_table(rows, run["host_us"]), sep="\n\n")
    if options.json:
        Path(options.json).write_text(json.dumps(run, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)
    return 0 if all(row.exact for row in rows) else 1
