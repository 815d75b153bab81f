"""Smoothing: how strongly each channel is divided, what that makes of the tensors, and the gate that proves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...core.scope import PerToken
from ...functional import dequantize, dynamic_quantize, fake_quantize
from ...schemes import ActivationFormat, Recipe, Scheme, WeightFormat, get_method
from ..errors import FlowError
from .folds import Fold, Producer

#: alpha="auto" tries these. None does not smooth; an alpha of 0 would: it makes the largest weight of each column 1.
GRID = (None, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass
class Smoothing:
    """The tensors of a model after smoothing, and the divisors of what each linear reads."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    #: Linear weight -> the divisor of each of its input channels.
    divisors: dict[str, Tensor] = field(default_factory=dict)
    alphas: dict[str, float | None] = field(default_factory=dict)
    #: Each fold with the divisors that really happened.
    folds: list[tuple[Fold, Tensor]] = field(default_factory=list)

    def add(self, fold: Fold, strength: Tensor, parameters: dict[str, Tensor], alpha: float | None) -> None:
        """Add one fold; `strength` has a divisor for each channel of the producer."""
        strength = strength.clone()
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
            self.alphas[absorber.parameter] = alpha

    def _fold_norm(self, producer: Producer, strength: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Divide a norm's gain, and return the divisors that the weights must absorb.

        The gain is rounded to the checkpoint's type first. The weights then absorb old gain / new gain, the division
        that really happened, so that rounding a norm to bf16 costs nothing. Nothing can absorb the rounding of the
        bias. It is rounded when it is written, so that the gate measures the division alone.
        """
        weight = parameters[producer.parameter].cpu()
        gain = producer.offset + weight.float()
        stored = (gain / strength - producer.offset).to(weight.dtype)
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


def strength(activation: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """max|x|^alpha / max|w|^(1 - alpha) for each channel; 1 where either never differs from zero."""
    ratio = activation.double().pow(alpha) / weight.double().pow(1 - alpha)
    usable = (activation > 0) & (weight > 0) & torch.isfinite(ratio) & (ratio > 1e-5) & (ratio < 1e5)
    return torch.where(usable, ratio, torch.ones_like(ratio)).float()


def channel_maxima(fold: Fold, maxima: dict[str, Tensor], weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The largest activation and weight that meet in each channel of the producer, over all that read it."""
    activation, weight = torch.zeros(fold.producer.channels), torch.zeros(fold.producer.channels)
    for absorber in fold.absorbers:
        index = torch.tensor(absorber.channels)
        columns = weights[absorber.parameter].detach().abs().amax(1 - absorber.axis).float().cpu()
        weight.scatter_reduce_(0, index, columns, "amax")
        if absorber.parameter in maxima:
            activation.scatter_reduce_(0, index, maxima[absorber.parameter].float().cpu(), "amax")
    return activation, weight


def search_alpha(
    fold: Fold, maxima: dict[str, Tensor], weights: dict[str, Tensor], inputs: dict[str, Tensor], recipe: Recipe
) -> tuple[float | None, Tensor]:
    """The alpha of the grid whose quantized outputs are nearest the float ones, over everything the fold feeds."""
    activation, weight = channel_maxima(fold, maxima, weights)
    best: tuple[float, float | None, Tensor] | None = None
    for alpha in GRID:
        divisor = torch.ones_like(activation) if alpha is None else strength(activation, weight, alpha)
        divisor[list(fold.fixed)] = 1.0
        error = 0.0
        for absorber in fold.absorbers:
            if absorber.parameter in inputs and absorber.axis == 1:
                s, name = divisor[list(absorber.channels)], absorber.parameter
                scheme = recipe.of(name.removesuffix(".weight")).scheme
                error += output_error(inputs[name], weights[name], s, scheme)
        if best is None or error < best[0]:
            best = (error, alpha, divisor)
    assert best is not None
    return best[1], best[2]


def output_error(x: Tensor, weight: Tensor, divisor: Tensor, scheme: Scheme) -> float:
    """Squared error of the quantized linear relative to the float one, for these inputs."""
    x, weight, divisor = x.to(weight.device).float(), weight.detach().float(), divisor.to(weight.device)
    smooth, scaled = x / divisor, weight * divisor
    format, columns = scheme.weight, weight.shape[1]
    if format.group_size is not None and columns % format.group_size:
        format = WeightFormat(format.element)  # a Linear that stays float: it is compared as if it had no groups
    w_hat = get_method("rtn").quantize(scaled, format).dequantize(format, columns)
    exact = x @ weight.T
    noise = _quantized_input(smooth, scheme.activation) @ w_hat.T - exact
    return float(noise.square().sum() / exact.square().sum().clamp_min(1e-30))


def _quantized_input(x: Tensor, format: ActivationFormat) -> Tensor:
    """What a linear sees of its input, as floats."""
    if format.kind == "float":
        return x
    if format.kind == "static":
        largest = float(x.abs().max())
        return fake_quantize(x, largest / 127 if largest > 0 else 1.0, q_min=-127)
    q = dynamic_quantize(x, scope=PerToken())
    return dequantize(q.q, q.scale, scope=PerToken())


# -- the gate ----------------------------------------------------------------------------------------------------


class Gate:
    """Outputs of the model and of its layers before smoothing; after it they must be the same to rounding."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], folds: list[Fold]) -> None:
        self.model, self.batch = model, batch
        # Dividing a linear's rows changes its output on purpose: those are compared where they are absorbed.
        scaled = {fold.producer.parameter.removesuffix(".weight") for fold in folds}
        absorbing = {a.parameter.removesuffix(".weight") for fold in folds for a in fold.absorbers}
        self.watched = [
            name
            for name, module in model.named_modules()
            if (isinstance(module, nn.Linear) or name in absorbing) and name not in scaled
        ]
        self.before = self._run()

    def check(self) -> dict[str, Any]:
        """The largest difference, relative to each output's own size; raises where one moved."""
        worst = 0.0
        for (name, before), (_, after) in zip(self.before, self._run(), strict=True):
            size = before.square().mean().sqrt().clamp_min(1e-12)
            difference = float((after - before).square().mean().sqrt() / size)
            worst = max(worst, difference)
            if not difference <= self.tolerance:
                raise FlowError(
                    f"smoothing moved {name or 'the output of the model'} by {difference:.2e} of its size, more than "
                    f"rounding explains ({self.tolerance:.0e}): nothing was written. Please --ignore its inputs' "
                    "layers, or use --scheme w8a8"
                )
        return {"largest_difference": worst, "tolerance": self.tolerance, "dtype": str(self.dtype)}

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def tolerance(self) -> float:
        """A few hundred roundings of the type the model runs in, and never more than a twentieth."""
        return min(0.05, 2**10 * torch.finfo(self.dtype).eps)

    def _run(self) -> list[tuple[str, Tensor]]:
        seen: list[tuple[str, Tensor]] = []

        def watch(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor):  # some routers are Linears that return several
                    seen.append((name, output.detach().float().clone()))

            return hook

        handles = [self.model.get_submodule(name).register_forward_hook(watch(name)) for name in self.watched]
        try:
            with torch.no_grad():
                result = self.model(**self.batch)
        finally:
            for handle in handles:
                handle.remove()
        first = result[0] if isinstance(result, tuple) else next(iter(result.values()))
        return [*seen, ("", first.detach().float())]
