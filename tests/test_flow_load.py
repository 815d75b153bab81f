"""baracuda.load runs what was written in int8; transformers with compressed-tensors reads the same directory."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.packed import PackedLinear
from baracuda.flow.structure import quiet
from baracuda.nn import QuantizedLinear, SmoothQuantLinear

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")


def decompressed(model: torch.nn.Module, out: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The directory through transformers and compressed-tensors, which make its weights float on the first forward."""
    with quiet():
        return type(model).from_pretrained(out, dtype=dtype).eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    directory = tmp_path_factory.mktemp("load") / "model"
    model = models.save("llama", directory, shard="100KB")
    models.tokens(directory.parent / "tokens.safetensors")
    return model, directory


SCHEMES = {
    "w8a8": ({"scheme": "w8a8"}, QuantizedLinear),
    "w8a8 static": ({"scheme": "w8a8", "activations": "static"}, SmoothQuantLinear),
    "smoothquant": ({"scheme": "w8a8-smoothquant"}, QuantizedLinear),
    "smoothquant static": ({"scheme": "w8a8-smoothquant", "activations": "static"}, SmoothQuantLinear),
    "w4a16": ({"scheme": "w4a16", "group_size": 32}, PackedLinear),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_our_integers_and_their_floats_agree(name: str, llama: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    """Weights agree to the bit, and with them the outputs of w4a16 to the order of float sums.

    Static activations have the same steps; a value between two integers may still fall to either side, since sums in
    floats and in integers differ in their last bit. Dynamic steps differ (compressed-tensors takes amax/127.5, baracuda
    amax/127), so the two are as far apart as two roundings, about as far as each is from the float model.
    """
    model, directory = llama
    options, kind = SCHEMES[name]
    calibration = None if name in ("w8a8", "w4a16") else directory.parent / "tokens.safetensors"
    quantize_checkpoint(directory, tmp_path / "out", calibration=calibration, **options)
    ours, theirs = baracuda.load(tmp_path / "out"), decompressed(model, tmp_path / "out", torch.float32)
    x = models.prompt()
    with torch.no_grad():
        exact, mine, yours = (m(x).logits for m in (model, ours, theirs))
    replaced = [m for m in ours.modules() if isinstance(m, kind)]
    assert len(replaced) == 14
    for path, module in ours.named_modules():
        if isinstance(module, kind):
            assert torch.equal(module.dequantized_weight(), theirs.get_submodule(path).weight), path
    error = models.relative(exact, yours)
    tolerance = {QuantizedLinear: 1.5 * error, SmoothQuantLinear: 0.5 * error, PackedLinear: 1e-5}
    assert models.relative(yours, mine) < tolerance[kind]
    assert models.relative(exact, mine) < 1.3 * error


def test_a_bf16_checkpoint_loads_in_its_own_type_with_f32_scales(tmp_path: Path) -> None:
    model = models.save("qwen2", tmp_path / "model", torch.bfloat16)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    ours, theirs = baracuda.load(tmp_path / "out"), decompressed(model, tmp_path / "out", torch.bfloat16)
    with torch.no_grad():
        exact, mine, yours = (m(models.prompt()).logits.float() for m in (model, ours, theirs))
    assert ours.dtype is torch.bfloat16 and mine.isfinite().all()
    assert ours.model.layers[0].mlp.up_proj.weight_scale.dtype is torch.float32
    assert models.relative(yours, mine) < 2 * models.relative(exact, yours)


def test_experts_stay_float_are_named_and_load(tmp_path: Path) -> None:
    model = models.save("mixtral", tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    reasons = {entry["name"]: entry["reason"] for entry in report["left"]}
    assert "expert weights" in reasons["model.layers.0.block_sparse_moe.experts.0.w1"]
    assert len(report["layers"]) == 8 and "experts stay in floating point" in report["notes"][0]
    with torch.no_grad():
        exact, mine = model(models.prompt()).logits, baracuda.load(tmp_path / "out")(models.prompt()).logits
    assert models.relative(exact, mine) < 0.1


def test_a_model_without_linears_of_the_format_is_refused_with_the_reason(tmp_path: Path) -> None:
    models.save("gpt2", tmp_path / "model")
    with pytest.raises(FlowError, match=r"nothing to quantize.*Conv1D"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out")


def test_a_float_checkpoint_is_not_loaded_as_a_quantized_one(llama: tuple[torch.nn.Module, Path]) -> None:
    with pytest.raises(FlowError, match="no quantization_config"):
        baracuda.load(llama[1])
