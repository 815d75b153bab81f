"""Two ranks under torchrun write the bytes of one process; a rank that dies ends the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import models
import pytest
import torch

from baracuda.flow import quantize_checkpoint
from baracuda.flow.run.distributed import Team

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = """
import os, sys, time, weakref
if sys.argv[1] != "smooth":
    sys.modules["transformers"] = None
import torch
torch.set_num_threads(1)
if sys.argv[1] == "leave":
    import torch.distributed as dist
    from baracuda.flow.run.distributed import team
    if sys.argv[2] == "second":
        dist.init_process_group("gloo")
    for turn in range(8):
        with team(timeout_s=30) as ranks:
            import torch.distributed.nn.functional
            group = weakref.ref(ranks.group)
            assert ranks.gather((turn, ranks.rank)) == [(turn, 0), (turn, 1)]
        assert group() is None
    if sys.argv[2] == "second":
        dist.destroy_process_group()
    assert not dist.is_initialized()
    sys.exit()
if sys.argv[1] == "wait":
    from baracuda.flow.run.distributed import team
    with team(timeout_s=6) as ranks:
        if ranks.leads:
            time.sleep(8)
        ranks.barrier()
    sys.exit()
import baracuda.flow.run.stream as stream
from baracuda.flow import quantize_checkpoint
if sys.argv[1] == "slow":
    if os.environ["RANK"] == "1":
        def work(self, block):
            open(sys.argv[4], "w").write(str(os.getpid()))
            time.sleep(60)
        stream.ShardJob._work = work
options = {}
if sys.argv[1] == "broken":
    import baracuda.flow.run.calibrate as calibration
    def calibrate(*arguments):
        if os.environ["RANK"] == "1":
            raise IndexError("index out of range in self")
        arguments[5].barrier()
    calibration.calibrate = calibrate
    options = dict(activations="static", calibration=sys.argv[4])
if sys.argv[1] == "smooth":
    options = dict(scheme="w8a8-smoothquant", activations="static", alpha="auto", calibration=sys.argv[4])
report = quantize_checkpoint(sys.argv[2], sys.argv[3], resume=sys.argv[1] == "again", **options)
assert bool(report) == (os.environ["RANK"] == "0")
"""


def torchrun(folder: Path, *arguments: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    return [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), *arguments]


@pytest.mark.parametrize("shards", [1, 3])
def test_two_ranks_write_the_bytes_of_one(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three shards ranks take whole ones; a single shard is shared tensor by tensor."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    source = models.plain_checkpoint(tmp_path / "model", shards=shards)
    quantize_checkpoint(source, tmp_path / "one")
    subprocess.run(torchrun(tmp_path, "plain", str(source), str(tmp_path / "two")), check=True, timeout=120)
    assert models.contents(tmp_path / "two") == models.contents(tmp_path / "one")


def test_a_run_that_has_ended_is_told_to_two_ranks_by_the_first(tmp_path: Path) -> None:
    source = models.plain_checkpoint(tmp_path / "model")
    quantize_checkpoint(source, tmp_path / "out")
    (tmp_path / "out" / ".baracuda").mkdir()  # as a run killed in its last step leaves it
    subprocess.run(torchrun(tmp_path, "again", str(source), str(tmp_path / "out")), check=True, timeout=120)
    assert not (tmp_path / "out" / ".baracuda").exists()


def test_calibration_over_two_ranks_gives_the_bytes_of_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model", torch.float32, shard="100KB")
    tokens = models.tokens(tmp_path / "tokens.safetensors", sequences=40)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quantize_checkpoint(
            tmp_path / "model",
            tmp_path / "one",
            scheme="w8a8-smoothquant",
            activations="static",
            alpha="auto",
            calibration=tokens,
        )
    finally:
        torch.set_num_threads(threads)
    command = torchrun(tmp_path, "smooth", str(tmp_path / "model"), str(tmp_path / "two"), str(tokens))
    subprocess.run(command, check=True, timeout=180)
    assert models.contents(tmp_path / "two") == models.contents(tmp_path / "one")


@pytest.mark.parametrize("guest", ["first", "second"])
def test_what_is_imported_meanwhile_keeps_no_thread_of_the_team(guest: str, tmp_path: Path) -> None:
    """torch.distributed.nn takes the default group as a default argument; gloo's threads, were they kept, can abort the
    process while Python shuts down. A group somebody else had started goes on."""
    subprocess.run(torchrun(tmp_path, "leave", guest), check=True, timeout=120)


def test_a_rank_that_works_alone_is_waited_for(tmp_path: Path) -> None:
    """Rank 0 evaluates alone, for longer than the ranks give each other to start."""
    subprocess.run(torchrun(tmp_path, "wait"), check=True, timeout=120)


def test_a_killed_rank_ends_the_run_with_an_error(tmp_path: Path) -> None:
    source, mark = models.plain_checkpoint(tmp_path / "model", shards=3), tmp_path / "pid"
    command = torchrun(tmp_path, "slow", str(source), str(tmp_path / "two"), str(mark))
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 90
        while not (mark.exists() and mark.read_text()):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        os.kill(int(mark.read_text()), signal.SIGKILL)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode != 0 and "SIGKILL" in errors
    assert not (tmp_path / "two" / "config.json").exists()


def test_calibration_that_fails_on_one_rank_leaves_no_unfinished_run(tmp_path: Path) -> None:
    source, tokens = models.plain_checkpoint(tmp_path / "model"), models.tokens(tmp_path / "tokens.safetensors")
    command = torchrun(tmp_path, "broken", str(source), str(tmp_path / "two"), str(tokens))
    failed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert failed.returncode != 0 and "index out of range" in failed.stderr
    assert not (tmp_path / "two").exists()


def test_work_is_dealt_completely_and_evenly() -> None:
    sizes = {f"shard{i}": 10 + i for i in range(11)}
    dealt = [Team(rank, 3).share(sizes) for rank in range(3)]
    assert sorted(name for part in dealt for name in part) == sorted(sizes)
    loads = [sum(sizes[name] for name in part) for part in dealt]
    assert max(loads) - min(loads) <= 20
