"""Scales of least squared error: per group, and as an integer factor of one scale per output channel.

Every function is deterministic: rows do not depend on each other, and a row is computed by one thread's fixed order of
operations, whatever rows are beside it. All errors are those of the scale as it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Largest magnitude / scale, in units of the largest integer: below 1 keeps headroom, above 1 clips.
RATIOS = (0.93, 1.0, 1.07, 1.145, 1.215, 1.29, 1.39, 1.5)
#: Then this many times: the best scale for the integers that the best scale gave.
REFINEMENTS = 2
#: The largest integer factor: s4 times it still fits in s8.
LARGEST_FACTOR = 15
#: Elements searched together: small enough for a core's cache.
BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Rounding:
    """How weights become integers: the range, and the type that scales are stored in."""

    low: int
    high: int
    dtype: torch.dtype

    def stored(self, scale: Tensor) -> Tensor:
        """f32 scales as they are once stored: at least the smallest one, and 1 where there is nothing to scale.

        NaN and infinities stay, so that whoever stores them can say that the weight holds some.
        """
        kept = scale.to(self.dtype).float().clamp_min(least_scale(self.dtype))
        return torch.where(scale == 0, 1.0, kept)

    def integers(self, values: Tensor, scale: Tensor) -> Tensor:
        """Nearest integers, as floats."""
        return (values / scale).round_().clamp_(self.low, self.high)


def least_scale(dtype: torch.dtype) -> float:
    """The smallest scale: f16 has few exponents, so that its subnormal numbers are used."""
    return 2.0**-24 if dtype is torch.float16 else 2.0**-126


def search_scales(weight: Tensor, group: int, rounding: Rounding, importance: Tensor | None = None) -> Tensor:
    """Scales `[N, K / group]` in f32, of least squared error, for whole rows `[N, K]` of a weight.

    `importance` `[K]` weighs the error of each column, as the mean square of the input channel does.
    """
    columns, device = weight.shape[1], weight.device
    weight, importance = _on_cpu(weight, importance)
    blocks = [_search(rows, group, rounding, importance) for rows in _blocks(weight)]
    return torch.cat(blocks).to(device) if blocks else torch.ones(0, columns // group, device=device)


def search_factors(
    weight: Tensor, group: int, rounding: Rounding, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scales `[N]` in f32 and integer factors `[N, K / group]` in 1..15: `scale * factor` is the scale of a group.

    The scales have so few bits that every product is exact in the stored type: a file of group scales holds them, and a
    reader can tell the factors from it.
    """
    columns, device = weight.shape[1], weight.device
    weight, importance = _on_cpu(weight, importance)
    pairs = [_factors(rows, group, rounding, importance) for rows in _blocks(weight)]
    if not pairs:
        return torch.ones(0, device=device), torch.ones(0, columns // group, dtype=torch.int8, device=device)
    scales, factors = (torch.cat(parts).to(device) for parts in zip(*pairs, strict=True))
    return scales, factors


def _on_cpu(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Errors are sums of floats, which a GPU adds in another order: the search gives the same scales everywhere."""
    return weight.cpu(), None if importance is None else importance.cpu()


def split_factors(scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scales `[N]` in f32 and factors `[N, G]` in u8 whose products are `scales` exactly; None where there are none."""
    wide = scales.double()
    channel, factors = torch.zeros(len(wide), dtype=torch.float64, device=wide.device), torch.zeros_like(wide)
    for largest in range(1, LARGEST_FACTOR + 1):
        candidate = wide.amax(1) / largest
        ratio = (wide / candidate[:, None]).round_()
        exact = (ratio * candidate[:, None] == wide).all(1) & (ratio >= 1).all(1) & (candidate.float() == candidate)
        exact &= channel == 0
        channel, factors = torch.where(exact, candidate, channel), torch.where(exact[:, None], ratio, factors)
    if not bool((channel > 0).all()):
        return None
    return channel.float(), factors.to(torch.uint8)


# -- blocks of rows ----------------------------------------------------------------------------------------------


def _blocks(weight: Tensor) -> list[Tensor]:
    step = max(1, BLOCK_ELEMENTS // max(1, weight.shape[1]))
    return [weight[first : first + step] for first in range(0, weight.shape[0], step)]


def _search(rows: Tensor, group: int, rounding: Rounding, importance: Tensor | None) -> Tensor:
    groups = rows.float().reshape(rows.shape[0], rows.shape[1] // group, group)
    weights = _weights(groups, importance)
    largest = groups.abs().amax(-1, keepdim=True)
    best = _Best(groups, weights, rounding)
    for ratio in RATIOS:
        best.offer(rounding.stored(largest / (rounding.high * ratio)))
    for _ in range(REFINEMENTS):
        best.offer(rounding.stored(best.refined()))
    return best.scale.squeeze(-1)


def _factors(rows: Tensor, group: int, rounding: Rounding, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    wanted = _search(rows, group, rounding, importance)
    groups = rows.float().reshape(rows.shape[0], rows.shape[1] // group, group)
    weights = _weights(groups, importance)
    # A group of zeros asks for nothing: its stand-in scale of 1 must not decide the channel's.
    wanted = torch.where((groups != 0).any(-1), wanted, 0.0)
    largest = wanted.amax(-1)
    chosen: tuple[Tensor, Tensor, Tensor] | None = None
    for candidate in _channel_scales(largest, rounding):
        factors = (wanted / candidate[:, None]).round_().clamp_(1, LARGEST_FACTOR)
        error = _error(groups, (candidate[:, None] * factors)[..., None], weights, rounding).sum(-1)
        if chosen is None:
            chosen = error, candidate, factors
        else:
            better = error < chosen[0]
            chosen = (torch.where(better, error, chosen[0]), torch.where(better, candidate, chosen[1]),
                      torch.where(better[:, None], factors, chosen[2]))  # fmt: skip
    assert chosen is not None
    _, scale, factors = chosen
    error = _error(groups, (scale[:, None] * factors)[..., None], weights, rounding)
    for change in (-1, 1):
        other = (factors + change).clamp_(1, LARGEST_FACTOR)
        its = _error(groups, (scale[:, None] * other)[..., None], weights, rounding)
        factors, error = torch.where(its < error, other, factors), torch.minimum(its, error)
    return scale, factors.to(torch.int8)


def _channel_scales(largest: Tensor, rounding: Rounding) -> list[Tensor]:
    """The scales whose multiples up to 15 are exact in the stored type and reach `largest` with a factor of 8 to 15."""
    bits = {torch.bfloat16: 4, torch.float16: 7}.get(rounding.dtype, 16)
    steps = min(1 << (bits - 1), 16)  # of an octave; more are no better
    mantissa, exponent = torch.frexp(largest / LARGEST_FACTOR)
    candidates = []
    for i in range(steps):
        # From the first number of few bits that is not below largest / 15, an octave up.
        at = torch.ceil(mantissa * (2 * steps)) + i
        value = torch.ldexp(at, exponent) / (2 * steps)
        # At the top of an octave the numbers are twice as far apart.
        top, top_exponent = torch.frexp(value)
        value = torch.ldexp(torch.floor(top * (2 * steps)), top_exponent) / (2 * steps)
        smallest = least_scale(rounding.dtype) if rounding.dtype is torch.float16 else least_scale(torch.float32)
        candidates.append(torch.where(largest == 0, 1.0, value.clamp_min(smallest)))
    return candidates


def _weights(groups: Tensor, importance: Tensor | None) -> Tensor | None:
    return None if importance is None else importance.to(groups).reshape(1, *groups.shape[1:])


def _error(groups: Tensor, scale: Tensor, weights: Tensor | None, rounding: Rounding) -> Tensor:
    error = rounding.integers(groups, scale).mul_(scale).sub_(groups).square_()
    return (error if weights is None else error.mul_(weights)).sum(-1)


class _Best:
    """The best scale of each group so far, and its error."""

    def __init__(self, groups: Tensor, weights: Tensor | None, rounding: Rounding) -> None:
        self.groups, self.weights, self.rounding = groups, weights, rounding
        self.scale = self.error = torch.empty(0)

    def offer(self, scale: Tensor) -> None:
        error = _error(self.groups, scale, self.weights, self.rounding).unsqueeze(-1)
        if not self.scale.numel():
            self.scale, self.error = scale, error
            return
        self.scale = torch.where(error < self.error, scale, self.scale)
        # Not the smaller one: where both are NaN, the scale stays.
        self.error = torch.where(error < self.error, error, self.error)

    def refined(self) -> Tensor:
        """The scale of least squared error for the integers of the best one."""
        integers = self.rounding.integers(self.groups, self.scale)
        weighted = integers if self.weights is None else integers * self.weights
        product = (weighted * self.groups).sum(-1, keepdim=True)
        size = integers.mul_(weighted).sum(-1, keepdim=True)
        return torch.where((size > 0) & (product > 0), product / size, self.scale)
