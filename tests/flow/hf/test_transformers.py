"""transformers as its users expect it: from_pretrained computes in integers, save_pretrained writes what is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors
from baracuda.flow.hf.packed import PackedLinear
from baracuda.flow.hf.skeleton import quiet
from baracuda.nn import QuantizedLinear, SmoothQuantLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
LINEARS = 14  # in two layers of a Llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("transformers") / "model"
    models.save("llama", directory, shard="100KB")
    models.tokens(directory.parent / "tokens.safetensors")
    return directory


def read(directory: Path, **options: Any) -> Any:
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(models.prompt()).logits
    return found


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


CASES = {
    "w8a8": ({"scheme": "w8a8"}, QuantizedLinear),
    "static": ({"scheme": "w8a8", "activations": "static"}, SmoothQuantLinear),
    "w4a16": ({"scheme": "w4a16", "group_size": 32}, PackedLinear),
    "w4a8": ({"scheme": "w4a8", "group_size": 32}, QuantizedLinear),
}


def quantized(llama: Path, out: Path, case: str) -> Path:
    calibration = llama.parent / "tokens.safetensors" if case == "static" else None
    quantize_checkpoint(llama, out, calibration=calibration, **CASES[case][0])
    return out


@pytest.mark.parametrize("case", CASES)
def test_from_pretrained_computes_our_checkpoints_in_integers(case: str, llama: Path, tmp_path: Path) -> None:
    out = quantized(llama, tmp_path / "out", case)
    model, given = read(out), read(out, quantization_config=baracuda.BaracudaConfig())
    assert count(model, CASES[case][1]) == count(given, CASES[case][1]) == LINEARS
    assert torch.equal(logits(model), logits(baracuda.load(out, fuse=False))) and torch.equal(
        logits(model), logits(given)
    )


@pytest.mark.parametrize("order", ["import baracuda, transformers", "import transformers, baracuda"])
def test_either_import_may_come_first(order: str, llama: Path, tmp_path: Path) -> None:
    out = quantized(llama, tmp_path / "out", "w8a8")
    code = (
        f"{order}, sys\nmodel = transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
        "print(type(model.model.layers[0].mlp.up_proj).__name__)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert run.stdout.split()[-1] == "QuantizedLinear"


def test_a_variable_leaves_reading_to_transformers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    out = quantized(llama, tmp_path / "out", "w8a8")
    monkeypatch.setenv("BARACUDA_TRANSFORMERS", "0")
    model = read(out)
    assert count(model, QuantizedLinear) == 0 and type(model.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"


@pytest.mark.parametrize("case", ["w8a8", "w4a16", "w4a8"])
def test_a_float_model_is_quantized_while_it_is_loaded_with_the_bits_of_a_checkpoint(
    case: str, llama: Path, tmp_path: Path
) -> None:
    out = quantized(llama, tmp_path / "out", case)
    options, kind = CASES[case]
    model = read(llama, quantization_config=baracuda.BaracudaConfig(**options))
    assert count(model, kind) == LINEARS and type(model.lm_head) is nn.Linear
    loaded = baracuda.load(out, fuse=False)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert torch.equal(logits(model), logits(loaded))


def test_what_on_the_fly_leaves_is_named_by_patterns(llama: Path) -> None:
    model = read(llama, quantization_config=baracuda.BaracudaConfig("w8a8", ignore=["*.q_proj"]))
    assert count(model, QuantizedLinear) == LINEARS - 6, "servers fuse q, k and v: all of them stay float"


def test_on_the_fly_refuses_what_needs_data() -> None:
    with pytest.raises(FlowError, match=r"w8a8-static needs calibration data.*baracuda quantize"):
        baracuda.BaracudaConfig("w8a8-static")


def round_trip(model: Any, out: Path, llama: Path, *, strict: bool = True) -> Any:
    """Saved by transformers, verified, and read back."""
    with quiet():
        model.save_pretrained(out)
    assert verify(out) == [] and (not strict or verify(out, llama) == [])
    again = read(out)
    assert torch.equal(logits(again), logits(model))
    return again


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_is_saved_as_it_was_read(case: str, llama: Path, tmp_path: Path) -> None:
    out = quantized(llama, tmp_path / "out", case)
    round_trip(baracuda.load(out, fuse=False), tmp_path / "again", llama)
    stored = {name: tensor for path in out.glob("*.safetensors") for name, tensor in read_tensors(path).items()}
    saved = read_tensors(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == stored.keys() and all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
    first, second = (
        json.loads((d / "config.json").read_text())["quantization_config"] for d in (out, tmp_path / "again")
    )
    assert first == second


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_a_quantize_modeled_model_is_saved_as_one_that_is_read_back(scheme: str, llama: Path, tmp_path: Path) -> None:
    """Four bits with one scale a channel are stored as groups of that scale."""
    model = read(llama)
    baracuda.quantize_model(model, scheme, ignore=["lm_head"])
    again = round_trip(model, tmp_path / "out", llama)
    assert count(again, QuantizedLinear) == count(model, QuantizedLinear) == LINEARS
    assert again.model.layers[0].mlp.up_proj.weight_group == (32 if scheme == "w4a8" else 0)


def test_a_part_of_a_model_that_was_quantized_is_saved_too(llama: Path, tmp_path: Path) -> None:
    model = read(llama)
    baracuda.quantize_model(model.model.layers[1], "w8a8")
    again = round_trip(model, tmp_path / "out", llama)
    assert count(again, QuantizedLinear) == LINEARS // 2
    assert type(again.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_converted_model_is_saved_as_one_that_is_read_back(llama: Path, tmp_path: Path) -> None:
    model = read(llama)
    baracuda.prepare_qat(model, "w8a8", ignore=["lm_head"])
    baracuda.convert(model)
    round_trip(model.eval(), tmp_path / "out", llama)


def test_a_model_quantized_while_it_was_loaded_is_saved(llama: Path, tmp_path: Path) -> None:
    model = read(llama, quantization_config=baracuda.BaracudaConfig("w4a16", group_size=32))
    round_trip(model, tmp_path / "out", llama)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_a_mixture_is_saved_with_float_experts(scheme: str, tmp_path: Path) -> None:
    if not hasattr(transformers.quantizers.HfQuantizer, "update_weight_conversions"):
        pytest.skip("quantized experts need transformers 5.8")
    models.save("mixtral", tmp_path / "model")
    group = {"group_size": 32} if scheme == "w4a16" else {}
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme=scheme, **group)
    round_trip(baracuda.load(tmp_path / "out", fuse=False), tmp_path / "again", tmp_path / "model", strict=False)


def test_what_no_reader_reads_is_not_saved(llama: Path, tmp_path: Path) -> None:
    model = read(llama)
    baracuda.quantize_model(model, "w4a4", ignore=["lm_head"])
    with pytest.raises(FlowError, match=r"q_proj: .* has no layout in checkpoints; expected symmetric w8a8"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_shape_is_not_read(llama: Path, tmp_path: Path) -> None:
    from baracuda.flow.checkpoint.tensorfile import write_tensors

    out = quantized(llama, tmp_path / "out", "w8a8")
    path = next(path for path in out.glob("*.safetensors") if "model.norm.weight" in read_tensors(path))
    write_tensors(path, read_tensors(path) | {"model.norm.weight": torch.ones(32)}, {"format": "pt"})
    with pytest.raises((FlowError, RuntimeError), match=r"model\.norm\.weight"):
        read(out)


def test_load_passes_further_options_on(llama: Path, tmp_path: Path) -> None:
    out = quantized(llama, tmp_path / "out", "w8a8")
    model = baracuda.load(out, dtype=torch.bfloat16, attn_implementation="eager", fuse=False)
    assert model.dtype is torch.bfloat16 and model.config._attn_implementation == "eager"
    with pytest.raises(FlowError, match="expected device or device_map, got both"):
        baracuda.load(out, device="cpu", device_map="auto", fuse=False)


# -- trained scales ----------------------------------------------------------------------------------------------


def trained(llama: Path, rate: float = 1e-5, **options: Any) -> Any:
    """A model after a few steps of training with learned scales."""
    torch.manual_seed(0)
    model = read(llama).train()
    baracuda.prepare_qat(model, ignore=["lm_head"], weight_strategy="learned", **options)
    with torch.no_grad():
        model(models.prompt())  # learned activations take their first scale from data
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(3):
        optimizer.zero_grad()
        model(models.prompt(), labels=models.prompt()).loss.backward()
        optimizer.step()
    return model.eval()


def test_trained_scales_of_four_bits_are_the_ones_that_are_saved(llama: Path, tmp_path: Path) -> None:
    model = trained(llama, scheme="w4a8")
    baracuda.save(model, tmp_path / "out")
    assert verify(tmp_path / "out") == []
    stored = read_tensors(tmp_path / "out" / "model.safetensors")
    linear = model.model.layers[0].mlp.down_proj
    scale = stored["model.layers.0.mlp.down_proj.weight_scale"]
    assert torch.equal(scale, linear.weight_fake_quantize.scale.detach().reshape(-1, 1).expand(-1, 96 // 32))
    assert isinstance(linear, baracuda.nn.QATLinear), "the model stays as it was"
    assert models.relative(logits(model), logits(baracuda.load(tmp_path / "out", fuse=False))) < 0.05


@pytest.mark.parametrize("static", [False, True])
def test_trained_scales_are_the_ones_that_are_saved(static: bool, llama: Path, tmp_path: Path) -> None:
    options = {"scheme": "w8a8-static", "activation_strategy": "learned"} if static else {"scheme": "w8a8"}
    model = trained(llama, **options)
    baracuda.save(model, tmp_path / "out")
    assert verify(tmp_path / "out") == []
    stored = read_tensors(tmp_path / "out" / "model.safetensors")
    assert not [name for name in stored if "fake_quantize" in name]
    linear = model.model.layers[0].mlp.down_proj
    scale = stored["model.layers.0.mlp.down_proj.weight_scale"]
    assert torch.equal(scale.flatten(), linear.weight_fake_quantize.scale.detach().flatten())
    amax = linear.weight.detach().abs().amax(1) / 127
    assert not torch.allclose(scale.flatten(), amax), "recomputed"
    if static:
        stored_input = stored["model.layers.0.mlp.down_proj.input_scale"]
        assert torch.equal(stored_input.flatten(), linear.activation_fake_quantize.scale.detach().flatten())
    assert isinstance(linear, baracuda.nn.QATLinear), "the model stays as it was"
    assert models.relative(logits(model), logits(baracuda.load(tmp_path / "out", fuse=False))) < 0.02


def test_a_scale_that_training_has_turned_over_is_not_saved(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="has made a scale zero or negative"):
        baracuda.save(trained(llama, rate=1.0), tmp_path / "out")


def test_fused_layers_with_scales_of_their_own_get_one_and_a_warning(llama: Path, tmp_path: Path) -> None:
    model = trained(llama, scheme="w8a8-static", activation_strategy="learned")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.activation_fake_quantize.scale.mul_(1.5)
    with pytest.warns(UserWarning, match="as one layer with their neighbours and keep one input scale"):
        baracuda.save(model, tmp_path / "out")
    stored = read_tensors(tmp_path / "out" / "model.safetensors")
    scales = [stored[f"model.layers.0.self_attn.{name}_proj.input_scale"] for name in "qkv"]
    own = [
        model.model.layers[0].self_attn.get_submodule(f"{name}_proj").activation_fake_quantize.scale for name in "qkv"
    ]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[1], scales[2])
    assert float(scales[0]) == max(float(scale) for scale in own)


def test_a_model_in_training_is_not_saved_by_save_pretrained(llama: Path, tmp_path: Path) -> None:
    model = read(llama)
    baracuda.prepare_qat(model, "w8a8", ignore=["lm_head"])
    with pytest.raises(FlowError, match=r"a QATLinear, which is for training; baracuda.save writes"):
        model.save_pretrained(tmp_path / "out")


def test_a_scale_without_a_value_is_named(llama: Path, tmp_path: Path) -> None:
    model = read(llama)
    baracuda.prepare_qat(model, "w8a8-static", ignore=["lm_head"])
    with pytest.raises(FlowError, match=r"q_proj: cannot be saved"):
        baracuda.save(model, tmp_path / "out")


def test_verify_flags_what_training_left_behind(llama: Path, tmp_path: Path) -> None:
    from baracuda.flow.checkpoint.tensorfile import write_tensors

    models.save("llama", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    left = "model.layers.0.mlp.up_proj.weight_fake_quantize.scale"
    write_tensors(path, read_tensors(path) | {left: torch.ones(96)}, {"format": "pt"})
    models.reseal(tmp_path / "out")
    found = verify(tmp_path / "out")
    assert [(finding.code, finding.where) for finding in found] == [("extra-tensor", left)]
    assert "training" in found[0].message
