"""How fast a model is on this machine, beside the checkpoint it was quantized to: `baracuda bench`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.host import multiplies_bf16
from ...plans.plan import resolve_device
from ..checkpoint.directory import read_json
from ..errors import FlowError
from ..hf import measure
from ..hf.forward import float_model, generates
from ..hf.generation import plain_generation
from ..hf.hub import model_directory
from ..hf.load import load
from ..hf.skeleton import require_transformers


@dataclass(frozen=True)
class Speed:
    """One model's figures, all of one run."""

    name: str
    dtype: str
    """The type of what is not quantized."""
    memory: int
    """Bytes of parameters and buffers."""
    prefill: float
    """Tokens a second of one forward over the prompts."""
    decode: float
    """Tokens a second that `generate` adds, over the whole batch."""
    compiled: float | None
    """The same with a static cache, with which transformers compiles; on a GPU only."""


def compare_speed(
    model: str | Path,
    quantized: str | Path | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    batch: int = 1,
    length: int = 512,
    tokens: int = 32,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Speed]:
    """Tokens a second and memory of a model directory, and of its quantized checkpoint in turns with it."""
    require_transformers("measuring runs the model")
    device = resolve_device(device)
    contestants: dict[str, Any] = {}
    places = {given: model_directory(given) for given in (model, quantized) if given is not None}
    for given, directory in places.items():
        last = Path(given).name  # of an id, not of its snapshot in the cache
        name = last if last not in contestants else str(given)
        progress(f"loading {given}")
        contestants[name] = _opened(directory, device, dtype)
    with ExitStack() as stack:
        for each in contestants.values():
            stack.enter_context(plain_generation(each))
        progress(f"prefill of {batch} x {length} tokens")
        prefill = measure.prefill(contestants, batch, length)
        progress(f"decoding with a batch of {batch}")
        decode = measure.decode(contestants, batch, length=32, tokens=tokens)
        compiled: dict[str, float] = {}
        if device.type == "cuda":
            progress("decoding with a static cache, which is compiled first")
            compiled = measure.decode(contestants, batch, length=32, tokens=tokens, compiled=True)
    return [
        Speed(
            name,
            str(each.dtype).removeprefix("torch."),
            measure.memory(each),
            batch * length / prefill[name],
            batch / decode[name],
            batch / compiled[name] if name in compiled else None,
        )
        for name, each in contestants.items()
    ]


def advice(rows: list[Speed], device: torch.device | str) -> str | None:
    """Whether this machine is slow with the models' type, which flatters a quantized model beside a float one."""
    slow = sorted({row.dtype for row in rows} & {"bfloat16", "float16"})
    if not slow or resolve_device(device).type != "cpu" or multiplies_bf16():
        return None
    return (
        f"this CPU has no instructions for products of {' or '.join(slow)}, and torch emulates them: "
        "a float model prefills faster with --dtype float32"
    )


def _opened(directory: Path, device: torch.device, dtype: torch.dtype | None) -> Any:
    if "quantization_config" in read_json(directory / "config.json"):
        model = load(directory, device=device, dtype=dtype)
    else:
        model = float_model(directory, device)
        model = model if dtype is None else model.to(dtype)
    if not generates(model):
        raise FlowError(f"{directory}: {type(model).__name__} does not generate text, which is what is measured")
    return model
