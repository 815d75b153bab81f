"""kill -9 at any moment, then --resume: the result has the bytes of a run nobody killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest

from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.stream import ShardJob

# The driver computes nothing itself, so that forked children may use torch's threads. It prints one line of JSON.
DRIVER = """
import json, os, random, signal, sys, time
sys.modules["transformers"] = None
from pathlib import Path
import baracuda.flow.convert as convert

source, folder, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def child(out, resume, crash_at=None, delay=0.0):
    pid = os.fork()
    if pid:
        return pid
    count = 0
    def wrapped(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if crash_at is not None and count == crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(delay)
            return function(*args, **kwargs)
        return call
    for name in ("pwrite", "fsync", "replace", "rmdir"):
        setattr(os, name, wrapped(getattr(os, name)))
    Path.unlink = wrapped(Path.unlink)
    try:
        convert.quantize_checkpoint(source, out, resume=resume)
        if mode == "count":
            (folder / "count").write_text(str(count))
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

if mode == "count":
    print(json.dumps(wait(child(folder / "out", False))))
elif mode == "crash":
    codes = []
    for number in json.loads(sys.argv[4]):
        out = folder / f"crash{number}"
        codes.append([wait(child(out, False, crash_at=number)), wait(child(out, True))])
    print(json.dumps(codes))
else:
    moments, codes = random.Random(11), []
    start = time.perf_counter()
    wait(child(folder / "timing", False, delay=0.005))
    whole = time.perf_counter() - start
    for number in range(10):
        out, killed = folder / f"kill{number}", 0
        for attempt in range(2):
            pid = child(out, attempt > 0 or out.exists(), delay=0.005)
            time.sleep(moments.uniform(0, whole))
            os.kill(pid, signal.SIGKILL)
            killed += wait(pid) == -9
        codes.append([killed, wait(child(out, True))])
    print(json.dumps(codes))
"""


def drive(source: Path, folder: Path, *arguments: str) -> list:  # type: ignore[type-arg]
    command = [sys.executable, "-c", DRIVER, str(source), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.plain_checkpoint(tmp_path_factory.mktemp("plain") / "model")


def test_ten_runs_killed_at_random_moments_and_resumed_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    codes = drive(source, tmp_path, "kill")
    expected = models.contents(tmp_path / "timing")
    assert [end for _, end in codes] == [0] * 10
    assert sum(killed for killed, _ in codes) >= 5, "most kills should hit a running process"
    for number in range(10):
        assert models.contents(tmp_path / f"kill{number}") == expected


def test_a_crash_at_every_write_sync_and_rename_is_survived(source: Path, tmp_path: Path) -> None:
    drive(source, tmp_path, "count")
    total = int((tmp_path / "count").read_text())
    expected = models.contents(tmp_path / "out")
    # The first and last calls each, the many alike writes between them by steps.
    points = sorted({*range(1, 9), *range(9, total - 28, 7), *range(max(9, total - 28), total + 1)})
    codes = drive(source, tmp_path, "crash", json.dumps(points))
    assert codes == [[-9, 0]] * len(points)
    for number in points:
        assert models.contents(tmp_path / f"crash{number}") == expected, f"after a crash at call {number} of {total}"


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_died_after_calibrating_does_not_calibrate_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model", shard="100KB")
    options = {"scheme": "w8a8-smoothquant", "calibration": models.tokens(tmp_path / "tokens.safetensors")}
    quantize_checkpoint(tmp_path / "model", tmp_path / "whole", **options)
    with monkeypatch.context() as broken:
        broken.setattr(ShardJob, "_work", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(FlowError, match="full"):
            quantize_checkpoint(tmp_path / "model", tmp_path / "out", **options)
    with monkeypatch.context() as forbidden:
        forbidden.setattr("baracuda.flow.prepare.prepare", None)
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", resume=True, **options)
    assert models.contents(tmp_path / "out") == models.contents(tmp_path / "whole")


def test_a_resumed_run_must_be_the_same_run(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".baracuda").mkdir(parents=True)
    (out / ".baracuda" / "run.json").write_text(json.dumps({"fingerprint": "x", "run": {"options": {}}}))
    with pytest.raises(FlowError, match="unfinished run: pass --resume"):
        quantize_checkpoint(source, out)
    with pytest.raises(FlowError, match=r"differs from this one in .*options"):
        quantize_checkpoint(source, out, resume=True)
