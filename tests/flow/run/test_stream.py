"""Data-free quantization: what is written, how much memory it takes, and what a killed run leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch

import baracuda
from baracuda import PerChannel, PerGroup
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import TensorFile, read_tensors, write_tensors
from baracuda.flow.errors import CheckpointError
from baracuda.flow.run.quantize import _own_device
from baracuda.schemes.search import Rounding, search_scales

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.plain_checkpoint(tmp_path_factory.mktemp("plain") / "model")


def test_a_w8a8_weight_is_what_dynamic_quantize_gives_per_channel(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out")
    name = "model-00001-of-00002.safetensors"
    before, after = read_tensors(source / name), read_tensors(tmp_path / "out" / name)
    module = "model.layers.0.mlp.up_proj"
    expected = baracuda.dynamic_quantize(before[f"{module}.weight"], scope=PerChannel(0))
    assert torch.equal(after[f"{module}.weight"], expected.q)
    assert torch.equal(after[f"{module}.weight_scale"], expected.scale[:, None])
    assert torch.equal(after[f"{module}.bias"], before[f"{module}.bias"])
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_a_w4a16_weight_is_packed_from_the_lowest_bits_up_with_eight_added(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", scheme="w4a16", group_size=32)
    name, module = "model-00002-of-00002.safetensors", "model.layers.4.mlp.down_proj"
    before, after = read_tensors(source / name), read_tensors(tmp_path / "out" / name)
    weight = before[f"{module}.weight"]
    scale = search_scales(weight.float(), 32, Rounding(-8, 7, torch.bfloat16)).to(torch.bfloat16)
    nibbles = baracuda.unpack_int4(baracuda.quantize(weight, scale, scope=PerGroup(32), dtype="s4")).long() + 8
    words = sum(nibbles[:, i::8] << (4 * i) for i in range(8))
    assert torch.equal(after[f"{module}.weight_packed"].long() & 0xFFFFFFFF, words)
    assert torch.equal(after[f"{module}.weight_scale"], scale)
    assert after[f"{module}.weight_shape"].tolist() == [64, 96]


def test_small_files_come_along_and_pickles_do_not(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out")
    files = models.contents(tmp_path / "out")
    assert files["tokenizer.json"] == (source / "tokenizer.json").read_bytes()
    assert "sub/settings.json" in files and "pytorch_model.bin" not in files
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(
        entry.nbytes for shard in set(index["weight_map"].values()) for entry in _entries(tmp_path / "out" / shard)
    )
    assert verify(tmp_path / "out", source) == []


def _entries(path: Path) -> list:  # type: ignore[type-arg]
    with TensorFile(path) as file:
        return list(file.entries.values())


def test_ignored_layers_stay_float_and_are_named_with_the_reason(source: Path, tmp_path: Path) -> None:
    ignore = ["*.layers.0.*", "*.down_proj"]
    report = quantize_checkpoint(source, tmp_path / "out", scheme="w4a16", ignore=ignore, allow_float=True)
    left = {entry["name"]: entry["reason"] for entry in report["left"]}
    assert left["model.layers.0.mlp.up_proj"] == left["model.layers.1.mlp.down_proj"] == "ignored on request"
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in config["ignore"]
    assert r"re:^model\.layers\.\d+\.mlp\.down_proj$" in config["ignore"]


def test_an_ignore_that_splits_what_servers_fuse_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model")
    with pytest.raises(FlowError, match="ignore all of them or none"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", ignore=["*.k_proj"])


def test_other_tools_read_the_files(source: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    quantize_checkpoint(source, tmp_path / "out")
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        theirs, ours = safetensors.load_file(path), read_tensors(path)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_weight_with_nan_stops_the_run_and_is_named(tmp_path: Path) -> None:
    source = models.plain_checkpoint(tmp_path / "model")
    path = source / "model-00001-of-00002.safetensors"
    tensors = read_tensors(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    write_tensors(path, tensors)
    with pytest.raises(FlowError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: holds NaN"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_directory_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="never loaded"):
        quantize_checkpoint(tmp_path, tmp_path / "out")


def test_a_finished_or_foreign_directory_is_not_written_into(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(FlowError, match="not empty"):
        quantize_checkpoint(source, tmp_path / "out")
    quantize_checkpoint(source, tmp_path / "done")
    before = models.contents(tmp_path / "done")
    quantize_checkpoint(source, tmp_path / "done", resume=True)
    assert models.contents(tmp_path / "done") == before


def test_blocks_of_many_tensors_in_flight_do_not_mix(tmp_path: Path) -> None:
    """Tensors of several blocks, copied and quantized in turn: each block's memory is another's a moment later."""
    source, generator = tmp_path / "model", torch.Generator().manual_seed(4)
    source.mkdir()
    tensors = {
        f"{i}.{name}.weight": torch.randn(3000, 4096, generator=generator).to(torch.bfloat16)
        for i in range(2)
        for name in ("embed_tokens", "up_proj")
    }
    write_tensors(source / "model.safetensors", tensors)
    (source / "config.json").write_text("{}")
    quantize_checkpoint(source, tmp_path / "out")
    stored = read_tensors(tmp_path / "out" / "model.safetensors")
    for i in range(2):
        assert torch.equal(stored[f"{i}.embed_tokens.weight"], tensors[f"{i}.embed_tokens.weight"])
        expected = baracuda.dynamic_quantize(tensors[f"{i}.up_proj.weight"], scope=PerChannel(0))
        assert torch.equal(stored[f"{i}.up_proj.weight"], expected.q)


@pytest.mark.parametrize(("asked", "given"), [("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")])
def test_under_torchrun_cuda_is_a_gpu_for_each_rank(asked: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _own_device(asked) == torch.device(given)


MEMORY = """
import json, resource, sys
sys.modules["transformers"] = None
import torch, baracuda
from baracuda.flow import quantize_checkpoint
baracuda.dynamic_quantize(torch.ones(64, 64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize_checkpoint(sys.argv[1], sys.argv[2])
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024))
"""


def test_memory_does_not_grow_with_the_checkpoint_nor_with_its_largest_tensor(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    block = torch.randn(1024, 4096).to(torch.bfloat16)
    tensors = {
        "a.up_proj.weight": block.repeat(24, 1),  # 192 MiB, quantized
        "embed_tokens.weight": block.repeat(24, 1),  # 192 MiB, copied
        "b.up_proj.weight": block.repeat(8, 1),
    }
    write_tensors(source / "model.safetensors", tensors)
    (source / "config.json").write_text("{}")
    del tensors
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) < 200, "448 MiB went through; blocks of 16 MiB and their copies should suffice"
