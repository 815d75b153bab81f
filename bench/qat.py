"""Training with fake-quantization: FakeQuantize beside torch.ao's on the CPU, and what it adds to a step on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize as TorchFakeQuantize
from torch.ao.quantization import MinMaxObserver

import baracuda
from baracuda import PerChannel, PerTensor
from baracuda.nn import FakeQuantize

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


def step_rows(quick: bool) -> list[dict[str, Any]]:
    """A training step of four layers in bf16 under autocast: float, and prepared in the ways QATLinear offers."""
    size, tokens, repeats = (256, 64, 3) if quick else (1024, 512, 30)
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(size, size // 128) for _ in range(4))).cuda()
    x = torch.randn(8, tokens, size, device="cuda")
    variants = {"float": model}
    for name, options in {
        "dynamic": {},
        "static activations": {"scheme": "w8a8-smoothquant"},
        "learned": {"activation_strategy": "learned", "weight_strategy": "learned"},
    }.items():
        variants[name] = copy.deepcopy(model)
        baracuda.prepare_qat(variants[name], **options)

    def step(module: nn.Module) -> Body:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

        def body() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = module(x).float().square().mean()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()

        return body

    times = interleaved({name: step(module) for name, module in variants.items()}, repeats, seconds=10.0)
    return [{"step": name, "ms": t * 1e3, "added %": (t / times["float"] - 1) * 100} for name, t in times.items()]


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
        content["steps"] = step_rows(options.quick)
        table(
            "training step of four transformer layers, GPU",
            list(content["steps"][0]),
            [list(s.values()) for s in content["steps"]],
        )
        dynamic = next(s for s in content["steps"] if s["step"] == "dynamic")
        bars.append(Bar("a QAT step over a float step, added %", 15.0, dynamic["added %"], below=True))
    show_bars(bars)
    write_json(options.json, {**content, "bars": bars})
