"""HTML that is safe by construction: whatever is not made by `element` is text, and is escaped."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from ...core.printable import printable

#: What a page may consist of. Nothing here runs, loads or submits anything.
TAGS = frozenset(
    (
        *("b", "br", "code", "details", "div", "em", "g", "h1", "h2", "h3", "i", "li", "line", "ol", "p", "path"),
        *("polyline", "rect", "small", "span", "strong", "summary", "svg", "table", "tbody", "td", "text", "th"),
        *("thead", "title", "tr", "ul"),
    )
)
ATTRIBUTES = frozenset(
    (
        *("aria-label", "class", "colspan", "cx", "cy", "d", "fill", "height", "id", "open", "opacity", "points", "r"),
        *("role", "rowspan", "stroke", "stroke-dasharray", "stroke-width", "text-anchor", "title", "transform"),
        *("viewBox", "width", "x", "x1", "x2", "y", "y1", "y2"),
    )
)


class Markup(str):
    """A string that is HTML already. Make one with `text`, `element` or `join`, never from a string."""

    __slots__ = ()


def text(value: object) -> Markup:
    """The one way from a value to the text of a page. Markup stays as it is."""
    return value if isinstance(value, Markup) else Markup(escape(printable(str(value)), quote=True))


def join(*parts: object) -> Markup:
    """The parts one after the other; those that are no markup become text."""
    return Markup("".join(map(text, parts)))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element with its children. Attributes are spelled with `_` for `-`, and `class_`; None leaves one out.

    Tags and attributes that can run, load or restyle something raise: add a class to the page's style instead.
    """
    if tag not in TAGS:
        raise ValueError(f"<{tag}>: expected one of the elements that a report may hold: {', '.join(sorted(TAGS))}")
    given = []
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if name not in ATTRIBUTES:
            raise ValueError(f"{name}: expected one of the attributes of a report: {', '.join(sorted(ATTRIBUTES))}")
        if value is not None:
            given.append(f' {name}="{escape(printable(str(value)), quote=True)}"')
    start = f"<{tag}{''.join(given)}>"
    return Markup(start if tag == "br" else f"{start}{join(*children)}</{tag}>")


def document(title: str, style: str, *body: object, script: str = "") -> str:
    """A whole page that may use this style and script and nothing else, by its Content-Security-Policy.

    Style and script are constants of ours: nothing that was read goes into them.
    """
    policy = f"default-src 'none'; style-src {_digest(style)}; base-uri 'none'; form-action 'none'"
    if script:
        policy += f"; script-src {_digest(script)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style></head>\n<body>{join(*body)}"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def _digest(text: str) -> str:
    """A source of a policy: this text, by its hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
