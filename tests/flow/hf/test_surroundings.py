"""Models whose own code reads the weights of Linears, instead of calling them only, are quantized, loaded and run."""

from __future__ import annotations

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
from baracuda.flow.hf.packed import PackedLinear
from baracuda.flow.hf.skeleton import quiet
from baracuda.flow.hf.surroundings import casts_to_its_type, taken_apart

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {**models._SIZES, "num_hidden_layers": 1}
SMALL = {"vocab_size": models.VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
INDEXER = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 8}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL))


def umt5() -> nn.Module:
    return transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**SMALL))


def mamba() -> nn.Module:
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 8}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def modernbert() -> nn.Module:
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**SIZES, **models._TOKENS))


def falcon() -> nn.Module:
    return transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES, **models._TOKENS))


def deepseek_v32() -> nn.Module:
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no DeepSeek-V3.2")
    sizes = {**SIZES, **LATENT, **EXPERTS, **INDEXER, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**sizes, num_key_value_heads=4))


def llama() -> nn.Module:
    return models.build("llama")


def longcat() -> nn.Module:
    if not hasattr(transformers, "LongcatFlashConfig"):
        pytest.skip("this transformers has no LongCat-Flash")
    experts = {"n_routed_experts": 16, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 32}
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 1, **experts}
    config = transformers.LongcatFlashConfig(**sizes, **LATENT, num_attention_heads=4, head_dim=16)
    return transformers.LongcatFlashForCausalLM(config)


def wavlm() -> nn.Module:
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    return transformers.WavLMModel(transformers.WavLMConfig(**SIZES, **convolutions, **positions))


def rwkv() -> nn.Module:
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "rescale_every": 1}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes))


def bloom() -> nn.Module:
    return transformers.BloomForCausalLM(transformers.BloomConfig(n_layer=1, n_head=4, hidden_size=64, vocab_size=160))


def deberta() -> nn.Module:
    return transformers.DebertaModel(transformers.DebertaConfig(**SIZES))


BUILDS = [t5, umt5, mamba, modernbert, falcon, deepseek_v32, llama]


def logits(model: nn.Module) -> Tensor:
    inputs = {"input_ids": models.prompt()}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = models.prompt()[:, :5]
    with torch.no_grad(), quiet():
        return model(**inputs).logits


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_packed_weights_are_loaded_and_compute_what_they_stand_for(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = models.save_built(build, tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w4a16", group_size=16)
    assert verify(tmp_path / "out", tmp_path / "model") == []
    before, ours = logits(model), baracuda.load(tmp_path / "out", fuse=False)
    packed = {name: module for name, module in ours.named_modules() if isinstance(module, PackedLinear)}
    with torch.no_grad():
        for name, module in packed.items():
            model.get_submodule(name).weight.copy_(module.weight)
        for name, parameter in ours.named_parameters():  # experts, made float when loaded
            model.get_parameter(name).copy_(parameter)
    assert packed and models.relative(logits(model), logits(ours)) < 1e-5 < models.relative(before, logits(ours))


def test_the_weight_of_a_packed_linear_has_the_type_of_its_scales_and_no_storage_on_the_meta_device() -> None:
    from transformers import initialization

    linear = PackedLinear(64, 32, False, 16, dtype=torch.bfloat16)
    linear.weight_packed.random_()
    assert linear.weight.dtype is torch.bfloat16
    assert torch.equal(linear.weight, linear.dequantized_weight(torch.bfloat16)) and linear.weight.any()
    assert torch.equal(initialization.normal_(linear.weight), linear.weight), "it counts as loaded"
    empty = linear.to("meta").weight
    assert empty.is_meta and empty.shape == (32, 64) and empty.dtype is torch.bfloat16


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_the_report_says_so_exactly_where_transformers_cannot_open_the_checkpoint(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    model = models.save_built(build, tmp_path / "model")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w4a16", group_size=16)
    told = [note for note in report["notes"] if f"cannot open this checkpoint: its {type(model).__name__}" in note]
    try:
        with models.transformers_alone():
            _, loading = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    except AttributeError as error:
        assert "no attribute 'weight'" in str(error) and len(told) == 1
    else:  # compressed-tensors may pack nn.Linear and no class derived from it: Falcon's then start random
        random = [name for name in loading["missing_keys"] if name.endswith(".weight")]
        assert bool(random) == bool(told)


def dinov2() -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=32, patch_size=8))


def llama4() -> nn.Module:
    sizes = {**SIZES, "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 4, "moe_layers": [0]}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, **models._TOKENS))


def olmo_hybrid() -> nn.Module:
    if not hasattr(transformers, "OlmoHybridConfig"):
        pytest.skip("this transformers has no OLMo hybrid")
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 4}
    heads |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    sizes = {**SIZES, **heads, **kinds, "num_hidden_layers": 2}
    return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**sizes, **models._TOKENS))


