"""Patterns over module names: those of compressed-tensors, and of a shell.

A name, "re:" and a regular expression that matches from the start, or a shell pattern such as "*.mlp.*".
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import ceil, comb, inf
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

#: Steps of backtracking that matching the patterns of a stranger may take; a second has about fifty million.
MAX_STEPS = 10**9
#: Repetitions one after the other that are quick with names of any allowed length.
QUICK = 2.5
#: A part that is repeated at most this often counts as so many parts.
FEW = 4
#: What a choice of two costs, in repetitions.
CHOICE = 0.25


def flaw(pattern: str) -> str | None:
    """What is wrong with a pattern's regular expression, if it is one."""
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except (re.error, OverflowError, RecursionError) as error:
            return str(error)
    return None


def matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(name) is not None
    return pattern == name or (any(mark in pattern for mark in "*?[") and fnmatch.fnmatchcase(name, pattern))


@lru_cache(maxsize=1 << 16)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def steps(patterns: Iterable[str], names: Iterable[str]) -> float:
    """About how many steps matching the slow ones of these patterns may take; infinite where nothing bounds it.

    A regular expression with n repetitions one after the other tries about length ** n / n! ways to share a name among
    them. That is quick for one or two, which are not counted. One repetition inside another tries exponentially many.
    """
    lengths, total = Counter(map(len, names)), 0.0
    for degree in (_degree(pattern[3:]) for pattern in patterns if pattern.startswith("re:")):
        if degree == inf:
            return inf
        if degree > QUICK:
            n = ceil(degree)
            total += sum(count * comb(length + n, n) for length, count in lengths.items())
    return total


@lru_cache(maxsize=1 << 16)
def _degree(pattern: str) -> float:
    try:
        items = list(parser.parse(pattern))
    except RecursionError:
        return inf
    while items and _ends(*items[-1]):
        items.pop()
    return max(_search(items))


def _ends(op: Any, value: Any) -> bool:
    """Whether this is the end of a name, or anything up to it: that never fails, so nothing is tried again."""
    if op is codes.AT:
        return True
    anything = op in _REPEATS and value[1] is codes.MAXREPEAT
    return anything and [kind for kind, _ in value[2]] == [codes.ANY]


_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
#: Parts that are not entered again once they have matched.
_CLOSED = (codes.ATOMIC_GROUP, codes.ASSERT, codes.ASSERT_NOT, codes.POSSESSIVE_REPEAT)


def _search(sequence: Any) -> tuple[float, float]:
    """How often what follows may be tried again, and the steps of the sequence itself, as powers of a name's length."""
    again, most = 0.0, 0.0
    for op, value in sequence:
        inner, own = _part(op, value)
        most = max(most, again + own)
        again += inner
    return again, max(most, again)


def _part(op: Any, value: Any) -> tuple[float, float]:
    found = [_search(body) for body in _bodies(op, value)]
    again, own = (max((pair[i] for pair in found), default=0.0) for i in (0, 1))
    if op in _REPEATS:
        low, high, _ = value
        if high > FEW and again > 0:
            return inf, inf
        if high > FEW:
            again, own = float(low != high), max(own, float(low != high))
        else:
            again, own = again * high + CHOICE * (low != high), own * max(1, high)
    elif op in (codes.BRANCH, codes.GROUPREF_EXISTS):
        again += CHOICE
    return (0.0, max(again, own)) if op in _CLOSED else (again, own)


def _bodies(op: Any, value: Any) -> list[Any]:
    if op in _REPEATS or op in (codes.SUBPATTERN, codes.ASSERT, codes.ASSERT_NOT):
        return [value[-1]]
    if op is codes.ATOMIC_GROUP:
        return [value]
    if op is codes.BRANCH:
        return list(value[1])
    return [body for body in value[1:] if body is not None] if op is codes.GROUPREF_EXISTS else []
