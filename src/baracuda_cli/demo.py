"""`baracuda demo`: a small model, trained here, quantized four ways, checked, measured and compared."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from baracuda import InvalidProblem

from .terminal import console, stderr

SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("w8a8", {"scheme": "w8a8"}),
    ("SmoothQuant", {"scheme": "w8a8-smoothquant"}),
    ("SmoothQuant, static", {"scheme": "w8a8-smoothquant", "activations": "static", "alpha": "auto"}),
    ("w4a16", {"scheme": "w4a16", "group_size": 64}),
]

NEXT = """
{folder} holds the model and, for each scheme, a checkpoint that vLLM and transformers load, with its report.
Talk to one, look into it, then take your own model:
  [bold]baracuda chat {folder}/w8a8 -p "{prompt}"[/]
  [bold]baracuda inspect {folder}/w4a16[/]
  [bold]baracuda quantize MODEL_DIR -o OUT[/]
  [bold]baracuda quantize MODEL_DIR -o SMOOTH --scheme w8a8-smoothquant --calibration texts.txt --evaluate texts.txt[/]
  [bold]baracuda verify OUT --against MODEL_DIR[/]
baracuda.load("OUT") in Python runs it in int8. [bold]baracuda demo --scopes[/] shows what a scope costs on one tensor,
[bold]baracuda info[/] what runs on this machine."""


def run(device: torch.device, folder: Path | None = None) -> None:
    """Make a model, quantize it in every scheme, check each result against the original, and compare."""
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidProblem(f"{folder}: expected an empty or a new folder, where the demo writes; choose another -o")
    folder = Path(tempfile.mkdtemp(prefix="baracuda-demo-")) if folder is None else folder
    with Progress(console=stderr, transient=True) as progress:
        bar = progress.add_task("training a small Llama", total=None)
        model, texts = make_model(
            folder / "model", lambda done, total: progress.update(bar, completed=done, total=total)
        )
        progress.update(bar, total=1, completed=1, visible=False)
        size = (model / "model.safetensors").stat().st_size / 1e6
        kind = "a Llama of three layers, trained just now on a paragraph" if texts else _UNTRAINED
        console.print(f"The model: {kind}, {size:.1f} MB, with outlier channels as large models have them.\n")
        table, samples, reports = _quantize_all(model, texts, folder, device, progress)
    console.print(table)
    if samples:
        console.print(_samples(samples))
    for name, report in reports:
        console.print(f"report of {name}: {escape(str(report))}", highlight=False, soft_wrap=True)
    from baracuda.flow.hf.small_llama import PROMPT

    console.print(NEXT.format(folder=escape(str(folder)), prompt=PROMPT), highlight=False, soft_wrap=True)
    if shutil.which("baracuda") is None:  # as after `make demo`, whose environment nobody has activated
        activate = escape(str(Path(sys.prefix) / "bin" / "activate"))
        console.print(f"The command baracuda is not on your PATH yet: [bold]source {activate}[/]", soft_wrap=True)


_UNTRAINED = "Linears with random weights (transformers is not installed: pip install 'baracuda[flow]')"


def _quantize_all(
    model: Path, texts: Path | None, folder: Path, device: torch.device, progress: Progress
) -> tuple[Table, dict[str, str], list[tuple[str, Path]]]:
    """A row of figures, a sample of text and a report for each scheme."""
    from baracuda.flow import quantize_checkpoint, verify

    columns = ("size", "lowest\nSQNR dB", "KL", "same top\ntoken", "verify", "time")
    table = Table(Column("scheme", no_wrap=True), *columns, title="baracuda quantize, then baracuda verify")
    samples = {} if texts is None else {"float": _continued(model, device)}
    reports = []
    bar = progress.add_task("", total=len(SCHEMES))
    for name, options in SCHEMES:
        progress.update(bar, description=f"quantizing: {name}")
        calibrated = needs_calibration(options)
        if calibrated and texts is None:
            continue
        out = folder / name.replace(", ", "-").lower()
        data: dict[str, Any] = {"calibration": texts if calibrated else None, "evaluation": texts}
        start = perf_counter()
        content = quantize_checkpoint(model, out, device=device, sequence_length=64, **options, **data)
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
        reports.append((name, out / "baracuda_report.html"))
        if texts is not None:
            samples[name] = _continued(out, device)
        progress.advance(bar)
    return table, samples, reports


def _continued(model: Path, device: torch.device) -> str:
    from baracuda.flow.hf.chat import Conversation
    from baracuda.flow.hf.small_llama import PROMPT

    return Conversation(model, device=device).reply(PROMPT, max_tokens=24).text


def _samples(samples: dict[str, str]) -> Table:
    from baracuda.flow.hf.small_llama import PROMPT

    table = Table(Column("model", no_wrap=True), "what it says next", title=f"Before and after: {PROMPT!r} ...")
    for name, text in samples.items():
        table.add_row(name, escape(text.strip()))
    return table


def needs_calibration(options: dict[str, Any]) -> bool:
    """Whether `quantize_checkpoint` needs data for these options."""
    from baracuda.flow.run.options import Options

    return Options(**options).plan().needs_calibration


def make_model(folder: Path, progress: Any = None) -> tuple[Path, Path | None]:
    """A model directory, and the texts it was trained on where transformers can run it."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    from baracuda.flow.hf.small_llama import TEXT, train_small_llama

    if not train_small_llama(folder, progress):
        return _make_weights(folder, hidden=192, wide=512), None
    texts = folder.parent / "texts.txt"
    texts.write_text("".join(f"{sentence}.\n" for sentence in TEXT.strip().rstrip(".").split(". ")))
    return folder, texts


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
