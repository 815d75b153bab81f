"""Group sizes that do not divide a layer's columns, and runs that would leave most of a model float."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.config import parse_config, quantization_config
from baracuda.flow.checkpoint.groups import fitting, unserved_groups, usable_size
from baracuda.flow.checkpoint.targets import layer_recipe
from baracuda.flow.checkpoint.tensorfile import write_tensors
from baracuda.schemes import Scheme, checkpoint_scheme
from baracuda_cli import app

pytestmark = pytest.mark.filterwarnings("ignore")
W4, W8 = checkpoint_scheme("w4a16")[0], checkpoint_scheme("w8a8")[0]


@pytest.mark.parametrize(
    ("asked", "columns", "size"),
    [(128, 576, 64), (128, 640, 128), (128, 96, 32), (256, 512, 256), (256, 576, 64), (64, 80, 64), (16, 48, 16)],
)
def test_the_next_smaller_size_that_servers_take_is_chosen(asked: int, columns: int, size: int) -> None:
    """Where none fits, the size stays as it was, and the layer float."""
    assert fitting(W4.with_groups(asked), columns).weight.group_size == size


@pytest.mark.parametrize("size", [16, 256])
def test_a_group_size_that_servers_may_refuse_is_named(size: int) -> None:
    said = unserved_groups([size, 128, None])
    assert said is not None and said.startswith(f"Groups of {size} are read by baracuda.load and transformers; vLLM")
    assert unserved_groups([32, 64, 128, None]) is None


def test_all_columns_of_experts_fit_one_size() -> None:
    assert fitting(W4, 1536, 576).weight.group_size == 64
    assert usable_size([80, 48], 128) == 16 and usable_size([7], 128) is None


def narrow(directory: Path, rows: int = 16) -> Path:
    """A checkpoint with Linears of 64 columns, and others of 80, which no group of 32 divides."""
    directory.mkdir()
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(rows, 64) for i in range(2)}
    tensors |= {f"model.layers.{i}.mlp.down_proj.weight": torch.randn(24, 80) for i in range(2)}
    write_tensors(directory / "model.safetensors", tensors, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "nobody-knows"}))
    return directory


def test_a_run_that_leaves_most_of_a_model_float_stops_before_it_begins(tmp_path: Path) -> None:
    source = narrow(tmp_path / "model")
    arguments = ["quantize", str(source), "-o", str(tmp_path / "out"), "--scheme", "w4a16"]
    refused = CliRunner().invoke(app, arguments)
    said = " ".join(refused.output.split())
    assert refused.exit_code == 2 and not (tmp_path / "out").exists()
    assert "65% of the parameters of its Linears would stay in floating point" in said
    assert "Pass --group-size 80, or pass --allow-float" in said
    allowed = CliRunner().invoke(app, [*arguments, "--allow-float"])
    assert allowed.exit_code == 0 and "65% of the parameters" in " ".join(allowed.output.split())


def test_the_size_that_the_error_names_quantizes_the_model_and_is_one_that_servers_may_refuse(tmp_path: Path) -> None:
    source = narrow(tmp_path / "model")
    report = quantize_checkpoint(source, tmp_path / "out", scheme="w4a16", group_size=80)
    assert report["float_share"] == 0 and not report["left"]
    assert "Groups of 80 are read by baracuda.load" in report["notes"][1]
    assert [layer["group_size"] for layer in report["layers"]] == [80, 64, 80, 64]


def test_less_than_half_of_a_model_may_stay_float(tmp_path: Path) -> None:
    report = quantize_checkpoint(narrow(tmp_path / "model", rows=64), tmp_path / "out", scheme="w4a16")
    assert 0 < report["float_share"] < 0.5 and "--group-size 80 divides them" in report["left"][0]["reason"]


def test_layers_get_the_groups_that_fit_and_every_reader_finds_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = models.save("llama", tmp_path / "model", torch.bfloat16)
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w4a16")
    sizes = {layer["name"].split(".", 3)[3]: layer["group_size"] for layer in report["layers"]}
    assert sizes["self_attn.q_proj"] == 64 and sizes["mlp.down_proj"] == 32 and len(report["layers"]) == 14
    assert "Groups of 32 in 2 Linears, as 128 does not divide their columns" in report["notes"][0]
    assert verify(tmp_path / "out", tmp_path / "model") == []
    loaded = baracuda.load(tmp_path / "out", merge=False)
    assert loaded.model.layers[1].mlp.down_proj.group_size == 32
    pytest.importorskip("compressed_tensors")
    with models.transformers_alone():
        theirs = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        mine, yours = loaded(models.prompt()).logits, theirs(models.prompt()).logits
    assert models.relative(yours, mine) < 0.05


def layers(count: int, **schemes: Scheme) -> dict[str, Scheme]:
    return {f"model.layers.{i}.{name.replace('__', '.')}": s for i in range(count) for name, s in schemes.items()}


def test_patterns_say_of_each_layer_what_it_has_and_match_the_names_of_fused_layers() -> None:
    attention = dict.fromkeys(("attn__q_proj", "attn__k_proj", "attn__v_proj"), W4)
    schemes = layers(12, **attention, mlp__down_proj=W4)
    schemes |= {n: W8 for n in schemes if n.startswith(("model.layers.1.attn", "model.layers.10.attn"))}
    schemes |= {n: W4.with_groups(32) for n in schemes if n.endswith("down_proj")}
    recipe = layer_recipe(schemes)
    assert {name: recipe.of(name).scheme for name in schemes} == schemes
    patterns = [pattern for pattern, _ in recipe.rules]
    assert patterns == [
        r"re:^model\.layers\.\d+\.mlp\.down_proj$",
        r"re:^model\.layers\.(?:1|10)\.attn\.(?:k_proj|q_proj|v_proj|qkv_proj)$",
    ]
    assert recipe.of("model.layers.10.attn.qkv_proj").scheme == W8, "as vLLM calls the fused layer"
    config = quantization_config(recipe, [])
    assert len(config["config_groups"]) == 3 and config["format"] == "mixed-precision"
    assert {name: parse_config(config).of(name).scheme for name in schemes} == schemes


def test_layers_that_are_numbers_have_patterns_of_their_names() -> None:
    """As in an nn.Sequential."""
    schemes = {"merger.mlp.0": W8, "merger.mlp.2": W8, "list.0.mlp.0": W8, "list.1.mlp.2": W8} | layers(8, up=W4)
    recipe = layer_recipe(schemes)
    assert [pattern for pattern, _ in recipe.rules] == [r"re:^list\.\d+\.mlp\.\d+$", r"re:^merger\.mlp\.\d+$"]
    assert {name: recipe.of(name).scheme for name in schemes} == schemes


PARTS = st.sampled_from(
    ["0", "1", "10", "layers", "mlp", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"]
)
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)


@given(st.dictionaries(NAMES, st.sampled_from([W4, W8, W4.with_groups(32)]), min_size=1, max_size=12))
def test_patterns_say_of_any_names_what_they_have(schemes: dict[str, Scheme]) -> None:
    recipe = layer_recipe(schemes)
    assert {name: recipe.of(name).scheme for name in schemes} == schemes


def test_schemes_that_split_a_fused_layer_have_patterns_of_their_own() -> None:
    schemes = layers(3, attn__q_proj=W4, attn__k_proj=W8)
    schemes["model.layers.2.attn.q_proj"] = W8
    recipe = layer_recipe(schemes)
    assert {name: recipe.of(name).scheme for name in schemes} == schemes


def test_a_recipe_that_splits_a_fused_layer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model")
    recipe = {"scheme": "w4a16", "layers": [{"match": "*.q_proj", "scheme": "w8a8"}]}
    with pytest.raises(FlowError, match="servers run q_proj, k_proj, v_proj as one layer"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", recipe=recipe)
