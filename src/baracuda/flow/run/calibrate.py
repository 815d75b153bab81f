"""Calibration: load the float model, trace it, measure its inputs, smooth it, prove that its outputs stay the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.directory import Checkpoint
from ..checkpoint.folds import FoldRecord
from ..checkpoint.fusion import fused_with
from ..errors import FlowError, some
from ..hf.forward import TRACE_SHAPE, arguments, float_model, on_tokens_alone, without_head
from ..hf.layers import Structure
from ..transforms.folds import Folds, find_folds
from ..transforms.smooth import Smoothing
from ..transforms.strengths import Strength
from ..transforms.trace import trace
from .changes import Changes, input_scale
from .data import batches, read_for
from .distributed import Team
from .measure import InputRecorder, Measured
from .options import Options, Plan, Progress, weighable
from .scaling import choose, smooth
from .sequential import Workers


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
    sequences = read_for(model, source.directory, data, options, "calibration", device, progress)
    names = {f"{structure.modules.get(module, module)}.weight": module for module in structure.linears.values()}
    folds = analyse(model, set(names), device)
    groups, keep_rows = list(folds.inputs.values()), plan.smooth and options.alpha == "auto"
    recorder = InputRecorder(model, groups, keep_rows=keep_rows, needs=plan.needs, team=team)
    smoothing = Smoothing()
    changes = Changes(notes={"samples": len(sequences), "alpha": options.alpha if plan.smooth else None})
    with Workers(device).pool() as pool:
        measured = measure(model, recorder, sequences, device, progress, pool)
        if plan.smooth:
            folds.keep_stored(structure.names.stored, set(names))
            layers = {name: structure.choices[module] for name, module in names.items()}
            chosen = choose(model, folds, measured, options.alpha, layers, pool, team)
    if plan.smooth:
        load = partial(float_model, source.directory, device)
        tokens = batches(sequences)[0].to(device)
        smoothing, changes.notes["gate"] = smooth(model, load, folds, chosen, tokens, set(names), team)
        changes.notes["folded"] = [
            {"from": f.producer.parameter, "into": [a.parameter for a in f.absorbers], "fixed": len(f.fixed)}
            for f in folds.folds
        ]
        changes.notes["not_folded"] = dict(sorted(folds.reasons.items()))
    _store(changes, smoothing, structure)
    if plan.smooth:
        changes.notes["changed"] = sorted({*changes.columns, *changes.rows, *changes.replaced})
    changes.notes["outliers"] = {
        module: _outliers(measured.maxima[name], smoothing.divisors.get(name), smoothing.strengths.get(name))
        for name, module in names.items()
        if name in measured.maxima
    }
    choices = structure.choices
    static = {name: m for name, m in names.items() if choices[m].scheme.activation.kind == "static"}
    if static:
        _input_scales(changes, folds, measured.maxima, smoothing, static)
    by_data = {name: m for name, m in names.items() if choices[m].method.needs is not None or weighable(choices[m])}
    if by_data and plan.needs is not None:
        _keep_moments(changes, folds, measured, smoothing, by_data)
        changes.notes["weighed"] = sorted(m for m in changes.inputs if weighable(choices[m]))
        _require_seen(changes, {m for m in by_data.values() if choices[m].method.needs is not None})
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
    model: nn.Module,
    recorder: InputRecorder,
    sequences: list[Tensor],
    device: torch.device,
    progress: Progress,
    pool: ThreadPoolExecutor | None = None,
) -> Measured:
    """Show the sequences to the recorder: each in one thread of the pool, or in batches on a GPU."""
    on_cpu = device.type == "cpu"
    data = [sequence[None] for sequence in sequences] if on_cpu else batches(sequences)

    def step(count: int, index: int) -> None:
        progress("calibrate", count, len(data), f"batch {index + 1}")

    body = without_head(model, [group[0] for group in recorder.groups])
    return recorder.run(body, data, device, step, arguments(model), pool if on_cpu else None)


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


def _outliers(maximum: Tensor, divisor: Tensor | None, strength: Strength | None) -> dict[str, Any]:
    """The largest channel over the median one, before and after smoothing."""
    before = _over_median(maximum)
    after = before if divisor is None else _over_median(maximum / divisor)
    strength = strength or Strength()
    chosen = {"smoothed": divisor is not None, "alpha": strength.alpha, "rule": strength.rule}
    return {"outlier_before": before, "outlier_after": after, **chosen}


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


def _require_seen(changes: Changes, modules: set[str]) -> None:
    if missing := sorted(modules - set(changes.inputs)):
        raise FlowError(
            "the method needs data: expected calibration to see what every layer reads, it saw no input of "
            f"{some(missing)}; --ignore them, or use --method rtn"
        )
