"""Every link of the built pages, followed: the builder checks the Markdown, this what is read."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """What a page links to and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.remote: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        for name in ("href", "src"):
            if name not in values:
                continue
            if not urlsplit(values[name]).scheme:
                self.links.add(values[name])
            elif tag != "a" and not values[name].startswith("data:"):
                self.remote.add(values[name])


def broken(site: Path) -> list[str]:
    """One line for each link that leads nowhere, each thing a reader's browser would fetch elsewhere."""
    pages = {path.resolve(): _Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    problems = []
    for path, page in sorted(pages.items()):
        name = path.relative_to(site.resolve())
        problems += [f"{name}: {link}: is fetched from another host" for link in sorted(page.remote)]
        for link in sorted(page.links):
            if reason := _leads_nowhere(path, link, pages):
                problems.append(f"{name}: {link}: {reason}")
    return problems


def unplaced(config: Path, pages: Iterable[str]) -> list[str]:
    """Pages that the navigation forgets or invents."""
    nav = set(_leaves(tomllib.loads(config.read_text())["project"]["nav"]))
    missing = [f"{page}: is in no section of the navigation" for page in sorted(set(pages) - nav)]
    return missing + [f"{page}: the navigation has it, docs/ has not" for page in sorted(nav - set(pages))]


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(part)


def _leads_nowhere(page: Path, link: str, pages: dict[Path, _Page]) -> str | None:
    parts = urlsplit(link)
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "no such anchor"
    return None
