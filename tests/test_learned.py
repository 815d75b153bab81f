"""The learned backward's own kernels, in Triton's interpreter and compiled for the CPU, against the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from learned import assert_alike, problems, run

from baracuda import BackendKind
from cases import LARGE_LAYOUTS, LAYOUTS

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETER:

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @pytest.mark.parametrize("cut", [4096, 2], ids=["whole segments", "segments in parts"])
    def test_interpreted_kernels_agree_with_the_reference(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from baracuda.backends.triton import learned

        monkeypatch.setattr(learned, "PROGRAMS", cut)
        monkeypatch.setattr(learned, "TILE", 64 if cut == 2 else 1024)
        for p in problems(LAYOUTS):
            assert_alike(p, run(p, BackendKind.TRITON), run(p, BackendKind.REFERENCE))

else:

    def test_the_kernels_agree_with_the_reference_in_triton_s_interpreter() -> None:
        pytest.importorskip("triton")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            str(Path(__file__)),
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
        ]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_XDIST")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

    def test_the_reference_agrees_with_itself_on_large_shapes_in_every_form() -> None:
        for p in problems(LARGE_LAYOUTS[:2]):
            assert_alike(p, run(p, BackendKind.REFERENCE), run(p, BackendKind.REFERENCE))
