"""`baracuda demo`: a small model quantized end to end, or the cost of each scope on one tensor."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from baracuda.core.scope import PerChannel, PerGroup, PerTensor, PerToken, Scope
from baracuda.functional import Quantized, dequantize, dynamic_quantize, quantize, smoothquant_linear

ROWS: list[tuple[str, Scope, str, str]] = [
    ("per tensor", PerTensor(), "s8", "symmetric"),
    ("per token", PerToken(), "s8", "symmetric"),
    ("per token", PerToken(), "u8", "asymmetric"),
    ("per channel", PerChannel(1), "s8", "symmetric"),
    ("groups of 128", PerGroup(128), "s8", "symmetric"),
    ("groups of 32", PerGroup(32), "s4", "symmetric"),
    ("groups of 32", PerGroup(32), "u4", "asymmetric"),
]


SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("w8a8", {"scheme": "w8a8"}),
    ("SmoothQuant", {"scheme": "w8a8-smoothquant"}),
    ("SmoothQuant, static", {"scheme": "w8a8-smoothquant", "activations": "static", "alpha": "auto"}),
    ("w4a16", {"scheme": "w4a16", "group_size": 64}),
]


NEXT = """
{folder} holds the model and, for each scheme, a checkpoint in the format that vLLM and transformers load, with its
baracuda_report.html.
Next, on your own model, without and with data to calibrate on:
  [bold]baracuda quantize MODEL_DIR -o OUT[/]
  [bold]baracuda quantize MODEL_DIR -o SMOOTH --scheme w8a8-smoothquant --calibration texts.txt --evaluate texts.txt[/]
  [bold]baracuda verify OUT --against MODEL_DIR[/]
baracuda.load("OUT") in Python runs it in int8. [bold]baracuda demo --scopes[/] shows what a scope costs on one tensor,
[bold]baracuda info[/] what runs on this machine."""


def run(console: Console, device: torch.device, folder: Path | None = None) -> None:
    """Make a model, quantize it in every scheme, check each result against the original, and compare."""
    from baracuda.flow import quantize_checkpoint, verify

    folder = Path(tempfile.mkdtemp(prefix="baracuda-demo-")) if folder is None else folder
    model, tokens = make_model(folder / "model")
    size = (model / "model.safetensors").stat().st_size / 1e6
    kind = "a random Llama of three layers" if tokens else "Linears with random weights (transformers is not installed)"
    console.print(f"The model: {kind}, {size:.1f} MB, with outlier channels as large models have them.\n")
    columns = ("size", "lowest\nSQNR dB", "KL", "same top\ntoken", "verify", "time")
    table = Table(Column("scheme", no_wrap=True), *columns, title="baracuda quantize, then baracuda verify")
    for name, options in SCHEMES:
        calibrated = needs_calibration(options)
        if calibrated and tokens is None:
            continue
        out = folder / name.replace(", ", "-").lower()
        data: dict[str, Any] = {"calibration": tokens if calibrated else None, "evaluation": tokens}
        start = perf_counter()
        content = quantize_checkpoint(model, out, device=device, **options, **data)
        elapsed = perf_counter() - start
        findings = verify(out, against=model)
        quality = content["evaluation"] or {}
        table.add_row(
            name,
            f"{content['size']['ratio']:.0%}",
            f"{min(layer['sqnr_db'] for layer in content['layers']):.1f}",
            f"{quality['kl']:.1e}" if quality else "-",
            f"{quality['top1_agreement']:.1%}" if quality else "-",
            "[red]wrong[/]" if findings else "[green]fine[/]",
            f"{elapsed:.1f} s",
        )
    console.print(table)
    console.print(NEXT.format(folder=folder), highlight=False, soft_wrap=True)


def needs_calibration(options: dict[str, Any]) -> bool:
    """Whether `quantize_checkpoint` needs data for these options."""
    from baracuda.flow.run.options import Options

    return Options(**options).plan().needs_calibration


def make_model(folder: Path) -> tuple[Path, Path | None]:
    """A model directory, and tokens to calibrate it with where transformers can run it."""
    torch.manual_seed(0)
    hidden, wide, vocabulary = 192, 512, 2048
    folder.mkdir(parents=True, exist_ok=True)
    from baracuda.flow.checkpoint.tensorfile import write_tensors
    from baracuda.flow.hf.random_llama import save_random_llama

    if not save_random_llama(folder, hidden, wide, vocabulary):
        return _make_weights(folder, hidden, wide), None
    tokens = folder.parent / "tokens.safetensors"
    write_tensors(tokens, {"tokens": torch.randint(0, vocabulary, (8, 64))})
    return folder, tokens


def _make_weights(folder: Path, hidden: int, wide: int) -> Path:
    """The weights of a Llama without the code to run it: enough for schemes that need no data."""
    from baracuda.flow.checkpoint.tensorfile import write_tensors

    shapes = {"self_attn.q_proj": (hidden, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    weights = {
        f"model.layers.{layer}.{name}.weight": (0.05 * torch.randn(shape)).to(torch.bfloat16)
        for layer in range(4)
        for name, shape in shapes.items()
    }
    write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "demo", "dtype": "bfloat16"}))
    return folder


def run_scopes(console: Console, device: torch.device) -> None:
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
        y = dequantize(result.q, result.scale, result.zero_point, scope=scope, element=kind)
        table.add_row(
            name,
            kind if mode == "symmetric" else f"{kind} asym.",
            f"{sqnr(x, y):.1f} dB",
            f"{sqnr(x[:, small], y[:, small]):.1f} dB",
            f"{float((x - y).abs().max()):.3g}",
            f"{_bytes(result) / x.nbytes:.1%}",
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


def _bytes(result: Quantized) -> int:
    return sum(part.nbytes for part in result if part is not None)
