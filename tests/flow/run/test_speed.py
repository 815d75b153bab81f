"""`baracuda bench`: tokens a second and memory of a model beside its quantized checkpoint."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
from typer.testing import CliRunner

from baracuda import BaracudaError
from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.run.speed import compare_speed
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


def test_what_cannot_be_measured_is_said(directories: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BaracudaError, match="expected a Hugging Face model directory; it is not there"):
        compare_speed(tmp_path / "nothing")
    models.save("bert", tmp_path / "bert")
    with pytest.raises(FlowError, match="BertModel does not generate text"):
        compare_speed(tmp_path / "bert")
