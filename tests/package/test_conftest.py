"""What tests/conftest.py adds to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_is_named_while_the_run_goes_on(workers: int, tmp_path: Path) -> None:
    """So that a run that is cut off has named its failures."""
    code = "import time\ndef test_wrong(): assert 1 == 2, 'the reason'\ndef test_long(): time.sleep(300)\n"
    (tmp_path / "test_cut.py").write_text(code)
    path = f"{TESTS}{os.pathsep}{TESTS / 'support'}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-n", str(workers), "."]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        guard = Timer(120, os.killpg, (run.pid, signal.SIGKILL))
        guard.start()
        said = ""
        for line in run.stdout:
            said += line
            if line.startswith("failed: "):
                break
        guard.cancel()
        os.killpg(run.pid, signal.SIGKILL)
    assert "failed: test_cut.py::test_wrong: AssertionError: the reason" in said and "short test summary" not in said
