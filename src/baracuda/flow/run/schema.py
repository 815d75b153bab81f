"""The types of a report's JSON. A report may come from a stranger: it is checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import FlowError, shown

#: Nothing that is measured is larger. Sums and products of such numbers stay finite.
LARGEST_NUMBER = 1e300
LARGEST_COUNT = 2**63


@dataclass(frozen=True)
class Kind:
    """A type of JSON value: what to call it, and whether a value is one."""

    name: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Maybe:
    """A value or null."""

    of: Any


@dataclass(frozen=True)
class Each:
    """A list, or a table with any keys, whose values are all of one type."""

    of: Any
    table: bool = False


def _number(value: Any, low: float = -LARGEST_NUMBER, high: float = LARGEST_NUMBER) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


ANYTHING = Kind("a value", lambda value: True)
TEXT = Kind("a string", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number", _number)
AMOUNT = Kind("a number that is not negative", lambda value: _number(value, 0))
COUNT = Kind("a count", lambda value: type(value) is int and 0 <= value < LARGEST_COUNT)
DECIBEL = Kind("decibels", lambda value: _number(value, -1e6, 1e6))
TEXT_OR_NUMBER = Kind("a string or a number", lambda value: isinstance(value, str) or _number(value))

#: Keys that end with ? may be missing. Keys that are not named here are not read.
_LAYER = {
    "name": TEXT,
    "shape": Each(COUNT),
    "sqnr_db": Maybe(DECIBEL),
    "max_error": Maybe(AMOUNT),
    "measured_rows": COUNT,
    "bytes_before": COUNT,
    "bytes_after": COUNT,
    "bits?": COUNT,
    "group_size?": Maybe(COUNT),
    "method?": Each(Maybe(TEXT_OR_NUMBER), table=True),
    "rounding?": TEXT,
    "outlier_before?": Maybe(AMOUNT),
    "outlier_after?": Maybe(AMOUNT),
    "smoothed?": FLAG,
    "alpha?": Maybe(NUMBER),
    "rule?": TEXT,
}
_SMOOTHING = {
    "samples?": COUNT,
    "alpha?": Maybe(TEXT_OR_NUMBER),
    "gate?": {"largest_difference": Maybe(AMOUNT), "tolerance": AMOUNT, "dtype": TEXT},
    "folded?": Each({"from": TEXT, "into": Each(TEXT), "fixed": COUNT}),
    "not_folded?": Each(TEXT, table=True),
    "changed?": Each(TEXT),
    "weighed?": Each(TEXT),
}
_PAIR = {"float": Maybe(AMOUNT), "quantized": Maybe(AMOUNT)}
_EVALUATION = {
    "data": TEXT,
    "tokens": COUNT,
    "inputs?": COUNT,
    "seen_in_calibration?": AMOUNT,
    "kl?": Maybe(NUMBER),
    "top1_agreement?": Maybe(NUMBER),
    "perplexity?": _PAIR,
    "cosine?": {"mean": Maybe(NUMBER), "min": Maybe(NUMBER)},
    "layers?": Each(Maybe(DECIBEL), table=True),
    "samples?": Each({"prompt": TEXT, "float": TEXT, "quantized": TEXT}),
    "worst?": Each({"kl": Maybe(NUMBER), "sequence": COUNT, "position": COUNT}),
}
_PRECISION = {
    "budget?": AMOUNT,
    "max_kl?": AMOUNT,
    "kl": AMOUNT,
    "tokens": COUNT,
    "units": Each({"layers": Each(TEXT), "bits": COUNT, "kl_4_bits": AMOUNT, "kl_8_bits": AMOUNT}),
}
REPORT = {
    "baracuda": TEXT,
    "model": {"name": TEXT, "architectures": Maybe(Each(TEXT)), "model_type": Maybe(TEXT)},
    "scheme": {"name": TEXT, "input_activations": Maybe({"dynamic?": ANYTHING})},
    "method?": TEXT,
    "linears_found_by": TEXT,
    "layers": Each(_LAYER),
    "left": Each({"name": TEXT, "reason": TEXT}),
    "head?": {"name": TEXT, "tied_to": Maybe(TEXT), "bytes": COUNT, "bytes_added": COUNT},
    "float_share?": AMOUNT,
    "notes?": Each(TEXT),
    "precision?": _PRECISION,
    "smoothing": Maybe(_SMOOTHING),
    "size": {"before": COUNT, "after": COUNT, "ratio": AMOUNT},
    "evaluation": Maybe(_EVALUATION),
    "run": {
        "seconds": AMOUNT,
        "megabytes_per_second": AMOUNT,
        "device": TEXT,
        "ranks": COUNT,
        "torch?": TEXT,
        "python?": TEXT,
        "made_from?": Each(ANYTHING, table=True),
        "inputs?": Each(Maybe(TEXT), table=True),
        "tokens_per_second?": _PAIR,
    },
}

#: Section -> a key of it -> the keys that must come with that one.
_TOGETHER = {
    "evaluation": {"kl": ("perplexity", "top1_agreement")},
    "smoothing": {"folded": ("gate", "not_folded")},
}


def require_report(content: Any, where: str) -> dict[str, Any]:
    """The content, if every value that is read has its type; else raise a sentence about the first that does not."""
    if (problem := _problem(content, REPORT, "") or _first(_incomplete(content))) is not None:
        raise FlowError(f"{where}: not a report of this version: {problem}; quantize the model again")
    assert isinstance(content, dict)
    return content


def _problem(value: Any, kind: Any, path: str) -> str | None:
    """What is wrong with a value of this kind, or None."""
    here = path or "the report"
    if isinstance(kind, Kind):
        return None if kind.holds(value) else f"{here}: expected {kind.name}, got {shown(value)}"
    if isinstance(kind, Maybe):
        return None if value is None else _problem(value, kind.of, path)
    if isinstance(kind, Each):
        wanted = dict if kind.table else list
        if not isinstance(value, wanted):
            return f"{here}: expected a {'table' if kind.table else 'list'}, got {shown(value)}"
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return _first(_problem(item, kind.of, f"{path}[{shown(key)}]") for key, item in items)
    if not isinstance(value, dict):
        return f"{here}: expected a table, got {shown(value)}"
    for key, inner in kind.items():
        name, optional = key.removesuffix("?"), key.endswith("?")
        if name not in value and not optional:
            return f"{here}: expected a key {name!r}, there is none"
        if name in value and (found := _problem(value[name], inner, f"{path}.{name}" if path else name)):
            return found
    return None


def _incomplete(content: dict[str, Any]) -> Iterator[str]:
    for section, rules in _TOGETHER.items():
        table = content[section] or {}
        for key, others in rules.items():
            for other in others:
                if key in table and other not in table:
                    yield f"{section}: expected a key {other!r} beside {key!r}, there is none"


def _first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
