"""The rules of vLLM's compressed-tensors loader, written down and asked of what is written.

tests/serve runs vLLM itself, on CPUs; this holds for what only GPUs run.

A layer is looked up by its name in vLLM's model: Linears that it fuses under the names of their shards, experts under
`<experts>.0.gate_proj` whatever the checkpoint calls them. Ignored layers are float, all others have one scheme.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from baracuda.flow import quantize_checkpoint
from baracuda.flow.checkpoint.tensorfile import read_tensors

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

ARGUMENTS = {"num_bits", "type", "symmetric", "strategy", "dynamic", "group_size"}
SHARDS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SCHEMES: dict[str, dict[str, Any]] = {
    "w8a8": {"scheme": "w8a8"},
    "w8a8-static": {"scheme": "w8a8", "activations": "static"},
    "smoothquant": {"scheme": "w8a8-smoothquant"},
    "w4a16": {"scheme": "w4a16", "group_size": 32},
    "w4a8": {"scheme": "w4a8", "group_size": 32},
}
#: What each model's Linears are called inside a layer.
LAYERS = {
    "llama": ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"],
    "qwen2": ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"],
    "mixtral": ["self_attn.qkv_proj", "self_attn.o_proj"],
    "qwen2_moe": [
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.shared_expert.gate_up_proj",
        "mlp.shared_expert.down_proj",
    ],
}
EXPERTS = {
    "mixtral": ("block_sparse_moe", ["w1", "w2", "w3"]),
    "qwen2_moe": ("mlp", ["gate_proj", "up_proj", "down_proj"]),
}
#: Linears that vLLM always makes float.
ROUTERS = {"mixtral": ["block_sparse_moe.gate"], "qwen2_moe": ["mlp.gate", "mlp.shared_expert_gate"]}


def ignored(config: dict[str, Any], layer: str) -> bool:
    return any(
        re.match(target[3:], layer) is not None if target.startswith("re:") else target == layer
        for target in config["ignore"]
    )


def shards(layer: str) -> list[str]:
    parent, _, leaf = layer.rpartition(".")
    return [f"{parent}.{shard}" for shard in SHARDS.get(leaf, [leaf])]


def assert_stored(stored: dict[str, torch.Tensor], module: str, group: dict[str, Any]) -> None:
    """The tensors vLLM registers for a Linear of this scheme, and no other under its name."""
    weights, inputs = group["weights"], group["input_activations"]
    parts = {name.removeprefix(f"{module}."): t for name, t in stored.items() if name.startswith(f"{module}.")}
    parts.pop("bias", None)
    if "weight_packed" in parts:
        n, k = parts["weight_shape"].tolist()
        words = k * weights["num_bits"] // 32
        expected = {"weight_packed": (torch.int32, [n, words]), "weight_shape": (torch.int64, [2])}
        scale = [n, k // (weights["group_size"] or k)]
    else:
        expected = {"weight": (torch.int8, list(parts["weight"].shape))}
        scale = [parts["weight"].shape[0], 1]
        if not inputs["dynamic"]:
            expected["input_scale"] = (torch.float32, [1])
    assert parts.pop("weight_scale").shape == torch.Size(scale)
    assert {name: (t.dtype, list(t.shape)) for name, t in parts.items()} == expected


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_written_follows_the_rules_of_vllms_loader(name: str, scheme: str, tmp_path: Path) -> None:
    models.save(name, tmp_path / "model")
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    calibration = None if scheme in ("w8a8", "w4a16", "w4a8") else tokens
    quantize_checkpoint(
        tmp_path / "model", tmp_path / "out", calibration=calibration, allow_float=True, **SCHEMES[scheme]
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    stored = read_tensors(tmp_path / "out" / "model.safetensors")
    group, experts = assert_known_schemes(config, name in EXPERTS)
    for layer in (f"model.layers.{i}.{leaf}" for i in range(2) for leaf in LAYERS[name]):
        assert not any(ignored(config, shard) for shard in [layer, *shards(layer)])
        for shard in shards(layer):
            assert_stored(stored, shard, group)
        assert len({float(stored[f"{s}.input_scale"]) for s in shards(layer) if f"{s}.input_scale" in stored}) <= 1
    for router in (f"model.layers.{i}.{leaf}" for i in range(2) for leaf in ROUTERS.get(name, [])):
        assert ignored(config, router) and stored[f"{router}.weight"].is_floating_point()
    assert ignored(config, "lm_head")
    if name in EXPERTS:
        assert_experts(config, stored, experts, *EXPERTS[name])


def assert_known_schemes(config: dict[str, Any], mixture: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The groups of Linears and of experts, which may be the same, of kinds vLLM has kernels for."""
    assert config["quant_method"] == "compressed-tensors" and config["quantization_status"] == "compressed"
    default, *others = config["config_groups"].values()
    assert default["targets"] == ["Linear"] and len(others) <= int(mixture)
    group = others[0] if others else default
    for one in (default, *others):
        weights, inputs = one["weights"], one["input_activations"]
        assert set(weights) == ARGUMENTS and (inputs is None or set(inputs) == ARGUMENTS)
        assert weights["type"] == "int" and weights["symmetric"] and not weights["dynamic"]
        assert inputs is None or (inputs["num_bits"], inputs["type"], inputs["symmetric"]) == (8, "int", True)
        assert one["output_activations"] is None
    weights, inputs = group["weights"], group["input_activations"]
    format = group.get("format", config["format"])
    if weights["num_bits"] == 4:
        assert format == "pack-quantized" and weights["strategy"] == "group"
        assert inputs is None or (inputs["strategy"], inputs["dynamic"]) == ("token", True)
    else:
        assert format == "int-quantized" and weights["strategy"] == "channel"
        assert (inputs["strategy"], inputs["dynamic"]) in (("token", True), ("tensor", False))
    if mixture:  # vLLM's kernels for packed experts take float activations
        assert default["input_activations"] is None
        assert default.get("format", config["format"]) == "pack-quantized"
    return group, default


def assert_experts(
    config: dict[str, Any], stored: dict[str, torch.Tensor], group: dict[str, Any], block: str, names: list[str]
) -> None:
    """All of one kind, and found under the names vLLM asks for."""
    for layer in range(2):
        prefix = f"model.layers.{layer}.{block}.experts"
        patterns = [t for one in config["config_groups"].values() for t in one["targets"] if t.startswith("re:")]
        for module in [prefix, *(f"{prefix}.0.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj", *names))]:
            assert not ignored(config, module) and not any(re.match(pattern[3:], module) for pattern in patterns)
        for module in (f"{prefix}.{expert}.{leaf}" for expert in range(4) for leaf in names):
            assert_stored(stored, module, group)
