"""The code blocks of a Markdown page, and how each is run: the blocks of a page share one namespace and one folder.

- ```python runs; a ```text block right after it is what it must print (doctest's `...` stands for anything).
- ```pycon is compared line by line, exceptions by their last line.
- ```console runs its `$ baracuda` and `$ torchrun` lines and compares what follows them; other commands must name make
  targets, extras, examples and benchmarks that exist.
- `<!-- gpu -->` on the line before a block: only where torch sees a GPU. `<!-- not run: WHY -->`: never.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from baracuda_cli import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>gpu|not run: [^>]+) -->\n+)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    mark: str = ""
    #: What a python block must print; None where the page does not say.
    expected: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    """The blocks of a page in order, with the output that follows a python block as part of it."""
    found: list[Block] = []
    end = 0
    for match in BLOCK.finditer(text):
        language, code, mark = match["language"], match["code"], match["mark"] or ""
        line = text[: match.start("code")].count("\n") + 1
        follows = found and not text[end : match.start()].strip()
        end = match.end()
        if language == "text" and follows and found[-1].language == "python":
            last = found.pop()
            found.append(Block(page, last.line, last.language, last.code, last.mark, code))
        else:
            found.append(Block(page, line, language, code, mark))
    return found


class Runner:
    """One reader of one page: a namespace, and the current folder to work in."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> None:
        run = getattr(self, f"_{block.language}", None)
        if run is None:
            raise AssertionError(f"{block}: nobody knows how to check a {block.language!r} block")
        run(block)

    def _python(self, block: Block) -> None:
        printed = self._execute(block, block.code, "exec", block.line)
        if block.expected is not None:
            same(block, block.expected, printed)

    def _pycon(self, block: Block) -> None:
        for example in doctest.DocTestParser().get_examples(block.code):
            try:
                got = self._execute(block, example.source, "single", block.line + example.lineno)
            except Exception as error:
                got = traceback.format_exception_only(error)[-1]
            same(block, example.want, got)

    def _execute(self, block: Block, source: str, mode: str, line: int) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + source, block.page, mode), self.names)
        return printed.getvalue()

    def _console(self, block: Block) -> None:
        for command, want in commands(block.code):
            got = execute(block, command)
            if want.strip():
                same(block, want, got)

    def _text(self, block: Block) -> None:
        """Shown, not claimed."""

    _toml = _json = _text


def commands(code: str) -> Iterator[tuple[list[str], str]]:
    """Every `$ command` of a console block as words, with the output shown under it."""
    for part in re.split(r"^\$ ", code, flags=re.M)[1:]:
        command, _, output = part.replace("\\\n", " ").partition("\n")
        yield shlex.split(command, comments=True), output


def execute(block: Block, words: list[str]) -> str:
    """What a command prints. One that cannot run here has its names checked instead."""
    match words:
        case ["baracuda", *arguments]:
            done = CliRunner().invoke(app, arguments, catch_exceptions=False)
            shown_failure = done.exit_code == 1 and arguments[0] == "verify"
            assert done.exit_code == 0 or shown_failure, f"{block}: {words}: {done.output}"
            return done.output
        case ["torchrun", *arguments]:
            launch = [sys.executable, "-m", "torch.distributed.run", *arguments]
            done_process = subprocess.run(launch, capture_output=True, text=True, timeout=300, check=False)
            assert done_process.returncode == 0, f"{block}: {words}: {done_process.stderr[-2000:]}"
            return done_process.stdout
        case ["make", *targets]:
            known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
            missing = [target for target in targets if target not in known and "=" not in target]
        case ["pip", "install", *requirements]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = [e for r in requirements for e in re.findall(r"\[([\w,]+)\]", r)]
            missing = [e for names in extras for e in names.split(",") if e not in project["optional-dependencies"]]
        case ["python", "-m", "bench", area, *_]:
            missing = [] if (ROOT / "bench" / f"{area}.py").exists() else [area]
        case ["python", script, *_]:
            missing = [] if (ROOT / script).exists() else [script]
        case _:
            raise AssertionError(f"{block}: nobody knows how to check {shlex.join(words)!r}")
    assert not missing, f"{block}: {shlex.join(words)}: there is no {', '.join(missing)}"
    return ""


def same(block: Block, want: str, got: str) -> None:
    if not doctest.OutputChecker().check_output(want, got, OUTPUT):
        raise AssertionError(f"{block}: the page says\n{want}\nand this was printed\n{got}")
