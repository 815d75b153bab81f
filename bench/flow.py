"""The model flow: a checkpoint quantized against its bytes read and written; calibration against plain forwards."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from baracuda.flow import quantize_checkpoint
from baracuda.flow.checkpoint.tensorfile import write_tensors
from baracuda.flow.run.measure import InputRecorder

from .common import Bar, arguments, interleaved, show_bars, table, write_json

BLOCK = 16 << 20


def main(argv: Sequence[str]) -> None:
    options = arguments("flow", argv)
    rows, bars = streaming(64 if options.quick else 1024)
    header = ("scheme", "read and write s", "baracuda s", "GB/s", "ratio")
    table(
        "data-free quantization of a bf16 checkpoint on the CPU, files in the page cache, results synced", header, rows
    )
    observed = calibration(layers=2 if options.quick else 8)
    if observed is not None:
        header = ("tokens a batch", "forward s", "with hooks s", "ratio")
        table("forward passes of a Llama, and the same while calibrating", header, [observed])
        bars.append(Bar("calibration / forward", 1.10, observed[-1], below=True))
    show_bars(bars)
    write_json(options.json, {"rows": rows, "calibration": observed, "bars": bars})


def checkpoint(folder: Path, mebibytes: int) -> Path:
    """bf16 weights in one shard, under names that need no model to be understood."""
    folder.mkdir(parents=True)
    one = torch.randn(2048, 2048).to(torch.bfloat16)
    weights = {f"layers.{i}.up_proj.weight": one for i in range(mebibytes // 8)}
    write_tensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text("{}")
    return folder


def copy(source: Path, target: Path, written: float) -> None:
    """Read every byte, write as many as the checkpoint has, and wait for the disk: the least that must be done.

    One thread, one large buffer, input in the page cache, output new on the same file system and synced: the conditions
    of the run it is compared with, which has two cores where this has one, and quantizes.
    """
    buffer = bytearray(BLOCK)
    with source.open("rb") as reader, target.open("wb") as writer:
        while count := reader.readinto(buffer):
            writer.write(memoryview(buffer)[: int(count * written)])
        writer.flush()
        os.fsync(writer.fileno())
    target.unlink()


def streaming(mebibytes: int) -> tuple[list[tuple[Any, ...]], list[Bar]]:
    rows: list[tuple[Any, ...]] = []
    bars = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = checkpoint(folder / "model", mebibytes)
        file = source / "model.safetensors"
        for scheme, written in (("w8a8", 0.5), ("w4a16", 0.26)):
            bodies: dict[str, Callable[[], object]] = {
                "copy": lambda written=written: copy(file, folder / "copy", written),
                "ours": lambda scheme=scheme: quantize(source, folder / "out", scheme),
            }
            best = interleaved(bodies, repeats=7, seconds=60)
            ratio = best["ours"] / best["copy"]
            rows.append((scheme, best["copy"], best["ours"], file.stat().st_size / best["ours"] / 1e9, ratio))
            bars.append(Bar(f"{scheme}: quantize / read and write", 1.5, ratio, below=True))
    return rows, bars


def quantize(source: Path, out: Path, scheme: str) -> None:
    quantize_checkpoint(source, out, scheme=scheme)
    shutil.rmtree(out)


def calibration(layers: int) -> tuple[Any, ...] | None:
    """The cost of the hooks alone, on the forward passes they ride on."""
    try:
        import transformers
    except ImportError:
        return None
    from baracuda.flow.run.calibrate import analyse

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=1000, num_hidden_layers=layers, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    linears = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    groups = list(analyse(model, linears, torch.device("cpu")).inputs.values())
    tokens = torch.randint(0, 1000, (2, 256))

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)

    def observed() -> None:
        recorder = InputRecorder(model, groups, keep_rows=False)
        try:
            forward()
        finally:
            recorder.remove()

    best = interleaved({"forward": forward, "observed": observed}, repeats=25, seconds=30)
    return tokens.numel(), best["forward"], best["observed"], best["observed"] / best["forward"]
