"""Files of tokens: as many of them as were asked for, in sequences as long, and numbers a model has a row for."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch

from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.calibrate import read_sequences
from baracuda.flow.tensorfile import write_tensors

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("tokens") / "opt"
    models.save("opt", directory)
    return directory


def written(path: Path, **tensors: torch.Tensor) -> Path:
    write_tensors(path, tensors)
    return path


@pytest.mark.parametrize(
    "blocks, lengths",
    [
        (True, {"a": [32] * 3 + [4], "b": [32, 8, 32, 8], "c": [32], "d": [1]}),
        (False, {"a": [32], "b": [32, 32], "c": [32], "d": [1]}),
    ],
    ids=["into blocks", "to their beginning"],
)
def test_rows_are_cut_to_the_length(blocks: bool, lengths: dict[str, list[int]], tmp_path: Path) -> None:
    """As texts are: into blocks for a model that predicts the next token, to the beginning for another."""
    rows = {"a": torch.arange(100), "b": torch.arange(80).view(2, 40), "c": torch.arange(33), "d": torch.arange(1)}
    path = written(tmp_path / "tokens.safetensors", **rows)
    read = read_sequences(path, tmp_path, samples=100, length=32, blocks=blocks)
    assert [len(sequence) for sequence in read] == [length for row in lengths.values() for length in row]
    assert read[0].tolist() == list(range(32))
    assert len(read_sequences(path, tmp_path, samples=2, length=32, blocks=blocks)) == 2


def test_calibration_reads_sequences_of_the_length_asked_for(opt: Path, tmp_path: Path) -> None:
    tokens = torch.randint(3, models.VOCABULARY, (5000,), generator=torch.Generator().manual_seed(1))
    stream = written(tmp_path / "stream.safetensors", tokens=tokens)
    rows = written(tmp_path / "rows.safetensors", tokens=tokens[: 8 * 32].view(8, 32))
    made = []
    for data in (stream, rows):
        out = tmp_path / data.stem
        quantize_checkpoint(opt, out, activations="static", calibration=data, samples=8, sequence_length=32)
        made.append(models.contents(out)["model.safetensors"])
    assert made[0] == made[1]


def test_a_sequence_longer_than_the_model_reads_is_refused(opt: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "tokens.safetensors", tokens=torch.full((5000,), 5))
    with pytest.raises(FlowError, match="a sequence of 512 tokens, but the model reads 64: pass --sequence-length 64"):
        quantize_checkpoint(opt, tmp_path / "out", activations="static", calibration=data)
    with pytest.raises(FlowError, match="evaluation: a sequence of 512 tokens, but the model reads 64"):
        quantize_checkpoint(opt, tmp_path / "out", evaluation=data)


def test_negative_tokens_are_refused(opt: Path, tmp_path: Path) -> None:
    """Labels often hold -100 where there is nothing to predict."""
    data = written(tmp_path / "tokens.safetensors", labels=torch.tensor([[5, 6, -100], [7, -100, -100]]))
    with pytest.raises(FlowError, match="labels: expected token numbers from 0 up, got -100; leave padding"):
        quantize_checkpoint(opt, tmp_path / "out", activations="static", calibration=data)
    assert not (tmp_path / "out").exists()
