"""Training with fake-quantization: FakeQuantize beside torch.ao's on the CPU, and what it adds to a step on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize as TorchFakeQuantize
from torch.ao.quantization import MinMaxObserver

import baracuda
from baracuda import PerChannel, PerTensor
from baracuda.nn import FakeQuantize

from . import qat_step
from .common import Bar, Body, arguments, interleaved, per_call, show_bars, table, write_json

THREADS = 2


def _both_ways(module: nn.Module, x: Tensor, dy: Tensor) -> Body:
    def body() -> None:
        x.grad = None
        module(x).backward(dy)

    return body


def fake_quantize_rows(numel: int, repeats: int) -> list[dict[str, Any]]:
    """Forward and backward of one module over a flat tensor, its scale known already."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = torch.randn(numel, dtype=dtype, requires_grad=True), torch.randn(numel, dtype=dtype)
        ours = FakeQuantize("static", q_min=-128, q_max=127)
        theirs = TorchFakeQuantize(MinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8)
        ours(x.detach()[:1000])
        ours.eval()
        theirs.enable_observer()
        theirs(x.detach()[:1000].float())
        theirs.disable_observer()
        bodies = {"ours": _both_ways(ours, x, dy), "torch.ao": _both_ways(theirs, x, dy)}
        bodies["two copies"] = lambda x=x, dy=dy: (x.detach().clone(), dy.clone())  # type: ignore[misc]
        times = interleaved(bodies, repeats, seconds=8.0)
        rows.append({"element": str(dtype), **times, "ratio": times["torch.ao"] / times["ours"]})
    return rows


def learned_rows(numel: int, repeats: int) -> list[dict[str, Any]]:
    """The backward alone, to x, scale and zero point, beside torch's learnable fake-quantization."""
    rows = []
    for scope in (PerTensor(), PerChannel(0), PerChannel(1)):
        x, dy = torch.randn(256, numel // 256, requires_grad=True), torch.randn(256, numel // 256)
        shape = scope.scale_shape(tuple(x.shape))
        scale, zero_point = (torch.full(shape, v, requires_grad=True) for v in (0.02, 0.0))
        y = baracuda.fake_quantize(x, scale, zero_point, scope=scope)
        if isinstance(scope, PerTensor):
            flat = [v.detach().view(1).requires_grad_() for v in (scale, zero_point)]
            theirs = torch._fake_quantize_learnable_per_tensor_affine(x, *flat, -128, 127, 1.0)
        else:
            flat = [scale, zero_point]
            theirs = torch._fake_quantize_learnable_per_channel_affine(x, *flat, scope.axis, -128, 127, 1.0)

        def grad(y: Tensor, leaves: Sequence[Tensor], dy: Tensor = dy) -> Body:
            return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

        bodies = {"ours": grad(y, [x, scale, zero_point]), "torch": grad(theirs, [x, *flat])}
        times = interleaved(bodies, repeats, seconds=3.0)
        rows.append({"scope": str(scope), **times, "ratio": times["torch"] / times["ours"]})
    return rows


def overhead_rows() -> list[dict[str, Any]]:
    """The time of a call too small for the kernel to matter, in microseconds."""
    x, scale = torch.randn(64), torch.tensor(0.1)
    learner = x.clone().requires_grad_()
    bodies: dict[str, Body] = {
        "quantize": lambda: baracuda.quantize(x, 0.1),
        "dequantize": lambda q=baracuda.quantize(x, 0.1): baracuda.dequantize(q, 0.1),  # type: ignore[misc]
        "fake_quantize": lambda: baracuda.fake_quantize(x, scale),
        "dynamic_quantize": lambda: baracuda.dynamic_quantize(x),
        "fake_quantize, recorded": lambda: baracuda.fake_quantize(learner, 0.1),
        "torch.fake_quantize": lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    }
    return [{"call": name, "us": per_call(body) * 1e6} for name, body in bodies.items()]


def main(argv: Sequence[str]) -> None:
    options = arguments("qat", argv)
    torch.set_num_threads(THREADS)
    numel, repeats = (2**16, 3) if options.quick else (2**25, 40)
    rows, calls, learned = fake_quantize_rows(numel, repeats), overhead_rows(), learned_rows(numel // 2, repeats)
    bars = [Bar("FakeQuantize forward + backward, f32, CPU: over torch.ao", 6.0, rows[0]["ratio"])]
    bars += [Bar(f"learned backward, {r['scope']}, CPU: over torch", 3.0, r["ratio"]) for r in learned]
    bars += [Bar(f"{c['call']} of 64 elements, us", 12.0, c["us"], below=True) for c in calls[:4]]
    header = list(rows[0])
    shown = [[r[k] * 1e3 if k in ("ours", "torch.ao", "two copies") else r[k] for k in header] for r in rows]
    table(f"FakeQuantize forward + backward of {numel} elements, CPU, {THREADS} threads, ms", header, shown)
    table("one call on 64 elements, CPU, us", ["call", "us"], [list(c.values()) for c in calls])
    table(
        f"backward of a learned fake-quantization of {numel // 2} elements, CPU, {THREADS} threads, ms",
        list(learned[0]),
        [[r["scope"], r["ours"] * 1e3, r["torch"] * 1e3, r["ratio"]] for r in learned],
    )
    content: dict[str, Any] = {"fake_quantize": rows, "learned": learned, "calls": calls}
    if torch.cuda.is_available():
        content["steps"] = list(qat_step.measured(60.0, options.quick))
        bars += qat_step.bars_of(content["steps"])
    show_bars(bars)
    write_json(options.json, {**content, "bars": bars})
