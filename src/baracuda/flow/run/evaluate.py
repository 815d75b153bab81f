"""What quantization cost: the float and the quantized model on the same data."""

from __future__ import annotations

import math
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...plans.plan import resolve_device
from ..errors import CheckpointError, FlowError
from ..hf.forward import any_model, arguments, float_model, generates, tokenizer
from ..hf.generation import failures_told
from ..hf.hub import model_directory
from ..hf.load import load
from .changes import scaled_outputs
from .data import Data, as_file, batches, located, read_for, require_data, spelled
from .inputs import compare_inputs, holds_inputs, read_inputs, require_perceived
from .journal import digest_file
from .options import Options, Progress
from .overlap import seen_share
from .report import read_report, sqnr_db
from .samples import sample_texts

#: Tokens with the largest divergence that are named.
WORST = 8
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
    calibration: Path | None = None,
) -> dict[str, Any]:
    """KL divergence and perplexity for models with logits, cosine of mean embeddings for others; error of each layer.

    `skip` names modules whose outputs smoothing scaled on purpose. `calibration` is what the result was fitted to.
    """
    original, quantized = float_model(model_dir, device), load(out, device=device)
    if holds_inputs(data):
        return {"data": _named(data), **_perceive(original, quantized, data, options, device, progress, skip)}
    sequences = read_for(original, model_dir, data, options, "evaluation", device)
    found = {"data": _named(data), **_compare(original, quantized, sequences, device, progress, skip)}
    if calibration is not None:
        fitted = read_for(original, model_dir, calibration, options, "calibration", device)
        found["seen_in_calibration"] = seen_share(fitted, sequences)
    if samples := sample_texts(model_dir, original, quantized, sequences, device, progress):
        found["samples"] = samples
    return found


