"""Models of images and sounds: quantized without data, and evaluated on the tensors that they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import baracuda
from baracuda.flow import FlowError, evaluate_checkpoint, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import write_tensors
from baracuda.flow.run.data import require_data
from baracuda.flow.run.verdict import verdict

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
IMAGES = {"pixel_values": torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
SOUNDS = {
    "input_features": torch.randn(3, 80, 40, generator=torch.Generator().manual_seed(0)),
    "decoder_input_ids": torch.arange(15).view(3, 5) + 3,
}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
SOUND = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 160, "max_source_positions": 20,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], int]] = {
    "ViTForImageClassification": ({**VISION, "num_attention_heads": 4, "num_labels": 7}, IMAGES, 10),
    "WhisperForConditionalGeneration": ({**SOUND, **HEADS}, SOUNDS, 15),
}


def save(name: str, directory: Path) -> nn.Module:
    kind = getattr(pytest.importorskip("transformers"), name)
    return models.save_built(lambda: kind(kind.config_class(**MODELS[name][0])), directory)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_images_or_sounds_is_quantized_and_evaluated(name: str, tmp_path: Path) -> None:
    _, inputs, outputs = MODELS[name]
    model = save(name, tmp_path / "model")
    write_tensors(tmp_path / "inputs.safetensors", inputs)
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", evaluation=tmp_path / "inputs.safetensors")
    found = report["evaluation"]
    assert verify(tmp_path / "out", tmp_path / "model") == [] and report["float_share"] < 0.2
    assert found["tokens"] == outputs and found["inputs"] == len(next(iter(inputs.values())))
    with torch.no_grad():
        exact, noisy = (m(**inputs).logits for m in (model, baracuda.load(tmp_path / "out")))
    cosine = torch.nn.functional.cosine_similarity(exact, noisy, dim=-1)
    assert abs(found["cosine"]["mean"] - float(cosine.mean())) < 1e-4 and 0.9 < found["cosine"]["min"] < 1
    assert found["top1_agreement"] == float((exact.argmax(-1) == noisy.argmax(-1)).float().mean())
    assert min(found["layers"].values()) > 15
    told = str(verdict(report))
    assert "same largest output" in told and f"Only {outputs} outputs were measured: give more samples" in told
    again = evaluate_checkpoint(tmp_path / "out", tmp_path / "inputs.safetensors", against=tmp_path / "model")
    assert again["cosine"] == found["cosine"]


def test_inputs_that_the_model_does_not_read_are_told_before_anything_is_done(tmp_path: Path) -> None:
    save("ViTForImageClassification", tmp_path / "model")
    write_tensors(tmp_path / "inputs.safetensors", SOUNDS)
    with pytest.raises(FlowError, match=r"does not run on decoder_input_ids \[1, 5\], input_features \[1, 80, 40\]"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", evaluation=tmp_path / "inputs.safetensors")
    write_tensors(tmp_path / "inputs.safetensors", IMAGES)
    with pytest.raises(FlowError, match="calibrated on texts or tokens only"):
        quantize_checkpoint(
            tmp_path / "model", tmp_path / "out", activations="static", calibration=tmp_path / "inputs.safetensors"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"pixel_values": torch.zeros(2, 3), "labels": torch.zeros(2)}, "labels: expected only inputs of a model"),
        ({"pixel_values": torch.zeros(2, 3).to(torch.uint8)}, "expected floats, as a processor makes them, got"),
        ({"input_values": torch.zeros(2, 3), "input_ids": torch.zeros(3, 2).long()}, "as many samples of each input"),
        ({"pixel_values": torch.tensor([[1.0], [float("nan")]])}, "got NaN or infinite ones in sample 1"),
    ],
)
def test_a_file_of_other_tensors_is_refused(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "inputs.safetensors", tensors)
    with pytest.raises(FlowError, match=message):
        require_data(tmp_path / "inputs.safetensors")
