"""Evaluation of models that read images or sounds: on the tensors that their processor makes of them.

The data is a .safetensors file whose tensors are named as the model's forward calls them, a sample a row.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checkpoint.tensorfile import TensorFile
from ..errors import FlowError
from ..hf.forward import arguments
from .options import Progress

#: Images, spectrograms and waves, as models of transformers call them.
INPUTS = ("pixel_values", "input_features", "input_values")
#: What may come with them: the tokens that a decoder predicts the next one of.
BESIDES = ("decoder_input_ids", "input_ids", "attention_mask")
#: Samples that go through the model together.
BATCH = 8


def holds_inputs(path: Path) -> bool:
    """Whether a file has images or sounds, instead of texts or tokens."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with TensorFile(path) as file:
        return any(name in file.entries for name in INPUTS)


def require_inputs(path: Path) -> None:
    """Raise unless every tensor of the file is an input of a model, with a row for each sample."""
    with TensorFile(path) as file:
        for name, entry in file.entries.items():
            if name not in INPUTS + BESIDES:
                known = ", ".join(INPUTS + BESIDES)
                raise FlowError(f"{path}: {name}: expected only inputs of a model, {known}; leave it out of the file")
            if name in INPUTS and not entry.dtype.is_floating_point:
                raise FlowError(f"{path}: {name}: expected floats, as a processor makes them, got {entry.dtype}")
        rows = {name: entry.shape[0] if entry.shape else 0 for name, entry in file.entries.items()}
        if len(set(rows.values())) != 1 or 0 in rows.values():
            raise FlowError(f"{path}: expected as many samples of each input, got {rows}; write a row for each sample")
        for name in filter(file.entries.__contains__, INPUTS):
            for row in range(rows[name]):
                if not bool(torch.isfinite(file.read(name, row, row + 1)).all()):
                    told = f"expected finite values, got NaN or infinite ones in sample {row}"
                    raise FlowError(f"{path}: {name}: {told}; leave it out of the file")


def read_inputs(path: Path, samples: int, model: nn.Module) -> list[dict[str, Tensor]]:
    """The first samples in batches, floats in the type of the model."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    made = []
    with TensorFile(path) as file:
        count = min(samples, *(entry.shape[0] for entry in file.entries.values()))
        for first in range(0, count, BATCH):
            batch = {name: file.read(name, first, min(first + BATCH, count)) for name in sorted(file.entries)}
            made.append({n: t.to(dtype) if t.is_floating_point() else t.to(torch.int64) for n, t in batch.items()})
    return made


def require_perceived(model: nn.Module, path: Path, device: torch.device) -> None:
    """Raise unless the model runs on the first sample."""
    first = {name: tensor[:1].to(device) for name, tensor in read_inputs(path, 1, model)[0].items()}
    try:
        with torch.no_grad():
            model(**first, **arguments(model))
    except torch.OutOfMemoryError:
        raise  # a lack of memory says nothing about the model's inputs
    except Exception as error:  # each model fails in its own way on what it does not read
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in first.items())
        message = (str(error).strip().splitlines() or ["without a word"])[0][:200]
        raise FlowError(
            f"evaluation: {type(model).__name__} does not run on {shapes} ({type(error).__name__}: {message}); make "
            f"{path.name} with the model's processor, or drop --evaluate"
        ) from error


def compare_inputs(
    original: nn.Module,
    quantized: nn.Module,
    batches: list[dict[str, Tensor]],
    device: torch.device,
    progress: Progress,
) -> dict[str, Any]:
    """The cosine between both models' outputs, and how often their largest one is the same, where they are logits."""
    seconds = {"float": 0.0, "quantized": 0.0}
    cosines: list[float] = []
    agree = outputs = samples = 0
    classifies = False
    for index, batch in enumerate(batches):
        given, results = {name: tensor.to(device) for name, tensor in batch.items()}, []
        for name, model in (("float", original), ("quantized", quantized)):
            start = perf_counter()
            with torch.no_grad():
                made = model(**given, **arguments(model))
            classifies = "logits" in made
            results.append(made[0].float())
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name] += perf_counter() - start
        exact, noisy = (result.reshape(-1, result.shape[-1]) for result in results)
        cosines += functional.cosine_similarity(exact, noisy).tolist()
        agree += int((exact.argmax(-1) == noisy.argmax(-1)).sum())
        outputs, samples = outputs + len(exact), samples + len(results[0])
        progress("evaluate", 1, len(batches), f"batch {index + 1}")
    return {
        "tokens": outputs,
        "inputs": samples,
        "cosine": {"mean": sum(cosines) / len(cosines), "min": min(cosines)},
        **({"top1_agreement": agree / outputs} if classifies else {}),
        "tokens_per_second": {name: outputs / max(elapsed, 1e-9) for name, elapsed in seconds.items()},
    }
