"""What a day with the command line needs: quick help, completion, JSON, silence, a look into a file, a talk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
from typer.testing import CliRunner

from baracuda.schemes import checkpoint_names, method_names
from baracuda_cli import app, quantize, terminal

pytestmark = pytest.mark.filterwarnings("ignore")
run = CliRunner()
SOURCE = str(Path(quantize.__file__).parents[1])
COMMANDS = ["bench", "chat", "compare", "demo", "eval", "info", "inspect", "quantize", "report", "verify"]


def fresh(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter, which has imported nothing yet."""
    code = f"import sys; sys.path.insert(0, {SOURCE!r}); {code}"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment or None,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_imports_neither_torch_nor_baracuda(arguments: list[str]) -> None:
    code = (
        "from baracuda_cli import app\n"
        "try: app()\n"
        "finally: assert not {'torch', 'baracuda', 'transformers'} & set(sys.modules)"
    )
    done = fresh(code, *arguments)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_help_takes_little_more_than_an_empty_command_of_typer() -> None:
    """In CPU time, in turns, the best of several: a multiple holds on slow machines too."""
    ours = "import time; from baracuda_cli import app; app(standalone_mode=False); print(time.process_time())"
    empty = (
        "import time, rich.progress, typer; app = typer.Typer(); app.command('quantize')(lambda: None); "
        "app.callback()(lambda: None); app(standalone_mode=False); print(time.process_time())"
    )

    def seconds(code: str) -> float:
        return float(fresh(code, "quantize", "--help").stdout.split()[-1])

    pairs = [(seconds(ours), seconds(empty)) for _ in range(3)]
    assert min(own for own, _ in pairs) < 3 * min(least for _, least in pairs), pairs


def test_the_shell_completes_commands_and_schemes_without_torch() -> None:
    code = "from baracuda_cli import app\ntry: app(prog_name='baracuda')\nfinally: assert 'torch' not in sys.modules"

    def completed(words: str) -> str:
        asked = {"_BARACUDA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()))}
        return fresh(code, **asked).stdout

    assert set(completed("baracuda ").split()) == set(COMMANDS)
    assert set(completed("baracuda quantize model --scheme ").split()) == set(checkpoint_names())


def test_the_names_in_the_help_are_those_of_the_registry() -> None:
    assert list(quantize.SCHEMES) == checkpoint_names() and list(quantize.METHODS) == method_names()


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    source = models.plain_checkpoint(tmp_path / "model")
    arguments = ["quantize", str(source), "-o", str(tmp_path / "out"), "--scheme", "w4a16", "--group-size", "32"]
    done = run.invoke(app, [*arguments, "--quiet"])
    assert done.exit_code == 0 and done.output == ""
    return tmp_path / "out"


def test_inspect_shows_the_scheme_the_sizes_and_each_module(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.console, "width", 160)
    found = json.loads(run.invoke(app, ["inspect", str(quantized), "--json"]).stdout)
    stored = {module["name"]: module for module in found["modules"]}
    linear = stored["model.layers.0.mlp.down_proj"]
    assert linear["stored"] == "w4a16, groups of 32" and linear["quantized"]
    original = json.loads(run.invoke(app, ["inspect", str(quantized.parent / "model"), "--json"]).stdout)
    same = next(module for module in original["modules"] if module["name"] == linear["name"])
    assert linear["shape"] == same["shape"] and same["stored"] == "bf16" and not same["quantized"]
    assert linear["bytes"] < 0.4 * same["bytes"]
    assert found["bytes"] == sum(module["bytes"] for module in found["modules"])
    assert found["parameters"] == original["parameters"] and "not quantized" in original["note"]
    done = run.invoke(app, ["inspect", str(quantized)])
    assert "w4a16, groups of 32 (compressed-tensors, pack-quantized)" in done.output
    assert "model.layers.*.mlp.down_proj" in done.output
    each = run.invoke(app, ["inspect", str(quantized), "--layers"])
    assert "model.layers.2.mlp.down_proj" in each.output


def test_inspect_lists_a_checkpoint_of_another_tool(quantized: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (quantized / "config.json").write_text(json.dumps(config))
    found = json.loads(run.invoke(app, ["inspect", str(quantized), "--json"]).stdout)
    assert found["note"].startswith("quantized by another tool") and found["quant_method"] == "awq"
    assert {module["stored"] for module in found["modules"] if module["quantized"]} == {"awq, i32"}


def test_json_goes_to_stdout_and_everything_else_to_stderr(quantized: Path) -> None:
    done = run.invoke(app, ["verify", str(quantized), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout) == []
    (quantized / "model-00001-of-00002.safetensors").write_bytes(b"")
    done = run.invoke(app, ["verify", str(quantized), "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)[0]["code"] == "truncated"
    done = run.invoke(app, ["verify", str(quantized), "--quiet"])
    assert done.exit_code == 1 and done.output == ""
    done = run.invoke(app, ["inspect", "nowhere", "--json"])
    assert done.exit_code == 2 and done.stdout == "" and "nowhere" in done.stderr


def test_quantize_prints_its_report_as_json(tmp_path: Path) -> None:
    source = models.plain_checkpoint(tmp_path / "model")
    done = run.invoke(app, ["quantize", str(source), "-o", str(tmp_path / "out"), "--json"])
    assert json.loads(done.stdout) == json.loads((tmp_path / "out" / "baracuda_report.json").read_text())


def test_info_is_json_too() -> None:
    found = json.loads(run.invoke(app, ["info", "--json", "--device", "cpu"]).stdout)
    assert found["device"].startswith("cpu") and {"operation", "backends"} <= found["operations"][0].keys()


def test_compare_puts_reports_side_by_side(quantized: Path, tmp_path: Path) -> None:
    other = tmp_path / "int8"
    assert run.invoke(app, ["quantize", str(tmp_path / "model"), "-o", str(other), "-q"]).exit_code == 0
    page = tmp_path / "compared.html"
    done = run.invoke(app, ["compare", str(quantized), str(other), "-o", str(page)], env={"COLUMNS": "120"})
    assert done.exit_code == 0 and "w4a16" in done.output and "w8a8" in done.output and "not measured" in done.output
    drawn = page.read_text()
    assert "2 checkpoints compared" in drawn and "Content-Security-Policy" in drawn
    found = json.loads(run.invoke(app, ["compare", str(quantized), str(other), "--json"]).stdout)
    assert [row["checkpoint"] for row in found] == ["out", "int8"]
    layer = "model.layers.0.mlp.down_proj"
    assert f"<td>{layer}</td>" in drawn and "cannot be compared" not in done.output + drawn
    for out, data in ((quantized, "one.txt"), (other, "two.txt")):
        report = json.loads((out / "baracuda_report.json").read_text())
        report["evaluation"] = {"data": data, "kl": 0.01, "top1_agreement": 0.9, "tokens": 9, "layers": {}}
        report["evaluation"]["perplexity"] = {"float": 2.0, "quantized": 2.1}
        (out / "baracuda_report.json").write_text(json.dumps(report))
    done = run.invoke(app, ["compare", str(quantized), str(other), "-o", str(page)], env={"COLUMNS": "120"})
    said = " ".join(done.stderr.split())
    assert "cannot be compared" in said and "two.txt" in done.stdout and "cannot be compared" in page.read_text()
    for arguments, message in (
        ([str(other)], "at least two"),
        ([str(other), "nowhere"], "nowhere: no baracuda_report"),
    ):
        done = run.invoke(app, ["compare", *arguments])
        assert done.exit_code == 2 and message in done.output
