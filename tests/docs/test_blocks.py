"""Every code block of README and the site runs, and prints what the page says it prints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from docs_blocks import ROOT, Block, Runner, blocks

from baracuda_cli import demo

pytestmark = pytest.mark.filterwarnings("ignore")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {
    str(path.relative_to(ROOT)): blocks(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in PAGES
}
MARKED = [(page, block) for page, found in BLOCKS.items() for block in found if block.mark]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a reader has: a model directory of their own, with a tokenizer, and some texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"), prepend=":")
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with its texts, trained once for all pages."""
    folder = tmp_path_factory.mktemp("model")
    demo.make_model(folder / "MODEL_DIR")
    return folder


@pytest.mark.parametrize("page", [page for page, found in BLOCKS.items() if any(not b.mark for b in found)])
def test_every_block_of_a_page_does_what_the_page_says(page: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if any("MODEL_DIR" in block.code for block in BLOCKS[page]):
        shutil.copytree(request.getfixturevalue("trained"), folder, dirs_exist_ok=True)
    reader = Runner()
    for block in BLOCKS[page]:
        if not block.mark:
            reader.run(block)


@pytest.mark.parametrize(("page", "block"), MARKED, ids=[str(block) for _, block in MARKED])
def test_a_marked_block_runs_where_it_can(page: str, block: Block, folder: Path) -> None:
    if block.mark != "gpu":
        pytest.skip(block.mark)
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    reader = Runner()
    for other in BLOCKS[page]:
        if other.line <= block.line and other.mark in ("", "gpu"):
            reader.run(other)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\n1 / 0\n```", "division by zero"),
        ("```python\nprint(2)\n```\n\n```text\n3\n```", "the page says\n3"),
        ("```python\nx = 2\n```\n\nthen\n\n```python\nassert x == 3\n```", ""),
        ("```pycon\n>>> 1 + 1\n3\n```", "the page says\n3"),
        ("```pycon\n>>> int('a')\nValueError: another reason\n```", "the page says"),
        ("```console\n$ make nothing\n```", "there is no nothing"),
        ("```console\n$ pip install '.[nothing]'\n```", "there is no nothing"),
        ("```console\n$ baracuda quantize --no-such-option\n```", "No such option"),
        ("```console\n$ baracuda report elsewhere\n```", "elsewhere"),
        ("```console\n$ python examples/nothing.py\n```", "there is no examples/nothing.py"),
        ("```console\n$ rm everything\n```", "nobody knows how to check"),
        ("```haskell\nmain = mempty\n```", "nobody knows how to check"),
    ],
)
def test_a_page_that_is_wrong_is_noticed(text: str, error: str, folder: Path) -> None:
    reader = Runner()
    with pytest.raises(Exception, match=error):
        for block in blocks("page.md", text):
            reader.run(block)


def test_marks_are_read_and_the_lines_of_an_error_are_those_of_the_page() -> None:
    gpu, skipped, plain = blocks(
        "page.md",
        "<!-- gpu -->\n```python\nx\n```\n\n<!-- not run: why -->\n\n```console\n$ y\n```\n```python\n1/0\n```",
    )
    assert (gpu.mark, skipped.mark, plain.mark) == ("gpu", "not run: why", "")
    assert gpu.line == 3
    with pytest.raises(ZeroDivisionError) as raised:
        Runner().run(plain)
    assert raised.traceback[-1].lineno + 1 == plain.line == 12
