"""A run has its directory to itself, and leaves nothing behind where it could not begin."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest

from baracuda.flow import FlowError, quantize_checkpoint, verify

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "transformers", None)
    return models.plain_checkpoint(tmp_path / "model")


def meanwhile(action: Callable[[], object]) -> Callable[..., None]:
    """A progress callback that acts once, in the middle of a run."""
    left = [action]

    def progress(*_: object) -> None:
        if left:
            left.pop()()

    return progress


def test_a_second_run_is_kept_out_of_the_directory_of_the_first(source: Path, tmp_path: Path) -> None:
    """A scheduler starts a job again, with --resume, while the first one only hangs."""
    out, refused = tmp_path / "out", []
    writing = rf"another run is writing to .*out \(process {os.getpid()} on "

    def second() -> None:
        for resume in (True, False):
            with pytest.raises(FlowError, match=writing) as told:
                quantize_checkpoint(source, out, resume=resume)
            refused.append(told)

    quantize_checkpoint(source, out, progress=meanwhile(second))
    quantize_checkpoint(source, tmp_path / "alone")
    assert len(refused) == 2 and verify(out, source) == []
    assert models.contents(out) == models.contents(tmp_path / "alone")


def test_a_run_that_failed_lets_the_next_one_in(source: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the network is gone")

    with pytest.raises(RuntimeError) as failed:
        quantize_checkpoint(source, tmp_path / "out", progress=meanwhile(fail))
    quantize_checkpoint(source, tmp_path / "out", resume=True)
    assert failed and verify(tmp_path / "out", source) == []


def test_a_lock_that_is_removed_while_it_is_taken_is_taken_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another run that ends between the two steps; a lock on a file without a name would keep nobody out."""
    real, taken = fcntl.flock, []

    def flock(file: Any, how: int) -> None:
        taken.append(file)
        if len(taken) == 1:
            shutil.rmtree(tmp_path / "out")
        real(file, how)

    def second() -> None:
        with pytest.raises(FlowError, match="another run is writing"):
            quantize_checkpoint(source, tmp_path / "out", resume=True)

    monkeypatch.setattr(fcntl, "flock", flock)
    quantize_checkpoint(source, tmp_path / "out", progress=meanwhile(second))
    assert len(taken) == 3 and verify(tmp_path / "out", source) == []


def test_a_file_system_without_locks_is_told_and_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="no locks on this file system; start one run only"):
        quantize_checkpoint(source, tmp_path / "out")
    assert verify(tmp_path / "out", source) == []


def test_whatever_ends_calibration_leaves_no_unfinished_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(*_: object) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr("baracuda.flow.run.calibrate.calibrate", calibrate)
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    with pytest.raises(IndexError):
        quantize_checkpoint(source, tmp_path / "out", activations="static", calibration=tokens)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["a link", "the working directory", "a directory"])
def test_a_run_that_cannot_begin_leaves_a_directory_that_was_there(
    how: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(*_: object) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr("baracuda.flow.run.calibrate.calibrate", calibrate)
    tokens, there = models.tokens(tmp_path / "tokens.safetensors"), tmp_path / "there"
    there.mkdir()
    (tmp_path / "link").symlink_to(there)
    monkeypatch.chdir(there)
    out = {"a link": tmp_path / "link", "the working directory": Path("."), "a directory": there}[how]
    with pytest.raises(IndexError):
        quantize_checkpoint(source, out, activations="static", calibration=tokens)
    assert list(there.iterdir()) == [] and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("device", ["mps", "meta"])
def test_a_device_that_cannot_quantize_is_refused_before_anything_is_made(
    device: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(FlowError, match=f"device {device}: expected cpu or cuda"):
        quantize_checkpoint(source, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()
