"""Recipes: layers of one model with different schemes and methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from typer.testing import CliRunner

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.run.recipe_file import Rule, read_recipe
from baracuda_cli import app

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TOML = """
scheme = "w4a16"
method = "gptq"
group_size = 32
ignore = ["*.o_proj"]

[[layers]]
match = "*.down_proj"
scheme = "w8a8"

[[layers]]
match = "re:.*layers\\\\.1\\\\..*"
method = "rtn"
group_size = 64
"""


def test_a_recipe_gives_each_layer_its_scheme(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model", torch.bfloat16)
    data = models.tokens(tmp_path / "tokens.safetensors")
    (tmp_path / "recipe.toml").write_text(TOML)
    arguments = ["quantize", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--recipe",
                 str(tmp_path / "recipe.toml"), "--calibration", str(data), "--sequence-length", "24"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    layers = baracuda.load(tmp_path / "out", merge=False).model.layers
    kinds = [type(layers[0].get_submodule(n)).__name__ for n in ("mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")]
    assert kinds == ["PackedLinear", "QuantizedLinear", "Linear"]
    assert [layer.mlp.up_proj.group_size for layer in layers] == [32, 64]
    assert verify(tmp_path / "out", tmp_path / "model") == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 3 and config["format"] == "mixed-precision"
    report = json.loads((tmp_path / "out" / "baracuda_report.json").read_text())
    recorded = report["run"]["made_from"]["options"]
    assert recorded["method"] == "gptq" and recorded["rules"][0]["match"] == "*.down_proj"
    refused = CliRunner().invoke(app, [*arguments, "--scheme", "w8a8"])
    assert refused.exit_code == 2 and "the recipe says it" in " ".join(refused.output.split())


def test_a_recipe_is_a_file_or_a_dictionary(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(TOML)
    read = read_recipe(tmp_path / "recipe.toml")
    assert read.options == {"scheme": "w4a16", "method": "gptq", "group_size": 32} and read.ignore == ("*.o_proj",)
    assert read.rules == (Rule("*.down_proj", "w8a8"), Rule("re:.*layers\\.1\\..*", None, "rtn", 64))
    assert read_recipe({"layers": [{"match": "a", "scheme": "w8a8"}]}).rules == (Rule("a", "w8a8"),)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"shceme": "w8a8"}, "expected only scheme"),
        ({"group_size": "64"}, "group_size: expected int"),
        ({"layers": [{"scheme": "w8a8"}]}, "expected a match"),
        ({"layers": [{"match": "*", "scheme": "w2a2"}]}, "scheme: expected one of"),
        ({"layers": [{"match": "*", "method": "magic"}]}, "method: expected one of"),
        ({"layers": [{"match": "re:("}]}, r"^recipe: match re:\(: not a regular expression"),
        ({"layers": [{"match": "*.donw_proj", "scheme": "w8a8"}]}, r"^recipe: match \*\.donw_proj: expected names"),
        ({"scheme": "w4a8", "activations": "static"}, "expected only scheme"),
        ({"ignore": [3]}, "ignore: expected a list of patterns"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_told(recipe: dict[str, Any], message: str, tmp_path: Path) -> None:
    models.plain_checkpoint(tmp_path / "model")
    with pytest.raises(FlowError, match=message):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()
