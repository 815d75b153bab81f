"""JSON from strangers: what can be read is an object that a program can go on with."""

from __future__ import annotations

import json
import re
from typing import Any

from ..errors import CheckpointError

#: No config or header is nested deeper.
MAX_DEPTH = 64
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object; whatever is wrong with the bytes raises a CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key appears twice")
        return table

    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        text = f"{name}: not readable as JSON: {str(error)[:200]}; copy or download it again"
        raise CheckpointError("bad-json", text) from None
    if not isinstance(content, dict):
        raise CheckpointError("bad-json", f"{name}: expected a JSON object, got {type(content).__name__}")
    if (problem := _unusable(content, escapes=b"\\u" in data)) is not None:
        raise CheckpointError("bad-json", f"{name}: {problem}; copy or download it again")
    return content


def _unusable(content: Any, *, escapes: bool) -> str | None:
    """What no program can go on with, or None: deep nesting, and half a character, which cannot be written."""
    waiting = [(content, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"nested more than {MAX_DEPTH} times"
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for inner in value.values()]
            texts = [*value, *(inner for inner in value.values() if isinstance(inner, str))] if escapes else []
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value if isinstance(inner, (dict, list))]
            texts = [inner for inner in value if isinstance(inner, str)] if escapes else []
        else:
            continue
        if any(_SURROGATE.search(text) for text in texts):
            return "it holds half a character (a lone surrogate)"
    return None
