"""A report.json from a stranger: its types are checked, its strings are text, and the page's policy stops the rest."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import models
import pytest

from baracuda.core.printable import printable
from baracuda.flow import FlowError, report
from baracuda.flow.run.markup import ATTRIBUTES, TAGS, Markup, document, element
from baracuda.flow.run.page import SCRIPT, STYLE, page
from baracuda.flow.run.schema import require_report
from baracuda_cli.quantize import summary

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
ATTACK = "\"'><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    measured = dict.fromkeys(("calibration", "evaluation"), folder / "tokens.safetensors")
    return models.quantized(folder, "qwen2", scheme="w8a8-smoothquant", **measured) / "out"


@pytest.fixture(scope="module")
def content(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "baracuda_report.json").read_text()))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values that hold no others; of a list or a table of many, those of the first."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    many = isinstance(value, list) or len(items) > 12
    for key, inner in items[:1] if many and path else items:
        yield from leaves(inner, (*path, key))
    if not items:
        yield path


def replaced(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(content)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


class Seen(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_no_value_of_a_report_becomes_markup(content: dict[str, Any]) -> None:
    """Even where the check of types is passed by: every value at every place, replaced by an attack."""
    tags = TAGS | {"html", "head", "meta", "style", "body", "script"}
    attributes = {name.lower() for name in ATTRIBUTES} | {"charset", "http-equiv", "content", "name", "lang"}
    drawn = 0
    for path in leaves(content):
        try:
            text = page(replaced(content, path, ATTACK))
        except (ValueError, TypeError, AttributeError):  # a number was expected there
            continue
        drawn += 1
        seen = Seen(text)
        assert seen.tags <= tags and seen.attributes <= attributes, path
        assert text.count("<script") == 1 and text.endswith(f"<script>{SCRIPT}</script></body></html>\n"), path
    assert drawn > 10
    for path in (("layers", 0, "measured_rows"), ("layers", 0, "shape"), ("evaluation", "tokens"), ("run", "ranks")):
        assert "&lt;script&gt;" in page(replaced(content, path, [ATTACK] if path[-1] == "shape" else ATTACK))


def test_a_value_of_another_type_is_refused_with_its_place(content: dict[str, Any], out: Path, tmp_path: Path) -> None:
    require_report(content, "here")
    copied = Path(shutil.copytree(out, tmp_path / "copy"))
    for path, value in (
        (("layers", 0, "measured_rows"), ATTACK),
        (("layers", 0, "shape"), [ATTACK]),
        (("evaluation", "tokens"), ATTACK),
        (("run", "ranks"), ATTACK),
        (("layers", 0, "sqnr_db"), 1e308),
        (("layers", 0, "outlier_before"), 10**400),
        (("run", "seconds"), float("nan")),
        (("model", "architectures"), [1]),
        (("layers",), {"a": 1}),
        (("smoothing",), 3),
        (("run",), None),
    ):
        (copied / "baracuda_report.json").write_text(json.dumps(replaced(content, path, value)))
        with pytest.raises(
            FlowError, match=rf"not a report of this version: {path[0]}\b.*expected .*, got .*; quantize"
        ):
            report(copied)


def test_every_value_of_every_type_is_drawn_or_refused_with_a_sentence(content: dict[str, Any]) -> None:
    wrong: list[Any] = [None, True, -1, 0, 10**400, 1e308, -1e308, float("nan"), "", ATTACK, "\ud800", [], {}, [[]]]
    for path in leaves(content):
        for value in wrong:
            with suppress(FlowError):
                page(require_report(replaced(content, path, value), "here")).encode()


def test_every_key_of_a_report_can_be_missing_without_a_trace(content: dict[str, Any]) -> None:
    missing = 0
    for path in {leaf[:depth] for leaf in leaves(content) for depth in range(1, len(leaf) + 1)}:
        if isinstance(path[-1], str):
            without = replaced(content, path, None)
            at: Any = without
            for key in path[:-1]:
                at = at[key]
            del at[path[-1]]
            try:
                assert summary(require_report(without, "here")) and page(without)
            except FlowError as error:
                assert "expected a key" in str(error)
                missing += 1
    assert missing > 20


def test_elements_that_could_run_or_load_something_cannot_be_made() -> None:
    for tag in ("script", "iframe", "img", "object", "a", "link", "form", "style", "use", "foreignObject"):
        with pytest.raises(ValueError, match="expected one of the elements"):
            element(tag)
    for name in ("onclick", "style", "href", "src", "xlink_href", "srcdoc", "action"):
        with pytest.raises(ValueError, match="expected one of the attributes"):
            element("p", **{name: "x"})
    assert element("p", '<b a="1">', element("b", "&"), class_='"x') == (
        '<p class="&quot;x">&lt;b a=&quot;1&quot;&gt;<b>&amp;</b></p>'
    )


def test_characters_that_are_obeyed_instead_of_shown_are_spelled() -> None:
    assert printable("a\x1b]0;x\x07\x9bm\u202eb\ud800\r\n\tc\u00e9") == (
        "a\\x1b]0;x\\x07\\x9bm\\u202eb\\ud800\\x0d\n\tc\u00e9"
    )
    assert "\x1b" not in element("p", "\x1b[2J") and element("p", "\ud800").encode()


def test_a_real_browser_runs_nothing_of_a_hostile_report(content: dict[str, Any], tmp_path: Path) -> None:
    """Attacks as text, and, where escaping had failed, as markup: the policy stops those."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here")
    hostile = content
    for path in leaves(content):
        try:
            page(replaced(hostile, path, ATTACK))
        except (ValueError, TypeError, AttributeError):
            continue
        hostile = replaced(hostile, path, ATTACK)
    attack = Markup(f"{ATTACK}<svg onload=\"document.title='ran'\"></svg><p style='color: red'>x</p>")
    pages = {
        "escaped": page(hostile),
        "injected": document("quiet", STYLE, attack, script=SCRIPT),
        "unguarded": f"<p>{attack}",
    }
    for name, text in pages.items():
        path = tmp_path / f"{name}.html"
        path.write_text(text)
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        shown = subprocess.run(
            [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
        ).stdout
        assert ("<title>ran</title>" in shown) == (name == "unguarded"), name
