"""Patterns that somebody wrote into a command line or a config.json."""

from __future__ import annotations

from ..core.patterns import flaw
from .errors import FlowError


def require_pattern(pattern: str, where: str = "--ignore") -> None:
    """Raise unless this can be matched; `where` says who wrote it."""
    if (error := flaw(pattern)) is not None:
        raise FlowError(
            f"{where} {pattern[:80]}: not a regular expression: {error}; correct it, or drop re: for a shell pattern"
        )
