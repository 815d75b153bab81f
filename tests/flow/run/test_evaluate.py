"""`baracuda eval`: any checkpoint on a text, alone or against its float model."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import torch
from typer.testing import CliRunner

from baracuda.flow import FlowError, evaluate_checkpoint, quantize_checkpoint
from baracuda_cli import app

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A float model, the same quantized, and tokens."""
    folder = tmp_path_factory.mktemp("eval")
    models.save("llama", folder / "model")
    quantize_checkpoint(folder / "model", folder / "out", scheme="w4a16", group_size=32)
    return folder / "model", folder / "out", models.tokens(folder / "tokens.safetensors")


def test_perplexity_is_that_of_the_model(case: tuple[Path, Path, Path]) -> None:
    from baracuda.flow.checkpoint.tensorfile import read_tensors
    from baracuda.flow.hf.forward import float_model

    source, _, data = case
    found = evaluate_checkpoint(source, data, sequence_length=24)
    tokens = read_tensors(data)["tokens"]
    with torch.no_grad():
        loss = float_model(source, torch.device("cpu"))(input_ids=tokens, labels=tokens).loss
    assert found["tokens"] == tokens.numel()
    assert found["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-4)


def test_against_its_float_model_the_cost_is_told(case: tuple[Path, Path, Path]) -> None:
    source, out, data = case
    found = evaluate_checkpoint(out, data, against=source, sequence_length=24)
    assert 0 < found["kl"] < 0.1 and 0.5 < found["top1_agreement"] <= 1
    assert found["perplexity"]["float"] == pytest.approx(
        evaluate_checkpoint(source, data, sequence_length=24)["perplexity"], rel=1e-4
    )
    worst = [token["kl"] for token in found["worst"]]
    assert len(worst) == 8 and worst == sorted(worst, reverse=True) and worst[0] > found["kl"]
    assert min(found["layers"].values()) > 5
    same = evaluate_checkpoint(source, data, against=source, sequence_length=24)
    assert same["kl"] == 0 and same["top1_agreement"] == 1


def test_the_command_prints_the_figures_or_json(case: tuple[Path, Path, Path]) -> None:
    source, out, data = case
    arguments = ["eval", str(out), "--text", str(data), "--against", str(source), "--sequence-length", "24"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for word in ("perplexity, float", "KL divergence", "worst token", "noisiest layer"):
        assert word in result.output
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(result.stdout)["tokens"] == 288


def test_what_cannot_be_evaluated_is_told(case: tuple[Path, Path, Path], tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="no such file"):
        evaluate_checkpoint(case[0], tmp_path / "none.txt")
    models.save("bert", tmp_path / "bert")
    with pytest.raises(FlowError, match="does not predict the next token"):
        evaluate_checkpoint(tmp_path / "bert", case[2], sequence_length=24)
