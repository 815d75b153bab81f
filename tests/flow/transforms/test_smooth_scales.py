"""What smoothing reads and leaves: maxima, strengths, the input scales of a checkpoint, and data that is refused."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from smoothing import linears, measured
from torch import nn

from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.folds import Factors, read_folds
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors
from baracuda.flow.run.calibrate import analyse
from baracuda.flow.run.data import read_sequences
from baracuda.flow.run.measure import InputRecorder, channel_maximum
from baracuda.flow.transforms.strengths import Channels, Linear, Strength, sensitivity
from baracuda.schemes import live_scheme

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


class Alone(nn.Sequential):
    """One linear that is called by the name of its input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_maxima_of_batches_are_those_of_all_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Alone().to(dtype), torch.randn(3, 5, 8).to(dtype)
    x[..., 2] = 0
    x[1, 3, 4] = -50
    recorder = InputRecorder(model, [["0.weight"]], keep_rows=False)
    maxima = recorder.run(model, list(x), torch.device("cpu"), lambda *_: None, {}).maxima
    assert torch.equal(maxima["0.weight"], x.abs().amax((0, 1)).float()) and maxima["0.weight"][4] == 50
    x[2, 0, 1] = float("nan")
    assert channel_maximum(x[2]).isnan().tolist() == [False, True, *[False] * 6]


def test_strength_balances_activations_and_weights_and_leaves_dead_channels_alone() -> None:
    activation, weight = torch.tensor([16.0, 1.0, 0.0, 4.0]), torch.tensor([1.0, 4.0, 1.0, 0.0])
    channels = Channels(activation, weight, torch.tensor([4.0, 1.0, 0.0, 1.0]))
    assert channels.divisor(Strength("smoothquant", 0.5)).tolist() == [4.0, 0.5, 1.0, 1.0]
    assert channels.divisor(Strength()).tolist() == [1.0] * 4
    awq = channels.divisor(Strength("awq", 0.5))
    assert awq[2:].tolist() == [1.0, 1.0] and float(awq[0] / awq[1]) == 2


def test_smoothing_brings_outliers_down_and_auto_is_no_worse_than_a_fixed_alpha(tmp_path: Path) -> None:
    model = models.save("llama", tmp_path / "model")
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    errors = {}
    for alpha in ("auto", 0.5, 0.9):
        out = tmp_path / str(alpha)
        report = quantize_checkpoint(
            tmp_path / "model", out, scheme="w8a8-smoothquant", activations="static", calibration=tokens, alpha=alpha
        )
        errors[alpha] = sum(_static_errors(model, report, tokens, tmp_path / "model"))
        norms = [x for x in report["layers"] if x["name"].endswith(("q_proj", "up_proj"))]
        assert all(layer["outlier_after"] < 0.7 * layer["outlier_before"] for layer in norms) or alpha == "auto"
        assert all(layer["smoothed"] for layer in report["layers"])
    assert errors["auto"] <= min(errors[0.5], errors[0.9]) * 1.05


def _static_errors(model: nn.Module, report: dict, tokens: Path, directory: Path) -> list[float]:  # type: ignore[type-arg]
    """The output error of each smoothed group, recomputed from what the report says was chosen."""
    folds = analyse(model, linears(model), torch.device("cpu"))
    data = read_sequences(tokens, directory, samples=99, length=99, blocks=True)
    found = measured(model, folds, data, keep_rows=True)
    parameters = dict(model.named_parameters())
    chosen = {f"{layer['name']}.weight": Strength(layer["rule"], layer["alpha"]) for layer in report["layers"]}
    errors = []
    for fold in folds.folds:
        channels = Channels.of(fold, found.maxima, parameters, found.rows)
        divisor = channels.divisor(chosen[fold.absorbers[0].parameter])
        for a in fold.absorbers:
            x = found.rows[a.parameter].double()
            scheme, weighed = live_scheme("w8a8-static"), sensitivity(x, compensates=False)
            linear = Linear.of(x, parameters[a.parameter], scheme, weighed)
            errors.append(linear.error(divisor[list(a.channels)]))
    return errors


def test_layers_that_servers_fuse_get_one_input_scale(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model", torch.bfloat16)
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    out = tmp_path / "out"
    quantize_checkpoint(tmp_path / "model", out, scheme="w8a8-smoothquant", activations="static", calibration=tokens)
    stored = read_tensors(out / "model.safetensors")
    for layer in range(2):
        for block, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
            scales = {float(stored[f"model.layers.{layer}.{block}.{name}.input_scale"]) for name in names}
            assert len(scales) == 1
    assert verify(out, tmp_path / "model") == []


def test_layers_that_servers_take_for_one_share_the_larger_input_scale(tmp_path: Path) -> None:
    """The queries of cross-attention read the decoder, its keys and values the encoder; a server goes by the names."""
    import transformers

    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    sizes = {**models._TOKENS, **heads, "vocab_size": 160, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}
    config = transformers.BartConfig(**sizes, forced_eos_token_id=2)
    models.save_built(lambda: transformers.BartForConditionalGeneration(config), tmp_path / "model")
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", activations="static", calibration=tokens)
    stem = "model.decoder.layers.0.encoder_attn."
    made = read_tensors(tmp_path / "out" / "model.safetensors")
    assert len({float(made[f"{stem}{leaf}.input_scale"]) for leaf in ("q_proj", "k_proj", "v_proj")}) == 1
    assert verify(tmp_path / "out", tmp_path / "model") == []


def test_what_smoothing_leaves_alone_is_still_compared_with_the_original(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model", torch.bfloat16)
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w8a8-smoothquant", calibration=tokens)
    path, embedding = tmp_path / "out" / "model.safetensors", "model.embed_tokens.weight"
    stored = read_tensors(path)
    factors = Factors.of(read_folds(tmp_path / "out" / "baracuda_folds.tensors"))
    assert not factors.touches(embedding) and factors.touches("model.layers.0.mlp.up_proj.weight")
    write_tensors(path, stored | {embedding: stored[embedding] + 1})
    models.reseal(tmp_path / "out")
    assert [finding.where for finding in verify(tmp_path / "out", tmp_path / "model")] == [embedding]


def test_tokens_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    write_tensors(tmp_path / "tokens.safetensors", {"t": torch.full((2, 8), models.VOCABULARY)})
    with pytest.raises(FlowError, match="token 160 is not in the model's vocabulary of 160"):
        quantize_checkpoint(
            tmp_path / "model",
            tmp_path / "out",
            scheme="w8a8-smoothquant",
            calibration=tmp_path / "tokens.safetensors",
        )


def test_smoothquant_without_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    with pytest.raises(FlowError, match="needs calibration data"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w8a8-smoothquant")
    assert not (tmp_path / "out").exists()
