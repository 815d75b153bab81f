"""From calibration data to a Preparation: load the float model, trace it, measure it, smooth it, prove it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.directory import Checkpoint
from ..checkpoint.scheme import Scheme
from ..errors import FlowError, some
from ..hf.load import read_model, require_transformers
from ..hf.structure import Structure, fused_with, model_config
from ..transforms.folds import Folds, find_folds
from ..transforms.smooth import Gate, Smoothing, channel_maxima, search_alpha, strength
from ..transforms.trace import trace
from .calibrate import Observer, batches, read_sequences, run_batches
from .distributed import Team
from .preparation import Preparation, input_scale

if TYPE_CHECKING:
    from .convert import Options, Progress

#: Small, and unlike any size of a model, so that no two axes are taken for one another.
TRACE_SHAPE = (2, 11)


def float_model(directory: Path, device: torch.device) -> nn.Module:
    """The checkpoint as transformers loads it."""
    require_transformers("calibration and evaluation run the model")
    return read_model(directory, model_config(directory), "auto").to(device).eval()


def arguments(model: nn.Module) -> dict[str, Any]:
    """A cache would only hold on to memory."""
    return (
        {"use_cache": False} if hasattr(model, "generate") and getattr(model, "can_generate", lambda: False)() else {}
    )


def generates(model: nn.Module) -> bool:
    return bool(getattr(model, "can_generate", lambda: False)())


def prepare(
    source: Checkpoint,
    structure: Structure,
    scheme: Scheme,
    options: Options,
    data: Path,
    team: Team,
    device: torch.device,
    progress: Progress,
) -> Preparation:
    model = float_model(source.directory, device)
    sequences = readable(model, source.directory, data, options, "calibration", device)
    names = {f"{structure.modules.get(module, module)}.weight": module for module in structure.linears.values()}
    folds = analyse(model, set(names), device)
    keep_rows = scheme.smooth and options.alpha == "auto"
    maxima, rows = measure(model, folds, batches(sequences), team, device, progress, keep_rows=keep_rows)
    smoothing = Smoothing()
    prepared = Preparation(notes={"samples": len(sequences), "alpha": options.alpha if scheme.smooth else None})
    if scheme.smooth:
        folds.keep_stored(structure.names.stored, set(names))
        axes = {a.parameter: a.axis for fold in folds.folds for a in fold.absorbers}
        smoothing = choose(model, folds, maxima, rows, options.alpha, scheme.activations == "static")
        prepared.notes["gate"] = passes_gate(model, smoothing, folds, axes, batches(sequences)[0][:2].to(device))
        prepared.notes["folded"] = [
            {"from": f.producer.parameter, "into": [a.parameter for a in f.absorbers], "fixed": len(f.fixed)}
            for f in folds.folds
        ]
        prepared.notes["not_folded"] = dict(sorted(folds.reasons.items()))
    _store(prepared, smoothing, structure)
    if scheme.smooth:
        prepared.notes["changed"] = sorted({*prepared.columns, *prepared.rows, *prepared.replaced})
    prepared.notes["outliers"] = {
        module: _outliers(maxima[name], smoothing.divisors.get(name), smoothing.alphas.get(name))
        for name, module in names.items()
        if name in maxima
    }
    if scheme.activations == "static":
        _input_scales(prepared, folds, maxima, smoothing, names)
    return prepared


def rehearse(directory: Path, data: Path, options: Options, device: torch.device) -> None:
    """Raise where the evaluation would fail on the model as it is: before anything is made, not when all is."""
    readable(float_model(directory, device), directory, data, options, "evaluation", device)


def readable(
    model: nn.Module, directory: Path, data: Path, options: Options, use: str, device: torch.device
) -> list[Tensor]:
    """The sequences of `data`, once the model has run on a few of their tokens and on the longest of them."""
    sequences = read_sequences(
        data, directory, samples=options.samples, length=options.sequence_length, blocks=generates(model)
    )
    require_known(model, sequences, use)
    few = sequences[0][: TRACE_SHAPE[1]].expand(TRACE_SHAPE[0], -1).to(device)
    with on_tokens_alone(model, use), torch.no_grad():
        model(input_ids=few, **arguments(model))[0].float()
    require_short(model, max(sequences, key=len).to(device), use)
    return sequences


@contextmanager
def on_tokens_alone(model: nn.Module, use: str) -> Iterator[None]:
    """What a model raises that wants images, sounds or a second text besides, in a sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # that is another matter
    except Exception as error:  # each model fails in its own way on what it did not get
        told = (str(error).strip().splitlines() or ["without a word"])[0][:200]
        remedy = {"calibration": "use a scheme without calibration: w8a8 or w4a16", "evaluation": "drop --evaluate"}
        raise FlowError(
            f"{use}: expected a model that runs on tokens alone; {type(model).__name__} does not "
            f"({type(error).__name__}: {told}); {remedy[use]}"
        ) from error


