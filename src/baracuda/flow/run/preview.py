"""What a run would do: each layer's scheme and size, what stays float, and estimates of time and memory."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...schemes import Choice
from ..checkpoint.directory import Checkpoint
from ..checkpoint.storage import Storage
from ..checkpoint.targets import is_head
from ..checkpoint.tensorfile import Entry
from ..hf.coverage import float_share
from ..hf.layers import Structure
from .options import Options, Plan
from .report import natural
from .sequential import HELD_BYTES
from .stream import BLOCK_BYTES, MOST_WORKERS

#: Elements of a layer that are quantized, to see how long it takes.
SAMPLE = 1 << 18
#: Rows of the products that show how fast the device multiplies.
PRODUCT = 512
#: Passes of the calibration data through a block where it runs again for each of its inputs, of which most blocks have
#: four, and once with the quantized weights; where its inputs are held, it runs once.
PASSES = 5
#: Of English text.
BYTES_A_TOKEN = 4


def preview(
    source: Checkpoint,
    structure: Structure,
    plan: Plan,
    options: Options,
    device: torch.device,
    evaluation: Path | None = None,
) -> dict[str, Any]:
    """The layers as they would be stored, sizes before and after, and what the run would take. Writes nothing."""
    layers = sorted(_layers(source, structure), key=lambda layer: natural(layer["name"]))
    before = sum(file.path.stat().st_size for file in source.shards.values())
    saved = sum(layer["bytes_before"] - layer["bytes_after"] for layer in layers)
    return {
        "baracuda": __version__,
        "model": source.directory.resolve().name,
        "scheme": options.scheme,
        "layers": layers,
        "left": [{"name": n, "reason": r} for n, r in sorted(structure.left.items(), key=lambda i: natural(i[0]))],
        "linears_found_by": structure.source,
        "notes": structure.notes(),
        "float_share": float_share(structure, source),
        "average_bits": average_bits([layer for layer in layers if not is_head(layer["name"])]),
        "size": {"before": before, "after": before - saved, "ratio": (before - saved) / before},
        "estimate": {
            "seconds": _seconds(source, structure, plan, options, device, evaluation),
            "memory_bytes": _memory(source, structure, plan, options),
        },
    }


def average_bits(layers: list[dict[str, Any]]) -> float:
    """Bits a weight of the quantized Linears takes in the files, scales included."""
    stored = sum(int(layer["bytes_after"]) for layer in layers)
    parameters = sum(int(math.prod(layer["shape"])) for layer in layers)
    return 8 * stored / parameters


def stored_bytes(choice: Choice, module: str, entry: Entry) -> int:
    """What a Linear takes in the result."""
    return sum(stored.nbytes for stored in Storage(choice.scheme).entries(module, entry))


def scheme_name(choice: Choice) -> str:
    """w4a16 and the like, by the bits of weights and activations."""
    kind = choice.scheme.activation.kind
    name = f"w{choice.scheme.weight.bits}a{16 if kind == 'float' else 8}"
    return f"{name}-static" if kind == "static" else name


def _layers(source: Checkpoint, structure: Structure) -> list[dict[str, Any]]:
    made = []
    for tensor, module in structure.quantized.items():
        choice, entry = structure.choices[module], source.entry(tensor)
        made.append(
            {
                "name": module,
                "shape": list(entry.shape),
                "scheme": scheme_name(choice),
                "method": choice.method.name,
                "bits": choice.scheme.weight.bits,
                "group_size": choice.scheme.weight.group_size,
                "bytes_before": 0 if tensor in structure.kept else entry.nbytes,
                "bytes_after": stored_bytes(choice, module, entry),
            }
        )
    return made


# -- estimates ---------------------------------------------------------------------------------------------------


def _seconds(
    source: Checkpoint,
    structure: Structure,
    plan: Plan,
    options: Options,
    device: torch.device,
    evaluation: Path | None,
) -> float:
    """From a part of a layer that is quantized here and now, and the speed of a matrix product."""
    parameters: dict[Choice, int] = {}
    for tensor, module in structure.quantized.items():
        choice = structure.choices[module]
        parameters[choice] = parameters.get(choice, 0) + math.prod(source.entry(tensor).shape)
    workers = min(torch.get_num_threads(), MOST_WORKERS)
    total = sum(file.path.stat().st_size for file in source.shards.values()) / 1e9  # reads and writes at 1 GB/s
    for choice, count in parameters.items():
        if choice.method.needs is None:
            total += count * _rate(source, structure, choice) / (workers if device.type == "cpu" else 1)
    passes = plan.measures + ((1 if _held(source, structure, options) else PASSES) if plan.sequential else 0)
    if passes or plan.recipe.needs is not None or evaluation is not None:
        speed = _products_per_second(device)
        tokens, count = options.samples * options.sequence_length, sum(parameters.values())
        total += 2 * passes * tokens * count / speed
        if evaluation is not None:  # two models read each token, of which a text has one in some BYTES_A_TOKEN bytes
            total += 2 * 2 * min(tokens, evaluation.stat().st_size // BYTES_A_TOKEN) * count / speed
        if plan.recipe.needs is not None:
            total += _method_products(source, structure, tokens) / speed
    return float(f"{total:.2g}")


def _rate(source: Checkpoint, structure: Structure, choice: Choice) -> float:
    """Seconds per element to quantize weights of this choice on one thread."""
    tensor = next(t for t, module in structure.quantized.items() if structure.choices[module] == choice)
    entry = source.entry(tensor)
    rows = max(1, min(entry.shape[0], SAMPLE // entry.shape[1]))
    sample = torch.randn(rows, entry.shape[1], generator=torch.Generator().manual_seed(0))
    weight = Storage(choice.scheme).as_quantized_from(sample.to(entry.dtype), entry.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        choice.method.quantize(weight[: max(1, rows // 8)], choice.scheme.weight)  # loads what is loaded once
        start = time.perf_counter()
        choice.method.quantize(weight, choice.scheme.weight)
        return (time.perf_counter() - start) / weight.numel()
    finally:
        torch.set_num_threads(threads)


def _products_per_second(device: torch.device) -> float:
    """Floating-point operations per second of a product in f32."""
    a = torch.ones(PRODUCT, 2 * PRODUCT, device=device)
    b = torch.ones(2 * PRODUCT, 2 * PRODUCT, device=device)
    a @ b
    start = time.perf_counter()
    (a @ b)[0, 0].item()
    return 8 * PRODUCT**3 / max(time.perf_counter() - start, 1e-9)


def _method_products(source: Checkpoint, structure: Structure, tokens: int) -> float:
    """The operations of second moments and of solving with them, for methods that need data."""
    total = 0.0
    for tensor in structure.linears:
        n, k = source.entry(tensor).shape
        total += tokens * k * k + k**3 / 3 + n * k * k  # of symmetric and triangular matrices, a half
    return total


def _memory(source: Checkpoint, structure: Structure, plan: Plan, options: Options) -> int:
    """Bytes at the peak, besides Python and torch themselves: buffers, or the model and what is kept of the data."""
    workers = min(torch.get_num_threads(), MOST_WORKERS)
    streaming = 3 * 2 * workers * BLOCK_BYTES
    if not plan.needs_calibration:
        return streaming
    weights = sum(file.path.stat().st_size for file in source.shards.values())
    shapes = [source.entry(tensor).shape for tensor in structure.linears]
    widest = max(k for _, k in shapes)
    hidden = options.samples * options.sequence_length * min(k for _, k in shapes) * 4
    block = sum(math.prod(shape) for shape in shapes) * 4 // max(1, len(shapes)) * 8
    held = _held(source, structure, options)
    return weights + max(streaming, 2 * hidden + held + block + 3 * widest * widest * 8)


def _held(source: Checkpoint, structure: Structure, options: Options) -> int:
    """Bytes of the inputs of a layer that are kept for all batches; 0 where blocks run again instead."""
    widest = max(source.entry(tensor).shape[1] for tensor in structure.linears)
    size = 4 * options.samples * options.sequence_length * widest
    return size if size <= HELD_BYTES else 0
