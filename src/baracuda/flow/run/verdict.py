"""Whether a result is good: a grade, from figures whose limits are written here and shown in the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .data import BUILTIN
from .overlap import warning

GRADES = ("good", "fair", "poor")
#: Below this many tokens, the figures depend on which ones were taken.
ENOUGH_TOKENS = 2000


@dataclass(frozen=True)
class Criterion:
    """A figure with the limits of good and fair."""

    name: str
    good: float
    fair: float
    form: str
    least: bool
    """Whether the figure should be at least the limit, not at most."""

    def grade(self, value: float) -> str:
        good, fair = (
            (value >= self.good, value >= self.fair) if self.least else (value <= self.good, value <= self.fair)
        )
        return "good" if good else "fair" if fair else "poor"

    def limits(self) -> str:
        """The limits in words."""
        sign = "at least" if self.least else "at most"
        return f"good: {sign} {self.good:{self.form}}, fair: {sign} {self.fair:{self.form}}"


KL = Criterion("KL divergence of the next-token distribution", 0.05, 0.2, ".2g", least=False)
AGREEMENT = Criterion("same most likely token", 0.95, 0.80, ".0%", least=True)
PERPLEXITY = Criterion("perplexity over that of the float model", 1.02, 1.10, ".2f", least=False)
#: Of a model of images or sounds.
ANSWERS = replace(AGREEMENT, name="same largest output")
COSINE = Criterion("least cosine of an embedding", 0.99, 0.95, ".2f", least=True)


@dataclass(frozen=True)
class Verdict:
    """The grade of a result is that of its worst figure; "not measured" where there was nothing to measure it on."""

    grade: str
    figures: tuple[tuple[Criterion, float, str], ...]
    advice: str
    #: Whether the figures come from text that the result was fitted to.
    flattered: bool = False

    def __str__(self) -> str:
        if not self.figures:
            return f"{self.grade}: {self.advice}"
        criterion, value, _ = max(self.figures, key=lambda figure: GRADES.index(figure[2]))
        return f"{self.title}: {criterion.name} {_shown(criterion, value)} ({criterion.limits()}). {self.advice}"

    @property
    def title(self) -> str:
        return f"{self.grade}, but on its calibration text" if self.flattered else self.grade


def verdict(content: dict[str, Any]) -> Verdict:
    """The verdict on the report of a run."""
    evaluation = content["evaluation"]
    figures = tuple((criterion, value, criterion.grade(value)) for criterion, value in _figures(evaluation or {}))
    if not figures:
        advice = f"Add --evaluate FILE with texts like those the model is for, or --evaluate {BUILTIN}."
        more = f" A model of text loses less with {next(_tries(content))}." if _calibration(content) is None else ""
        return Verdict("not measured", (), advice + more)
    grade = max((grade for _, _, grade in figures), key=GRADES.index)
    flattered = warning(evaluation) is not None
    return Verdict(grade, figures, _advice(grade, content, flattered), flattered)


def _figures(evaluation: dict[str, Any]) -> Iterator[tuple[Criterion, float]]:
    if evaluation.get("kl") is not None:
        yield KL, evaluation["kl"]
    if evaluation.get("top1_agreement") is not None:
        yield ANSWERS if "inputs" in evaluation else AGREEMENT, evaluation["top1_agreement"]
    perplexity = evaluation.get("perplexity") or {}
    if perplexity.get("float") and perplexity.get("quantized") is not None:
        yield PERPLEXITY, perplexity["quantized"] / perplexity["float"]
    if (evaluation.get("cosine") or {}).get("min") is not None:
        yield COSINE, evaluation["cosine"]["min"]


def _advice(grade: str, content: dict[str, Any], flattered: bool) -> str:
    tokens, perceives = content["evaluation"]["tokens"], "inputs" in content["evaluation"]
    few = isinstance(tokens, int) and tokens < ENOUGH_TOKENS
    what = "outputs were measured: give more samples" if perceives else "tokens were measured: give more text"
    more = f" Only {tokens} {what}." if few else ""
    if flattered:
        more += " These figures flatter it: evaluate on text that calibration did not read."
    if grade == "good":
        return more.strip() if flattered else f"Nothing needs to be done.{more}"
    if perceives:  # such models are not calibrated
        return f"Leave the noisiest layers below out with --ignore.{more}"
    tries = " or ".join(_tries(content))
    leave = "the noisiest layers below can be left out with --ignore."
    return f"Try {tries}; {leave}{more}" if tries else f"{leave.capitalize()}{more}"


def _calibration(content: dict[str, Any]) -> str | None:
    found: str | None = content["run"].get("inputs", {}).get("calibration")
    return found


def _tries(content: dict[str, Any]) -> Iterator[str]:
    """What may give a better result than what was done."""
    smoothing, made = content["smoothing"] or {}, _calibration(content)
    fits = content["scheme"]["name"].startswith("w4")
    method = "--method gptq" if fits and "method" not in content else ""
    smooth = "--smooth auto" if smoothing.get("alpha") != "auto" else ""
    data = f"--calibration {BUILTIN} (or FILE)" if made is None else ""
    if words := " ".join(filter(None, (smooth, method))):
        yield f"{words} {data}".strip()
    if made == BUILTIN:
        yield "--calibration FILE with texts like those the model is for"
    if fits:
        yield "a smaller --group-size"
        yield "w8a8"


def _shown(criterion: Criterion, value: float) -> str:
    return f"{value:.1%}" if criterion.form.endswith("%") else f"{value:.4g}"


def rows(found: Verdict) -> list[tuple[str, str, str, str]]:
    """Figure, value, grade and limits, for a table."""
    return [
        (criterion.name, _shown(criterion, value), grade, criterion.limits())
        for criterion, value, grade in found.figures
    ]
