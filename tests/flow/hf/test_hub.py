"""Hugging Face ids where a directory is expected."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from typer.testing import CliRunner

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import write_tensors
from baracuda.flow.hf.hub import local_directory
from baracuda_cli import app

hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("huggingface_hub.constants")  # loaded on demand, and patched below
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, on a machine without a network."""
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def keep(cache: Path, name: str) -> Path:
    """The folder where the cache has the files of a model, as the Hub's own library lays it out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_model_in_the_cache_is_quantized_verified_and_loaded_by_its_id(cache: Path, tmp_path: Path) -> None:
    models.save("llama", keep(cache, "someone/small"))
    quantize_checkpoint("someone/small", keep(cache, "someone/small-int8"))
    assert verify("someone/small-int8", against="someone/small") == []
    model = baracuda.load("someone/small-int8")
    assert isinstance(model.model.layers[0].mlp.up_proj, baracuda.nn.QuantizedLinear)


def test_every_command_takes_an_id_where_it_takes_a_directory(cache: Path, tmp_path: Path) -> None:
    small, made = "someone/small", "someone/small-int8"
    models.save("llama", keep(cache, small))
    out = keep(cache, made)
    tokens = {"tokens": torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))}
    write_tensors(tmp_path / "tokens.safetensors", tokens)
    text = ["--text", str(tmp_path / "tokens.safetensors"), "--sequence-length", "16"]
    for arguments in (
        ["quantize", small, "-o", str(out)],
        ["verify", made, "--against", small],
        ["inspect", made],
        ["eval", made, "--against", small, *text],
        ["bench", small, made, "--length", "8", "--tokens", "8"],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output


def test_a_model_that_is_nowhere_names_the_command_that_fetches_it(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"not in the local cache.*: hf download someone/absent$"):
        quantize_checkpoint("someone/absent", tmp_path / "out")


def test_what_is_not_an_id_stays_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    for name in ("some/model", "/no/such/place", "nowhere", "./some/absent", "a/b/c"):
        assert local_directory(name) == Path(name)
