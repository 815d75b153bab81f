"""An evaluation on the calibration text is told as such: by the tokens, whatever the files are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from typer.testing import CliRunner

from baracuda.flow import evaluate_checkpoint, quantize_checkpoint
from baracuda.flow.checkpoint.tensorfile import write_tensors
from baracuda.flow.run import overlap
from baracuda.flow.run.verdict import verdict
from baracuda_cli import app

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, models.VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer; texts to calibrate with, the same as tokens in other rows, and others."""
    folder = tmp_path_factory.mktemp("overlap")
    models.save("llama", folder / "model")
    models.word_tokenizer().save_pretrained(folder / "model")
    text = random(1, 12, 24)
    lines = [" ".join(f"w{token}" for token in row) for row in text.tolist()]
    (folder / "calibration.txt").write_text("\n".join(lines))
    write_tensors(folder / "same.safetensors", {"tokens": text.flatten()[5:261].view(8, 32)})
    write_tensors(folder / "other.safetensors", {"tokens": random(2, 8, 32)})
    return folder


def quantized(folder: Path, out: Path, evaluation: str, **options: Any) -> dict[str, Any]:
    return quantize_checkpoint(
        folder / "model",
        out,
        calibration=folder / "calibration.txt",
        evaluation=folder / evaluation,
        activations="static",
        sequence_length=32,
        **options,
    )


@pytest.mark.parametrize("evaluation", ["calibration.txt", "same.safetensors"])
def test_the_same_text_under_any_name_is_told_in_verdict_notes_and_page(
    evaluation: str, folder: Path, tmp_path: Path
) -> None:
    report = quantized(folder, tmp_path / "out", evaluation)
    assert report["evaluation"]["seen_in_calibration"] > 0.9
    assert report["notes"][-1].endswith("Evaluate on text that calibration did not read.")
    found = verdict(report)
    assert found.flattered and "but on its calibration text" in str(found) and "flatter" in str(found)
    assert "Nothing needs to be done" not in str(found)
    page = (tmp_path / "out" / "baracuda_report.html").read_text()
    assert "but on its calibration text" in page and "are in the calibration text" in page
    assert json.loads((tmp_path / "out" / "baracuda_report.json").read_text())["notes"] == report["notes"]


def test_other_text_is_praised_as_before(folder: Path, tmp_path: Path) -> None:
    report = quantized(folder, tmp_path / "out", "other.safetensors")
    assert report["evaluation"]["seen_in_calibration"] == 0 and not report["notes"]
    assert not verdict(report).flattered and "calibration" not in str(verdict(report))


def test_the_terminal_says_it_and_eval_remembers_what_calibration_read(folder: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", str(folder / "calibration.txt")
    options = ["--activations", "static", "--calibration", data, "--evaluate", data, "--sequence-length", "32"]
    run = CliRunner().invoke(app, ["quantize", str(folder / "model"), "-o", str(out), *options])
    assert run.exit_code == 0 and "calibration text" in " ".join(run.output.split()), run.output
    run = CliRunner().invoke(app, ["eval", str(out), "--text", data, "--sequence-length", "32"])
    assert run.exit_code == 0 and "warning" in run.output and "100% of the evaluated tokens" in run.output
    for name, least, most in (("same.safetensors", 0.9, 1.0), ("other.safetensors", 0.0, 0.0)):
        found = evaluate_checkpoint(out, folder / name, against=folder / "model", sequence_length=32)
        assert least <= found["seen_in_calibration"] <= most


def test_windows_count_tokens_that_both_texts_have() -> None:
    calibration = [random(3, 40)]
    half = torch.cat([calibration[0][10:30], random(4, 20)])
    assert overlap.seen_share(calibration, [half]) == 0.5
    assert overlap.seen_share(calibration, [calibration[0][: overlap.WINDOW - 1]]) == 0, "a phrase is no quotation"
    short = [random(5, 6)]
    assert overlap.seen_share(short, short) == 1 and overlap.seen_share(short, [random(6, 6)]) == 0
    assert overlap.warning({"seen_in_calibration": overlap.LIMIT - 0.01}) is None and overlap.warning(None) is None
