"""The tours run as a reader would run them, in time, and print what they set out to show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Tour -> what it needs, what its output must hold.
TOURS = {
    "tour_kernels": (["torch"], ["the reference's bits: True", "expected shape [512], got [7]", "== CUDA graphs"]),
    "tour_training": (["sklearn"], ["4096 of 4096", "4 bits / 3 levels", "accuracy before converting"]),
    "tour_serving": (["transformers"], ["the result: 0 findings", "truncated", "the same sentence: True"]),
}


def test_every_tour_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("tour_*.py")} == set(TOURS)


@pytest.mark.parametrize("name", TOURS)
def test_a_tour_runs_and_shows_what_it_says(name: str, tmp_path: Path) -> None:
    needs, shown = TOURS[name]
    for package in needs:
        pytest.importorskip(package)
    path = EXAMPLES / f"{name}.py"
    assert path.read_text().count("# %%") >= 5
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:baracuda", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for text in shown:
        assert text in done.stdout, done.stdout
