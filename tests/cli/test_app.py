"""The commands: what they print, what they exit with, and that `import baracuda` does not pay for them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import typer
from typer.testing import CliRunner

from baracuda import BaracudaError, __version__, flow
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors
from baracuda.flow.run import steps
from baracuda_cli import app, demo
from baracuda_cli.terminal import console

pytestmark = pytest.mark.filterwarnings("ignore")
run = CliRunner()
SMOOTH = ["--scheme", "w8a8-smoothquant", "--calibration"]


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


@pytest.mark.parametrize("name", ["x[/y]", "a[v1]", "[red]"])
def test_a_path_with_brackets_is_printed_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_width", 200)
    models.plain_checkpoint(tmp_path / "model")
    done = run.invoke(app, ["quantize", "model", "-o", name])
    assert done.exit_code == 0, done.output
    assert f"{name}/baracuda_report.html" in done.output and f"baracuda verify {name};" in done.output
    for command in ("report", "verify"):
        done = run.invoke(app, [command, name])
        assert done.exit_code == 0 and name in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "w3a3"], "expected one of w8a8"),
        (
            ["--activations", "static"],
            "needs calibration data: texts (.txt, .jsonl or .parquet) or tokens (.safetensors); pass --calibration",
        ),
        (["--method", "gptq"], "--method gptq needs calibration data"),
        (["--smooth"], "--smooth needs calibration data"),
        (["--scheme", "w4a16", "--budget", "5"], "--budget needs calibration data"),
        (["--scheme", "w8a8-smoothquant"], "--scheme w8a8-smoothquant needs calibration data"),
        (["--scheme", "w4a16", "--activations", "static"], "floating point"),
        ([*SMOOTH, "floats.safetensors", "--alpha", "much"], "expected a number in"),
        ([*SMOOTH, "floats.safetensors", "--alpha", "7"], "expected a number in [0, 1] or 'auto', got 7"),
        (["--alpha", "0.5"], "w8a8 does not smooth: drop --alpha, or add --smooth"),
        (["--group-size", "128"], "w8a8 has no groups: drop --group-size, or use --scheme w4a8 or w4a16"),
        (["--scheme", "w4a16", "--group-size", "0"], "group_size: expected a positive multiple of 8, got 0"),
        (["--calibration", "nowhere.txt"], "needs no data: drop --calibration, or add --activations static"),
        (["--scheme", "w4a16", "--calibration", "nowhere.txt"], "nowhere.txt: no such file; expected texts"),
        (["--device", "cuda"], "sees no CUDA GPU here; use --device cpu"),
        (["--ignore", "*.donw_proj"], "--ignore *.donw_proj: expected names of modules, such as model.layers.0.mlp."),
        (["--ignore", "lm_head", "--ignore", "model.layers.0"], "--ignore model.layers.0: expected names"),
        (["--ignore", "*"], "nothing to quantize. model.embed_tokens"),
        (["--ignore", "re:["], "not a regular expression"),
        (["--samples", "0"], "samples: expected at least 1, got 0"),
        (["--sequence-length", "1"], "sequence_length: expected at least 2"),
        ([*SMOOTH, "nowhere.txt"], "nowhere.txt: no such file"),
        ([*SMOOTH, "texts.csv"], "texts.csv: another kind of file"),
        ([*SMOOTH, "empty.txt"], "empty.txt: expected a text a line; it is empty"),
        ([*SMOOTH, "latin.txt"], "latin.txt: expected UTF-8 text: 'utf-8' codec"),
        ([*SMOOTH, "prompts.jsonl"], 'line 1: expected {"text": "..."}, got {"prompt": 1}'),
        (
            ["--evaluate", "floats.safetensors"],
            "int64, got torch.float32 of shape [2, 3]; convert it, or leave",
        ),
        (
            ["--evaluate", "none.safetensors"],
            "none.safetensors: expected tensors of token numbers, got none; write one",
        ),
        (["--evaluate", "nowhere.txt"], "nowhere.txt: no such file"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "texts.csv").write_text("a,b")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": 1}\n')
    write_tensors(tmp_path / "floats.safetensors", {"tokens": torch.zeros(2, 3)})
    write_tensors(tmp_path / "none.safetensors", {})
    source = models.plain_checkpoint(tmp_path / "model")
    done = run.invoke(app, ["quantize", str(source), "-o", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [("model", "the model's own directory; choose another directory"), ("file", "is a file"), ("full", "is not empty")],
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


@pytest.mark.parametrize("pattern", ["lm_head", "*norm", "re:lm_head|.*\\.fc2$", "model.layers.0.mlp.up_proj"])
def test_a_pattern_may_name_what_stays_as_it_is_anyway(pattern: str, tmp_path: Path) -> None:
    source = models.plain_checkpoint(tmp_path / "model")
    done = run.invoke(app, ["quantize", str(source), "-o", str(tmp_path / "out"), "--ignore", pattern])
    assert done.exit_code == 0, done.output


def test_a_finished_run_is_told_from_another(tmp_path: Path) -> None:
    source, out = models.plain_checkpoint(tmp_path / "model"), tmp_path / "out"
    command = ["quantize", str(source), "-o", str(out)]
    assert run.invoke(app, command).exit_code == 0
    done = run.invoke(app, [*command, "--resume"])
    assert done.exit_code == 0 and "was finished already, from this model with these options" in done.output
    assert "12 Linears" in done.output
    for other, message in (
        ([*command, "--scheme", "w4a16", "--group-size", "32"], "scheme ('w8a8' there, 'w4a16' here)"),
        ([*command, "--scheme", "nonsense"], "expected one of w8a8"),
        (["quantize", str(tmp_path / "nosuch"), "-o", str(out)], "expected a Hugging Face model directory"),
    ):
        done = run.invoke(app, [*other, "--resume"])
        assert done.exit_code == 2 and message in done.output and "12 Linears" not in done.output


def test_ctrl_c_says_how_to_go_on_and_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, whole = models.plain_checkpoint(tmp_path / "model"), tmp_path / "out", tmp_path / "whole"
    command = ["quantize", str(source), "-o", str(out)]
    started = steps.ShardJob.run

    def interrupted(job: steps.ShardJob, names: list[str]) -> object:
        if job.source.path.name.startswith("model-00002"):
            raise KeyboardInterrupt
        return started(job, names)

    with monkeypatch.context() as patch:
        patch.setattr(steps.ShardJob, "run", interrupted)
        done = run.invoke(app, command)
    said = f"stopped: what is finished stays in {out}; repeat the command with --resume to go on"
    assert done.exit_code == 130 and done.output.splitlines()[-1] == said
    assert run.invoke(app, [*command, "--resume"]).exit_code == 0
    assert run.invoke(app, ["quantize", str(source), "-o", str(whole)]).exit_code == 0
    assert models.contents(out) == models.contents(whole)


def test_ctrl_c_before_anything_is_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.plain_checkpoint(tmp_path / "model")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "find_linears", interrupted)
    done = run.invoke(app, ["quantize", str(source), "-o", str(tmp_path / "out")])
    assert done.exit_code == 130 and done.output == "stopped: nothing was written\n"
    monkeypatch.setenv("RANK", "1")
    assert run.invoke(app, ["quantize", str(source), "-o", str(tmp_path / "out")]).output == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "nosuch: expected a directory with a quantized checkpoint; it is not there"),
        (["model/config.json"], "it is a file"),
        (["out", "--against", "nosuch"], "nosuch: expected a Hugging Face model directory; it is not there"),
        (["out", "--against", "model/sub"], "config.json: expected this file of a Hugging Face model directory"),
    ],
)
def test_what_cannot_be_verified_is_not_called_wrong(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models.plain_checkpoint(tmp_path / "model")
    assert run.invoke(app, ["quantize", "model", "-o", "out"]).exit_code == 0
    done = run.invoke(app, ["verify", *arguments])
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")


@pytest.mark.parametrize("width", [40, 80])
def test_names_and_paths_are_printed_whole_however_narrow_the_page(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = models.plain_checkpoint(tmp_path / "model"), tmp_path / "checkpoints" / ("out" * 30)
    monkeypatch.setattr(console, "_width", width)
    done = run.invoke(app, ["quantize", str(source), "-o", str(out)])
    assert done.exit_code == 0 and f"{out}/baracuda_report.html" in re.sub(r"\s", "", done.output)
    shard, scale = out / "model-00001-of-00002.safetensors", "model.layers.0.mlp.down_proj.weight_scale"
    tensors = read_tensors(shard)
    tensors[scale][0] = float("nan")
    write_tensors(shard, tensors, {"format": "pt"})
    models.reseal(out)
    [finding] = flow.verify(out)
    done = run.invoke(app, ["verify", str(out)])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.output.splitlines() if "│" in line]
    code, where, what = ("".join(cells) for cells in zip(*rows, strict=True))
    assert done.exit_code == 1 and (code, where) == (finding.code, finding.where) and scale in where
    assert what.replace(" ", "") == finding.message.replace(" ", "")


@pytest.mark.parametrize("command", ["info", "demo"])
def test_a_gpu_that_is_not_there_is_told_in_the_commands_own_words(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run.invoke(app, [command, "--device", "cuda"])
    assert done.exit_code == 2 and "use --device cpu" in done.output and "device=" not in done.output


def test_the_version_is_told() -> None:
    done = run.invoke(app, ["--version"])
    assert done.exit_code == 0 and done.output == f"baracuda {__version__}\n"


def test_the_demo_proposes_commands_that_work_in_a_row() -> None:
    outputs = re.findall(r"-o (\S+?)(?:\[|\s)", demo.NEXT)
    assert len(outputs) == len(set(outputs)) == 2
    assert re.findall(r"verify (\S+)", demo.NEXT)[0] in outputs


def test_a_calibration_that_fails_leaves_nothing_to_be_cleared_away(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model")
    (tmp_path / "texts.txt").write_text("hello\n")
    command = ["quantize", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--scheme", "w8a8-smoothquant"]
    done = run.invoke(app, [*command, "--calibration", str(tmp_path / "texts.txt")])
    assert done.exit_code == 2 and "no tokenizer" in done.output and not (tmp_path / "out").exists()


def test_the_demo_quantizes_a_model_end_to_end(tmp_path: Path) -> None:
    done = run.invoke(app, ["demo", "--output", str(tmp_path / "demo")], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert done.output.count("fine") == 4 and "wrong" not in done.output
    report = tmp_path / "demo" / "smoothquant-static" / "baracuda_report.html"
    assert report.exists() and str(report) in done.output
    assert done.output.count("so an outlier") == 5  # what the model learned, said by all five
    said = run.invoke(app, ["chat", str(tmp_path / "demo" / "w4a16"), "-p", "a token has", "--max-tokens", "6"])
    assert said.exit_code == 0 and said.stdout == "a scale of its own,\n" and "6 tokens in" in said.stderr
    on_path = shutil.which("baracuda") is not None
    assert ("is not on your PATH yet" in done.output) != on_path  # a command that cannot be called is no advice
    before = sorted((tmp_path / "demo").rglob("*"))
    again = run.invoke(app, ["demo", "--output", str(tmp_path / "demo")])
    assert again.exit_code == 2 and "expected an empty or a new folder" in again.output
    assert sorted((tmp_path / "demo").rglob("*")) == before
    talk = ["chat", str(tmp_path / "demo" / "model"), "--json", "--max-tokens", "4"]
    talked = run.invoke(app, talk, input="a token has\n\nround to\n")
    first, second = (json.loads(part) for part in re.split(r"(?<=\n})\n", talked.stdout.strip()))
    assert first["prompt"] == "a token has" and second["text"].startswith("even, clamp")


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


def test_control_characters_of_names_reach_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A title, a cleared screen, text that runs backwards: in an error, in a table, in what a model says."""
    from rich.table import Table

    from baracuda_cli.chat import _print
    from baracuda_cli.terminal import PrintableConsole, errors_told

    bad = "a\x1b]0;title\x07\x1b[2J\u202egpj.exe\x9b5m\x08"
    with pytest.raises(typer.Exit), errors_told():
        raise BaracudaError(bad)
    table = Table("name")
    table.add_row(bad)
    PrintableConsole(width=200).print(table, bad, soft_wrap=True)
    _print(bad)
    out, err = capfd.readouterr()
    for text in (out, err):
        assert not {"\x1b", "\x07", "\u202e", "\x9b", "\x08"} & set(text)
        assert "a\\x1b]0;title" in text and "\\x1b[2J\\u202egpj.exe\\x9b5m" in text  # rich drops bells itself
