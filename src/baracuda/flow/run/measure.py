"""What hooks record of the inputs of linears while the model reads the calibration data.

On a CPU, sequences are computed by one thread each and put together in their order, so that what was measured does not
depend on the number of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...schemes import Needs
from ..errors import FlowError
from .distributed import Team

#: Rows of each layer's input that are kept for the search of strengths, and the batches that they are taken from.
KEPT_ROWS, KEPT_BATCHES = 256, 32


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


@dataclass
class _Pass:
    """What one batch showed of each input."""

    index: int
    maxima: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class InputRecorder:
    """Hooks on linears, one for each distinct input.

    They record the largest magnitude of each channel, some rows if `keep_rows`, and the second moments if some method
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
        self.squares: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.products: dict[str, Tensor] = {}
        self._local, self._kept = threading.local(), KEPT_ROWS
        # Moments are sums of floats, which depend on their order: one rank adds up all batches of an input.
        owned = [group[0] for i, group in enumerate(groups) if i % self.team.size == self.team.rank]
        self._owned = set(owned if needs is not None else [])
        self._handles = [self._watch(model, group[0]) for group in groups]

    def _watch(self, model: nn.Module, weight: str) -> Any:
        module = model.get_submodule(weight.removesuffix(".weight"))

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen: _Pass | None = getattr(self._local, "seen", None)
            if seen is not None:
                self._record(seen, weight, args[0].detach().reshape(-1, args[0].shape[-1]))

        return module.register_forward_pre_hook(hook)

    def _record(self, seen: _Pass, weight: str, x: Tensor) -> None:
        largest = channel_maximum(x)
        known = seen.maxima.get(weight)
        seen.maxima[weight] = largest if known is None else torch.maximum(known, largest, out=known)
        if self.keep_rows and seen.index < KEPT_BATCHES:
            step = max(1, x.shape[0] // self._kept)
            seen.rows[weight] = x[::step][: self._kept].float().cpu()
        if weight not in self._owned:
            return
        squares = x.double().square().sum(0)
        seen.squares[weight] = seen.squares[weight] + squares if weight in seen.squares else squares
        seen.counts[weight] = seen.counts.get(weight, 0) + x.shape[0]
        if self.needs == "hessian":
            x = x.float()
            self.products.setdefault(weight, torch.zeros(x.shape[1], x.shape[1], device=x.device)).addmm_(x.T, x)

    def run(
        self,
        model: nn.Module,
        data: list[Tensor],
        device: torch.device,
        step: Callable[[int, int], None],
        arguments: dict[str, Any],
        pool: ThreadPoolExecutor | None = None,
    ) -> Measured:
        """Run the batches through the model, in the threads of a pool; `step(batches, index)` is called for each."""
        shared = self.needs is None  # each rank runs its batches alone, or every rank runs all
        mine = [i for i in range(len(data)) if not shared or i % self.team.size == self.team.rank]
        self._kept = -(-KEPT_ROWS // max(1, min(len(data), KEPT_BATCHES)))

        def one(index: int) -> _Pass:
            self._local.seen = seen = _Pass(index)
            try:
                with torch.no_grad():
                    model(input_ids=data[index].to(device), **arguments)
            finally:
                self._local.seen = None
            return seen

        # Products of all pairs of channels are too large to be kept for each batch: one thread adds them up.
        passes: Iterator[_Pass] = map(one, mine) if pool is None or self.needs == "hessian" else pool.map(one, mine)
        try:
            for seen in passes:
                self._merge(seen)
                step(self.team.size if shared else 1, seen.index)
        finally:
            self.remove()
        return self.reduce()

    def _merge(self, seen: _Pass) -> None:
        for weight, largest in seen.maxima.items():
            known = self.maxima.get(weight)
            self.maxima[weight] = largest if known is None else torch.maximum(known, largest, out=known)
        for weight, rows in seen.rows.items():
            self.rows[weight][seen.index] = rows
        for weight, squares in seen.squares.items():
            self.squares[weight] = self.squares[weight] + squares if weight in self.squares else squares
            self.counts[weight] = self.counts.get(weight, 0) + seen.counts[weight]

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
        name, mine = group[0], None
        if name in self.squares:
            count, products = self.counts[name], self.products.pop(name, None)
            pairs = None if products is None else (products / count).cpu()
            mine = count, (self.squares.pop(name) / count).float().cpu(), pairs
        means = next(m for m in self.team.gather(mine) if m is not None)
        found.counts |= dict.fromkeys(group, means[0])
        found.moments |= dict.fromkeys(group, means[1])
        if means[2] is not None:
            found.hessians |= dict.fromkeys(group, means[2])
