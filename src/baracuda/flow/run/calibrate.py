"""Calibration: load the float model, trace it, measure its inputs, smooth it, prove that its outputs stay the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...schemes import Recipe
from ..checkpoint.directory import Checkpoint
from ..checkpoint.folds import FoldRecord
from ..checkpoint.fusion import fused_with
from ..errors import FlowError, some
from ..hf.forward import TRACE_SHAPE, arguments, float_model, on_tokens_alone
from ..hf.layers import Structure
from ..transforms.folds import Folds, find_folds
from ..transforms.smooth import Gate, Smoothing, channel_maxima, search_alpha, strength
from ..transforms.trace import trace
from .changes import Changes, input_scale
from .data import batches, read_for
from .distributed import Team
from .measure import InputRecorder, Measured
from .options import Options, Plan, Progress


def calibrate(
    source: Checkpoint,
    structure: Structure,
    plan: Plan,
    options: Options,
    data: Path,
    team: Team,
    device: torch.device,
    progress: Progress,
) -> Changes:
    """What the data says about the model: the same on every rank."""
    model = float_model(source.directory, device)
    sequences = read_for(model, source.directory, data, options, "calibration", device)
    names = {f"{structure.modules.get(module, module)}.weight": module for module in structure.linears.values()}
    folds = analyse(model, set(names), device)
    groups, keep_rows = list(folds.inputs.values()), plan.smooth and options.alpha == "auto"
    recorder = InputRecorder(
        model, groups, keep_rows=keep_rows, needs=None if plan.sequential else plan.recipe.needs, team=team
    )
    measured = measure(model, recorder, batches(sequences), device, progress)
    smoothing = Smoothing()
    changes = Changes(notes={"samples": len(sequences), "alpha": options.alpha if plan.smooth else None})
    if plan.smooth:
        folds.keep_stored(structure.names.stored, set(names))
        axes = {a.parameter: a.axis for fold in folds.folds for a in fold.absorbers}
        smoothing = choose(model, folds, measured, options.alpha, plan.recipe)
        changes.notes["gate"] = passes_gate(model, smoothing, folds, axes, batches(sequences)[0][:2].to(device))
        changes.notes["folded"] = [
            {"from": f.producer.parameter, "into": [a.parameter for a in f.absorbers], "fixed": len(f.fixed)}
            for f in folds.folds
        ]
        changes.notes["not_folded"] = dict(sorted(folds.reasons.items()))
    _store(changes, smoothing, structure)
    if plan.smooth:
        changes.notes["changed"] = sorted({*changes.columns, *changes.rows, *changes.replaced})
    changes.notes["outliers"] = {
        module: _outliers(measured.maxima[name], smoothing.divisors.get(name), smoothing.alphas.get(name))
        for name, module in names.items()
        if name in measured.maxima
    }
    choices = structure.choices
    static = {name: m for name, m in names.items() if choices[m].scheme.activation.kind == "static"}
    if static:
        _input_scales(changes, folds, measured.maxima, smoothing, static)
    by_data = {name: m for name, m in names.items() if choices[m].method.needs is not None}
    if by_data and not plan.sequential:
        _keep_moments(changes, folds, measured, smoothing, by_data)
    return changes


def analyse(model: nn.Module, wanted: set[str], device: torch.device) -> Folds:
    """Trace a few tokens through the model and find what can be folded."""
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 0) or 2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, TRACE_SHAPE, generator=generator).to(device)
    with on_tokens_alone(model, "calibration"):
        record, outputs = trace(model, {"input_ids": tokens, **arguments(model)})
    return find_folds(record, outputs, wanted)


def measure(
    model: nn.Module, recorder: InputRecorder, data: list[Tensor], device: torch.device, progress: Progress
) -> Measured:
    def step(count: int, index: int) -> None:
        progress("calibrate", count, len(data), f"batch {index + 1}")

    return recorder.run(model, data, device, step, arguments(model))


def choose(model: nn.Module, folds: Folds, measured: Measured, alpha: float | str, recipe: Recipe) -> Smoothing:
    """Divisors for every fold, from statistics alone: the same on every rank."""
    smoothing, parameters = Smoothing(), {name: p.detach() for name, p in model.named_parameters()}
    for fold in folds.folds:
        if alpha == "auto":
            used, divisor = search_alpha(fold, measured.maxima, parameters, measured.rows, recipe)
        else:
            used = float(alpha)
            divisor = strength(*channel_maxima(fold, measured.maxima, parameters), used)
        smoothing.add(fold, divisor, parameters, used)
    return smoothing


def passes_gate(model: nn.Module, smoothing: Smoothing, folds: Folds, axes: dict[str, int], tokens: Tensor) -> Any:
    """Smooth the model in memory and compare its outputs: in f32, where rounding is small, if that fits in memory."""
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
    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.8


def _store(changes: Changes, smoothing: Smoothing, structure: Structure) -> None:
    """Take over the smoothing, under the checkpoint's names instead of the model's."""
    for kind in ("columns", "rows", "replaced"):
        for name, value in getattr(smoothing, kind).items():
            getattr(changes, kind)[structure.names.stored[name]] = value
    stored = structure.names.stored
    for fold, divisors in smoothing.folds:
        producer, into = fold.producer, {stored[a.parameter]: torch.tensor(a.channels) for a in fold.absorbers}
        bias = None if producer.bias is None else stored[producer.bias]
        norm = producer.kind == "norm"
        changes.folds.append(
            FoldRecord(stored[producer.parameter], bias, norm, float(producer.offset), divisors.float().cpu(), into)
        )


def _outliers(maximum: Tensor, divisor: Tensor | None, alpha: float | None) -> dict[str, Any]:
    """The largest channel over the median one, before and after smoothing."""
    before = _over_median(maximum)
    after = before if divisor is None else _over_median(maximum / divisor)
    return {"outlier_before": before, "outlier_after": after, "smoothed": divisor is not None, "alpha": alpha}


def _over_median(maximum: Tensor) -> float:
    median = float(maximum.median())
    return float(maximum.max()) / median if median > 0 else 0.0


def _input_scales(
    changes: Changes, folds: Folds, maxima: dict[str, Tensor], smoothing: Smoothing, names: dict[str, str]
) -> None:
    """One scale for all linears that read the same value, and for those that servers fuse, which keep only one."""
    largest: dict[str, float] = {}
    for group in folds.inputs.values():
        if group[0] not in maxima:
            continue  # traced, but not reached by the data
        together = max(
            float((maxima[w] / smoothing.divisors[w] if w in smoothing.divisors else maxima[w]).max()) for w in group
        )
        largest |= {names[weight]: together for weight in group if weight in names}
    for module in largest:
        changes.input_scales[module] = input_scale(max(largest[m] for m in fused_with(module) if m in largest))
    missing = sorted(set(names.values()) - set(largest))
    if missing:
        raise FlowError(
            "static activations: expected calibration to see what every layer reads, it saw no input of "
            f"{some(missing)}; --ignore them, or use --activations dynamic"
        )


def _keep_moments(
    changes: Changes, folds: Folds, measured: Measured, smoothing: Smoothing, names: dict[str, str]
) -> None:
    """The second moments of what each module reads once its input is smoothed, kept once for each input."""
    for group in folds.inputs.values():
        modules = [names[weight] for weight in group if weight in names]
        if not modules or group[0] not in measured.moments:
            continue
        key, divisor = modules[0], smoothing.divisors.get(group[0])
        divisor = torch.ones(()) if divisor is None else divisor.cpu()
        changes.inputs |= dict.fromkeys(modules, key)
        changes.counts[key] = torch.tensor([measured.counts[group[0]]])
        changes.moments[key] = measured.moments[group[0]] / divisor.square()
        if group[0] in measured.hessians:
            changes.hessians[key] = measured.hessians[group[0]] / (divisor * divisor.reshape(-1, 1))
    missing = sorted(set(names.values()) - set(changes.inputs))
    if missing:
        raise FlowError(
            "the method needs data: expected calibration to see what every layer reads, it saw no input of "
            f"{some(missing)}; --ignore them, or use --method rtn"
        )
