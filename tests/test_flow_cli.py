"""The commands: what they print, what they exit with, and that `import baracuda` does not pay for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from typer.testing import CliRunner

from baracuda.cli import app
from baracuda.flow.tensorfile import write_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
run = CliRunner()


def test_quantize_verify_and_report_in_a_row(tmp_path: Path) -> None:
    source, out = models.plain_checkpoint(tmp_path / "model"), tmp_path / "out"
    done = run.invoke(app, ["quantize", str(source), "-o", str(out), "--scheme", "w4a16", "--group-size", "32"])
    assert done.exit_code == 0 and "12 Linears" in done.output and "baracuda verify" in done.output
    done = run.invoke(app, ["verify", str(out), "--against", str(source)])
    assert done.exit_code == 0 and "nothing is wrong" in done.output
    (out / "model-00001-of-00002.safetensors").write_bytes(b"")
    done = run.invoke(app, ["verify", str(out)])
    assert done.exit_code == 1 and "truncated" in done.output
    done = run.invoke(app, ["report", str(out)])
    assert done.exit_code == 0 and "baracuda_report.html" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "w3a3"], "expected one of w8a8"),
        (["--activations", "static"], "needs calibration data"),
        (["--scheme", "w4a16", "--activations", "static"], "floating point"),
        (["--alpha", "much"], "expected a number in"),
        (["--alpha", "7"], "expected a number in [0, 1] or 'auto', got 7"),
        (["--ignore", "*"], "nothing to quantize. model.embed_tokens"),
        (["--ignore", "re:["], "not a regular expression"),
        (["--samples", "0"], "samples: expected at least 1, got 0"),
        (["--sequence-length", "1"], "sequence_length: expected at least 2"),
        (["--calibration", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--calibration", "texts.csv"], "texts.csv: another kind of file"),
        (["--calibration", "empty.txt"], "empty.txt: expected a text a line; it is empty"),
        (["--calibration", "latin.txt"], "latin.txt: expected UTF-8 text"),
        (["--calibration", "prompts.jsonl"], 'line 1: expected {"text": "..."}, got {"prompt": 1}'),
        (["--evaluate", "floats.safetensors"], "expected token numbers"),
        (["--evaluate", "nowhere.txt"], "nowhere.txt: no such file"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.csv").write_text("a,b")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": 1}\n')
    write_tensors(tmp_path / "floats.safetensors", {"tokens": torch.zeros(2, 3)})
    source = models.plain_checkpoint(tmp_path / "model")
    done = run.invoke(app, ["quantize", str(source), "-o", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [("model", "cannot be the model's own directory"), ("file", "is a file"), ("full", "is not empty")],
)
def test_an_output_that_is_taken_is_left_as_it_is(place: str, message: str, tmp_path: Path) -> None:
    source = models.plain_checkpoint(tmp_path / "model")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = run.invoke(app, ["quantize", str(source), "-o", str(tmp_path / place)])
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_calibration_that_fails_leaves_nothing_to_be_cleared_away(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model")
    (tmp_path / "texts.txt").write_text("hello\n")
    command = ["quantize", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--scheme", "w8a8-smoothquant"]
    done = run.invoke(app, [*command, "--calibration", str(tmp_path / "texts.txt")])
    assert done.exit_code == 2 and "no tokenizer" in done.output and not (tmp_path / "out").exists()


def test_the_demo_quantizes_a_model_end_to_end(tmp_path: Path) -> None:
    done = run.invoke(app, ["demo", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.count("fine") == 4 and "wrong" not in done.output
    assert (tmp_path / "smoothquant-static" / "baracuda_report.html").exists()


def test_the_demo_works_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run.invoke(app, ["demo", "--output", str(tmp_path)])
    assert done.exit_code == 0 and done.output.count("fine") == 2, done.output


def test_importing_baracuda_imports_no_model_stack() -> None:
    code = (
        "import sys, baracuda\n"
        "heavy = {'transformers', 'safetensors', 'matplotlib', 'baracuda.flow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "baracuda.load, baracuda.flow.quantize_checkpoint\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
