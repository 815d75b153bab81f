"""`bench model` without a GPU: what it measures, what it leaves out, and the bars it holds rows against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from baracuda.flow.hf import measure
from bench import model as bench_model
from bench._decoder import LLAMA_8B, Decoders, Shapes, weight_bytes

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
    parts = {"linears", "prefill", "decode", "decode: its linears", "decode: its head"}
    assert {row["part"] for row in content["rows"]} == parts
    for row in content["rows"]:
        floats = next(r for r in content["rows"] if (r["part"], r["model"]) == (row["part"], "f32"))
        assert row["ratio"] == pytest.approx(floats["ms"] / row["ms"])
    assert content["memory"]["w4a8"] < content["memory"]["w8a8"] < content["memory"]["bf16"] < content["memory"]["f32"]
    assert "w4a8" in capsys.readouterr().out and content["bars"] == []


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
