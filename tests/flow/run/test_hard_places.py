"""Runs that must not be lost: an evaluation that fails, more shards than descriptors, a link to nothing."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from baracuda.flow import CheckpointError, FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import DESCRIPTORS, TensorFile, read_tensors, write_tensors
from baracuda.flow.hf import load as loading

pytestmark = pytest.mark.filterwarnings("ignore")


def fail(*args: Any, **options: Any) -> Any:
    raise TypeError("of another version")


def test_a_failed_evaluation_does_not_lose_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from baracuda.flow.run import evaluate

    models.save("llama", tmp_path / "model")
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    monkeypatch.setattr(evaluate, "load", fail)
    with pytest.raises(FlowError, match=r"complete, but its evaluation failed \(TypeError: of an.*: baracuda eval"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", evaluation=tokens)
    assert verify(tmp_path / "out", tmp_path / "model") == []
    content = json.loads((tmp_path / "out" / "baracuda_report.json").read_text())
    assert content["evaluation"] is None and content["layers"]
    assert quantize_checkpoint(tmp_path / "model", tmp_path / "out", resume=True)["evaluation"] is None


def test_a_transformers_that_loads_no_quantized_model_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model")
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    whole = loading.read_model

    def read(directory: Path, config: Any, *args: Any, **options: Any) -> Any:
        return fail() if getattr(config, "quantization_config", None) else whole(directory, config, *args, **options)

    monkeypatch.setattr(loading, "read_model", read)
    with pytest.raises(FlowError, match=r"transformers .* cannot load a quantized checkpoint here .* drop --evaluate"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", evaluation=tokens)
    assert not (tmp_path / "out").exists()


def test_a_model_of_three_thousand_shards_needs_few_descriptors(tmp_path: Path) -> None:
    source, weight_map = tmp_path / "model", {}
    source.mkdir()
    for shard in range(3000):
        name, file = f"layers.{shard}.up_proj.weight", f"model-{shard:05d}.safetensors"
        write_one(source / file, name)
        weight_map[name] = file
    (source / "config.json").write_text('{"model_type": "nobody-knows", "torch_dtype": "float32"}')
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[0]), limits[1]))
    try:
        from baracuda.flow.checkpoint.directory import Checkpoint

        with Checkpoint.open(source) as opened:
            assert len(opened.shards) == 3000 and len(os.listdir("/proc/self/fd")) < 600
            assert all(float(file.read(name)[0, 0]) == 1.0 for file in opened.shards.values() for name in file.entries)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def write_one(path: Path, name: str) -> None:
    """Without the fsync of every file, which takes most of the time."""
    header = json.dumps({name: {"dtype": "F32", "shape": [16, 16], "data_offsets": [0, 1024]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + torch.ones(256).numpy().tobytes())


def test_a_file_that_was_replaced_while_its_descriptor_was_closed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DESCRIPTORS, "limit", 1)
    for name in ("a", "b"):
        write_tensors(tmp_path / name, {"x": torch.zeros(3)})
    with TensorFile(tmp_path / "a") as first, TensorFile(tmp_path / "b") as second:
        assert first.read("x").sum() == 0 and second.read("x").sum() == 0
        write_tensors(tmp_path / "new", {"x": torch.ones(3)})
        (tmp_path / "new").replace(tmp_path / "a")
        with pytest.raises(CheckpointError, match="it changed while it was read"):
            first.read("x")
    with pytest.raises(ValueError, match="after it was closed"):
        first.read("x")
    assert read_tensors(tmp_path / "a")["x"].sum() == 3


def test_an_output_that_is_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    source = models.plain_checkpoint(tmp_path / "model")
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FlowError, match="a link to nothing: remove it, or choose another") as error:
        quantize_checkpoint(source, tmp_path / "out")
    assert "resume" not in str(error.value) and (tmp_path / "out").is_symlink()