def read_by_transformers(model: nn.Module, out: Path) -> str:
    """What comes of a checkpoint in transformers' own reader: the error that it raises, "random", or "read".

    Integers that no file holds are left as they are in memory, or raise when they are to be random.
    """
    with models.transformers_alone():
        try:
            _, loading = type(model).from_pretrained(out, output_loading_info=True)
        except NotImplementedError:
            return "random"
        except (ValueError, AttributeError, RuntimeError) as error:
            return type(error).__name__
    return "random" if loading["missing_keys"] else "read"


CUT = "its rules for Dinov2Model cut a weight into several, which from 5.21 on it refuses"
ASKS = "its Dinov2Model asks Linears for a float weight"
JOINED = "transformers joins model.layers.0.linear_attn.k_conv1d.weight, "
ONE_BY_ONE = "looks for single ones in place of Llama4TextExperts"
#: Model and scheme -> from each version of transformers on, what the report says and what becomes of the checkpoint.
UNREAD: dict[tuple[Callable[[], nn.Module], str], dict[tuple[int, int], tuple[str | None, str]]] = {
    (dinov2, "w8a8"): {(5, 0): (None, "read"), (5, 18): (CUT, "read"), (5, 21): (CUT, "ValueError")},
    (dinov2, "w4a16"): {
        (5, 0): (ASKS, "AttributeError"),
        (5, 18): (CUT, "AttributeError"),
        (5, 21): (CUT, "ValueError"),
    },
    (llama4, "w8a8"): {(5, 0): (ONE_BY_ONE, "random")},
    (llama4, "w4a16"): {(5, 0): (ONE_BY_ONE, "random")},
    (olmo_hybrid, "w8a8"): {
        (5, 0): (None, "read"),
        (5, 15): (JOINED, "read"),
        (5, 21): (JOINED, "random"),
        (5, 23): (JOINED, "RuntimeError"),
    },
    (olmo_hybrid, "w4a16"): {
        (5, 0): (None, "read"),
        (5, 15): (JOINED, "read"),
        (5, 21): (JOINED, "random"),
        (5, 23): (JOINED, "RuntimeError"),
    },
}


@pytest.mark.parametrize(("build", "scheme"), UNREAD, ids=lambda one: getattr(one, "__name__", one))
def test_the_report_says_what_transformers_does_not_read_of_a_checkpoint_that_we_load(
    build: Callable[[], nn.Module], scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    told, result = [found for since, found in UNREAD[build, scheme].items() if models.since(*since)][-1]
    model = models.save_built(build, tmp_path / "model")
    packed = {"group_size": 16} if scheme == "w4a16" else {}
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme=scheme, allow_float=True, **packed)
    notes = [note for note in report["notes"] if not note.startswith("Groups of 16")]
    assert len(notes) == (told is not None) and all(str(told) in note for note in notes)
    baracuda.load(tmp_path / "out", fuse=False)
    assert read_by_transformers(model, tmp_path / "out") == result


def test_linears_that_are_left_float_are_in_nobodys_way(tmp_path: Path) -> None:
    """Mamba asks for the weight of out_proj alone."""
    pytest.importorskip("compressed_tensors")
    model = models.save_built(mamba, tmp_path / "model")
    options: dict[str, Any] = {"scheme": "w4a16", "group_size": 16, "ignore": "*.out_proj"}
    *others, note = quantize_checkpoint(tmp_path / "model", tmp_path / "out", allow_float=True, **options)["notes"]
    if others and not models.since(5, 17):  # old versions initialize every Linear of Mamba once more
        assert "its MambaForCausalLM asks Linears for a float weight when it has loaded" in others[0]
        pytest.skip("this transformers asks all of Mamba's Linears for their weight, and the report says so")
    assert not others and note.startswith("Groups of 16 are read by baracuda.load")
    with models.transformers_alone():
        theirs = type(model).from_pretrained(tmp_path / "out").eval()
    assert models.relative(logits(theirs), logits(baracuda.load(tmp_path / "out", fuse=False))) < 1e-5


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_a_linear_whose_input_is_cast_to_the_type_of_its_weight_stays_float(scheme: str, tmp_path: Path) -> None:
    model = models.save_built(deepseek_v32, tmp_path / "model")
    packed = {"group_size": 16} if scheme == "w4a16" else {}
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme=scheme, allow_float=True, **packed)
    reasons = {entry["name"]: entry["reason"] for entry in report["left"]}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.indexer.weights_proj"
        assert reasons[name] == "the module around it casts to the type of its weight"
    ours = baracuda.load(tmp_path / "out", fuse=False)
    assert type(ours.model.layers[0].self_attn.indexer.weights_proj) is nn.Linear
    assert 0 < models.relative(logits(model), logits(ours)) < (0.05 if scheme == "w8a8" else 0.4)


