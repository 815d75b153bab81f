"""What tests/conftest.py adds to a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_is_cut_off_has_named_its_failures(workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_cut.py").write_text(
        "import os, signal\n"
        "def test_wrong(): assert 1 == 2, 'the reason'\n"
        "def test_cut(): os.kill(os.PARENT, signal.SIGKILL)\n".replace(
            "os.PARENT", "os.getppid()" if workers else "os.getpid()"
        )
    )
    path = f"{TESTS}{os.pathsep}{TESTS / 'support'}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-n", str(workers), "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9 and "short test summary" not in done.stdout
    assert "failed: test_cut.py::test_wrong: AssertionError: the reason" in done.stdout
