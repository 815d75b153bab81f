"""What a dry run says, and that it is what the run then does."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import torch
from typer.testing import CliRunner

from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.checkpoint.tensorfile import write_tensors
from baracuda.flow.run import preview
from baracuda_cli import app

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("preview") / "model"
    models.save("llama", directory, torch.bfloat16)
    return directory


RECIPE = {"scheme": "w4a16", "ignore": ["*.o_proj"], "layers": [{"match": "*.down_proj", "scheme": "w8a8"}]}


def test_a_dry_run_says_what_the_run_then_does_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    plan = quantize_checkpoint(source, tmp_path / "out", recipe=RECIPE, dry_run=True)
    assert not (tmp_path / "out").exists()
    told: list[dict[str, object]] = []
    report = quantize_checkpoint(source, tmp_path / "out", recipe=RECIPE, on_plan=told.append)
    shared = ("name", "shape", "bits", "group_size", "bytes_before", "bytes_after")
    assert [[layer[k] for k in shared] for layer in plan["layers"]] == [
        [layer[k] for k in shared] for layer in report["layers"]
    ]
    assert plan["left"] == report["left"] and plan["notes"] == report["notes"]
    assert {layer["scheme"] for layer in plan["layers"]} == {"w4a16", "w8a8"}
    assert told[0]["layers"] == plan["layers"]
    header = 8192  # what the names of the tensors take
    assert abs(plan["size"]["after"] - report["size"]["after"]) < header
    weights = sum(layer["bytes_after"] for layer in report["layers"])
    assert plan["average_bits"] == 8 * weights / sum(layer["shape"][0] * layer["shape"][1] for layer in plan["layers"])
    assert plan["estimate"]["seconds"] > 0 and plan["estimate"]["memory_bytes"] > 2**20


def test_the_estimate_counts_the_evaluation(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "_products_per_second", lambda device: 1e6)
    monkeypatch.setattr(preview, "_rate", lambda source, structure, choice: 0.0)
    data = tmp_path / "tokens.safetensors"
    write_tensors(data, {"tokens": torch.zeros(100, 64, dtype=torch.int64)})
    sizes = {"samples": 100, "sequence_length": 64, "dry_run": True}
    without = quantize_checkpoint(source, None, **sizes)
    plan = quantize_checkpoint(source, None, evaluation=data, **sizes)
    parameters = sum(layer["shape"][0] * layer["shape"][1] for layer in plan["layers"])
    added = plan["estimate"]["seconds"] - without["estimate"]["seconds"]
    assert added == pytest.approx(2 * 2 * 100 * 64 * parameters / 1e6, rel=0.1)


def test_the_command_shows_it_to_people_and_as_json_to_programs(source: Path) -> None:
    drawn = CliRunner().invoke(app, ["quantize", str(source), "--scheme", "w4a16", "--dry-run"])
    assert drawn.exit_code == 0, drawn.output
    for part in ("mlp.down_proj", "64 x 96", "w4a16", "2 (0-1)", "Stays float", "the output head", "estimate"):
        assert part in drawn.output
    read = CliRunner().invoke(app, ["quantize", str(source), "--scheme", "w4a16", "--dry-run", "--json"])
    assert json.loads(read.output)["layers"][0]["group_size"] == 32


def test_a_run_without_an_output_is_refused(source: Path) -> None:
    refused = CliRunner().invoke(app, ["quantize", str(source)])
    assert refused.exit_code == 2 and "expected a directory for the result" in " ".join(refused.output.split())


def test_a_dry_run_refuses_what_the_run_would(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="needs calibration data"):
        quantize_checkpoint(source, None, method="gptq", dry_run=True)