def test_casts_are_told_by_the_source_unless_it_asks_whether_the_type_is_an_integers() -> None:
    from transformers.models.colpali import modeling_colpali
    from transformers.models.t5 import modeling_t5

    retrieval = object.__new__(modeling_colpali.ColPaliForRetrieval)
    assert casts_to_its_type(retrieval, "embedding_proj_layer")
    assert not casts_to_its_type(retrieval, "vlm")
    assert not casts_to_its_type(object.__new__(modeling_t5.T5DenseActDense), "wo")
    assert not casts_to_its_type(nn.Sequential(nn.Linear(2, 2)), "0")
    assert not casts_to_its_type(SimpleNamespace(), "proj")  # type: ignore[arg-type]


#: Model -> the Linears whose weight its code takes and computes with.
TAKEN_APART: dict[Callable[[], nn.Module], set[str]] = {
    longcat: {"model.layers.0.mlp.router.classifier"},
    wavlm: {f"encoder.layers.0.attention.{name}_proj" for name in ("q", "k", "v", "out")},
    rwkv: {f"rwkv.blocks.{i}.{name}" for i in range(2) for name in ("attention.output", "feed_forward.value")},
    mamba: {"backbone.layers.0.mixer.dt_proj"},
    bloom: set(),
    deberta: set(),
    t5: set(),
    llama: set(),
}


@pytest.mark.parametrize("build", TAKEN_APART, ids=lambda build: build.__name__)
def test_the_source_tells_which_linears_are_not_called_in_inference_but_computed_with(
    build: Callable[[], nn.Module],
) -> None:
    """Bloom would do so in a mode that is off, DeBERTa for an argument that nobody passes, Mamba's others to train."""
    model = build()
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert taken_apart(model) & linears == TAKEN_APART[build]


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
@pytest.mark.parametrize("build", [longcat, wavlm, rwkv], ids=lambda build: build.__name__)
def test_linears_that_are_computed_with_stay_float_and_the_model_runs(
    build: Callable[[], nn.Module], scheme: str, tmp_path: Path
) -> None:
    if build is longcat:
        models.needs_readable_experts()
    model = models.save_built(build, tmp_path / "model")
    packed = {"group_size": 16} if scheme == "w4a16" else {}
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme=scheme, allow_float=True, **packed)
    reasons = {entry["name"]: entry["reason"] for entry in report["left"]}
    for name in TAKEN_APART[build]:
        assert "router" in name or reasons[name] == "the code around it computes with its weight itself"
    assert verify(tmp_path / "out", tmp_path / "model") == []
    ours = baracuda.load(tmp_path / "out", fuse=False)
    for name in TAKEN_APART[build]:
        assert ours.get_submodule(name).weight.is_floating_point()
    if build is wavlm:
        sound = torch.randn(1, 2000, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before, after = model(sound)[0], ours(sound)[0]
    else:
        before, after = logits(model), logits(ours)
    assert 0 < models.relative(before, after) < (0.05 if scheme == "w8a8" else 0.4)


def test_verify_finds_integers_where_the_code_computes_with_the_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tool writes them that looks at the modules alone."""
    models.save_built(rwkv, tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr("baracuda.flow.hf.skeleton.taken_apart", lambda model: set())
        quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    found = {
        finding.where: finding.message for finding in verify(tmp_path / "out") if finding.code == "config-mismatch"
    }
    assert set(found) == TAKEN_APART[rwkv]
    assert all("the code around it computes with its weight itself" in message for message in found.values())
    with pytest.raises(FlowError, match=r"nothing reads rwkv\.blocks\.0\.attention\.output\.weight_scale"):
        baracuda.load(tmp_path / "out", fuse=False)
