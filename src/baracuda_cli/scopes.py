"""`baracuda demo --scopes`: what each scope costs and saves on one tensor."""

from __future__ import annotations

from time import perf_counter

import torch
from rich.table import Table
from torch import Tensor

from baracuda.core.scope import PerChannel, PerGroup, PerTensor, PerToken, Scope
from baracuda.core.types import ElementName, ModeName
from baracuda.functional import dynamic_quantize, quantize, smoothquant_linear

from .terminal import console

ROWS: list[tuple[str, Scope, ElementName, ModeName]] = [
    ("per tensor", PerTensor(), "s8", "symmetric"),
    ("per token", PerToken(), "s8", "symmetric"),
    ("per token", PerToken(), "u8", "asymmetric"),
    ("per channel", PerChannel(1), "s8", "symmetric"),
    ("groups of 128", PerGroup(128), "s8", "symmetric"),
    ("groups of 32", PerGroup(32), "s4", "symmetric"),
    ("groups of 32", PerGroup(32), "u4", "asymmetric"),
]


def run(device: torch.device) -> None:
    torch.manual_seed(0)
    x = outlier_activations(2048, 2048, device)
    console.print(
        f"A float32 activation of {list(x.shape)}, {x.nbytes / 2**20:.0f} MiB; 1 % of its channels are outliers, as is "
        "common in large language models.\n"
    )
    console.print(scopes_table(x))
    console.print(smoothquant_table(x))
    console.print(
        "\nOne outlier channel spoils the one scale of a tensor; a scale per token, channel or group contains it, and "
        "SmoothQuant moves it into the weights.\n"
        "Next: [bold]baracuda info[/] shows what runs here; in Python, baracuda.dynamic_quantize(x, scope=PerToken())."
    )


def outlier_activations(tokens: int, channels: int, device: torch.device) -> Tensor:
    """Channels of lognormal size, every hundredth about fifty times larger: the shape of real activations."""
    size = torch.exp(0.4 * torch.randn(channels))
    size[torch.randperm(channels)[: max(1, channels // 100)]] *= 50
    return (torch.randn(tokens, channels) * size).to(device)


def sqnr(signal: Tensor, noisy: Tensor) -> float:
    """Signal over quantization noise, in decibels: 6 dB is one bit."""
    noise = (signal.double() - noisy.double()).square().sum()
    return float(10 * torch.log10(signal.double().square().sum() / noise))


def scopes_table(x: Tensor) -> Table:
    columns = ("scope", "to", "SQNR", "of small\nchannels", "max error", "size", "time")
    table = Table(*columns, title="dynamic_quantize, then dequantize")
    small = x.abs().amax(0) < x.abs().amax(0).median()
    for name, scope, kind, mode in ROWS:
        dynamic_quantize(x, scope=scope, dtype=kind, mode=mode)
        start = perf_counter()
        result = dynamic_quantize(x, scope=scope, dtype=kind, mode=mode)
        if x.is_cuda:
            torch.cuda.synchronize()
        elapsed = perf_counter() - start
        y = result.dequantize()
        table.add_row(
            name,
            kind if mode == "symmetric" else f"{kind} asym.",
            f"{sqnr(x, y):.1f} dB",
            f"{sqnr(x[:, small], y[:, small]):.1f} dB",
            f"{float((x - y).abs().max()):.3g}",
            f"{result.nbytes / x.nbytes:.1%}",
            f"{elapsed * 1e3:.2f} ms",
        )
    return table


def smoothquant_table(x: Tensor) -> Table:
    """The static int8 linear with and without moving the outliers into the weight first."""
    weight = torch.randn(1024, x.shape[1], device=x.device) * 0.02
    exact = x.double() @ weight.double().T
    strength = x.abs().amax(0).sqrt() / weight.abs().amax(0).sqrt()
    table = Table("int8 linear", "SQNR", "max error", title="SmoothQuant: x / s and W * s before quantizing")
    for name, s in (("as it is", torch.ones_like(strength)), ("smoothed, alpha = 0.5", strength)):
        smooth = x / s
        act_scale = float(smooth.abs().max()) / 127
        x_q = quantize(smooth, act_scale, q_min=-127)
        w = dynamic_quantize(weight * s, scope=PerChannel(0))
        y = smoothquant_linear(x_q, w.q, act_scale, w.scale)
        table.add_row(name, f"{sqnr(exact, y):.1f} dB", f"{float((exact - y).abs().max()):.3g}")
    return table
