"""What hooks record of the inputs of linears while the model reads the calibration data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...schemes import Needs
from ..errors import FlowError
from .distributed import Team

#: Rows of each layer's input kept for alpha="auto": this many of each of the first batches.
KEPT_ROWS, KEPT_BATCHES = 32, 8


def channel_maximum(x: Tensor) -> Tensor:
    """max |x| of each column, NaN where there is one, in the type of x: every maximum is one of its values."""
    if x.device.type == "cuda":
        largest: Tensor = torch.linalg.vector_norm(x, math.inf, 0)  # one kernel, where launches are what costs
        return largest
    return torch.maximum(x.amax(0), x.amin(0).neg_())  # many times faster than the norm on a CPU


@dataclass
class Measured:
    """What was recorded, by linear weight. Weights that read the same tensor share their values."""

    maxima: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    hessians: dict[str, Tensor] = field(default_factory=dict)


class _Moments:
    """Sums over the rows of one input: of the squares of its channels, and of their products in pairs."""

    def __init__(self, width: int, device: torch.device, pairs: bool) -> None:
        self.count = 0
        self.squares = torch.zeros(width, dtype=torch.float64, device=device)
        self.products = torch.zeros(width, width, device=device) if pairs else None

    def add(self, x: Tensor) -> None:
        x = x.float()
        self.count += x.shape[0]
        self.squares += x.double().square().sum(0)
        if self.products is not None:
            self.products.addmm_(x.T, x)

    def means(self) -> tuple[int, Tensor, Tensor | None]:
        pairs = None if self.products is None else (self.products / self.count).cpu()
        return self.count, (self.squares / self.count).float().cpu(), pairs


class InputRecorder:
    """Hooks on linears, one for each distinct input.

    They record the largest magnitude of each channel, a few rows if `keep_rows`, and the second moments if some method
    needs them.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[list[str]],
        *,
        keep_rows: bool,
        needs: Needs | None = None,
        team: Team | None = None,
    ) -> None:
        """`groups`: names of linear weights that read the same value; a hook is on the first of each."""
        self.groups, self.keep_rows, self.needs, self.team = groups, keep_rows, needs, team or Team()
        self.maxima: dict[str, Tensor] = {}
        self.rows: dict[str, dict[int, Tensor]] = {group[0]: {} for group in groups}
        self.batch = 0
        self._moments: dict[str, _Moments] = {}
        # Moments are sums of floats, which depend on their order: one rank adds up all batches of an input.
        owned = [group[0] for i, group in enumerate(groups) if i % self.team.size == self.team.rank]
        self._owned = set(owned if needs is not None else [])
        self._handles = [self._watch(model, group[0]) for group in groups]

    def _watch(self, model: nn.Module, weight: str) -> Any:
        module = model.get_submodule(weight.removesuffix(".weight"))

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            largest = channel_maximum(x)
            known = self.maxima.get(weight)
            self.maxima[weight] = largest if known is None else torch.maximum(known, largest, out=known)
            if self.keep_rows and self.batch < KEPT_BATCHES:
                step = max(1, x.shape[0] // KEPT_ROWS)
                self.rows[weight][self.batch] = x[::step][:KEPT_ROWS].float().cpu()
            if weight in self._owned:
                if weight not in self._moments:
                    self._moments[weight] = _Moments(x.shape[1], x.device, self.needs == "hessian")
                self._moments[weight].add(x)

        return module.register_forward_pre_hook(hook)

    def run(
        self,
        model: nn.Module,
        data: list[Tensor],
        device: torch.device,
        step: Callable[[int, int], None],
        arguments: dict[str, Any],
    ) -> Measured:
        """Run the batches through the model; `step(batches, index)` is called for each."""
        shared = self.needs is None  # each rank runs its batches alone, or every rank runs all
        try:
            for index, tokens in enumerate(data):
                if shared and index % self.team.size != self.team.rank:
                    continue
                self.batch = index
                step(self.team.size if shared else 1, index)
                with torch.no_grad():
                    model(input_ids=tokens.to(device), **arguments)
        finally:
            self.remove()
        return self.reduce()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def reduce(self) -> Measured:
        """What all ranks recorded, for every linear of every group."""
        found = Measured()
        for group in self.groups:
            mine = self.maxima.get(group[0])
            everyone = [part for part in self.team.gather(None if mine is None else mine.cpu()) if part is not None]
            if not everyone:
                continue
            largest = torch.stack(everyone).amax(0).float()
            if not bool(torch.isfinite(largest).all()):
                raise FlowError(
                    f"calibration: expected finite inputs, {group[0]} got NaN or infinite ones; give other data, or "
                    "use a scheme without calibration: w8a8 or w4a16"
                )
            kept: dict[int, Tensor] = {}
            for part in self.team.gather(self.rows[group[0]]):
                kept |= part
            found.maxima |= dict.fromkeys(group, largest)
            if kept:
                found.rows |= dict.fromkeys(group, torch.cat([kept[i] for i in sorted(kept)]))
            if self.needs is not None:
                self._reduce_moments(group, found)
        return found

    def _reduce_moments(self, group: list[str], found: Measured) -> None:
        mine = self._moments.pop(group[0], None)
        means = next(m for m in self.team.gather(None if mine is None else mine.means()) if m is not None)
        found.counts |= dict.fromkeys(group, means[0])
        found.moments |= dict.fromkeys(group, means[1])
        if means[2] is not None:
            found.hessians |= dict.fromkeys(group, means[2])
