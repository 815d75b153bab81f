"""The GPU benches without a GPU: what they compare, that both sides compute the same, and what they say."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from baracuda import BackendKind, DynamicRangeMode, ElementKind, PlanPreference, QuantizeKind
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan
from bench import _gpu_small, gpu
from bench._gpu_peers import formula

CPU = torch.device("cpu")
PROBLEMS = list(_gpu_small.problems())
EVERY = [p for _, p in gpu.problems((256, 256), quick=False) if p.quantized is ElementKind.S8]


def line(ours: float, theirs: float) -> _gpu_small.Line:
    return _gpu_small.Line("quantize", "token", "bf16", "s8", (256, 4096), ours, theirs)


def test_every_operation_is_measured_in_every_scope_and_size() -> None:
    counts = Counter((p.op, p.mode) for _, p in PROBLEMS)
    each = len(_gpu_small.SHAPES) * 2 * 4
    assert counts == {
        (QuantizeKind.QUANTIZE, DynamicRangeMode.SYMMETRIC): each,
        (QuantizeKind.DEQUANTIZE, DynamicRangeMode.SYMMETRIC): each,
        (QuantizeKind.FAKE_QUANTIZE, DynamicRangeMode.SYMMETRIC): each,
        (QuantizeKind.FAKE_QUANTIZE_BACKWARD, DynamicRangeMode.SYMMETRIC): each,
        (QuantizeKind.DYNAMIC_QUANTIZE, DynamicRangeMode.SYMMETRIC): each,
        (QuantizeKind.DYNAMIC_QUANTIZE, DynamicRangeMode.ASYMMETRIC): each,
    }
    assert len({(p.view.shape, p.op, p.mode, p.element) for _, p in PROBLEMS}) == len(PROBLEMS)
    assert {p.element for _, p in PROBLEMS} == {ElementKind.BF16, ElementKind.F32}


@pytest.mark.parametrize("p", EVERY, ids=lambda p: f"{p.op.value}-{p.mode.value}-{p.scope}-{p.element.value}")
def test_the_formula_beside_ours_is_the_same_operation(p: Problem) -> None:
    torch.manual_seed(0)
    values = gpu.operands(p, CPU)
    SelectedPlan(p, CPU, PlanPreference(prefer_backend=BackendKind.REFERENCE)).launch(values)
    found = formula(p)
    assert found is not None
    body, count = found
    results = body(*values[:count])
    theirs = list(results) if isinstance(results, tuple) else [results]
    ours = [v for v, o in zip(values, OPS[p.op].operands, strict=True) if o.output and v is not None]
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine.reshape(-1), other.reshape(-1))


def test_operands_fill_the_cache_twice_within_reason() -> None:
    assert _gpu_small.set_count(10, 100) == 20
    assert _gpu_small.set_count(1000, 100) == 4
    assert _gpu_small.set_count(1, 10**9) == _gpu_small.MOST_SETS


def test_what_is_slower_is_marked_and_counted() -> None:
    lines = [line(2.0, 4.0), line(2.0, 1.99), line(2.0, 1.5)]
    assert [str(each)[0] for each in lines] == [" ", "!", "!"]
    assert "2.00 us, torch.compile     4.00 us   2.00x" in str(lines[0])
    said = _gpu_small.summary(lines, 5)
    assert said.startswith("2 of 3 slower than torch.compile, 1 by more than 2%; least 0.75x, median 0.99x")
    assert said.endswith("2 rows were not begun in time")
    assert _gpu_small.summary([], 0) == "0 of 0 slower than torch.compile, 0 by more than 2%"


def test_a_run_prints_its_rows_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=2**20))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(_gpu_small, "measure", lambda name, p, device, check: line(2.0, 1.0))
    options = Namespace(
        only="256x4096|quantize,f32", jobs=1, seconds=60.0, no_check=False, json=tmp_path / "small.json"
    )
    _gpu_small.main(options, CPU)
    assert "4 of 4 slower than torch.compile" in capsys.readouterr().out
    written = json.loads(options.json.read_text())
    assert written["device"] == "A GPU"
    assert [row["ratio"] for row in written["lines"]] == [0.5] * 4
    options.seconds = -1.0
    _gpu_small.main(options, CPU)
    assert "4 rows were not begun in time" in capsys.readouterr().out


def test_peers_are_left_out_when_the_time_is_over_and_rows_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(name: str, p: Problem, ceiling: float, device: torch.device, peers: bool, check: bool) -> gpu.Line:
        found = {"torch.compile": 3.0} if peers else {}
        return gpu.Line(p.op.value, name, p.element.value, p.quantized.value, p.shape, 2.0, 4.0, 0.9, 0.95, found)

    for name, value in {"is_available": True, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(gpu, "host_microseconds", lambda device: 5.0)
    monkeypatch.setattr(gpu, "copy_ceiling", lambda device: 4.2e6)
    monkeypatch.setattr(gpu, "measure", measured)
    for seconds, beside in (("60", [{"torch.compile": 3.0}]), ("0", [{}])):
        file = tmp_path / f"{seconds}.json"
        gpu.main(["--only", "dequantize|token|f32|s4", "--seconds", seconds, "--json", str(file)])
        said = capsys.readouterr().out
        assert "0 of 1 at or above their bar" in said and ("torch.compile 1.50x" in said) == (seconds == "60")
        assert [line["peers"] for line in json.loads(file.read_text())["lines"]] == beside


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no CUDA device"):
        gpu.main(["--small"])
