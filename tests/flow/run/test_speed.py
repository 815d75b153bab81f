"""`baracuda bench`: tokens a second and memory of a model beside its quantized checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
from typer.testing import CliRunner

from baracuda import BaracudaError
from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.run import speed
from baracuda.flow.run.speed import advice, compare_speed
from baracuda_cli import app

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("speed")
    models.save("llama", folder / "model")
    quantize_checkpoint(folder / "model", folder / "small")
    return folder / "model", folder / "small"


def test_both_models_are_measured_in_one_run(directories: tuple[Path, Path]) -> None:
    said: list[str] = []
    original, small = compare_speed(*directories, batch=2, length=8, tokens=8, progress=said.append)
    assert (original.name, small.name) == ("model", "small") and small.memory < original.memory
    for row in (original, small):
        assert row.prefill > 0 and row.decode > 0 and row.compiled is None
    assert said[-1] == "decoding with a batch of 2"


def test_the_command_draws_ratios_to_the_original(directories: tuple[Path, Path]) -> None:
    arguments = ["bench", *map(str, directories), "--length", "8", "--tokens", "8"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "tokens/s (1.00x)" in result.output and "small" in result.output and "MiB (0." in result.output


def test_a_cpu_that_emulates_bf16_is_told_of_and_float32_is_measured_where_asked(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", str(directories[1]), "--length", "8", "--tokens", "8", "--dtype"]
    monkeypatch.setattr(speed, "multiplies_bf16", lambda: False)
    told = " ".join(CliRunner().invoke(app, [*arguments, "bfloat16"]).output.split())
    assert "no instructions for products of bfloat16" in told and "--dtype float32" in told
    assert "note:" not in CliRunner().invoke(app, [*arguments, "float32"]).output
    (row,) = json.loads(CliRunner().invoke(app, [*arguments, "float32", "--json"]).output)
    assert row["dtype"] == "float32"
    refused = CliRunner().invoke(app, [*arguments, "f32"])
    assert refused.exit_code == 2 and "--dtype: expected float32, bfloat16 or float16, got f32" in refused.output
    measured = [speed.Speed("model", "bfloat16", 1, 1.0, 1.0, None)]
    assert advice(measured, "cpu")
    monkeypatch.setattr(speed, "multiplies_bf16", lambda: True)
    assert advice(measured, "cpu") is None


def test_what_cannot_be_measured_is_said(directories: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BaracudaError, match="expected a Hugging Face model directory; it is not there"):
        compare_speed(tmp_path / "nothing")
    models.save("bert", tmp_path / "bert")
    with pytest.raises(FlowError, match="BertModel does not generate text"):
        compare_speed(tmp_path / "bert")
