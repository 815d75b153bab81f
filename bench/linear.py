"""W8A8 linears beside bf16 cuBLAS, cuBLASLt int8 with a compiled epilogue, and row-wise fp8, interleaved in one run.

    python -m bench linear [--quick] [--json FILE] [--plot FILE]

GEMM rows start from quantized activations, whole-linear rows from bf16. Every output of ours is compared with the
formula before it is timed. Times are medians with cold caches; ratios within the run are what to quote.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from baracuda import (
    ElementKind,
    QuantizedLinearArgs,
    QuantizedLinearDescriptor,
    QuantizedLinearPlan,
    SmoothQuantLinearArgs,
    SmoothQuantLinearDescriptor,
    SmoothQuantLinearPlan,
)

Shape = tuple[int, int, int]
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
#: The shapes with a bar: least ratios of the GEMM or the whole linear to a peer, and most microseconds.
BARS: dict[Shape, dict[str, float]] = {
    (8192, 8192, 8192): {"gemm/bf16": 2.1, "gemm/fp8": 1.05},
    (4096, 14336, 4096): {"gemm/bf16": 1.95, "gemm/fp8": 1.05},
    (4096, 4096, 14336): {"gemm/bf16": 1.95, "gemm/fp8": 1.05},
    (2048, 6144, 4096): {"gemm/bf16": 2.0, "gemm/fp8": 1.05},
    (256, 14336, 4096): {"gemm/bf16": 1.45, "gemm/fp8": 1.05},
    (64, 14336, 4096): {"gemm/bf16": 1.6, "gemm/fp8": 1.05, "gemm us": 26.0},
    (16, 14336, 4096): {"gemm/bf16": 1.6, "gemm/fp8": 1.05, "gemm us": 26.0, "linear us": 28.0},
    (1, 14336, 4096): {"gemm/bf16": 1.6, "gemm/fp8": 1.05, "gemm us": 26.0, "linear us": 28.0},
    (2048, 14336, 4096): {"linear/bf16": 1.6},
    (8192, 14336, 4096): {"linear/bf16": 1.85},
}
SCALE_A = 0.017


@dataclass
class Row:
    """One shape: microseconds by contestant, and whether ours had the bits of the formula."""

    name: str
    shape: Shape
    exact: bool = True
    kernel: str = ""
    us: dict[str, float] = field(default_factory=dict)

    def ratio(self, ours: str, peer: str) -> float:
        return self.us[peer] / self.us[ours] if ours in self.us and peer in self.us else float("nan")

    @property
    def tops(self) -> float:
        m, n, k = self.shape
        return 2 * m * n * k / self.us["gemm"] / 1e6

    @property
    def weight_tb(self) -> float:
        return self.shape[1] * self.shape[2] / self.us["gemm"] / 1e6


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same work as a CUDA graph, so that a slow host does not show in the device's time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Timer:
    """Interleaved medians: every contestant once per round, the caches flushed before each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")

    def __call__(self, contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
        contestants = {name: captured(run) for name, run in contestants.items()}
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contestants}
        start = time.perf_counter()
        while time.perf_counter() - start < self.seconds or len(next(iter(events.values()))) < 7:
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


@torch.compile(dynamic=False)
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


def measure(name: str, shape: Shape, timer: Timer, peers: bool = True) -> Row:
    m, n, k = shape
    row = Row(name, shape)
    # The same data for everybody, since power, and with it speed, depends on the bits.
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    q, _ = quantized_rows(x)
    weight, scale_w = quantized_rows(wide)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

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
        "bf16": lambda: torch.nn.functional.linear(x, wide),
    }
    row.kernel = f"{static.sku().kernel}: {static.sku().epilogue}"
    row.exact = _exact(contestants, q, x, weight, scale_w, out)
    if peers:
        contestants |= _peers(q, x, weight, wide, scale_w)
    row.us = timer(contestants)
    return row


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


# -- what is printed ---------------------------------------------------------------------------------------------


def bars(rows: list[Row], host: float) -> list[tuple[str, str, float, float, bool]]:
    """Shape, measure, bar, measured, passed."""
    found = {row.shape: row for row in rows}
    lines = []
    for shape, wanted in BARS.items():
        row = found.get(shape)
        for what, bar in wanted.items() if row is not None else ():
            if what.endswith(" us"):
                value = row.us[what.removesuffix(" us")]
                passed = value <= bar
            else:
                value = row.ratio(*what.split("/"))
                passed = value >= bar
            lines.append(("x".join(map(str, shape)), what, bar, value, passed))
    slower = [row for row in rows if row.ratio("linear", "bf16") < 1]
    lines.append(("every shape", "linear/bf16", 1.0, min(row.ratio("linear", "bf16") for row in rows), not slower))
    lines.append(("1x256x256", "host us", 8.0, host, host <= 8.0))
    return lines


COLUMNS = ("gemm us", "TOPS", "weight TB/s", "linear us", "bf16 us", "int_mm us", "fp8 us")
RATIOS = ("gemm/bf16", "gemm/fp8", "linear/bf16")


def table(rows: list[Row]) -> str:
    head = ["weight", "M x N x K", *COLUMNS, *RATIOS, "exact"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [row.name, " x ".join(map(str, row.shape))]
        for column in COLUMNS:
            if column == "TOPS":
                cells.append(f"{row.tops:.0f}")
            elif column == "weight TB/s":
                cells.append(f"{row.weight_tb:.2f}")
            else:
                us = row.us.get(column.removesuffix(" us"))
                cells.append("-" if us is None else f"{us:.1f}")
        cells += [f"{row.ratio(*ratio.split('/')):.2f}" for ratio in RATIOS]
        lines.append([*cells, "yes" if row.exact else "NO"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(rows: list[Row], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.name for row in rows))
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.5), sharey=True)
    for axis, what in zip(axes, ("gemm", "linear"), strict=True):
        for name in names:
            mine = sorted((row for row in rows if row.name == name), key=lambda row: row.shape[0])
            axis.plot(
                [str(row.shape[0]) for row in mine], [row.ratio(what, "bf16") for row in mine], marker="o", label=name
            )
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_title({"gemm": "GEMM with epilogue", "linear": "whole linear, bf16 to bf16"}[what])
        axis.set_xlabel("tokens")
    axes[0].set_ylabel("times as fast as bf16 cuBLAS")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench linear", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="the shapes with a bar only")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=0.4, help="time spent on one shape")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench linear: needs a CUDA device", file=sys.stderr)
        return 1
    shapes = [("bar", shape) for shape in BARS]
    if not options.quick:
        shapes += [(name, (m, *weight)) for name, weight in WEIGHTS.items() for m in TOKENS]
    timer, rows = Timer(options.seconds), []
    for name, shape in shapes:
        rows.append(measure(name, shape, timer))
        torch.cuda.empty_cache()
    host = host_us()
    print(table(rows))
    print("\n| shape | measure | bar | measured | |\n| --- | --- | --- | --- | --- |")
    for shape_name, what, bar, value, passed in bars(rows, host):
        print(f"| {shape_name} | {what} | {bar:g} | {value:.2f} | {'pass' if passed else 'FAIL'} |")
    if options.json:
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "host_us": host,
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(record, indent=1))
    if options.plot:
        plot(rows, options.plot)
    return 0 if all(row.exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
