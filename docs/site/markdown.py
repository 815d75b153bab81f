"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], figures: range = range(0)) -> str:
    """The columns in `figures` line up to the right."""
    rule = ["---:" if i in figures else "---" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [header, rule, *rows])
