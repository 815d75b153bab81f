"""Patterns over module names: those of compressed-tensors, and of a shell.

A name, "re:" and a regular expression that matches from the start, or a shell pattern such as "*.mlp.*".
"""

from __future__ import annotations

import fnmatch
import re


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
        return re.match(pattern[3:], name) is not None
    return pattern == name or fnmatch.fnmatchcase(name, pattern)
