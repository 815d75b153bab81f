"""transformers as its users expect it: from_pretrained computes in integers, save_pretrained writes what is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loading import CASES, LINEARS, count, logits, quantized, read, save_llama
from torch import nn

import baracuda
from baracuda.flow import FlowError
from baracuda.flow.checkpoint.tensorfile import read_tensors
from baracuda.nn import QuantizedLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("transformers"))


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


def test_a_file_of_another_shape_is_not_read(llama: Path, tmp_path: Path) -> None:
    """transformers 5.23 and newer name the tensor in their log, older ones in the error."""
    from baracuda.flow.checkpoint.tensorfile import write_tensors

    out = quantized(llama, tmp_path / "out", "w8a8")
    path = next(path for path in out.glob("*.safetensors") if "model.norm.weight" in read_tensors(path))
    write_tensors(path, read_tensors(path) | {"model.norm.weight": torch.ones(32)}, {"format": "pt"})
    with pytest.raises((FlowError, RuntimeError), match=r"model\.norm\.weight|details look at the above report"):
        read(out)


def test_load_passes_further_options_on(llama: Path, tmp_path: Path) -> None:
    out = quantized(llama, tmp_path / "out", "w8a8")
    model = baracuda.load(out, dtype=torch.bfloat16, attn_implementation="eager", fuse=False)
    assert model.dtype is torch.bfloat16 and model.config._attn_implementation == "eager"
    with pytest.raises(FlowError, match="expected device or device_map, got both"):
        baracuda.load(out, device="cpu", device_map="auto", fuse=False)
