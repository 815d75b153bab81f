"""What `make gpu-sanitize` looks at, and that it cannot pass by looking at nothing: all but the tool itself."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")

import gpu_sanitize

from baracuda import DynamicRangeMode, ElementKind, PerChannel, PerGroup, PerTensor, PerToken, QuantizeKind
from baracuda.backends.triton.linear import tune as linear_tune
from baracuda.backends.triton.linear.tune_floats import direct_floats
from baracuda.core.optable import OPS
from baracuda.core.types import FLOATS, INTEGERS, OpCategory

CLEAN = "case a\ncase b\nran 2\n========= ERROR SUMMARY: 0 errors\n"
OUTSIDE = """case a
========= Invalid __global__ write of size 4 bytes
=========     at beyond+0x90 in gpu_sanitize.py:12
case b
ran 2
========= ERROR SUMMARY: 1 error
"""
RACE = """case a
========= Error: Race reported between Write access at rows+0x90 in ranges.py:41
=========     and Read access at rows+0xa0 in ranges.py:42 [12 hazards]
========= Error: Race reported between Write access at rows+0xc0 in ranges.py:41
ran 1
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
BEGIN, SPECIALIZE = sorted(gpu_sanitize.hand_over())
HAND_OVER = f"""case a
========= Error: Race reported between Read access at gemm+0x100 in {BEGIN}
=========     and Write access at gemm+0x63a0 in {BEGIN} [7 hazards]
=========     and Write access at gemm+0xb5a0 in {SPECIALIZE} [13 hazards]
=========
ran 1
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_every_operation_meets_every_scope_mode_and_width() -> None:
    cases = gpu_sanitize.spread()
    plain = [c for c in cases if OPS[c.problem.op].category is not OpCategory.FUSED]  # those have one scope each
    seen = {(c.problem.op, type(c.problem.scope), c.problem.mode, c.problem.quantized.is_packed) for c in plain}
    scopes = (PerTensor, PerChannel, PerToken, PerGroup)
    for scope in scopes:
        for packed in (False, True):
            assert (QuantizeKind.QUANTIZE, scope, DynamicRangeMode.SYMMETRIC, packed) in seen
            for mode in DynamicRangeMode:
                assert (QuantizeKind.DYNAMIC_QUANTIZE, scope, mode, packed) in seen
        assert {op for op, kind, *_ in seen if kind is scope} == {op for op, *_ in seen}
    assert {c.problem.element for c in cases} == set(FLOATS)
    assert {c.problem.quantized for c in cases} == set(INTEGERS)
    learned = [name for name, body in gpu_sanitize.work() if body.func is gpu_sanitize.check_learned]
    assert len(learned) > 20


def test_every_schedule_of_the_sm_90_linears_is_run() -> None:
    shapes = [c.problem.shape for c in gpu_sanitize.linears() if c.problem.shape in gpu_sanitize.LINEAR_SHAPES]
    most = linear_tune.FEW_TOKENS
    few = [linear_tune.few(*shape, False, 0, 132) for shape in shapes if shape[0] <= most]
    tiles = [linear_tune.pingpong(*shape, 2, 132, cut=True) for shape in shapes if shape[0] > most]
    assert {tile.fold > 1 for tile in few} == {tile.wgmma for tile in few} == {False, True}
    assert {tile.tail > 1 for tile in tiles} == {False, True}
    direct = [linear_tune.direct(m, 72, k, 128) for m, k in gpu_sanitize.PACKED]
    assert {tile.whole for tile in direct} == {False, True}
    floats = [direct_floats(m, 72, k, 64, 132) for m, k in gpu_sanitize.PACKED_FLOATS]
    assert {tile.once for tile in floats} == {tile.split > 1 for tile in floats} == {False, True}
    stored = {(c.problem.quantized, c.problem.weight) for c in gpu_sanitize.linears()}
    assert stored == set(product((ElementKind.S8, ElementKind.U8), (ElementKind.S8, ElementKind.S4)))


def test_operands_at_odd_addresses_are_every_operations() -> None:
    ops = {case.problem.op for case in gpu_sanitize.odd()}
    others = {
        QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD,
        QuantizeKind.QUANTIZED_LINEAR,
        QuantizeKind.WEIGHT_ONLY_LINEAR,
    }
    assert ops == set(QuantizeKind) - others


@pytest.mark.parametrize(
    "code, log, holds",
    [
        (0, CLEAN, True),
        (9, CLEAN, False),
        (0, OUTSIDE, False),
        (0, RACE, False),
        (0, "case a\nran 1\n", False),
        (0, CLEAN.replace("ran 2\n", ""), False),
        (0, CLEAN.replace("case b", "WRONG AssertionError: q differs"), False),
        (9, HAND_OVER, True),
        (9, HAND_OVER.replace(SPECIALIZE, "hopper.py:1"), False),
        (9, HAND_OVER.replace("SUMMARY: 1 hazard", "SUMMARY: 2 hazards"), False),
    ],
    ids=["clean", "status", "outside", "race", "no tool", "cut short", "wrong bits", "hand-over", "beside it", "more"],
)
def test_a_run_passes_only_if_the_tool_saw_all_of_it_and_found_nothing(code: int, log: str, holds: bool) -> None:
    assert gpu_sanitize.passed(code, log) == holds


def test_findings_are_counted_by_place() -> None:
    race = "Error: Race reported between Write access at rows+.. in ranges.py:41"
    assert gpu_sanitize.findings(RACE) == {race: 2}
    outside = "Invalid __global__ write of size 4 bytes at beyond+.. in gpu_sanitize.py:12"
    assert gpu_sanitize.findings(OUTSIDE) == {outside: 1}


def tool(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_tool_that_notices_nothing_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(out=tmp_path, jobs=1, shares=1, every=1, seconds=20, tools="memcheck")
    monkeypatch.setattr("sys.executable", tool(tmp_path / "python", "printf 'case a\\nran 1\\n'"))
    summary = "printf 'case a\\nran 1\\n========= ERROR SUMMARY: 0 errors\\n'"
    controls = 'case "$*" in *--help*) exit 0;; *--control*) exit 9;; esac'
    blind = tool(tmp_path / "blind", summary)
    assert gpu_sanitize.watched(blind, options) == 1
    assert "wrong on purpose went unnoticed (exit status 0)" in capsys.readouterr().out
    awake = tool(tmp_path / "awake", f"{controls}\n{summary}")
    assert gpu_sanitize.watched(awake, options) == 0
    assert "ok memcheck: 1 cases, 0 findings" in capsys.readouterr().out
    monkeypatch.setattr("sys.executable", tool(tmp_path / "wrong", "exit 1"))
    assert gpu_sanitize.watched(awake, options) == 1
    said = capsys.readouterr().out
    assert "FAIL without any tool: see alone-0.log" in said and "ok memcheck" in said
    slow = tool(tmp_path / "slow", f"{controls}\nexec sleep 60")
    options.seconds = 0.5
    assert gpu_sanitize.watched(slow, options) == 1
    assert "memcheck-0 (exit status -1)" in capsys.readouterr().out


def test_without_the_tool_it_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPUTE_SANITIZER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(SystemExit, match="found none; install one of them, or name it in COMPUTE_SANITIZER"):
        gpu_sanitize.sanitizer()
    (tmp_path / "bin").mkdir()
    path = tool(tmp_path / "bin" / "compute-sanitizer", "")
    assert gpu_sanitize.sanitizer() == path
