"""The gate behind smoothing: the outputs of a smoothed float model must be those from before, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FlowError
from .folds import Fold


class MovedError(FlowError):
    """Smoothing changed the output of a layer: the fold into it is wrong for this model."""

    def __init__(self, layer: str, difference: float, tolerance: float) -> None:
        self.layer, self.difference, self.tolerance = layer, difference, tolerance
        super().__init__(
            f"smoothing moved {layer or 'the output of the model'} by {difference:.2e} of its size, more than rounding "
            f"explains ({tolerance:.0e}): nothing was written. Please --ignore its inputs' layers, or do not smooth"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all of it: by default only `args`, the message, would reach another process."""
        return type(self), (self.layer, self.difference, self.tolerance)


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
        self.before: list[tuple[str, Tensor]] = []
        self._run(lambda name, output: self.before.append((name, output.clone())))

    def check(self) -> dict[str, Any]:
        """The largest difference, relative to each output's own size; raises where one moved."""
        differences: list[tuple[str, float]] = []

        def compare(name: str, after: Tensor) -> None:
            _, before = self.before[len(differences)]
            size = before.square().mean().sqrt().clamp_min(1e-12)
            differences.append((name, float((after - before).square().mean().sqrt() / size)))

        self._run(compare)
        for name, difference in differences:
            if not difference <= self.tolerance:
                raise MovedError(name, difference, self.tolerance)
        worst = max((difference for _, difference in differences), default=0.0)
        return {"largest_difference": worst, "tolerance": self.tolerance, "dtype": str(self.dtype)}

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def tolerance(self) -> float:
        """A few hundred roundings of the type the model runs in, and never more than a twentieth."""
        return min(0.05, 2**10 * torch.finfo(self.dtype).eps)

    def _run(self, visit: Callable[[str, Tensor], None]) -> None:
        """Show the output of each watched layer in the order they run, then that of the model."""

        def watch(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor):  # some routers are Linears that return several
                    visit(name, output.detach().float())

            return hook

        handles = [self.model.get_submodule(name).register_forward_hook(watch(name)) for name in self.watched]
        try:
            with torch.no_grad():
                result = self.model(**self.batch)
        finally:
            for handle in handles:
                handle.remove()
        first = result[0] if isinstance(result, tuple) else next(iter(result.values()))
        visit("", first.detach().float())
