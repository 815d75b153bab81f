"""Pages say `<!-- make: NAME -->` where the code, not a writer, knows what belongs there."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

from . import benchmarks, figures, tables

ROOT = Path(__file__).parents[2]
PAGES, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
#: Pages that live elsewhere in the repository.
BORROWED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
#: Plots of committed runs, which pages under docs/reference/ show.
RESULTS = "bench/results/"
MARK = re.compile(r"<!-- make: (\w+) -->")

MAKERS = {**tables.MAKERS, **benchmarks.MAKERS}
#: The landing page has no table of contents beside it.
WIDE = "---\nhide:\n  - navigation\n  - toc\n---\n\n"


def fill(target: Path) -> None:
    """Write every page and picture of the site to `target`."""
    shutil.rmtree(target, ignore_errors=True)
    pictures = target / "pictures"
    pictures.mkdir(parents=True)
    for name, page in sources().items():
        written = target / name
        written.parent.mkdir(parents=True, exist_ok=True)
        made = partial(_made, pictures=pictures, up="../" * name.count("/"))
        head = WIDE if name == "index.md" else ""
        written.write_text(head + MARK.sub(made, _linked(page.read_text())))
    for kept in ("docs/site.css", f"{RESULTS}linear.svg"):
        shutil.copy(ROOT / kept, target)
    shutil.copytree(ROOT / "docs" / "images", target / "images")


def sources() -> dict[str, Path]:
    """Every page of the site by its name there."""
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*.md"))}
    return pages | {name: ROOT / path for name, path in BORROWED.items()}


def _linked(page: str) -> str:
    """A page whose links to files above docs/ lead to what the site has in their place."""
    page = page.replace(f"../../{RESULTS}", "../")
    for name, path in BORROWED.items():
        page = page.replace(f"../{path})", f"{name})")
    return page


def _made(mark: re.Match[str], pictures: Path, up: str) -> str:
    name = mark[1]
    if name in MAKERS:
        return MAKERS[name]()
    if name in figures.FIGURES:
        return figures.draw(name, pictures, up)
    known = ", ".join(sorted([*MAKERS, *figures.FIGURES]))
    raise ValueError(f"<!-- make: {name} -->: expected one of {known}")
