"""Triton's interpreter without what it repeats: at each call it looks for what to replace in its language.

What a kernel has replaced stays so until it ends, and the functions that it calls see the same modules. So they need
not look again; that was more than half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def make_quick() -> None:
    """For every kernel that this process interprets from now on."""
    from triton import language
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[str] = set()

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        """Names of the modules of the language that a function can reach, which is where Triton looks."""
        values = function.__globals__.values()
        return frozenset(module.__name__ for module in (language, language.core) if any(v is module for v in values))

    class Scope:
        """What a kernel has replaced, put back when it ends; a function that it calls has nothing to replace."""

        def __init__(self, function: Any) -> None:
            self.inner = None if seen_by(function) <= replaced else replace(function)
            replaced.update(seen_by(function))

        def restore(self) -> None:
            replaced.clear()
            if self.inner is not None:
                self.inner.restore()

    interpreter._patch_lang = Scope
