"""The output head as int8: its tie to the embedding resolved, in every scheme, for every reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from loading import CASES, logits, read
from torch import nn

import baracuda
from baracuda.flow import FlowError, inspect_checkpoint, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors
from baracuda.nn import QuantizedLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    models.save("llama", folder / "model", tie_word_embeddings=True)
    models.tokens(folder / "tokens.safetensors")
    return folder / "model"


def with_head(source: Path, out: Path, case: str = "w8a8", **options: Any) -> dict[str, Any]:
    calibration = source.parent / "tokens.safetensors" if case == "static" or "method" in options else None
    given = {**CASES[case][0], "calibration": calibration, "quantize_head": True, **options}
    return quantize_checkpoint(source, out, **given)


def stored(out: Path) -> dict[str, torch.Tensor]:
    return read_tensors(out / "model.safetensors")


def found(out: Path, source: Path | None = None) -> list[tuple[str, str]]:
    return [(finding.code, finding.where) for finding in verify(out, source)]


@pytest.mark.parametrize("case", CASES)
def test_a_tied_head_gets_a_weight_of_its_own_in_every_scheme(case: str, tied: Path, tmp_path: Path) -> None:
    out, plain = tmp_path / "out", tmp_path / "plain"
    report = with_head(tied, out, case)
    with_head(tied, plain, case, quantize_head=False)
    tensors, config = stored(out), json.loads((out / "config.json").read_text())
    expected = baracuda.dynamic_quantize(stored(tied)[EMBEDDING], scope=baracuda.PerChannel(0))
    assert torch.equal(tensors["lm_head.weight"], expected.q)
    assert torch.equal(tensors["lm_head.weight_scale"].squeeze(1), expected.scale)
    assert torch.equal(tensors[EMBEDDING], stored(tied)[EMBEDDING])
    assert config["tie_word_embeddings"] is False and "lm_head" not in config["quantization_config"]["ignore"]
    assert found(out, tied) == []
    # The body is that of the checkpoint without it, and the head computes what a live model's does.
    model, other = baracuda.load(out), baracuda.load(plain)
    assert type(model.lm_head) is QuantizedLinear and type(other.lm_head) is nn.Linear
    other.lm_head = QuantizedLinear.from_float(other.lm_head)
    assert torch.equal(logits(model), logits(other))
    added = report["size"]["after"] - (plain / "model.safetensors").stat().st_size
    assert report["head"]["tied_to"] == EMBEDDING and 0 <= added - report["head"]["bytes_added"] < 2048


@pytest.mark.parametrize("case", CASES)
def test_transformers_own_reader_computes_the_head(case: str, tied: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    with_head(tied, tmp_path / "out", case)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    with models.transformers_alone(), torch.no_grad():
        theirs = read(tmp_path / "out")
        whole, head = logits(theirs), theirs.lm_head(hidden)
        assert theirs.lm_head.quantization_scheme.weights.num_bits == 8
    ours = baracuda.load(tmp_path / "out", merge=False, fuse=False)
    # It rounds activations to other integers, so that results differ by a part of a step.
    assert models.relative(ours.lm_head(hidden), head) < 0.01 and models.relative(logits(ours), whole) < 0.05


def test_an_untied_head_is_stored_in_its_place(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model", tie_word_embeddings=False)
    report = with_head(tmp_path / "model", tmp_path / "out", "w4a16")
    tensors = stored(tmp_path / "out")
    assert tensors["lm_head.weight"].dtype is torch.int8 and tensors[EMBEDDING].dtype is torch.float32
    assert report["head"] == {"name": "lm_head", "tied_to": None, "bytes": 160 * 64 + 4 * 160, "bytes_added": 0}
    assert found(tmp_path / "out", tmp_path / "model") == [] and "more than" not in report["notes"][0]


def test_a_head_that_is_stored_although_it_is_tied_is_what_is_quantized(tied: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_bytes((tied / "config.json").read_bytes())
    tensors = stored(tied)
    tensors["lm_head.weight"] = tensors[EMBEDDING] * 2
    write_tensors(source / "model.safetensors", tensors, {"format": "pt"})
    report = with_head(source, tmp_path / "out")
    scales = stored(tmp_path / "out")["lm_head.weight_scale"].squeeze(1)
    assert torch.equal(scales, tensors["lm_head.weight"].abs().amax(1) / 127) and report["head"]["bytes_added"] == 0
    assert found(tmp_path / "out", source) == []


def test_the_config_names_the_head_since_servers_do_not_take_it_for_a_linear(tied: Path, tmp_path: Path) -> None:
    with_head(tied, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear"], ["re:^lm_head$"]]
    del groups["group_1"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    models.reseal(tmp_path / "out")
    assert ("config-mismatch", "lm_head") in found(tmp_path / "out")


def test_verify_sees_a_head_that_is_not_the_embedding_quantized(tied: Path, tmp_path: Path) -> None:
    with_head(tied, tmp_path / "out", "w4a16", method="gptq")
    assert found(tmp_path / "out", tied) == []
    tensors = stored(tmp_path / "out")
    tensors["lm_head.weight"][7, 3] += 1
    write_tensors(tmp_path / "out" / "model.safetensors", tensors, {"format": "pt", "made_by": "baracuda quantize"})
    models.reseal(tmp_path / "out")
    assert found(tmp_path / "out") == []
    assert found(tmp_path / "out", tied) == [("wrong-values", EMBEDDING)], "rounded to nearest beside GPTQ, to the bit"


def test_verify_sees_a_quantized_head_that_the_config_ties(tied: Path, tmp_path: Path) -> None:
    with_head(tied, tmp_path / "out")
    models.change_json(tmp_path / "out" / "config.json", tie_word_embeddings=True)
    models.reseal(tmp_path / "out")
    assert ("config-mismatch", "lm_head") in found(tmp_path / "out")
    assert ("config-mismatch", "config.json") in found(tmp_path / "out", tied)


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_is_saved_with_its_head(case: str, tied: Path, tmp_path: Path) -> None:
    with_head(tied, tmp_path / "out", case)
    model = baracuda.load(tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    assert found(tmp_path / "again", tied) == []
    assert torch.equal(logits(baracuda.load(tmp_path / "again")), logits(model))


def test_a_live_model_with_a_quantized_head_is_saved_untied(tied: Path, tmp_path: Path) -> None:
    model = read(tied)
    baracuda.quantize_model(model, "w8a8", quantize_head=True)
    model.save_pretrained(tmp_path / "out")
    assert found(tmp_path / "out", tied) == []
    assert torch.equal(logits(baracuda.load(tmp_path / "out", fuse=False)), logits(model))


def test_sizes_are_known_before_and_after(tied: Path, tmp_path: Path) -> None:
    preview = with_head(tied, tmp_path / "out", dry_run=True)
    report = with_head(tied, tmp_path / "out")
    assert abs(preview["size"]["after"] - report["size"]["after"]) < 4096
    (head,) = (layer for layer in preview["layers"] if layer["name"] == "lm_head")
    assert head["bytes_before"] == 0 and head["bytes_after"] == report["head"]["bytes"] == 160 * 64 + 4 * 160
    assert report["layers"][0]["bytes_before"] == 0, "the original does not store it"
    assert preview["notes"] == report["notes"] and "tie is resolved" in report["notes"][0]
    assert report["left"] == [] and report["layers"][0]["name"] == "lm_head"
    (module,) = (m for m in inspect_checkpoint(tmp_path / "out")["modules"] if m["name"] == "lm_head")
    assert module["quantized"] and module["stored"] == "w8a8" and module["shape"] == [160, 64]


def test_budgets_and_smoothing_leave_the_head_alone(tied: Path, tmp_path: Path) -> None:
    data = tied.parent / "tokens.safetensors"
    options = {"scheme": "w4a16", "group_size": 32, "budget": 6.0, "calibration": data}
    reports = [quantize_checkpoint(tied, None, quantize_head=h, dry_run=True, **options) for h in (True, False)]
    assert reports[0]["average_bits"] == reports[1]["average_bits"]
    assert reports[0]["precision"] == reports[1]["precision"]
    out = tmp_path / "out"
    quantize_checkpoint(tied, out, smooth="auto", calibration=data, quantize_head=True)
    assert found(out, tied) == [] and torch.equal(stored(out)["model.norm.weight"], stored(tied)["model.norm.weight"])


def test_a_killed_run_ends_in_the_same_bytes(tied: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    models.save("llama", source, shard="60KB", tie_word_embeddings=True)
    with_head(source, tmp_path / "whole")

    class Killed(Exception): ...

    def die(stage: str, done: int, total: int, label: str) -> None:
        if label == "model.layers.1.mlp.up_proj.weight":
            raise Killed

    with pytest.raises(Killed):
        with_head(source, tmp_path / "out", progress=die)
    with pytest.raises(FlowError, match="quantize_head"):
        with_head(source, tmp_path / "out", resume=True, quantize_head=False)
    with_head(source, tmp_path / "out", resume=True)
    assert models.contents(tmp_path / "out") == models.contents(tmp_path / "whole")


def test_what_cannot_be_untied_is_refused_with_the_reason(tied: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, tie_word_embeddings=True)
    models.save_built(lambda: transformers.T5ForConditionalGeneration(config), tmp_path / "t5")
    models.save("bert", tmp_path / "bert")
    models.plain_checkpoint(tmp_path / "plain")
    for source, why in {
        tmp_path / "t5": "lm_head of T5.* must stay as it is: .*; drop it",
        tmp_path / "bert": "expected one output head called lm_head, BertModel has none",
        tmp_path / "plain": "transformers does not know this model",
    }.items():
        with pytest.raises(FlowError, match=why):
            quantize_checkpoint(source, tmp_path / "out", quantize_head=True)
    with pytest.raises(FlowError, match="--ignore lm_head leaves the output head, which --quantize-head quantizes"):
        quantize_checkpoint(tied, tmp_path / "out", quantize_head=True, ignore="lm_head")
    assert not (tmp_path / "out").exists()
