"""Observers: what a static fake-quantization remembers of the values it has seen, and the range it draws from them.

Each keeps plain buffers, one entry for each segment of its scope, and answers `range() -> (low, high)`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.errors import InvalidProblem
from ..core.scope import PerTensor, Scope, Shape


class Observer(nn.Module):
    """Base: the extremes of each segment, and the buffers `low` and `high`: empty ranges until something is seen."""

    low: Tensor
    high: Tensor

    def __init__(self, scope: Scope = PerTensor(), scale_shape: Shape = ()) -> None:
        super().__init__()
        self.scope, self.scale_shape = scope, tuple(scale_shape)
        self.register_buffer("low", torch.full(self.scale_shape, float("inf"), dtype=torch.float32))
        self.register_buffer("high", torch.full(self.scale_shape, float("-inf"), dtype=torch.float32))

    def forward(self, x: Tensor) -> None:
        if x.numel():
            self.see(x.detach())

    def see(self, x: Tensor) -> None:
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest value of every segment that quantization should keep; NaN where nothing was seen."""
        seen = self.low <= self.high
        return torch.where(seen, self.low, torch.nan), torch.where(seen, self.high, torch.nan)

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """In x's own type, where they are exact, then in that of the buffers."""
        segments = self.segments(x)
        if not self.scale_shape:
            low, high = torch.aminmax(segments)
        else:
            low, high = segments.amin(dim=(0, 2)), segments.amax(dim=(0, 2))
        kept = self.low.dtype
        return low.to(kept).view(self.scale_shape), high.to(kept).view(self.scale_shape)

    def segments(self, x: Tensor) -> Tensor:
        """x through the scope's view, `[repeat, rows, run, inner]`."""
        shape = tuple(x.shape)
        found = self.scope.scale_shape(shape)
        if found != self.scale_shape:
            raise InvalidProblem(
                f"{type(self).__name__}: expected inputs with scales of shape {list(self.scale_shape)}, "
                f"got {list(shape)} with {list(found)} under {self.scope}"
            )
        return x.reshape(self.scope.view(shape).shape)


class MinMax(Observer):
    """The extremes of everything seen."""

    def see(self, x: Tensor) -> None:
        low, high = self.extremes(x)
        self.low.copy_(torch.minimum(self.low, low))
        self.high.copy_(torch.maximum(self.high, high))


class MovingAverage(Observer):
    """Extremes that move towards those of each batch by the fraction `momentum`; the first batch sets them."""

    def __init__(self, scope: Scope = PerTensor(), scale_shape: Shape = (), *, momentum: float = 0.01) -> None:
        super().__init__(scope, scale_shape)
        if not 0 < momentum <= 1:
            raise InvalidProblem(f"momentum: expected a number in (0, 1], got {momentum}")
        self.momentum = momentum

    def see(self, x: Tensor) -> None:
        for kept, found in zip((self.low, self.high), self.extremes(x), strict=True):
            moved = kept + self.momentum * (found - kept)
            kept.copy_(torch.where(kept.isinf(), found, moved))


class Percentile(Observer):
    """The range that holds `percentile` percent of the values: a histogram decides, so a few outliers do not.

    Bins have one width for each segment and lie evenly around zero. When a value falls outside, the width doubles as
    often as needed and neighbouring bins merge, so that counts stay exact and the histogram's size stays the same.
    """

    counts: Tensor
    limit: Tensor

    def __init__(
        self, scope: Scope = PerTensor(), scale_shape: Shape = (), *, percentile: float = 99.99, bins: int = 2048
    ) -> None:
        super().__init__(scope, scale_shape)
        if not 50 < percentile <= 100:
            raise InvalidProblem(f"percentile: expected a number in (50, 100], got {percentile}")
        if bins < 4 or bins % 4:
            raise InvalidProblem(f"bins: expected a multiple of 4, got {bins}")
        self.percentile, self.bins = percentile, bins
        rows = torch.Size(self.scale_shape).numel()
        self.register_buffer("counts", torch.zeros(rows, bins, dtype=torch.int64))
        self.register_buffer("limit", torch.zeros(rows, dtype=torch.float32))

    def see(self, x: Tensor) -> None:
        low, high = self.extremes(x)
        self.low.copy_(torch.minimum(self.low, low))
        self.high.copy_(torch.maximum(self.high, high))
        self._widen(torch.maximum(low.abs(), high.abs()).reshape(-1))
        view = self.segments(x).to(self.low.dtype)
        rows, inner = view.shape[1], view.shape[3]
        values = view.permute(1, 3, 0, 2).reshape(rows * inner, -1)
        usable = self.limit > 0
        width = torch.where(usable, 2 * self.limit / self.bins, 1.0).unsqueeze(1)
        index = torch.floor(values / width).nan_to_num(0).clamp(-self.bins // 2, self.bins // 2 - 1).long()
        index += self.bins // 2 + torch.arange(len(values), device=x.device).unsqueeze(1) * self.bins
        finite = values.isfinite()
        self.counts += torch.bincount(index[finite], minlength=self.counts.numel()).view(self.counts.shape)

    def _widen(self, reached: Tensor) -> None:
        """Double limits until they hold `reached`; a first limit is the next power of two."""
        reached = torch.where(reached.isfinite(), reached, 0.0)
        needed = torch.exp2(torch.ceil(torch.log2(reached.clamp(min=2.0**-120))))
        empty = self.limit == 0
        target = torch.where(reached > 0, torch.maximum(self.limit, needed), self.limit)
        factor = torch.where(empty, 1.0, target / torch.where(empty, 1.0, self.limit)).unsqueeze(1)
        half = self.bins // 2
        old = torch.arange(self.bins, device=reached.device) - half
        new = (torch.floor(old / factor) + half).long().expand(self.counts.shape)
        self.counts.copy_(torch.zeros_like(self.counts).scatter_add_(1, new, self.counts))
        self.limit.copy_(target)

    def range(self) -> tuple[Tensor, Tensor]:
        """The tightest bin edges with no more than the rest of the values beyond them, never wider than what was seen.

        Half of that rest may lie beyond each end.
        """
        low, high = super().range()
        total = self.counts.sum(dim=1, keepdim=True)
        spare = (total.double() * (1 - self.percentile / 100) / 2).floor()
        below, above = self.counts.cumsum(dim=1), self.counts.flip(1).cumsum(dim=1)
        width = 2 * self.limit / self.bins
        first, last = (below <= spare).sum(dim=1), self.bins - (above <= spare).sum(dim=1)
        edge_low = ((first - self.bins // 2) * width).view(self.scale_shape)
        edge_high = ((last - self.bins // 2) * width).view(self.scale_shape)
        return torch.maximum(low, edge_low), torch.minimum(high, edge_high)
