"""The endurance run, briefly, and that it notices what it is there for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import soak
import torch

from baracuda.plans.plan import SelectedPlan


def test_ten_seconds_of_random_plans_from_four_threads_pass() -> None:
    """In a process of its own, whose memory nothing else moves."""
    command = [sys.executable, str(Path(soak.__file__)), "--seconds", "10", "--threads", "4"]
    path = os.pathsep.join(sys.path)  # where pytest finds the helpers
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout and ": flat" in done.stdout


def test_a_wrong_bit_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compute = SelectedPlan.compute

    def wrong(self: SelectedPlan, inputs: tuple[object, ...]) -> tuple[object, ...]:
        outputs = compute(self, inputs)
        for output in outputs:
            if output is not None and output.numel():
                output.view(-1)[-1] += 1
        return outputs

    monkeypatch.setattr(SelectedPlan, "compute", wrong)
    assert soak.main(["--seconds", "2", "--threads", "2", "--pool", "20", "--device", "cpu"]) == 1
    assert "differs in 1 of" in capsys.readouterr().out


def test_a_hunt_for_rows_that_depend_on_the_batch_finds_none() -> None:
    command = [sys.executable, str(Path(soak.__file__)), "--invariance", "--seconds", "8", "--threads", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout and "of random problems" in done.stdout


def test_a_hunt_finds_a_result_that_depends_on_the_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = SelectedPlan.launch

    def by_size(self: SelectedPlan, operands: tuple[object, ...], workspace: object = None) -> None:
        launch(self, operands, workspace)
        if self.problem.shape[0] > 16 and operands[-1].numel():
            operands[-1].view(-1)[0] += 1

    monkeypatch.setattr(SelectedPlan, "launch", by_size)
    assert soak.main(["--invariance", "--seconds", "4", "--threads", "1", "--device", "cpu"]) == 1
    assert "differs in" in capsys.readouterr().out


@pytest.mark.parametrize(("a_minute", "grows"), [(0, False), (1e6, False), (6e6, True), (-6e6, False)])
def test_a_leak_is_told_from_noise(a_minute: float, grows: bool) -> None:
    """Ten minutes of samples around 300 MB, five up and down."""
    noise = torch.rand(600, generator=torch.Generator().manual_seed(0)) * 10e6 - 5e6
    samples = [(float(t), int(300e6 + a_minute / 60 * t + float(noise[t]))) for t in range(600)]
    assert soak.Watched("memory", samples).grows() is grows
