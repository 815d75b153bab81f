"""What quantization cost: the float and the quantized model on the same data."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..hf.forward import arguments, float_model, generates
from ..hf.load import load
from .data import batches, read_for
from .options import Options, Progress
from .report import sqnr_db

#: Layer outputs are compared on the first of this many tokens: enough to see which layer is the noisy one.
COMPARED_TOKENS = 256


def evaluate(
    model_dir: Path,
    out: Path,
    data: Path,
    options: Options,
    device: torch.device,
    progress: Progress,
    skip: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """KL divergence and perplexity for models with logits, cosine of mean embeddings for others; error of each layer.

    `skip` names modules whose outputs smoothing scaled on purpose.
    """
    original, quantized = float_model(model_dir, device), load(out, device=device)
    causal = generates(original)
    sequences = read_for(original, model_dir, data, options, "evaluation", device)
    compare: _Logits | _Embeddings = _Logits() if causal else _Embeddings()
    seconds = {"float": 0.0, "quantized": 0.0}
    made, tokens = batches(sequences), 0
    for index, batch in enumerate(made):
        inputs = {"input_ids": batch.to(device), **arguments(original)}
        results = []
        for name, model in (("float", original), ("quantized", quantized)):
            start = perf_counter()
            with torch.no_grad():
                results.append(model(**inputs)[0].float())
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name] += perf_counter() - start
        tokens += batch.numel()
        compare.add(results[0], results[1], inputs["input_ids"])
        progress("evaluate", 1, len(made), f"batch {index + 1}")
    sample = made[0][: max(1, COMPARED_TOKENS // made[0].shape[1])].to(device)
    layers = _layer_errors(original, quantized, {"input_ids": sample, **arguments(original)}, skip)
    speed = {name: tokens / max(elapsed, 1e-9) for name, elapsed in seconds.items()}
    return {"data": data.name, "tokens": tokens, **compare.result(), "layers": layers, "tokens_per_second": speed}


class _Logits:
    """KL(float || quantized) of the next-token distributions, and both perplexities."""

    def __init__(self) -> None:
        self.kl, self.count, self.agree = 0.0, 0, 0
        self.nll, self.targets = {"float": 0.0, "quantized": 0.0}, 0

    def add(self, exact: Tensor, noisy: Tensor, tokens: Tensor) -> None:
        p, q = functional.log_softmax(exact, -1), functional.log_softmax(noisy, -1)
        self.kl += float(functional.kl_div(q, p, log_target=True, reduction="sum"))
        self.agree += int((exact.argmax(-1) == noisy.argmax(-1)).sum())
        self.count += p[..., 0].numel()
        for name, logs in (("float", p), ("quantized", q)):
            picked = logs[:, :-1].gather(-1, tokens[:, 1:, None])
            self.nll[name] -= float(picked.sum())
        self.targets += tokens[:, 1:].numel()

    def result(self) -> dict[str, Any]:
        perplexity = {name: float(torch.tensor(v / max(1, self.targets)).exp()) for name, v in self.nll.items()}
        return {"kl": self.kl / self.count, "top1_agreement": self.agree / self.count, "perplexity": perplexity}


class _Embeddings:
    """The cosine between the mean embeddings of each sequence; between its logits, where a model classifies it."""

    def __init__(self) -> None:
        self.cosines: list[float] = []

    def add(self, exact: Tensor, noisy: Tensor, tokens: Tensor) -> None:
        one, other = (x.mean(1) if x.ndim == 3 else x.reshape(len(x), -1) for x in (exact, noisy))
        self.cosines += functional.cosine_similarity(one, other).tolist()

    def result(self) -> dict[str, Any]:
        return {"cosine": {"mean": sum(self.cosines) / len(self.cosines), "min": min(self.cosines)}}


def _layer_errors(
    original: nn.Module, quantized: nn.Module, inputs: dict[str, Any], skip: frozenset[str]
) -> dict[str, float | None]:
    """SQNR of every quantized layer's output, the noise of the layers before it included."""
    names = [
        name
        for name, module in original.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(quantized.get_submodule(name), nn.Linear)
        and name not in skip
    ]
    exact, noisy = (_outputs(model, inputs, names) for model in (original, quantized))
    errors = {}
    for name in names:
        if name in exact and name in noisy:
            noise = float((exact[name] - noisy[name]).double().square().sum())
            errors[name] = sqnr_db(float(exact[name].double().square().sum()), noise)
    return errors


def _outputs(model: nn.Module, inputs: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        return lambda module, args, output: seen.__setitem__(name, output.detach().float().cpu())

    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen
