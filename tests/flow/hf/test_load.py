"""baracuda.load runs what was written in int8; transformers with compressed-tensors reads the same directory."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch

import baracuda
from baracuda.flow import CheckpointError, FlowError, quantize_checkpoint, verify
from baracuda.flow.hf.packed import PackedLinear
from baracuda.flow.hf.skeleton import quiet
from baracuda.nn import QuantizedLinear, SmoothQuantLinear

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")


def decompressed(model: torch.nn.Module, out: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The directory through transformers and compressed-tensors, which make its weights float on the first forward."""
    with models.transformers_alone():
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
    ours, theirs = baracuda.load(tmp_path / "out", fuse=False), decompressed(model, tmp_path / "out", torch.float32)
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
    ours, theirs = baracuda.load(tmp_path / "out", fuse=False), decompressed(model, tmp_path / "out", torch.bfloat16)
    with torch.no_grad():
        exact, mine, yours = (m(models.prompt()).logits.float() for m in (model, ours, theirs))
    assert ours.dtype is torch.bfloat16 and mine.isfinite().all()
    assert ours.model.layers[0].mlp.up_proj.weight_scale.dtype is torch.float32
    assert models.relative(yours, mine) < 2 * models.relative(exact, yours)


def test_a_checkpoint_that_does_not_name_its_type_keeps_it(tmp_path: Path) -> None:
    """Readers take that of the first float tensor, which in T5's file is a scale now."""
    sizes = {"vocab_size": models.VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).to(torch.bfloat16)
    with quiet():
        model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("dtype") == "bfloat16"
    path.write_text(json.dumps(config))
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    with models.transformers_alone():
        loaded = [type(model).from_pretrained(tmp_path / name, dtype="auto") for name in ("model", "out")]
    for read in (*loaded, baracuda.load(tmp_path / "out", fuse=False)):
        assert read.dtype is read.shared.weight.dtype is torch.bfloat16


MIXTURES = ["mixtral", "qwen2_moe"]


#: Scheme -> its options, and how far the logits of transformers' own reader may be from ours: it rounds activations of
#: 8 bits in floating point, over another scale.
EXPERT_SCHEMES = {
    "w4a16": ({"group_size": 32}, 1e-5),
    "w4a8": ({"group_size": 32}, 0.1),
    "w8a8": ({}, 0.05),
}


@pytest.mark.parametrize("scheme", EXPERT_SCHEMES)
@pytest.mark.parametrize("name", MIXTURES)
def test_packed_experts_are_read_by_transformers_and_by_us_alike(name: str, scheme: str, tmp_path: Path) -> None:
    model = models.save(name, tmp_path / "model")
    options, apart = EXPERT_SCHEMES[scheme]
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme=scheme, **options)
    assert verify(tmp_path / "out", tmp_path / "model") == []
    assert sum(".experts." in layer["name"] for layer in report["layers"]) == 2 * 4 * 3
    if not models.since(5, 8):
        for read in (baracuda.load, type(model).from_pretrained):
            with pytest.raises(FlowError, match=r"quantized experts need transformers 5\.8 or newer, got 5\."):
                read(tmp_path / "out")
        assert "baracuda.load, which needs transformers 5.8" in report["notes"][0]
        return
    ours = baracuda.load(tmp_path / "out", fuse=False)
    with torch.no_grad():
        exact, mine = model(models.prompt()).logits, ours(models.prompt()).logits
    experts = {n: p for n, p in ours.named_parameters() if ".experts." in n}
    assert len(experts) == 4
    errors = [models.relative(model.get_parameter(key), value) for key, value in experts.items()]
    assert max(errors) < (0.01 if scheme == "w8a8" else 0.15) and min(errors) > 1e-4
    assert 1e-5 < models.relative(exact, mine) < 0.4
    if not models.since(5, 13):
        with models.transformers_alone():
            _, loading = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert set(experts) <= loading["missing_keys"] and "5.13 and newer do" in report["notes"][0]
        return
    theirs = decompressed(model, tmp_path / "out", torch.float32)
    with torch.no_grad():
        yours = theirs(models.prompt()).logits
    assert all(torch.equal(value, theirs.get_parameter(key)) for key, value in experts.items())
    assert models.relative(yours, mine) < apart and not report["notes"]


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_are_ignored_stay_float_are_named_and_load(name: str, tmp_path: Path) -> None:
    """transformers' own reader looks for packed experts alone since it reads those, and does not find these."""
    model = models.save(name, tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", ignore=["*.experts.*"], allow_float=True)
    left = [entry for entry in report["left"] if ".experts.0." in entry["name"]]
    assert len(left) == 6 and all("ignored on request" in entry["reason"] for entry in left)
    assert "experts stay in floating point" in report["notes"][0]
    ours = baracuda.load(tmp_path / "out", fuse=False)
    for key, value in ours.named_parameters():
        if ".experts." in key:
            assert torch.equal(value, model.get_parameter(key))
    with torch.no_grad():
        exact, mine = model(models.prompt()).logits, ours(models.prompt()).logits
    assert models.relative(exact, mine) < 0.1
    assert "from 5.13 on, looks for packed experts only" in report["notes"][0]
    with models.transformers_alone():
        if models.since(5, 23):
            with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
                type(model).from_pretrained(tmp_path / "out")
            return
        _, loading = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    lost = "model.layers.0.mlp.experts.down_proj" in loading["missing_keys"]
    assert lost == models.since(5, 13), "the note says from which version on they are lost"


def test_a_mixture_is_loaded_in_another_type(tmp_path: Path) -> None:
    """Its router has another name in the file than in the model; some versions of transformers leave that in f32."""
    models.save("mixtral", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", ignore=["*.experts.*"], allow_float=True)
    model = baracuda.load(tmp_path / "out", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert model(models.prompt()).logits.isfinite().all()


def test_a_recipe_that_tells_experts_apart_is_refused(tmp_path: Path) -> None:
    models.save("mixtral", tmp_path / "model")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('scheme = "w8a8"\n[[layers]]\nmatch = "*.experts.1.*"\nscheme = "w4a8"\ngroup_size = 32\n')
    with pytest.raises(FlowError, match="experts of one kind; write patterns that match all experts or none"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", recipe=recipe)


def test_experts_of_different_columns_share_a_group_size_that_fits_all(tmp_path: Path) -> None:
    models.save("qwen2_moe", tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w4a16", group_size=64)
    sizes = {layer["name"]: layer["group_size"] for layer in report["layers"]}
    assert {size for name, size in sizes.items() if ".experts." in name} == {32}, "down_proj has 32 columns"
    assert sizes["model.layers.0.self_attn.q_proj"] == 64
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32, "servers look for experts there"


def test_routers_stay_float(tmp_path: Path) -> None:
    models.save("qwen2_moe", tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w4a16")
    reasons = {entry["name"]: entry["reason"] for entry in report["left"]}
    assert "a router" in reasons["model.layers.0.mlp.shared_expert_gate"]


def test_an_ignore_that_leaves_some_experts_is_refused(tmp_path: Path) -> None:
    models.save("mixtral", tmp_path / "model")
    with pytest.raises(FlowError, match="experts of one kind; ignore all of them or none"):
        quantize_checkpoint(
            tmp_path / "model", tmp_path / "out", scheme="w4a16", group_size=32, ignore=["*.experts.1.*"]
        )


def test_a_model_without_linears_of_the_format_is_refused_with_the_reason(tmp_path: Path) -> None:
    models.save("gpt2", tmp_path / "model")
    with pytest.raises(FlowError, match=r"nothing to quantize\. transformer\.h\.0\.attn\.c_attn and 7 more: a Conv1D"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out")


def test_conv1d_beside_a_linear_stays_float_and_is_named(tmp_path: Path) -> None:
    """GPT-2 with a classifier: its one nn.Linear is quantized, and transformers reads the rest as it was."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**models.CONFIGS["gpt2"][1], num_labels=16)
    model = transformers.GPT2ForSequenceClassification(config).eval()
    with quiet():
        model.save_pretrained(tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", allow_float=True)
    reasons = {entry["name"]: entry["reason"] for entry in report["left"]}
    assert [layer["name"] for layer in report["layers"]] == ["score"] and len(reasons) == 8
    assert "Conv1D" in reasons["transformer.h.1.mlp.c_fc"] and verify(tmp_path / "out", tmp_path / "model") == []
    ours, theirs = baracuda.load(tmp_path / "out", fuse=False), decompressed(model, tmp_path / "out", torch.float32)
    x = models.prompt()[:1]
    with torch.no_grad():
        exact, mine, yours = (m(x).logits for m in (model, ours, theirs))
    assert models.relative(exact, mine) < 0.05 and models.relative(exact, yours) < 0.05


def test_a_device_that_is_not_there_is_told_before_anything_is_loaded(
    llama: tuple[torch.nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(baracuda.Unsupported, match=r"device cuda: .* sees no CUDA GPU here; use device='cpu'"):
        baracuda.load(llama[1], device="cuda")


def test_a_float_checkpoint_is_not_loaded_as_a_quantized_one(llama: tuple[torch.nn.Module, Path]) -> None:
    with pytest.raises(FlowError, match="no quantization_config"):
        baracuda.load(llama[1], fuse=False)


def test_another_tool_s_scheme_is_not_loaded_and_the_error_says_who_loads_it(
    llama: tuple[torch.nn.Module, Path], tmp_path: Path
) -> None:
    quantize_checkpoint(llama[1], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 2
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlowError, match=r"out: .* 2-bit weights .*; load other checkpoints with transformers$"):
        baracuda.load(tmp_path / "out", fuse=False)


@pytest.mark.parametrize("name", ["w8a8", "w8a8 static", "w4a16"])
def test_a_loaded_model_is_pickled_and_another_process_runs_it(
    name: str, llama: tuple[torch.nn.Module, Path], tmp_path: Path
) -> None:
    _, directory = llama
    calibration = directory.parent / "tokens.safetensors" if name == "w8a8 static" else None
    quantize_checkpoint(directory, tmp_path / "out", calibration=calibration, **SCHEMES[name][0])
    model = baracuda.load(tmp_path / "out", fuse=False)
    with torch.no_grad():
        logits = model(models.prompt()).logits
    assert torch.equal(pickle.loads(pickle.dumps(model))(models.prompt()).logits, logits)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, models.prompt(), logits)))
    code = (
        "import pickle, sys, torch\n"
        "model, tokens, logits = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert torch.allclose(model(tokens).logits, logits, atol=1e-5)\n"  # another process may have other threads
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pickle")], check=True)


def test_an_error_about_a_checkpoint_survives_the_way_between_processes() -> None:
    error = CheckpointError("bad-config", "config.json: what is wrong with it")
    error.add_note("while loading")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), back.code, str(back)) == (CheckpointError, error.code, str(error))
    assert back.__notes__ == ["while loading"] and copy.copy(error).code == "bad-config"


@pytest.mark.parametrize("given", [(), ("the model",)], ids=["without the model", "with the model"])
def test_the_quantizer_serves_both_signatures_of_transformers(given: tuple[str, ...]) -> None:
    """Versions differ in whether they pass the model when they ask for the conversions of weights."""
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    from baracuda.flow.hf.quantizer import BaracudaConfig, Quantizer

    if not models.since(5, 8):
        assert not hasattr(transformers.quantizers.HfQuantizer, "update_weight_conversions")
        pytest.skip("transformers asks since 5.8")
    experts = WeightConverter("experts.*.up.weight", "experts.up", operations=[MergeModulelist(0)])
    other = WeightConverter("q.*.weight", "qkv.weight", [MergeModulelist(0)])
    changed, same = Quantizer(BaracudaConfig()).update_weight_conversions([experts, other], *given)
    assert same is other and "experts.*.up.weight_packed" in changed.source_patterns
    assert len(changed.operations) == 2 and changed.target_patterns == experts.target_patterns
