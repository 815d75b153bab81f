"""The options of a run: what they mean together, and which combinations are refused before anything is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...core.errors import InvalidProblem
from ...schemes import Choice, Method, Needs, Recipe, Scheme, checkpoint_scheme, get_method
from ...schemes.calibration import strongest
from ..errors import FlowError, require_pattern
from .recipe_file import Rule

#: stage, bytes or steps done since the last call, total of the stage, what is being worked on
Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Options:
    """Everything that decides the bytes of the result. None stands for the default of the scheme."""

    scheme: str = "w8a8"
    activations: str = "dynamic"
    alpha: float | str = 0.5
    ignore: tuple[str, ...] = ()
    group_size: int = 128
    samples: int = 128
    sequence_length: int = 512
    smooth: bool | None = None
    method: str = "rtn"
    one_shot: bool = False
    rules: tuple[Rule, ...] = ()
    budget: float | None = None
    max_kl: float | None = None
    quantize_head: bool = False

    def __post_init__(self) -> None:
        # W8A8 and w8a8 are one scheme, so a run that was begun with the one goes on with the other.
        for name in ("scheme", "activations", "method"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, value.lower())

    def plan(self) -> Plan:
        """What is done to which layer; raises for options that contradict each other."""
        scheme, smooths = self._scheme(self.scheme, self.group_size)
        if self.smooth is False and smooths:
            raise FlowError(f"{self.scheme} smooths: drop smooth=False, or use --scheme w8a8")
        rules = []
        for rule in self.rules:
            own, smooth = self._scheme(rule.scheme or self.scheme, rule.group_size or self.group_size)
            if smooth and not smooths:
                raise FlowError(f"{rule.match}: smoothing is for the whole model: use scheme w8a8 there, and --smooth")
            rules.append((rule.match, Choice(own, _method(rule.method or self.method))))
        recipe = Recipe(Choice(scheme, _method(self.method)), tuple(rules))
        if self.one_shot and recipe.needs is None:
            raise FlowError(f"method {self.method} needs no data: drop --one-shot, or use --method gptq")
        self._require_choosable(recipe)
        sequential = recipe.needs is not None and not self.one_shot
        return Plan(recipe, smooths or bool(self.smooth), sequential, self.chooses)

    @property
    def chooses(self) -> bool:
        """Whether some layers get more bits, chosen by what quantizing them does to the model."""
        return self.budget is not None or self.max_kl is not None

    def _require_choosable(self, recipe: Recipe) -> None:
        """Raise for a budget that cannot be met, and for schemes without a choice."""
        if not self.chooses:
            return
        if self.budget is not None and self.max_kl is not None:
            raise FlowError("expected --budget or --max-kl, got both; drop one")
        if self.budget is not None and not 4 <= self.budget <= 16:
            raise FlowError(f"--budget: expected average bits from 4 to 16, got {self.budget:g}")
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise FlowError(f"--max-kl: expected a positive number, got {self.max_kl:g}")
        if recipe.static or all(choice.scheme.weight.bits == 8 for choice in recipe.choices):
            raise FlowError(
                "--budget and --max-kl choose which 4-bit layers get 8 bits: use --scheme w4a16 or w4a8, and dynamic "
                "activations"
            )

    def _scheme(self, name: str, group_size: int) -> tuple[Scheme, bool]:
        """A scheme with these activations and groups, and whether its name also asks for smoothing."""
        scheme: Scheme
        scheme, smooths = _explained(lambda: checkpoint_scheme(name))
        if self.activations not in ("dynamic", "static"):
            raise FlowError(f"activations: expected dynamic or static, got {self.activations!r}")
        if scheme.activation.kind == "float" and self.activations == "static":
            raise FlowError(f"{name} keeps activations in floating point: drop --activations static")
        if scheme.weight.element.is_packed and self.activations == "static":
            raise FlowError(f"{name} has a scale for each token: drop --activations static, or use --scheme w8a8")
        if group_size < 8 or group_size % 8:
            raise FlowError(f"group_size: expected a positive multiple of 8, got {group_size}")
        if self.activations == "static":
            scheme = scheme.with_activations("static")
        return scheme.with_groups(group_size) if scheme.weight.group_size is not None else scheme, smooths

    def check(self) -> None:
        """Raise for values that are out of range."""
        if self.alpha != "auto" and not (isinstance(self.alpha, (int, float)) and 0 <= self.alpha <= 1):
            raise FlowError(f"alpha: expected a number in [0, 1] or 'auto', got {self.alpha!r}")
        for name, least in (("samples", 1), ("sequence_length", 2)):
            if getattr(self, name) < least:
                raise FlowError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        for pattern in self.ignore:
            require_pattern(pattern)
        for rule in self.rules:
            require_pattern(rule.match, "recipe: match")

    def why_data(self, plan: Plan) -> str:
        """Which of the options asks for calibration data."""
        if self.budget is not None or self.max_kl is not None:
            return "--budget" if self.budget is not None else "--max-kl"
        if plan.smooth:
            return "--smooth" if self.scheme != "w8a8-smoothquant" else f"--scheme {self.scheme}"
        needing = [choice.method.name for choice in plan.recipe.choices if choice.method.needs is not None]
        return f"--method {needing[0]}" if needing else f"{self.scheme} with {self.activations} activations"

    def record(self) -> dict[str, Any]:
        """As JSON. What is left at its default is not in it where older versions did not have the option."""
        written = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
        newer = {
            "smooth": not self.smooth,
            "method": self.method == Options.method,
            "one_shot": not self.one_shot,
            "rules": not self.rules,
            "budget": self.budget is None,
            "max_kl": self.max_kl is None,
            "quantize_head": not self.quantize_head,
        }
        return {key: value for key, value in written.items() if not newer.get(key, False)}

    def require_used(self, plan: Plan, **given: object) -> None:
        """Reject options that the scheme ignores."""
        scheme = plan.recipe.default.scheme
        name, kind = self.scheme, f"{self.scheme} with {self.activations} activations"
        static = "" if scheme.activation.kind == "float" else ", or add --activations static"
        grouped = scheme.weight.group_size is not None
        unused = {
            "alpha": (plan.smooth, f"{name} does not smooth: drop --alpha, or add --smooth"),
            "group_size": (grouped, f"{name} has no groups: drop --group-size, or use --scheme w4a8 or w4a16"),
            "calibration": (plan.needs_calibration, f"{kind} needs no data: drop --calibration{static}"),
        }
        for option, (used, why) in unused.items():
            if given[option] is not None and not used:
                raise FlowError(why)


@dataclass(frozen=True)
class Plan:
    """What options ask for: a scheme and a method for each layer, and whether to smooth the model first.

    A `sequential` plan calibrates each layer on what the quantized layers before it compute, block by block.
    """

    recipe: Recipe
    smooth: bool
    sequential: bool = False
    #: Whether sensitivities are measured, to choose the bits of each layer.
    chooses: bool = False
    #: Whether searched scales are weighed by the inputs' second moments, for methods that would do without data.
    weighs: bool = False

    def with_data(self) -> Plan:
        """The plan of a run that is given calibration data, which searched scales gain from where nothing needs it."""
        return replace(self, weighs=not self.sequential and any(map(weighable, self.recipe.choices)))

    @property
    def needs(self) -> Needs | None:
        """What is measured of the inputs of the float model."""
        return None if self.sequential else strongest([self.recipe.needs, "moments" if self.weighs else None])

    @property
    def needs_calibration(self) -> bool:
        return self.measures or self.sequential or self.chooses

    @property
    def measures(self) -> bool:
        """Whether the float model is run first, for what is decided before any layer is quantized."""
        return self.smooth or self.recipe.static or self.needs is not None


def weighable(choice: Choice) -> bool:
    """Whether a layer's scales are searched, so that data about its input makes better ones."""
    return choice.method.needs is None and choice.scheme.weight.scales == "search"


def _method(name: str) -> Method:
    found: Method = _explained(lambda: get_method(name))
    return found


def _explained(call: Callable[[], Any]) -> Any:
    """The result of a call, with its InvalidProblem as the FlowError of a run."""
    try:
        return call()
    except InvalidProblem as error:
        raise FlowError(str(error)) from None
