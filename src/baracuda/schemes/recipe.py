"""Which scheme and which method each layer of a model gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.patterns import matches
from .calibration import Needs, strongest
from .formats import Scheme
from .method import Method, get_method


@dataclass(frozen=True)
class Choice:
    """What becomes of one layer."""

    scheme: Scheme
    method: Method = field(default_factory=lambda: get_method("rtn"))


@dataclass(frozen=True)
class Recipe:
    """A choice for each layer: that of the first pattern that matches its name, or else the default."""

    default: Choice
    rules: tuple[tuple[str, Choice], ...] = ()

    def of(self, *names: str) -> Choice:
        """The choice for a layer, which may have several names: one in the checkpoint, another in the model."""
        return next((c for pattern, c in self.rules if any(matches(pattern, n) for n in names)), self.default)

    @property
    def choices(self) -> list[Choice]:
        return [self.default, *(choice for _, choice in self.rules)]

    @property
    def static(self) -> bool:
        """Whether some layer has a calibrated input scale."""
        return any(choice.scheme.activation.kind == "static" for choice in self.choices)

    @property
    def needs(self) -> Needs | None:
        """What calibration must measure for the methods."""
        return strongest([choice.method.needs for choice in self.choices])