def _compare(
    original: nn.Module,
    quantized: nn.Module,
    sequences: list[Tensor],
    device: torch.device,
    progress: Progress,
    skip: frozenset[str],
) -> dict[str, Any]:
    causal = generates(original)
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
            progress("evaluate", 1, 2 * len(made), f"batch {index + 1}, {name} model")
        tokens += batch.numel()
        compare.add(results[0], results[1], inputs["input_ids"])
    sample = made[0][: max(1, COMPARED_TOKENS // made[0].shape[1])].to(device)
    layers = _layer_errors(original, quantized, {"input_ids": sample, **arguments(original)}, skip)
    speed = {name: tokens / max(elapsed, 1e-9) for name, elapsed in seconds.items()}
    return {"tokens": tokens, **compare.result(), "layers": layers, "tokens_per_second": speed}


def _perceive(
    original: nn.Module,
    quantized: nn.Module,
    data: Path,
    options: Options,
    device: torch.device,
    progress: Progress,
    skip: frozenset[str],
) -> dict[str, Any]:
    """The same for models of images and sounds."""
    require_perceived(original, data, device)
    batches = read_inputs(data, options.samples, original)
    found = compare_inputs(original, quantized, batches, device, progress)
    sample = {name: tensor[:1].to(device) for name, tensor in batches[0].items()} | arguments(original)
    return found | {"layers": _layer_errors(original, quantized, sample, skip)}


def evaluate_checkpoint(
    checkpoint: str | Path,
    text: Data,
    *,
    against: str | Path | None = None,
    samples: int = 128,
    sequence_length: int = 512,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Perplexity of a model on texts; with `against`, its float model, what quantization cost.

    `text` is a file of texts or tokens, or a list of texts.

    The checkpoint can be one that baracuda wrote or any other that transformers loads. Against a float model the result
    has the KL divergence, how often both agree on the most likely token, the `worst` tokens, and the error of each
    layer's output in decibels.
    """
    with as_file(text, "evaluation") as data:
        assert data is not None
        original = None if against is None else model_directory(against)
        where = resolve_device(device)
        return _evaluate(model_directory(checkpoint), data, original, samples, sequence_length, where, progress)


def _evaluate(
    directory: Path,
    data: Path,
    against: Path | None,
    samples: int,
    sequence_length: int,
    where: torch.device,
    progress: Progress | None,
) -> dict[str, Any]:
    require_data(data)
    step = progress or (lambda stage, done, total, label: None)
    options = Options(samples=samples, sequence_length=sequence_length)
    options.check()
    model = any_model(directory, where)
    if against is None:
        sequences = read_for(model, directory, data, options, "evaluation", where)
        seen = _seen(directory, data, sequences, model, where)
        return {"data": _named(data), **_perplexity(model, sequences, where, step), **seen}
    original, skip = float_model(against, where), _folded(directory)
    if holds_inputs(data):
        return {"data": _named(data), **_perceive(original, model, data, options, where, step, skip)}
    sequences = read_for(original, against, data, options, "evaluation", where)
    found = {"data": _named(data), **_compare(original, model, sequences, where, step, skip)}
    found |= _seen(directory, data, sequences, original, where)
    for token in found.get("worst", []):
        token["before"], token["text"] = _texts(against, sequences[token["sequence"]], token["position"])
    return found


def _named(data: Path) -> str:
    return Path(spelled(data)).name


def _folded(directory: Path) -> frozenset[str]:
    """The modules whose outputs smoothing scaled, by the report of a checkpoint of ours."""
    try:
        return scaled_outputs(read_report(directory)["smoothing"] or {})
    except (FlowError, CheckpointError):  # not a checkpoint of ours
        return frozenset()


def _seen(
    directory: Path, data: Path, sequences: list[Tensor], model: nn.Module, where: torch.device
) -> dict[str, float]:
    """How much of the data was read when this checkpoint was calibrated, by its report; empty where nobody can tell."""
    try:
        run = read_report(directory)["run"]
    except (FlowError, CheckpointError):  # not a checkpoint of ours
        return {}
    recorded, place = run.get("made_from", {}).get("calibration"), run.get("inputs", {}).get("calibration")
    if recorded is None:
        return {}
    if recorded == digest_file(data):
        return {"seen_in_calibration": 1.0}
    path = None if place is None else located(place, "calibration")
    if path is None or not path.is_file() or digest_file(path) != recorded:
        return {}
    given = run["made_from"].get("options")
    sizes = {key: given[key] for key in ("samples", "sequence_length") if isinstance(given, dict) and key in given}
    fitted = read_for(model, directory, path, Options(**sizes), "calibration", where)
    return {"seen_in_calibration": seen_share(fitted, sequences)}


def _perplexity(model: nn.Module, sequences: list[Tensor], device: torch.device, progress: Progress) -> dict[str, Any]:
    if not generates(model):
        raise FlowError(f"{type(model).__name__} does not predict the next token: pass --against its float model")
    made, nll, targets = batches(sequences), 0.0, 0
    for index, batch in enumerate(made):
        tokens = batch.to(device)
        with torch.no_grad():
            logs = functional.log_softmax(model(input_ids=tokens, **arguments(model))[0].float(), -1)
        nll -= float(logs[:, :-1].gather(-1, tokens[:, 1:, None]).sum(dtype=torch.float64))
        targets += tokens[:, 1:].numel()
        progress("evaluate", 1, len(made), f"batch {index + 1}")
    count = sum(batch.numel() for batch in made)
    return {"tokens": count, "perplexity": math.exp(min(700.0, nll / max(1, targets)))}


def _texts(directory: Path, sequence: Tensor, position: int) -> tuple[str | None, str | None]:
    """The text before a token's successor, and that successor; None where the model has no tokenizer."""
    try:
        decode = tokenizer(directory).decode
    except FlowError:
        return None, None
    first = max(0, position - 15)
    with failures_told(f"{directory}: the tokenizer fails"):
        return decode(sequence[first : position + 1]), decode(sequence[position + 1 : position + 2])


class _Logits:
    """KL(float || quantized) of the next-token distributions, and both perplexities."""

    def __init__(self) -> None:
        self.kl, self.count, self.agree, self.sequences = 0.0, 0, 0, 0
        self.worst: list[tuple[float, int, int]] = []
        self.nll, self.targets = {"float": 0.0, "quantized": 0.0}, 0

    def add(self, exact: Tensor, noisy: Tensor, tokens: Tensor) -> None:
        p, q = functional.log_softmax(exact, -1), functional.log_softmax(noisy, -1)
        each = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        self.kl += float(each.sum())
        values, places = each.flatten().topk(min(WORST, each.numel()))
        found = zip(values.tolist(), places.tolist(), strict=True)
        length = each.shape[1]
        self.worst += [(v, self.sequences + place // length, place % length) for v, place in found]
        self.worst = sorted(self.worst, key=lambda token: (-token[0], *token[1:]))[:WORST]
        self.sequences += len(each)
        self.agree += int((exact.argmax(-1) == noisy.argmax(-1)).sum())
        self.count += p[..., 0].numel()
        for name, logs in (("float", p), ("quantized", q)):
            picked = logs[:, :-1].gather(-1, tokens[:, 1:, None])
            self.nll[name] -= float(picked.sum())
        self.targets += tokens[:, 1:].numel()

    def result(self) -> dict[str, Any]:
        perplexity = {name: float(torch.tensor(v / max(1, self.targets)).exp()) for name, v in self.nll.items()}
        worst = [{"kl": kl, "sequence": sequence, "position": position} for kl, sequence, position in self.worst]
        return {
            "kl": self.kl / self.count,
            "top1_agreement": self.agree / self.count,
            "perplexity": perplexity,
            "worst": worst,
        }


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
