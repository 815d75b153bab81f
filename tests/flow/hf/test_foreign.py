"""4-bit checkpoints of other tools: compressed-tensors packs them and says what they stand for, we run them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file, save_file

import baracuda
from baracuda.flow import FlowError, verify
from baracuda.flow.checkpoint.config import parse_config
from baracuda.flow.hf.packed import PackedLinear

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")

#: As llm-compressor writes it.
TOLD = {"observer": "minmax", "observer_kwargs": {}, "block_structure": None, "scale_dtype": None, "zp_dtype": None}
#: symmetric, group size, actorder.
FILES = {
    "groups": (True, 32, None),
    "groups, zero points": (False, 32, "weight"),
    "channels": (True, None, None),
    "channels, zero points": (False, None, None),
    "act-order": (True, 32, "group"),
    "act-order, zero points": (False, 32, "group"),
}


def config(symmetric: bool, size: int | None, order: str | None) -> dict[str, Any]:
    strategy = "channel" if size is None else "group"
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}
    group = {
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False, "actorder": order, **TOLD},
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "version": "0.12.2",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def write(source: Path, out: Path, kind: str) -> dict[str, torch.Tensor]:
    """The model in compressed-tensors' layout; returns the weights that its own code makes of the files."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor as Packing
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    symmetric, size, order = FILES[kind]
    shutil.copytree(source, out)
    described = json.loads((source / "config.json").read_text())
    described["quantization_config"] = config(symmetric, size, order)
    (out / "config.json").write_text(json.dumps(described))
    group = described["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme(**{**group, "weights": {**group["weights"], "actorder": None}})
    tensors, meant = load_file(source / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        module, weight = name.removesuffix(".weight"), tensors.pop(name)
        columns = weight.shape[1]
        g_idx = torch.arange(columns) // (size or columns)
        if order == "group":
            torch.manual_seed(columns)
            g_idx = g_idx[torch.randperm(columns)]
        sorted_columns = torch.argsort(g_idx, stable=True)
        weight = weight[:, sorted_columns]
        each = weight.view(len(weight), -1, size or columns)
        scale, zero_point = calculate_qparams(each.amin(-1), each.amax(-1), scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point.to(torch.int8)}
        state = Packing.compress(state, scheme)
        floats = Packing.decompress(state, scheme)["weight"]
        meant[module] = torch.empty_like(floats).index_copy_(1, sorted_columns, floats)
        if order == "group":  # packed in the order of the inputs, with the group of each
            from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32

            q = unpack_from_int32(state["weight_packed"], 4, weight.shape)
            state["weight_packed"] = pack_to_int32(torch.empty_like(q).index_copy_(1, sorted_columns, q), 4)
            state["weight_g_idx"] = g_idx.to(torch.int32)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in state.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return meant


@pytest.mark.parametrize("kind", FILES)
def test_packed_files_of_other_tools_are_verified_and_run(kind: str, tmp_path: Path) -> None:
    model = models.save("llama", tmp_path / "model")
    meant = write(tmp_path / "model", tmp_path / "out", kind)
    assert verify(tmp_path / "out") == []
    assert verify(tmp_path / "out", tmp_path / "model") == []
    ours = baracuda.load(tmp_path / "out")
    for name, weight in meant.items():
        module = ours.get_submodule(name)
        assert isinstance(module, PackedLinear) and torch.equal(module.dequantized_weight(), weight), name
        model.get_submodule(name).weight.data.copy_(weight)
    with torch.no_grad():
        for prompt in (models.prompt(), models.prompt()[:1, :3]):  # many tokens, and few
            assert models.relative(model(prompt).logits, ours(prompt).logits) < 1e-5
    assert any("as one" in what for what in baracuda.models.merge_siblings(ours).merged.values())


def test_a_model_with_zero_points_is_saved_as_it_was_and_one_in_another_order_not_at_all(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    write(tmp_path / "model", tmp_path / "zeros", "groups, zero points")
    ours = baracuda.load(tmp_path / "zeros")
    baracuda.save(ours, tmp_path / "saved")
    assert verify(tmp_path / "saved") == []
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("zeros", "saved"))
    assert {n for n in before if "proj" in n} == {n for n in after if "proj" in n}
    assert all(torch.equal(before[n], after[n]) for n in after)
    with torch.no_grad():
        assert torch.equal(baracuda.load(tmp_path / "saved")(models.prompt()).logits, ours(models.prompt()).logits)
    write(tmp_path / "model", tmp_path / "ordered", "act-order")
    with pytest.raises(FlowError, match=r"q_proj: its groups were out of order.*copy the directory"):
        baracuda.save(baracuda.load(tmp_path / "ordered"), tmp_path / "refused")


def test_damaged_tensors_are_found(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    for kind, part, code in (
        ("groups, zero points", "weight_zero_point", "shape-mismatch"),
        ("act-order", "weight_g_idx", "bad-groups"),
    ):
        out = tmp_path / part
        write(tmp_path / "model", out, kind)
        tensors = load_file(out / "model.safetensors")
        name = next(n for n in tensors if n.endswith(part))
        tensors[name] = tensors[name][:-1].clone() if code == "shape-mismatch" else torch.zeros_like(tensors[name])
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        assert [(f.code, f.where) for f in verify(out)] == [(code, name)]
        with pytest.raises(FlowError, match=code):
            baracuda.load(out)


@pytest.mark.parametrize("method", ["awq", "gptq", "auto-round", "of tomorrow"])
def test_layouts_of_other_tools_are_refused_with_what_to_do(method: str, tmp_path: Path) -> None:
    models.save("llama", tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(FlowError, match=rf"'{method}', .*layout that is not read.*baracuda quantize.*llm-compress"):
        baracuda.load(tmp_path)
    assert [finding.code for finding in verify(tmp_path)] == ["bad-config"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 3}, "3-bit weights in groups of 32 are not read"),
        ({"num_bits": 8}, "8-bit weights in groups of 32 with float activations are not read"),
        ({"group_size": 12}, "in groups of 12 are not read"),
        ({"actorder": "sideways"}, "expected an actorder of weight or group, got 'sideways'"),
        ({"type": "float"}, "config_groups is not one"),
        ({"strategy": "block"}, "config_groups is not one"),
        ({"dynamic": True}, "config_groups is not one"),
        ({"a key of tomorrow": 1}, "config_groups is not one"),
    ],
)
def test_what_a_config_asks_for_beyond_that_is_refused(change: dict[str, Any], message: str) -> None:
    asked = config(True, 32, None)
    parse_config(asked)
    asked["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(FlowError, match=message):
        parse_config(asked)


def test_what_stands_beside_the_groups_is_refused() -> None:
    for key, value in (("kv_cache_scheme", {"num_bits": 8}), ("transform_config", {"a": {}})):
        with pytest.raises(FlowError, match=f"its {key} is not read here"):
            parse_config({**config(True, 32, None), key: value})
    with pytest.raises(FlowError, match="its format is 'int-quantized'; expected 'pack-quantized'"):
        parse_config({**config(True, 32, None), "format": "int-quantized"})
