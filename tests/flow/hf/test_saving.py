"""Models with integer linears, saved: save_pretrained and baracuda.save write what every reader reads as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from loading import CASES, LINEARS, count, logits, quantized, read, save_llama
from torch import nn

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors
from baracuda.flow.hf.skeleton import quiet
from baracuda.nn import QuantizedLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("transformers"))


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


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_merged_and_fused_models_are_saved_as_if_they_were_not(scheme: str, llama: Path, tmp_path: Path) -> None:
    """As quantize_model makes them, and as baracuda.load does."""
    model = read(llama)
    report = baracuda.quantize_model(model, scheme, ignore=["lm_head"], merge=True, fuse=True)
    assert report.fused and any(type(module).__name__ == "FusedNorm" for module in model.modules())
    with quiet():
        model.save_pretrained(tmp_path / "out")
    assert verify(tmp_path / "out", llama) == []
    again = baracuda.load(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    with quiet():
        again.save_pretrained(tmp_path / "again")
    first, second = (read_tensors(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_four_bits_of_a_bf16_model_come_back_with_the_same_bits(llama: Path, tmp_path: Path) -> None:
    """Their scales have no exact value in bf16, and are stored and read in f32."""
    model = read(llama, dtype=torch.bfloat16)
    baracuda.quantize_model(model, "w4a8", ignore=["lm_head"])
    assert round_trip(model, tmp_path / "out", llama, strict=False).dtype is torch.bfloat16


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
    models.needs_readable_experts()
    models.save("mixtral", tmp_path / "model")
    group = {"group_size": 32} if scheme == "w4a16" else {}
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme=scheme, **group)
    round_trip(baracuda.load(tmp_path / "out", fuse=False), tmp_path / "again", tmp_path / "model", strict=False)


@pytest.mark.filterwarnings("default")
def test_a_mixture_with_float_experts_is_saved_with_a_warning(tmp_path: Path) -> None:
    model: Any = models.build("mixtral")
    baracuda.quantize_model(model, "w8a8", ignore=["lm_head"])
    with quiet(), pytest.warns(UserWarning, match="transformers without baracuda looks for packed experts only"):
        model.save_pretrained(tmp_path / "out")


@pytest.mark.filterwarnings("default")
def test_layers_that_servers_would_have_to_fuse_with_floats_are_saved_with_a_warning(
    llama: Path, tmp_path: Path
) -> None:
    model = read(llama)
    baracuda.quantize_model(model, "w8a8", targets=["*.q_proj"])
    with quiet(), pytest.warns(UserWarning, match=r"servers run model\.layers\.0\.self_attn\.k_proj.* as one layer"):
        model.save_pretrained(tmp_path / "out")
    assert {finding.code for finding in verify(tmp_path / "out")} == {"fused-mixed"}
    assert torch.equal(logits(read(tmp_path / "out")), logits(model))


def test_fused_layers_of_two_schemes_are_found(llama: Path, tmp_path: Path) -> None:
    model = read(llama)
    baracuda.quantize_model(model, "w8a8", targets=["*.q_proj"])
    baracuda.quantize_model(model, "w4a8", targets=["*.k_proj", "*.v_proj"])
    with quiet():
        model.save_pretrained(tmp_path / "out")
    found = verify(tmp_path / "out")
    assert [(finding.code, finding.where) for finding in found] == [
        ("fused-mixed", f"model.layers.{layer}.self_attn.k_proj") for layer in range(2)
    ]
    assert "another scheme" in found[0].message


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_a_state_dict_is_saved_where_it_is_what_a_checkpoint_stores(scheme: str, llama: Path, tmp_path: Path) -> None:
    model = read(llama)
    state = model.state_dict()
    baracuda.quantize_model(model, scheme, ignore=["lm_head"])
    with quiet(), pytest.raises(FlowError, match=r"save_pretrained\(state_dict=\.\.\.\): .*; leave state_dict out"):
        model.save_pretrained(tmp_path / "out", True, state)
    assert not (tmp_path / "out").exists()
    if scheme == "w8a8":
        with quiet():
            model.save_pretrained(tmp_path / "out", state_dict=model.state_dict())
        assert torch.equal(logits(read(tmp_path / "out")), logits(model))


def test_integers_that_cannot_be_described_have_no_config(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config without a description would make floats of them."""
    from baracuda.flow.hf import takeover

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    model = read(llama)
    baracuda.quantize_model(model, "w8a8", ignore=["lm_head"])
    monkeypatch.setattr(takeover, "describe_saved", full)
    with quiet(), pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises((OSError, ValueError)):
        read(tmp_path / "out")


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_a_process_without_baracuda_reads_a_saved_model_as_it_was(scheme: str, llama: Path, tmp_path: Path) -> None:
    """transformers rounds activations over another scale; the weights are the same."""
    from baracuda.flow.checkpoint.tensorfile import write_tensors

    pytest.importorskip("compressed_tensors")
    model = read(llama)
    exact = logits(model)
    baracuda.quantize_model(model, scheme, ignore=["lm_head"])
    with quiet():
        model.save_pretrained(tmp_path / "out")
    write_tensors(tmp_path / "tokens", {"prompt": models.prompt()}, {})
    code = (
        "import sys, torch, transformers\nfrom safetensors.torch import load_file, save_file\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "with torch.no_grad():\n    found = model(load_file(sys.argv[2])['prompt']).logits\n"
        "assert 'baracuda' not in sys.modules\nsave_file({'logits': found.contiguous()}, sys.argv[3])\n"
    )
    files = [str(tmp_path / name) for name in ("out", "tokens", "logits")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, capture_output=True)
    theirs = read_tensors(tmp_path / "logits")["logits"]
    assert models.relative(logits(model), theirs) < 0.5 * models.relative(exact, logits(model)) + 0.02


def test_what_no_reader_reads_is_not_saved(llama: Path, tmp_path: Path) -> None:
    model = read(llama)
    baracuda.quantize_model(model, "w4a4", ignore=["lm_head"])
    with pytest.raises(FlowError, match=r"q_proj: .* has no layout in checkpoints; expected symmetric w8a8"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


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


@pytest.mark.filterwarnings("default")
def test_converted_layers_with_scales_of_their_own_are_saved_with_one(llama: Path, tmp_path: Path) -> None:
    model = trained(llama, scheme="w8a8-static", activation_strategy="learned")
    baracuda.convert(model)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.input_scale.mul_(1.5)
    own = attention.q_proj.input_scale.clone()
    with quiet(), pytest.warns(UserWarning, match="as one layer with their neighbours and keep one input scale"):
        model.save_pretrained(tmp_path / "out")
    assert verify(tmp_path / "out") == []
    assert torch.equal(attention.q_proj.input_scale, own), "the model has changed"
    stored = read_tensors(tmp_path / "out" / "model.safetensors")
    largest = max(getattr(attention, f"{name}_proj").input_scale for name in "qkv")
    assert all(torch.equal(stored[f"model.layers.0.self_attn.{name}_proj.input_scale"], largest) for name in "qkv")


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
