"""Which layers get more bits: chosen from measured sensitivities, for a budget of bits or a bound on the divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import FlowError


@dataclass(frozen=True)
class Unit:
    """Layers that share a scheme, since servers fuse them; with what each choice costs and does to the model."""

    modules: tuple[str, ...]
    #: Bytes in the file at 4 and at 8 bits.
    small: int
    large: int
    #: KL divergence of the model in which only these layers are quantized, at 4 and at 8 bits.
    kl_small: float = 0.0
    kl_large: float = 0.0

    @property
    def gain(self) -> float:
        """What 8 bits save of the divergence, per byte."""
        return (self.kl_small - self.kl_large) / max(1, self.large - self.small)


def ranked(units: Iterable[Unit]) -> list[Unit]:
    """The units that gain from 8 bits, those first that gain most per byte; equals in the order of their names.

    Gains are compared to three digits: what a forward pass rounds differently on another machine decides nothing.
    """
    gaining = [unit for unit in units if unit.gain > 0]
    return sorted(gaining, key=lambda unit: (-float(f"{unit.gain:.2e}"), unit.modules))


def within_budget(units: list[Unit], fixed_bytes: int, parameters: int, budget: float) -> list[Unit]:
    """The units at 8 bits: as many as the budget pays for, those first that gain most per byte.

    `budget` is in bits for each of `parameters`, scales included; `fixed_bytes` is taken by layers that have no choice.
    """
    spent = fixed_bytes + sum(unit.small for unit in units)
    if spent * 8 > budget * parameters:
        raise FlowError(
            f"--budget {budget:g}: expected at least {spent * 8 / parameters:.3f} bits a weight, which all layers at 4 "
            "bits take with their scales; raise it, or pass a larger --group-size"
        )
    chosen = []
    for unit in ranked(units):
        if (spent + unit.large - unit.small) * 8 <= budget * parameters:
            spent += unit.large - unit.small
            chosen.append(unit)
    return chosen


def within_divergence(
    units: list[Unit], bound: float, measure: Callable[[list[Unit], list[Unit]], float]
) -> tuple[list[Unit], list[Unit], float]:
    """The fewest units at 8 bits, and only then in floating point, with which the model keeps the bound.

    `measure(large, float)` is the divergence of the whole model with these units at 8 bits and in floating point, all
    others at 4 bits. Returns both lists and the divergence that was measured with them.
    """
    order = ranked(units)
    found = _fewest(len(order), lambda count: measure(order[:count], []), bound)
    if found is not None:
        return order[: found[0]], [], found[1]
    # What does not gain from 8 bits stays at 4; whatever harms most becomes float first.
    best = {unit.modules: unit.kl_large if unit.gain > 0 else unit.kl_small for unit in units}
    harm = sorted(units, key=lambda unit: (-float(f"{best[unit.modules] / max(1, unit.large):.2e}"), unit.modules))

    def rest(count: int) -> list[Unit]:
        return [unit for unit in order if unit not in harm[:count]]

    found = _fewest(len(harm), lambda count: measure(rest(count), harm[:count]), bound)
    if found is None:
        raise FlowError(
            f"--max-kl {bound:g}: the layers that have no choice exceed it alone; raise it, or --ignore some of them"
        )
    return rest(found[0]), harm[: found[0]], found[1]


def _fewest(most: int, measure: Callable[[int], float], bound: float) -> tuple[int, float] | None:
    """The smallest count found by halving whose measured divergence is within the bound, with that; None for none."""
    value = measure(most)
    if value > bound:
        return None
    best, low = (most, value), 0
    while low < best[0]:
        middle = (low + best[0]) // 2
        value = measure(middle)
        if value <= bound:
            best = middle, value
        else:
            low = middle + 1
    return best
