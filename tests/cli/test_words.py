"""Words in the wrong place, and folders without a model: what was expected there is said at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baracuda_cli import app

pytestmark = pytest.mark.filterwarnings("ignore")


def said(*arguments: str) -> str:
    """What a refused command says, its lines and frames joined."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_a_second_directory_is_sent_behind_its_option() -> None:
    assert "the result goes behind -o: baracuda quantize MODEL -o OUT" in said("quantize", "MODEL_DIR", "OUT")
    assert "baracuda verify OUT --against MODEL_DIR" in said("verify", "OUT", "MODEL_DIR")
    assert "a text goes behind --text" in said("eval", "OUT", "texts.txt")
    assert "a text goes behind --text" in said("eval", "OUT", "texts.txt", "--text", "texts.txt")


def test_a_device_that_torch_does_not_know_is_answered_with_those_to_choose_from() -> None:
    assert said("info", "--device", "gpu").endswith("device: expected 'cpu', 'cuda' or 'cuda:N', got 'gpu'")


COMMANDS = {
    "quantize": ["-o", "OUT"],
    "chat": ["-p", "hello"],
    "bench": [],
    "inspect": [],
    "verify": [],
    "eval": ["--text", "texts.txt"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_model_is_named_with_what_is_missing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts.txt").write_text("some words\n")
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.json").write_text("{}")
    rest = COMMANDS[command]
    assert "nowhere: expected a" in (told := said(command, "nowhere", *rest)) and "it is not there" in told
    assert "texts.txt: expected a" in (told := said(command, "texts.txt", *rest)) and "it is a file" in told
    told = said(command, "empty", *rest)
    assert "it holds no model" in told if command == "verify" else "empty/config.json: expected this file" in told
    if command != "verify":  # which lists what is missing as a finding
        assert "expected files *.safetensors, found none" in said(command, "settings", *rest)


def test_bench_looks_for_both_models_before_it_loads_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from models import save

    monkeypatch.setattr("baracuda.flow.run.speed._opened", lambda *_: pytest.fail("a model was loaded"))
    save("llama", tmp_path / "model")
    assert "nowhere: expected" in said("bench", str(tmp_path / "model"), "nowhere")
