"""How strongly a fold divides each channel: by a rule with a strength alpha, given or searched.

One search serves all schemes and methods. It tries the rules that a fold's linears can gain from, and keeps the
divisors whose quantized outputs are expected to be nearest the float ones. Nothing is rounded for that: an integer's
error is spread evenly over its step, so that steps alone tell the noise of weights and inputs. Call it where torch has
one thread: then its choices do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...schemes import Choice, Scheme
from ...schemes.gptq import FactoredHessian
from .folds import Fold
from .trace import Value

Rule = Literal["none", "smoothquant", "awq"]


@dataclass(frozen=True)
class Strength:
    """A rule for the divisors of a fold's channels, and its strength.

    - `none`: all are 1.
    - `smoothquant`: max|x| ** alpha / max|w| ** (1 - alpha), which evens out the maxima of inputs and weights.
    - `awq`: rms(x) ** alpha. Columns that read large inputs grow, and with them the precision of their integers.
    """

    rule: Rule = "none"
    alpha: float | None = None


ALPHAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
#: Of the second moments of the rows that are kept, which are fewer than what GPTQ sees.
DAMPING = 0.05


@dataclass(frozen=True)
class Channels:
    """What meets in each channel of a producer, over all that read it."""

    largest: Tensor
    """The largest input."""
    weight: Tensor
    """The largest weight."""
    rms: Tensor | None = None
    """The root mean square of the input, where rows of it are known."""

    @classmethod
    def of(
        cls, fold: Fold, maxima: Mapping[str, Tensor], weights: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> Channels:
        largest, weight, squares = (torch.zeros(fold.producer.channels) for _ in range(3))
        for absorber in fold.absorbers:
            name, index = absorber.parameter, torch.tensor(absorber.channels)
            columns = weights[name].detach().abs().amax(1 - absorber.axis).float().cpu()
            weight.scatter_reduce_(0, index, columns, "amax")
            if name in maxima:
                largest.scatter_reduce_(0, index, maxima[name].float().cpu(), "amax")
            if name in rows:
                squares.scatter_reduce_(0, index, rows[name].double().square().mean(0).float(), "amax")
        return cls(largest, weight, squares.sqrt() if rows else None)

    def divisor(self, strength: Strength) -> Tensor:
        """The divisor of each channel by a rule; 1 where input or weight never differ from zero."""
        if strength.alpha is None:
            return torch.ones_like(self.largest)
        if strength.rule == "smoothquant":
            ratio = self.largest.double().pow(strength.alpha) / self.weight.double().pow(1 - strength.alpha)
        else:
            assert self.rms is not None
            ratio = self.rms.double().pow(strength.alpha)
            if bool((used := (self.rms > 0)).any()):
                ratio = ratio / ratio[used].log().mean().exp()  # their mean stays: it changes no group's integers
        usable = (self.largest > 0) & (self.weight > 0) & torch.isfinite(ratio) & (ratio > 1e-5) & (ratio < 1e5)
        return torch.where(usable, ratio, torch.ones_like(ratio)).float()


def candidates(schemes: list[Scheme]) -> list[Strength]:
    """What the search tries for linears of these schemes."""
    rules: list[Rule] = []
    if any(scheme.activation.kind != "float" for scheme in schemes):
        rules.append("smoothquant")
    if any(scheme.weight.element.is_packed for scheme in schemes):
        rules.append("awq")
    return [Strength(), *(Strength(rule, alpha) for rule in rules for alpha in ALPHAS)]


def search(
    fold: Fold,
    channels: Channels,
    weights: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    choices: Mapping[str, Choice],
) -> Strength:
    """The strength with the least expected error, over all linears that the fold feeds.

    `choices` has those that are quantized; the first of several equal strengths is taken.
    """
    reading = [a for a in fold.absorbers if a.parameter in rows and a.parameter in choices and a.axis == 1]
    known: dict[tuple[Value, bool], Tensor] = {}
    linears: list[Linear] = []
    for absorber in reading:
        x, choice = rows[absorber.parameter].double(), choices[absorber.parameter]
        compensates = choice.method.needs == "hessian"
        if (absorber.value, compensates) not in known:
            known[absorber.value, compensates] = sensitivity(x, compensates)
        linears.append(Linear.of(x, weights[absorber.parameter], choice.scheme, known[absorber.value, compensates]))
    best: tuple[float, Strength] | None = None
    for strength in candidates([linear.scheme for linear in linears]):
        divisor = channels.divisor(strength)
        divisor[list(fold.fixed)] = 1.0
        error = sum(linear.error(divisor[list(a.channels)]) for a, linear in zip(reading, linears, strict=True))
        if best is None or error < best[0]:
            best = error, strength
    assert best is not None
    return best[1]


def sensitivity(x: Tensor, compensates: bool) -> Tensor:
    """`[K]`: the square of the output that a weight's error in each column costs, for rows `[T, K]` of the input.

    Where the method `compensates` for an error in the columns that it rounds later, it costs only as much of the input
    as those cannot predict: the conditional variance, which the factor of the hessian has on its diagonal.
    """
    if not compensates:
        return x.square().mean(0)
    factored = FactoredHessian.of((x.T @ x / len(x)).double(), DAMPING)
    found = torch.empty(x.shape[1], dtype=torch.float64)
    found[factored.order] = factored.factor.diagonal().double().square().reciprocal()
    return found


@dataclass(frozen=True)
class Linear:
    """A linear that is to be quantized, with some of its inputs."""

    x: Tensor
    weight: Tensor
    scheme: Scheme
    sensitivity: Tensor
    signal: float
    """The mean square of its output, summed over channels."""

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, scheme: Scheme, sensitivity: Tensor) -> Linear:
        weight, x = weight.detach().float().cpu(), x.float()
        signal = float((x @ weight.T).double().square().sum() / len(x))
        return cls(x, weight, scheme, sensitivity, max(signal, 1e-30))

    def error(self, divisor: Tensor) -> float:
        """The expected square of the error of its output, relative to that of the output, its input divided by these.

        A value that is rounded to a multiple of its step is off by step ** 2 / 12 in the mean square.
        """
        (rows, columns), size = self.weight.shape, self.scheme.weight.group_size
        if size is None or columns % size:
            size = columns  # where groups do not divide it, the Linear stays float: compared as if it had none
        low, high = self.scheme.weight.range
        scaled = self.weight * divisor
        steps = scaled.view(rows, columns // size, size).abs().amax(-1).double() / ((high - low) / 2)
        costs = (self.sensitivity / divisor.double().square()).view(-1, size).sum(1)
        noise = float((steps.square().sum(0) * costs).sum())
        if self.scheme.activation.kind != "float":
            largest = (self.x / divisor).abs().amax(1).double() / (self.scheme.activation.q_max or 127)
            largest = largest.max() if self.scheme.activation.kind == "static" else largest
            noise += float(largest.square().mean() * scaled.double().square().sum())
        return noise / 12 / self.signal