def require_known(model: nn.Module, sequences: list[Tensor], use: str) -> None:
    """Raise where the model has no embedding for a token of this data."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = max(int(sequence.max()) for sequence in sequences)
    if vocabulary is not None and largest >= vocabulary:
        raise FlowError(f"{use}: token {largest} is not in the model's vocabulary of {vocabulary}; "
                        "the data was made with another tokenizer: make it with this model's")  # fmt: skip


def require_short(model: nn.Module, longest: Tensor, use: str) -> None:
    """Raise where the model does not read a sequence of this length, with the length that it does read."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 0
    claimed = min(len(longest), positions) if positions > 0 else len(longest)  # XLNet writes -1: any length
    if claimed == len(longest) and reads(model, longest):
        return
    # Positions may begin at 2, as RoBERTa's do: what was claimed is tried as well.
    limit = bisect_left(range(1, claimed + 1), True, key=lambda length: not reads(model, longest[:length]))
    told = f"the model reads {limit}: pass --sequence-length {limit}"
    failed = "the model fails on it: pass a smaller --sequence-length"  # a GPU does not recover from a bad index
    raise FlowError(f"{use}: a sequence of {len(longest)} tokens, but {told if limit > 1 else failed}")


def reads(model: nn.Module, sequence: Tensor) -> bool:
    try:
        with torch.no_grad():
            model(input_ids=sequence[None], **arguments(model))[0].flatten()[0].item()  # a GPU fails when it is asked
    except torch.OutOfMemoryError:
        raise  # that is another matter
    except Exception:  # each model fails in its own way on what is too long
        return False
    return True


def analyse(model: nn.Module, wanted: set[str], device: torch.device) -> Folds:
    """Trace a few tokens through the model and find what can be folded."""
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 0) or 2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, TRACE_SHAPE, generator=generator).to(device)
    with on_tokens_alone(model, "calibration"):
        record, outputs = trace(model, {"input_ids": tokens, **arguments(model)})
    return find_folds(record, outputs, wanted)


def measure(
    model: nn.Module,
    folds: Folds,
    data: list[Tensor],
    team: Team,
    device: torch.device,
    progress: Progress,
    *,
    keep_rows: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    observer = Observer(model, list(folds.inputs.values()), keep_rows=keep_rows)

    def step(index: int) -> None:
        observer.batch = index
        progress("calibrate", team.size, len(data), f"batch {index + 1}")

    try:
        run_batches(model, data, team, device, step, arguments(model))
    finally:
        observer.remove()
    return observer.reduce(team)


def choose(
    model: nn.Module,
    folds: Folds,
    maxima: dict[str, Tensor],
    rows: dict[str, Tensor],
    alpha: float | str,
    static: bool,
) -> Smoothing:
    """Divisors for every fold, from statistics alone: the same on every rank."""
    smoothing, parameters = Smoothing(), {name: p.detach() for name, p in model.named_parameters()}
    for fold in folds.folds:
        if alpha == "auto":
            used, divisor = search_alpha(fold, maxima, parameters, rows, static)
        else:
            used = float(alpha)
            divisor = strength(*channel_maxima(fold, maxima, parameters), used)
        smoothing.add(fold, divisor, parameters, used)
    return smoothing


def passes_gate(model: nn.Module, smoothing: Smoothing, folds: Folds, axes: dict[str, int], tokens: Tensor) -> Any:
    """Smooth the model in memory and compare. In f32, where rounding is small, unless that does not fit."""
    if _fits_in_f32(model):
        model.float()
    gate = Gate(model, {"input_ids": tokens, **arguments(model)}, folds.folds)
    smoothing.apply(model, axes)
    return gate.check()


def _fits_in_f32(model: nn.Module) -> bool:
    needed = sum(p.numel() * 4 for p in model.parameters())
    device = next(model.parameters()).device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return needed < free * 0.8
    import os

    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.8


def _store(prepared: Preparation, smoothing: Smoothing, structure: Structure) -> None:
    """From the model's names to the checkpoint's."""
    for kind in ("columns", "rows", "replaced"):
        for name, value in getattr(smoothing, kind).items():
            getattr(prepared, kind)[structure.names.stored[name]] = value


def _outliers(maximum: Tensor, divisor: Tensor | None, alpha: float | None) -> dict[str, Any]:
    """How far the largest channel stands out from the typical one, before and after."""
    before = _standing_out(maximum)
    after = before if divisor is None else _standing_out(maximum / divisor)
    return {"outlier_before": before, "outlier_after": after, "smoothed": divisor is not None, "alpha": alpha}


def _standing_out(maximum: Tensor) -> float:
    median = float(maximum.median())
    return float(maximum.max()) / median if median > 0 else 0.0


def _input_scales(
    prepared: Preparation, folds: Folds, maxima: dict[str, Tensor], smoothing: Smoothing, names: dict[str, str]
) -> None:
    """One scale for all linears that read the same value, or that servers fuse, which keep only one."""
    largest: dict[str, float] = {}
    for group in folds.inputs.values():
        if group[0] not in maxima:
            continue  # traced, but not reached by the data
        together = max(
            float((maxima[w] / smoothing.divisors[w] if w in smoothing.divisors else maxima[w]).max()) for w in group
        )
        largest |= {names[weight]: together for weight in group}
    for module in largest:
        prepared.input_scales[module] = input_scale(max(largest[m] for m in fused_with(module) if m in largest))
    missing = sorted(set(names.values()) - set(largest))
    if missing:
        raise FlowError(
            "static activations: expected calibration to see what every layer reads, it saw no input of "
            f"{some(missing)}; --ignore them, or use --activations dynamic"
        )
