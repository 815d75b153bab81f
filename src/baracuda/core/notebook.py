"""Values as small tables in notebooks: `_repr_html_` of plans, reports and quantized tensors."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(title: str, rows: Iterable[tuple[str, ...]], header: tuple[str, ...] = ()) -> str:
    """A caption and rows. Everything is escaped: names come from files."""
    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption>{head}{body}</table>"
