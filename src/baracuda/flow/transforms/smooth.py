"""Smoothing: what dividing the channels of some folds makes of the tensors of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .folds import Fold, Producer
from .strengths import Strength


@dataclass
class Smoothing:
    """The tensors of a model after smoothing, and the divisors of what each linear reads."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    #: Linear weight -> the divisor of each of its input channels.
    divisors: dict[str, Tensor] = field(default_factory=dict)
    #: Linear weight -> how the divisors were chosen.
    strengths: dict[str, Strength] = field(default_factory=dict)
    #: Each fold with the divisors that really happened.
    folds: list[tuple[Fold, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, chosen: Iterable[tuple[Fold, Strength, Tensor]], parameters: dict[str, Tensor]) -> Smoothing:
        """All folds, each with its strength and the divisor of each channel of its producer."""
        made = cls()
        for fold, strength, divisor in chosen:
            made.add(fold, divisor, parameters, strength)
        return made

    def add(self, fold: Fold, divisor: Tensor, parameters: dict[str, Tensor], chosen: Strength) -> None:
        """Add one fold; `divisor` has one for each channel of the producer."""
        strength = divisor.clone()
        strength[list(fold.fixed)] = 1.0
        producer = fold.producer
        if producer.kind == "norm":
            strength = self._fold_norm(producer, strength, parameters)
        else:
            for name in filter(None, (producer.parameter, producer.bias)):
                self.rows[name] = self.rows[name] * strength if name in self.rows else strength
        self.folds.append((fold, strength))
        for absorber in fold.absorbers:
            divisor = strength[list(absorber.channels)]
            self.columns[absorber.parameter] = divisor
            self.divisors[absorber.parameter] = divisor
            self.strengths[absorber.parameter] = chosen

    def _fold_norm(self, producer: Producer, strength: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Divide a norm's gain, and return the divisors that the weights must absorb.

        The gain is rounded to the checkpoint's type first. The weights then absorb old gain / new gain, the division
        that really happened, so that rounding a norm to bf16 costs nothing. Nothing can absorb the rounding of the
        bias. It is rounded when it is written, so that the gate measures the division alone.
        """
        weight = parameters[producer.parameter].cpu()
        gain = producer.offset + weight.float()
        stored = (gain / strength - producer.offset).to(weight.dtype)
        # A gain of zero would lose its channel. Near 1 + weight = 0, steps of the stored type are large.
        vanished = (producer.offset + stored.float() == 0) & (gain != 0)
        stored = torch.where(vanished, torch.nextafter(stored, weight), stored)
        new_gain = producer.offset + stored.float()
        exact = torch.where(new_gain != 0, gain / new_gain, torch.ones_like(gain))
        usable = torch.isfinite(exact) & (exact > 0)
        if producer.bias is not None:
            bias = parameters[producer.bias].cpu()
            usable &= torch.isfinite((bias.float() / exact).to(bias.dtype))
        stored, exact = torch.where(usable, stored, weight), torch.where(usable, exact, torch.ones_like(exact))
        self.replaced[producer.parameter] = stored
        if producer.bias is not None:
            self.replaced[producer.bias] = bias.float() / exact
        return exact

    def apply(self, model: nn.Module, axes: dict[str, int]) -> None:
        """Smooth a float model in place; `axes` names the weights whose input axis is not 1."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, divisor in self.rows.items():
                p = parameters[name]
                shape = [1] * p.ndim
                shape[(1 - axes.get(name, 1)) if p.ndim == 2 else 0] = -1
                p.div_(divisor.to(p).view(shape))
            for name, factor in self.columns.items():
                p = parameters[name]
                shape = [1, 1]
                shape[axes.get(name, 1)] = -1
                p.mul_(factor.to(p).view(shape))
            for name, value in self.replaced.items():
                parameters[name].copy_(value)
