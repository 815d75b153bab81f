"""What is beside the weights comes along, whole and once; a result says where its weights are."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import models
import pytest
import torch

import baracuda
from baracuda.flow import quantize_checkpoint, verify
from baracuda.flow.checkpoint.directory import JOURNAL
from baracuda.flow.run.journal import Journal

pytestmark = pytest.mark.filterwarnings("ignore")


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_layers_of_other_libraries_come_along_and_foreign_weights_do_not(tmp_path: Path) -> None:
    source = models.plain_checkpoint(tmp_path / "model", shards=1, layers=1)
    before = files(source)
    dense = {"2_Dense/model.safetensors": b"a dense layer", "2_Dense/config.json": b"{}", "README.md": b"read me"}
    foreign = {"onnx/model.onnx": b"x", "onnx/model.onnx_data": b"y", "2_Dense/pytorch_model.bin": b"z"}
    hidden = {".git/HEAD": b"ref", "consolidated.safetensors": b"the weights once more"}
    for name, data in (dense | foreign | hidden).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(data)
    out = source / "quantized" / "w8a8"
    quantize_checkpoint(source, out)
    reports = {"baracuda_report.json", "baracuda_report.html", "baracuda.sha256"}
    assert files(out) == before - {"pytorch_model.bin"} | set(dense) | reports
    assert all((out / name).read_bytes() == data for name, data in dense.items())
    quantize_checkpoint(source, source / "w4a16", scheme="w4a16", group_size=32)  # the first result stays where it is
    assert files(source / "w4a16") == files(out)
    assert verify(out, source) == [] and verify(source / "w4a16", source) == []


def test_a_companion_is_copied_in_blocks(tmp_path: Path) -> None:
    size = 64 << 20
    with (tmp_path / "large").open("wb") as file:
        os.truncate(file.fileno(), size)
    (tmp_path / "out" / JOURNAL).mkdir(parents=True)
    tracemalloc.start()
    try:
        Journal(tmp_path / "out").copy(tmp_path / "large", tmp_path / "out" / "sub" / "large")
        assert tracemalloc.get_traced_memory()[1] < size // 4
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out" / "sub" / "large").stat().st_size == size


def test_a_single_shard_of_another_name_has_an_index(tmp_path: Path) -> None:
    """Without one, readers look for model.safetensors."""
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "weights.safetensors")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"weights.safetensors"}
    assert verify(tmp_path / "out", tmp_path / "model") == []
    with torch.no_grad():
        assert bool(torch.isfinite(baracuda.load(tmp_path / "out")(models.prompt()).logits).all())
