"""What quantization adds to a bf16 training step on a GPU: eager, compiled, and replayed as CUDA graphs.

    python -m bench qat_step --ways eager --variants float integer dynamic --sizes 2048 4096 --json FILE
    python -m bench qat_step --ways compiled --variants float integer dynamic --sizes 2048 4096 --json FILE

A step is forward, backward and AdamW of four transformer layers with f32 weights under bf16 autocast. Each variant
takes turns with the float model, and each of the two commands is to take less than a minute.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import baracuda

from .common import Bar, Body, arguments, show_bars, write_json

#: How a model is prepared; float is as it comes.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "float": None,
    "integer": {"forward": "integer"},
    "dynamic": {},
    "learned": {"activation_strategy": "learned", "weight_strategy": "learned"},
    "static": {"scheme": "w8a8-smoothquant"},
}
WAYS: dict[str, dict[str, Any] | None] = {"eager": None, "compiled": {}, "graphs": {"mode": "reduce-overhead"}}
#: Width and tokens a sequence: where the host sets the pace, and where the GPU does.
TOKENS = {1024: 512, 2048: 1024, 4096: 1024}
#: What is measured, the most wanted first.
ORDER = [("eager", 2048), ("eager", 4096), ("compiled", 2048), ("compiled", 4096), ("eager", 1024), ("graphs", 1024)]
ORDER += [("graphs", 2048), ("compiled", 1024), ("graphs", 4096)]
#: Seconds that the turns of two variants may take, and the fewest and most turns.
TURNS = (2.5, 3, 9)
#: Percent that a step may take beyond a float one.
MOST_ADDED = {"dynamic": 15.0, "integer": 10.0}


class Layer(nn.Module):
    """A transformer layer with its linears in the open, so that they can be prepared."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


@dataclass
class Row:
    """One way of running one variant, and what it adds to the float model run the same way."""

    way: str
    size: int
    step: str
    ms: float
    added: float
    gpu_ms: float
    gpu_added: float


def prepared(model: nn.Module, options: dict[str, Any] | None) -> nn.Module:
    made = copy.deepcopy(model)
    if options is not None:
        baracuda.prepare_qat(made, **options)
    return made


def step_of(module: Callable[[Tensor], Tensor], parameters: Iterator[nn.Parameter], x: Tensor) -> Body:
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = module(x).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


def warm_step(way: str, model: nn.Module, name: str, x: Tensor) -> Body:
    """A variant's step, compiled where the way says so, and run a few times."""
    module, compiling = prepared(model, VARIANTS[name]), WAYS[way]
    called: Callable[[Tensor], Tensor] = module
    if compiling is not None:
        step_of(module, module.parameters(), x)()  # learned scales start from a batch, which no graph holds
        if compiling:  # graphs hold a whole step
            called = torch.compile(module, **compiling)
        else:
            for layer in module.children():  # one compilation serves all of them
                layer.compile()
    step = step_of(called, module.parameters(), x)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    return step


def wall_times(found: dict[str, Body], batch: int = 5) -> dict[str, float]:
    """Median milliseconds of each, taking turns; several steps at a time, so that the host may run ahead."""
    times: dict[str, list[float]] = {name: [] for name in found}
    seconds, fewest, most = TURNS
    began = time.perf_counter()
    for turn in range(most):
        if turn >= fewest and time.perf_counter() - began > seconds:
            break
        for name, step in found.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(batch):
                step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / batch * 1e3)
    return {name: median(values) for name, values in times.items()}


def gpu_time(step: Body, batch: int = 3) -> float:
    """Milliseconds the GPU itself is busy in a step."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as watched:
        for _ in range(batch):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in watched.key_averages()) / batch / 1e3


def measured(
    seconds: float,
    quick: bool,
    ways: Sequence[str] = tuple(WAYS),
    variants: Sequence[str] = tuple(VARIANTS),
    sizes: Sequence[int] = tuple(TOKENS),
) -> Iterator[Row]:
    """The rows in the order of `ORDER`, said as they come and for as long as there is time.

    Each variant takes turns with float; one that there may be no time to compile is left out.
    """
    start = time.perf_counter()

    def left() -> float:
        return start + seconds - time.perf_counter()

    for way, width in (each for each in ORDER if each[0] in ways and each[1] in sizes):
        size, tokens = (256, 64) if quick else (width, TOKENS[width])
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(size, size // 128) for _ in range(4))).cuda()
        x = torch.randn(8, tokens, size, device="cuda", requires_grad=True)  # as behind an embedding
        print(f"\ntraining step of four transformer layers of size {size}, 8 x {tokens} tokens, {way}", flush=True)
        base, step, gpu_base, longest = None, None, 0.0, 0.0
        for name in variants:
            if left() < longest + 5:
                break
            began = time.perf_counter()
            step = warm_step(way, model, name, x)
            longest = max(longest, time.perf_counter() - began)
            base, gpu_ms = base or step, gpu_time(step)
            gpu_base = gpu_base or gpu_ms
            wall = wall_times({"float": base} if step is base else {"float": base, name: step})
            row = Row(way, size, name, wall[name], added(wall[name], wall["float"]), gpu_ms, added(gpu_ms, gpu_base))
            print(
                f"{name:8}{row.ms:8.2f} ms, {row.added:+6.1f} %; GPU {gpu_ms:.2f} ms, {row.gpu_added:+.1f} %",
                flush=True,
            )
            yield row
        del base, step
        torch.cuda.empty_cache()


def added(time: float, base: float) -> float:
    """Percent."""
    return (time / base - 1) * 100


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    return [
        Bar(f"a QAT step, {row.step}, {row.way}, size {row.size}, added %", most, row.added, below=True)
        for row in rows
        if (most := MOST_ADDED.get(row.step)) is not None
    ]


def main(argv: Sequence[str]) -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=600.0, help="start nothing new after so long")
        parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
        parser.add_argument("--sizes", nargs="+", type=int, choices=TOKENS, default=list(TOKENS))
        parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="float first")

    options = arguments("qat_step", argv, more=more)
    if not torch.cuda.is_available():
        print("needs a CUDA GPU")
        return
    rows: list[Row] = []
    for row in measured(options.seconds, options.quick, options.ways, options.variants, options.sizes):
        rows.append(row)
        where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        write_json(options.json, {**where, "steps": rows, "bars": bars_of(rows)})
    show_bars(bars_of(rows))
