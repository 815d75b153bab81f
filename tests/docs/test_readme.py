"""README's code runs and its figures are those of the committed bench run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baracuda import InvalidProblem
from bench import readme

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_the_error_shown_is_the_error_raised() -> None:
    (call, message) = re.search(r">>> (.*)\nbaracuda.InvalidProblem: (.*)\n", TEXT).groups()  # type: ignore[union-attr]
    scope: dict[str, object] = {}
    exec("import torch, baracuda\nfrom baracuda import PerGroup", scope)
    with pytest.raises(InvalidProblem) as raised:
        exec(call, scope)
    assert str(raised.value) == message


def test_the_figures_are_those_of_the_committed_run() -> None:
    runs = readme.committed(ROOT)
    assert "cpu" in runs
    assert readme.rewritten(TEXT, runs) == TEXT, "run: python -m bench readme"
