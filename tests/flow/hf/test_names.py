"""Tensors that transformers renames when it loads them are found, and no model is filled with less than it needs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors
from baracuda.flow.hf import names
from baracuda.flow.hf.names import match_names
from baracuda.flow.hf.skeleton import model_class, quiet
from baracuda.nn import QuantizedLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = {**models._GROUPED, "num_hidden_layers": 1}
VISION = {**models._SIZES, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
del VISION["vocab_size"]
IMAGE = {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(2))}
TOKENS = {"input_ids": models.prompt()}


def llava() -> nn.Module:
    vision, text = transformers.CLIPVisionConfig(**VISION), transformers.LlamaConfig(**TEXT)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text))


def siglip() -> nn.Module:
    text = {**models._SIZES, "num_hidden_layers": 1}
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=VISION))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=16))


def gpt_neox() -> nn.Module:
    sizes = {**models._SIZES, **models._TOKENS, "num_hidden_layers": 1}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, tie_word_embeddings=False))


def nomic_bert() -> nn.Module:
    if not hasattr(transformers, "NomicBertConfig"):
        pytest.skip("this transformers has no NomicBERT")
    return transformers.NomicBertForMaskedLM(transformers.NomicBertConfig(**TEXT))


def falcon() -> nn.Module:
    sizes = {**models._SIZES, **models._TOKENS, "num_hidden_layers": 1}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))


def mamba() -> nn.Module:
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 8}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def dinov2() -> nn.Module:
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**VISION, num_labels=16))


#: Model -> what it is run on, a Linear as the file and as the model name it, and the Linears left, with why. Old
#: versions of transformers name all Linears as the file does, and save the head of Mamba as one of its own.
CASES: dict[Callable[[], nn.Module], tuple[dict[str, Tensor], tuple[str, str], dict[str, str | tuple[str, ...]]]] = {
    llava: (
        TOKENS,
        ("language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
        {"language_model.lm_head": "the output head"},
    ),
    siglip: (
        TOKENS | IMAGE,
        ("text_model.head", "text_model.head"),
        {"vision_model.head.attention.out_proj": "a NonDynamicallyQuantizableLinear, which may do more"},
    ),
    vit: (IMAGE, ("vit.encoder.layer.0.attention.attention.query", "vit.layers.0.attention.q_proj"), {}),
    dinov2: (IMAGE, ("dinov2.encoder.layer.0.mlp.fc1", "dinov2.encoder.layer.0.mlp.fc1"), {}),
    gpt_neox: (
        TOKENS,
        ("gpt_neox.layers.0.mlp.dense_h_to_4h", "gpt_neox.layers.0.mlp.dense_h_to_4h"),
        {"embed_out": "the output head"},
    ),
    nomic_bert: (
        TOKENS,
        ("nomic_bert.encoder.layers.0.mlp.fc2", "nomic_bert.layers.0.mlp.down_proj"),
        {
            "cls.predictions.decoder": "shares its weight",
            **{f"nomic_bert.layers.0.self_attn.{q}_proj": "transformers makes it from" for q in "qkv"},
        },
    ),
    falcon: (
        TOKENS,
        ("transformer.h.0.mlp.dense_h_to_4h", "transformer.h.0.mlp.dense_h_to_4h"),
        {"lm_head": "shares its weight"},
    ),
    mamba: (
        TOKENS,
        ("backbone.layers.0.mixer.x_proj", "backbone.layers.0.mixer.x_proj"),
        {
            "lm_head": ("shares its weight", "the output head"),
            "backbone.layers.0.mixer.dt_proj": "the code around it computes with its weight itself",
        },
    ),
}


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad(), quiet():
        made = model(**inputs)
    return made.logits if hasattr(made, "logits") else torch.cat([made.text_embeds, made.image_embeds])


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_every_linear_is_quantized_or_left_with_a_reason_and_the_model_runs(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    inputs, (stored, name), left = CASES[build]
    model = models.save_built(build, tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    quantized = {layer["name"] for layer in report["layers"]}
    reasons = {entry["name"]: entry["reason"] for entry in report["left"]}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert stored in quantized and len(quantized) == len(linears) - len(left)
    assert all(reasons[module].startswith(reason) for module, reason in left.items())
    assert verify(tmp_path / "out", tmp_path / "model") == []
    ours = baracuda.load(tmp_path / "out", fuse=False)
    renamed = name in dict(model.named_modules())
    assert isinstance(ours.get_submodule(name if renamed else stored), QuantizedLinear)
    assert 0 < models.relative(output(model, inputs), output(ours, inputs)) < 0.05


def test_transformers_reads_a_renamed_model_as_we_do(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = models.save_built(llava, tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    with models.transformers_alone():
        theirs = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = baracuda.load(tmp_path / "out", fuse=False)
    output(theirs, TOKENS)  # makes its weights float
    text = [(f"model.language_model.{n}", m) for n, m in ours.model.language_model.named_modules()]
    compared = [(path, module) for path, module in text if isinstance(module, QuantizedLinear)]
    assert len(compared) == 7
    for path, module in compared:
        assert torch.equal(module.dequantized_weight(), theirs.get_submodule(path).weight), path


def test_smoothing_changes_the_tensors_of_a_renamed_model_under_the_names_of_the_file(tmp_path: Path) -> None:
    model = models.save_built(llava, tmp_path / "model")
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    report = quantize_checkpoint(
        tmp_path / "model", tmp_path / "out", scheme="w8a8-smoothquant", calibration=tokens, ignore=["*vision*"]
    )
    before, after = (read_tensors(tmp_path / d / "model.safetensors") for d in ("model", "out"))
    norm = "language_model.model.layers.0.input_layernorm.weight"
    assert report["smoothing"]["folded"] and not torch.equal(before[norm], after[norm])
    assert models.relative(output(model, TOKENS), output(baracuda.load(tmp_path / "out", fuse=False), TOKENS)) < 0.05


def test_linears_that_share_their_weights_with_linears_stay_float(tmp_path: Path) -> None:
    """DAB-DETR's decoder holds the box head once more."""
    backbone = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16], depths=[1], out_features=["stage1"])
    sizes = {f"{part}_{size}": 1 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    # The oldest transformers has a backbone by default, and takes no other beside it.
    own = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": backbone}
    config = transformers.DabDetrConfig(
        hidden_size=32, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=8, **own, **sizes
    )
    model = models.save_built(lambda: transformers.DabDetrForObjectDetection(config), tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    reasons = {entry["name"]: entry["reason"] for entry in report["left"]}
    # Versions of transformers differ in which of the two names they save; the other one is none of the model's.
    known = ("shares its weight with another module", "not an nn.Linear of the model, shape")
    assert all(reasons[f"bbox_predictor.layers.{layer}"].startswith(known) for layer in range(3))
    assert verify(tmp_path / "out", tmp_path / "model") == []
    ours = baracuda.load(tmp_path / "out", fuse=False)
    assert ours.bbox_predictor.layers[0].weight is ours.model.decoder.bbox_embed.layers[0].weight
    assert models.relative(output(model, IMAGE), output(ours, IMAGE)) < 0.05


def reconfigure(directory: Path, **changes: Any) -> None:
    """Settings of config.json, changed, or dropped where they are None."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def mamba2() -> nn.Module:
    """Its config holds an infinity, which transformers spells in a way of its own."""
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 64, "num_hidden_layers": 1, "num_heads": 8}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, head_dim=16, state_size=16, n_groups=1))


def doge() -> nn.Module:
    """Its experts are vectors: more than other models have."""
    return transformers.DogeForCausalLM(transformers.DogeConfig(**TEXT, **models._TOKENS, num_experts=16384))


def gemma3n() -> nn.Module:
    """Its vocabulary has a size per layer, which is no number of layers."""
    sizes = {**TEXT, "head_dim": 16, "intermediate_size": [96], "activation_sparsity_pattern": [0.0]}
    inputs = {"vocab_size_per_layer_input": 10_001, "hidden_size_per_layer_input": 16, "laurel_rank": 16}
    layers = {"num_kv_shared_layers": 0, "layer_types": ["full_attention"]}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**sizes, **inputs, **layers))


@pytest.mark.parametrize("build", [mamba2, doge, gemma3n], ids=lambda build: build.__name__)
def test_settings_that_look_odd_are_no_reason_to_refuse_a_model(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = models.save_built(build, tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    assert verify(tmp_path / "out", tmp_path / "model") == []
    assert (
        0 < models.relative(output(model, TOKENS), output(baracuda.load(tmp_path / "out", fuse=False), TOKENS)) < 0.05
    )


@pytest.mark.parametrize("architectures", [None, ["NoSuchModel"]])
def test_without_a_known_architecture_the_model_below_the_heads_tells_what_is_a_linear(
    architectures: list[str] | None, tmp_path: Path
) -> None:
    model = models.save("llama", tmp_path / "llama")
    reconfigure(tmp_path / "llama", architectures=architectures)
    report = quantize_checkpoint(tmp_path / "llama", tmp_path / "out", ignore="*.down_proj")
    assert len(report["layers"]) == 12 and verify(tmp_path / "out", tmp_path / "llama") == []
    with torch.no_grad():
        before, after = model.model(**TOKENS)[0], baracuda.load(tmp_path / "out", fuse=False)(**TOKENS)[0]
    assert 0 < models.relative(before, after) < 0.05
    models.save("gpt2", tmp_path / "gpt2")
    reconfigure(tmp_path / "gpt2", architectures=architectures)
    with pytest.raises(FlowError, match=r"nothing to quantize\. .* a Conv1D"):
        quantize_checkpoint(tmp_path / "gpt2", tmp_path / "nothing")


@pytest.mark.parametrize("linear", ["model.layers.0.mlp.down_proj", "lm_head"])
def test_a_linear_whose_scale_would_not_be_renamed_with_its_weight_stays_float(
    linear: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the projector of Unlimited-OCR and the head of DeepSeek V4: their rules name a weight alone."""
    loading = pytest.importorskip("transformers.core_model_loading")
    before = names._rules
    rule = loading.WeightRenaming(r"(^|x)another\.name\.weight$", rf"\1{linear}.weight")

    def rules(model: nn.Module) -> tuple[list[Any], list[Any]]:
        renamings, converters = before(model)
        return [*renamings, rule], converters

    monkeypatch.setattr(names, "_rules", rules)
    models.save("llama", tmp_path / "model")
    stored = read_tensors(tmp_path / "model" / "model.safetensors")
    stored["another.name.weight"] = stored.pop(f"{linear}.weight")
    write_tensors(tmp_path / "model" / "model.safetensors", stored, {"format": "pt"})
    if linear == "lm_head":
        with pytest.raises(
            FlowError, match=r"--quantize-head: lm_head .* a rule that does not know its scale; drop it"
        ):
            quantize_checkpoint(tmp_path / "model", None, dry_run=True, quantize_head=True)
        return
    report = quantize_checkpoint(tmp_path / "model", None, dry_run=True)
    left = {entry["name"]: entry["reason"] for entry in report["left"]}
    assert left["another.name"] == names.RENAMED_ALONE and len(report["layers"]) == 13


def test_code_beside_a_model_may_build_it_otherwise_so_names_and_shapes_tell(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    reconfigure(tmp_path / "model", architectures=["NoSuchModel"], auto_map={"AutoModel": "modeling.NoSuchModel"})
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    assert "names and shapes" in report["linears_found_by"] and len(report["layers"]) == 14


def pix2struct() -> nn.Module:
    text = {"vocab_size": 160, "hidden_size": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 32, "d_ff": 64, "d_kv": 16, "num_hidden_layers": 1}
    config = transformers.Pix2StructConfig(text_config=text, vision_config={**vision, "num_attention_heads": 2})
    return transformers.Pix2StructForConditionalGeneration(config)


def switch() -> nn.Module:
    sizes = {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = transformers.SwitchTransformersConfig(**sizes, num_experts=16)
    return transformers.SwitchTransformersForConditionalGeneration(config)


def jetmoe() -> nn.Module:
    sizes = {**models._SIZES, "num_hidden_layers": 1, "num_key_value_heads": 4, "kv_channels": 16}
    del sizes["num_attention_heads"]
    return transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**sizes, num_local_experts=16, pad_token_id=0))


@pytest.mark.parametrize(
    ("build", "ending", "reason"),
    [
        (pix2struct, "decoder.lm_head", "the output head"),
        (switch, "mlp.router.classifier", "a router, which servers read in floating point"),
        (jetmoe, "mlp.router.layer", "a router, which servers read in floating point"),
    ],
    ids=["pix2struct", "switch", "jetmoe"],
)
def test_heads_and_routers_stay_float_wherever_they_are(
    build: Callable[[], nn.Module], ending: str, reason: str, tmp_path: Path
) -> None:
    models.save_built(build, tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", allow_float=True)
    left = [entry for entry in report["left"] if entry["name"].endswith(ending)]
    assert left and all(entry["reason"] == reason for entry in left)
    assert not any(layer["name"].endswith(ending) for layer in report["layers"])
    assert verify(tmp_path / "out", tmp_path / "model") == []


def rename(directory: Path, old: str, new: str) -> None:
    tensors = read_tensors(directory / "model.safetensors")
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    write_tensors(directory / "model.safetensors", renamed, {"format": "pt"})


def test_names_that_nobody_knows_stop_the_run_and_are_told(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    rename(tmp_path / "model", "self_attn", "selfish")
    message = (
        r"model\.layers\.0\.self_attn\.q_proj, .* and 5 more found no weight, and nothing reads "
        r"model\.layers\.0\.selfish\.k_proj\.weight, .* and 5 more; .* --ignore"
    )
    with pytest.raises(FlowError, match=message):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", ignore="*.self_attn.*")
    assert len(report["layers"]) == 6


def test_a_transformers_that_renames_nothing_still_finds_the_model_below_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build("llama")
    tensors = list(model.get_submodule("model").state_dict())
    expected = match_names(model, tensors)
    monkeypatch.delattr("transformers.core_model_loading.rename_source_key")
    assert match_names(model, tensors) == expected
    assert expected.module("model.layers.0.mlp.up_proj") == "layers.0.mlp.up_proj" and not expected.unread


# -- what is loaded ----------------------------------------------------------------------------------------------


UP, NORM = "model.layers.0.mlp.up_proj", "model.norm.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("names")
    models.save("llama", directory / "model")
    quantize_checkpoint(directory / "model", directory / "out")
    return directory / "out"


def changed(out: Path, where: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    shutil.copytree(out, where)
    tensors = read_tensors(where / "model.safetensors")
    change(tensors)
    write_tensors(where / "model.safetensors", tensors, {"format": "pt"})
    return where


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scale": (lambda t: t.pop(f"{UP}.weight_scale"), rf"missing-tensor: {UP}\.weight_scale"),
    "no weight": (lambda t: t.pop(f"{UP}.weight"), f"{UP}: expected a matrix of quantized weights, got nothing"),
    "no norm": (lambda t: t.pop(NORM), f"do not fill transformers' LlamaForCausalLM: no file holds {NORM}; make"),
    "no linear": (
        lambda t: (t.pop(f"{UP}.weight"), t.pop(f"{UP}.weight_scale")),
        rf"no file holds {UP}\.weight, {UP}\.weight_scale",
    ),
    "floats": (
        lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].float()}),
        rf"wrong-dtype: {UP}\.weight: expected torch\.int8, got torch\.float32",
    ),
    "another shape": (
        lambda t: t.update({NORM: torch.ones(32)}),
        rf"have another shape {NORM} \(\[32\], not \[64\]\)",
    ),
    "another name": (
        lambda t: t.update({"model.nrom.weight": t.pop(NORM)}),
        r"no file holds model\.norm\.weight; nothing reads model\.nrom\.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_does_not_fill_the_model_is_not_loaded(damage: str, good: Path, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    with pytest.raises(FlowError, match=message):
        baracuda.load(changed(good, tmp_path / "bad", change), fuse=False)


def test_integers_for_a_linear_that_the_config_leaves_float_are_not_loaded(good: Path, tmp_path: Path) -> None:
    out = changed(good, tmp_path / "bad", lambda tensors: None)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"].append(UP)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlowError, match=rf"nothing reads {UP}\.weight_scale"):
        baracuda.load(out, fuse=False)


def test_floats_that_no_module_reads_are_no_reason_to_refuse_a_checkpoint(good: Path, tmp_path: Path) -> None:
    head = {"old_head.weight": torch.randn(16, 64)}
    more = changed(good, tmp_path / "more", lambda tensors: tensors.update(head))
    x = models.prompt()
    assert torch.equal(
        output(baracuda.load(more, fuse=False), {"input_ids": x}),
        output(baracuda.load(good, fuse=False), {"input_ids": x}),
    )


def test_a_checkpoint_whose_files_are_links_is_loaded(good: Path, tmp_path: Path) -> None:
    """As in the cache of the hub."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(good, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / path.name)
    baracuda.load(snapshot, fuse=False)


@pytest.mark.parametrize("damage", ["no norm", "another shape", "another name"])
def test_calibration_does_not_run_a_model_that_its_files_do_not_fill(damage: str, good: Path, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    bad = changed(good.parent / "model", tmp_path / "bad", change)
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    with pytest.raises(FlowError, match=message):
        quantize_checkpoint(bad, tmp_path / "out", scheme="w8a8-smoothquant", calibration=tokens)


@pytest.mark.parametrize("name", [3, "set_seed", "NoSuchModel", None])
def test_an_architecture_that_is_no_model_of_transformers_is_none(name: object) -> None:
    assert model_class(SimpleNamespace(architectures=[name])) is None
    assert model_class(SimpleNamespace(architectures=["LlamaForCausalLM"])).__name__ == "LlamaForCausalLM"
