"""Patterns of module names: those of an ignore list in a config.json, and those of --ignore."""

from __future__ import annotations

import fnmatch
import re

from .errors import FlowError


def require_pattern(pattern: str, where: str = "--ignore") -> None:
    """Raise unless this can be matched; `where` says who wrote it."""
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except (re.error, OverflowError, RecursionError) as error:
        raise FlowError(f"{where} {pattern[:80]}: not a regular expression: {error}") from None


def matches(pattern: str, name: str) -> bool:
    """compressed-tensors' patterns ("re:..." or a name), and shell patterns for the command line."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or fnmatch.fnmatchcase(name, pattern)
