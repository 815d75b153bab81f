"""Chooses how strongly each fold of a model divides its channels, and proves that the smoothed model is the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...schemes import Choice
from ..hf.forward import arguments
from ..transforms.folds import Fold, Folds
from ..transforms.gate import Gate, MovedError
from ..transforms.smooth import Smoothing
from ..transforms.strengths import Channels, Strength, search
from .distributed import Team
from .measure import Measured

#: Sequences and tokens that the gate compares the models on: equal outputs are a property of the model, not of data.
GATE_SHAPE = (2, 64)


@dataclass(frozen=True)
class Chosen:
    """A fold with its strength, and what that makes of each channel of its producer."""

    fold: Fold
    strength: Strength
    divisor: Tensor


def choose(
    model: nn.Module,
    folds: Folds,
    measured: Measured,
    alpha: float | str,
    choices: Mapping[str, Choice],
    pool: ThreadPoolExecutor | None = None,
    team: Team | None = None,
) -> list[Chosen]:
    """Divisors for every fold, from statistics alone: the same on every rank. `choices`: of the linear weights.

    A number is SmoothQuant's alpha for all folds; "auto" searches rule and strength for each, in the threads of a pool
    with one thread of torch each.
    """
    team, weights = team or Team(), {name: p.detach() for name, p in model.named_parameters()}

    def one(index: int) -> tuple[Strength, Tensor]:
        fold = folds.folds[index]
        channels = Channels.of(fold, measured.maxima, weights, measured.rows)
        if alpha == "auto":
            strength = search(fold, channels, weights, measured.rows, choices)
        else:
            strength = Strength("smoothquant", float(alpha))
        return strength, channels.divisor(strength)

    mine = range(team.rank, len(folds.folds), team.size)
    made = map(one, mine) if pool is None else pool.map(one, mine)
    found: dict[int, tuple[Strength, Tensor]] = {}
    for part in team.gather(dict(zip(mine, made, strict=True))):
        found |= part
    return [Chosen(fold, *found[index]) for index, fold in enumerate(folds.folds)]


def smooth(
    model: nn.Module,
    load: Callable[[], nn.Module],
    folds: Folds,
    chosen: list[Chosen],
    tokens: Tensor,
    wanted: set[str],
    team: Team,
) -> tuple[Smoothing, dict[str, Any]]:
    """Smooth the model in memory, and compare its outputs. A fold that moves one is left out, and the reason kept.

    `load` makes the model anew, without the folds so far.
    """
    while True:
        smoothing = Smoothing.of(
            ((c.fold, c.strength, c.divisor) for c in chosen),
            {name: p.detach() for name, p in model.named_parameters()},
        )
        moved: MovedError | None = None
        try:
            found = passes_gate(model, smoothing, folds, tokens)
        except MovedError as error:
            moved = error
        moved = team.gather(moved)[0]
        if moved is None:
            return smoothing, found
        layer = f"{moved.layer}.weight"
        wrong = [c.fold for c in chosen if any(a.parameter == layer for a in c.fold.absorbers)]
        if not wrong:
            raise moved
        for fold in wrong:
            why = (
                f"smoothed through {fold.producer.parameter}, {moved.layer} moved by {moved.difference:.2e} of its size"
            )
            folds.leave_out(fold, why, wanted)
        chosen = [c for c in chosen if c.fold not in wrong]
        model = load()


def passes_gate(model: nn.Module, smoothing: Smoothing, folds: Folds, tokens: Tensor) -> dict[str, Any]:
    """Smooth the model in memory and compare its outputs: in f32, where rounding is small, if that fits in memory."""
    if _fits_in_f32(model):
        model.float()
    axes = {a.parameter: a.axis for fold in folds.folds for a in fold.absorbers}
    rows, length = GATE_SHAPE
    gate = Gate(model, {"input_ids": tokens[:rows, :length], **arguments(model)}, folds.folds)
    smoothing.apply(model, axes)
    return gate.check()


def _fits_in_f32(model: nn.Module) -> bool:
    needed = sum(p.numel() * 4 for p in model.parameters())
    device = next(model.parameters()).device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return needed < free * 0.8
    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.8
