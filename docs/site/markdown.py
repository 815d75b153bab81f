"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], right: int | None = None) -> str:
    """`right` is the first column of figures, which line up to the right."""
    right = len(header) if right is None else right
    rule = ["---" if i < right else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [header, rule, *rows])
