"""The model flow on a GPU: the bytes of the CPU wherever no float forward decides, and models that run there."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import baracuda
from baracuda.flow import quantize_checkpoint, verify
from baracuda.flow.checkpoint.storage import Storage
from baracuda.flow.checkpoint.tensorfile import TensorFile, TensorFileWriter, layout, read_tensors, write_tensors
from baracuda.flow.hf.packed import PackedLinear
from baracuda.flow.run.changes import Changes
from baracuda.flow.run.measure import channel_maximum
from baracuda.flow.run.stream import ShardJob
from baracuda.nn import QuantizedLinear
from baracuda.schemes import Choice, checkpoint_scheme, get_method

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("safetensors") is None, reason="needs transformers"
)


# -- without a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{"scheme": "w8a8"}, {"scheme": "w4a16", "group_size": 32}], ids=str)
def test_a_data_free_checkpoint_has_the_bytes_of_the_cpu(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    source = models.plain_checkpoint(tmp_path / "model", dtype=dtype)
    for device in (CPU, GPU):
        quantize_checkpoint(source, tmp_path / device.type, device=device, **options)
    assert models.contents(tmp_path / "cuda") == models.contents(tmp_path / "cpu")
    report = json.loads((tmp_path / "cuda" / "baracuda_report.json").read_text())
    assert report["run"]["device"] == str(GPU)
    assert verify(tmp_path / "cuda", source) == []


def test_many_blocks_from_many_threads_have_the_bytes_of_the_cpu(tmp_path: Path) -> None:
    """100 MiB in blocks of 8: every worker reads, the GPU takes turns."""
    source = tmp_path / "model"
    source.mkdir()
    torch.manual_seed(0)
    weights = {f"layers.{i}.up_proj.weight": torch.randn(6144, 2048).to(torch.bfloat16) for i in range(4)}
    write_tensors(source / "model.safetensors", weights)
    (source / "config.json").write_text("{}")
    for device in (CPU, GPU):
        quantize_checkpoint(source, tmp_path / device.type, device=device, scheme="w4a16")
    assert models.contents(tmp_path / "cuda") == models.contents(tmp_path / "cpu")


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_smoothing_that_is_decided_has_the_bytes_of_the_cpu(
    activations: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """What calibration measured in float forwards may differ between devices; what is made of it may not."""
    torch.manual_seed(1)
    tensors = {
        "up_proj.weight": torch.randn(96, 64).to(dtype),
        "up_proj.bias": torch.randn(96).to(dtype),
        "norm.weight": torch.randn(64).to(dtype),
    }
    write_tensors(tmp_path / "in.safetensors", tensors)
    changes = Changes(
        columns={"up_proj.weight": torch.rand(64) + 0.1},
        rows={"up_proj.weight": torch.rand(96) + 0.1, "up_proj.bias": torch.rand(96) + 0.1},
        replaced={"norm.weight": torch.randn(64).to(dtype)},
        input_scales={"up_proj": torch.tensor([0.37])},
    )
    scheme = checkpoint_scheme("w8a8")[0].with_activations(activations)
    choices = {"up_proj": Choice(scheme)}
    for device in (CPU, GPU):
        with TensorFile(tmp_path / "in.safetensors") as source:
            others = [source.entries[name] for name in ("up_proj.bias", "norm.weight")]
            entries = layout([*Storage(scheme).entries("up_proj", source.entries["up_proj.weight"]), *others])
            writer = TensorFileWriter(tmp_path / device.type, entries, {})
            job = ShardJob(source, writer, {"up_proj.weight": "up_proj"}, choices, changes, device)
            statistics = job.run(list(tensors))
            writer.close()
        assert statistics["up_proj"]["measured_rows"] == 96
    assert (tmp_path / "cuda").read_bytes() == (tmp_path / "cpu").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_maxima_of_calibration_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(300, 65).to(dtype)
    x[:, 3], x[7, 4], x[8, 5], x[9, 6] = 0, float("nan"), -float("inf"), -200
    on_gpu = channel_maximum(x.to(GPU)).cpu()
    assert torch.equal(on_gpu.nan_to_num(-1), channel_maximum(x).nan_to_num(-1))
    assert on_gpu[3] == 0 and on_gpu[4].isnan() and on_gpu[6] == 200 and on_gpu.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_linears_of_a_loaded_checkpoint_agree_with_the_cpu(dtype: torch.dtype) -> None:
    """int8 linears to the bit; 4-bit weights to the bit, their float product to the order of its sums."""
    torch.manual_seed(2)
    float_linear = torch.nn.Linear(256, 96).to(dtype)
    x = torch.randn(5, 256).to(dtype)
    integer = QuantizedLinear.from_float(float_linear, dtype=dtype)
    packed = PackedLinear(256, 96, True, 64, dtype=dtype)
    scheme = checkpoint_scheme("w4a16")[0].with_groups(64)
    stored = Storage(scheme).store(get_method("rtn").quantize(float_linear.weight.detach(), scheme.weight))
    packed.load_state_dict({**stored, "weight_shape": torch.tensor([96, 256]), "bias": float_linear.bias.detach()})
    with torch.no_grad():
        exact, y, weight = integer(x), packed(x), packed.dequantized_weight(dtype)
        assert torch.equal(integer.to(GPU)(x.to(GPU)).cpu(), exact)
        assert torch.equal(packed.to(GPU).dequantized_weight(dtype).cpu(), weight)
        assert models.relative(y, packed(x.to(GPU)).cpu()) < 4 * torch.finfo(dtype).eps


# -- whole models ------------------------------------------------------------------------------------------------


SCHEMES: dict[str, dict[str, Any]] = {
    "w8a8": {"scheme": "w8a8"},
    "smoothquant": {"scheme": "w8a8-smoothquant"},
    "smoothquant-static": {"scheme": "w8a8-smoothquant", "activations": "static"},
    "w4a16": {"scheme": "w4a16", "group_size": 32},
}


@needs_transformers
@pytest.mark.parametrize("name", SCHEMES)
def test_a_llama_is_quantized_verified_loaded_and_run(name: str, tmp_path: Path) -> None:
    model = models.save("llama", tmp_path / "model")
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    options, calibrated = SCHEMES[name], name.startswith("smoothquant")
    outs = {device: tmp_path / device.type for device in (CPU, GPU)}
    for device, out in outs.items():
        calibration = tokens if calibrated else None
        report = quantize_checkpoint(
            tmp_path / "model", out, device=device, calibration=calibration, evaluation=tokens, **options
        )
        assert verify(out, tmp_path / "model") == []
        assert report["evaluation"]["tokens"] == 12 * 24
    _assert_same_checkpoint(outs[CPU], outs[GPU], exactly=not calibrated)
    on_cpu, on_gpu = baracuda.load(outs[GPU]), baracuda.load(outs[GPU], device=GPU)
    x = models.prompt()
    with torch.no_grad():
        exact, here, there = model(x).logits, on_cpu(x).logits, on_gpu(x.to(GPU)).logits.cpu()
        longer = on_gpu.generate(x.to(GPU), min_new_tokens=5, max_new_tokens=5, do_sample=False)
    # Norms and attention round in another order there, so a value may fall to the next integer.
    error = models.relative(exact, here)
    assert models.relative(here, there) < (1e-4 if name == "w4a16" else 0.5 * error)
    assert longer.device == GPU and longer.shape == (2, 22) and torch.equal(longer[:, :17].cpu(), x)


def _assert_same_checkpoint(expected: Path, actual: Path, *, exactly: bool) -> None:
    """Calibration runs float forwards, whose sums differ between devices in the last bits: scales and norms follow."""
    before, after = (read_tensors(out / "model.safetensors") for out in (expected, actual))
    assert {k: (v.dtype, v.shape) for k, v in before.items()} == {k: (v.dtype, v.shape) for k, v in after.items()}
    assert (expected / "config.json").read_bytes() == (actual / "config.json").read_bytes()
    for key, value in before.items():
        if exactly or key.endswith(("embed_tokens.weight", "lm_head.weight")):
            assert torch.equal(value, after[key]), key
        elif value.is_floating_point():
            assert models.relative(value, after[key]) < 1e-3, key
        else:
            assert float((value.int() - after[key].int()).abs().max()) <= 1, key
