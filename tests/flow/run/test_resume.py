"""kill -9 at any moment, then --resume: the result has the bytes of a run nobody killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest

from baracuda.flow import CheckpointError, FlowError, quantize_checkpoint
from baracuda.flow.run.stream import ShardJob

# The driver computes nothing itself, so that forked children may use torch's threads. It prints one line of JSON.
DRIVER = """
import json, os, random, signal, sys, time
sys.modules["transformers"] = None
from pathlib import Path
from baracuda.flow import quantize_checkpoint

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
        quantize_checkpoint(source, out, resume=resume)
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
    assert sum(killed for killed, _ in codes) >= 3, "kills should hit a running process"
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
        forbidden.setattr("baracuda.flow.run.calibrate.calibrate", None)
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", resume=True, **options)
    assert models.contents(tmp_path / "out") == models.contents(tmp_path / "whole")


def test_a_resumed_run_must_be_the_same_run(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".baracuda").mkdir(parents=True)
    (out / ".baracuda" / "run.json").write_text(json.dumps({"fingerprint": "x", "run": {"options": {}}}))
    with pytest.raises(FlowError, match="unfinished run: pass --resume"):
        quantize_checkpoint(source, out)
    with pytest.raises(
        FlowError, match=r"unfinished run that differs .* the model, scheme \(None there, 'w8a8' here\)"
    ):
        quantize_checkpoint(source, out, resume=True)


@pytest.fixture(scope="module")
def ended(source: Path) -> Path:
    quantize_checkpoint(source, source.parent / "ended", ignore="*.layers.0.*")
    return source.parent / "ended"


def test_a_run_that_has_ended_is_left_as_it_is(source: Path, ended: Path) -> None:
    before = (ended / "baracuda_report.json").read_bytes()
    report = quantize_checkpoint(source, ended, ignore=["*.layers.0.*"], resume=True)
    assert report == json.loads(before) and len(report["layers"]) == 10
    assert (ended / "baracuda_report.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": ()}, r"ignore \(\['\*\.layers\.0\.\*'\] there, \[\] here\); choose another output directory"),
        ({"scheme": "w4a16", "group_size": 32}, r"scheme \('w8a8' there, 'w4a16' here\), group_size \(128 there, 32"),
        ({"evaluation": "texts.txt"}, r"one in the evaluation data; choose"),
        ({"scheme": "w3a3"}, r"scheme: expected one of"),
    ],
    ids=str,
)
def test_a_run_that_has_ended_must_be_the_same_run(
    options: dict[str, Any], message: str, source: Path, ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("some words\n")
    before = models.contents(ended)
    with pytest.raises(FlowError, match=message):
        quantize_checkpoint(source, ended, resume=True, **{"ignore": "*.layers.0.*", **options})
    assert models.contents(ended) == before


def test_a_run_that_has_ended_must_be_of_the_same_model(source: Path, ended: Path, tmp_path: Path) -> None:
    options = {"ignore": "*.layers.0.*", "resume": True}
    same = Path(shutil.copytree(source, tmp_path / "copied"))  # with the times of its files
    quantize_checkpoint(same, ended, **options)
    shard = same / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes())
    with pytest.raises(
        FlowError, match="finished run that differs from this one in when the model's files were written"
    ):
        quantize_checkpoint(same, ended, **options)
    with pytest.raises(FlowError, match="finished run that differs from this one in the model; choose"):
        quantize_checkpoint(models.plain_checkpoint(tmp_path / "other", layers=2), ended, **options)
    with pytest.raises(CheckpointError, match="it is not there"):
        quantize_checkpoint(tmp_path / "nosuch", ended, **options)


def test_a_report_that_does_not_say_what_it_was_made_from_is_not_taken_for_this_run(
    source: Path, ended: Path, tmp_path: Path
) -> None:
    older = Path(shutil.copytree(ended, tmp_path / "older"))
    report = json.loads((older / "baracuda_report.json").read_text())
    del report["run"]["made_from"]
    (older / "baracuda_report.json").write_text(json.dumps(report))
    with pytest.raises(FlowError, match=r"does not say what it was made from.*choose another output"):
        quantize_checkpoint(source, older, ignore="*.layers.0.*", resume=True)


def test_a_result_stands_whichever_version_made_it(source: Path, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baracuda.flow.run.steps.__version__", "99")
    assert quantize_checkpoint(source, ended, ignore="*.layers.0.*", resume=True)["baracuda"] != "99"
