"""Files of tokens: as many of them as were asked for, in sequences as long, and numbers a model has a row for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.checkpoint.tensorfile import write_tensors
from baracuda.flow.hf.skeleton import quiet
from baracuda.flow.run.calibrate import _input_scales
from baracuda.flow.run.changes import Changes
from baracuda.flow.run.data import read_sequences, require_data
from baracuda.flow.transforms.folds import Folds
from baracuda.flow.transforms.smooth import Smoothing
from baracuda.flow.transforms.trace import Value

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("tokens") / "opt"
    models.save("opt", directory)
    return directory


def written(path: Path, **tensors: torch.Tensor) -> Path:
    write_tensors(path, tensors)
    return path


@pytest.mark.parametrize(
    "blocks, lengths",
    [
        (True, {"a": [32] * 3 + [4], "b": [32, 8, 32, 8], "c": [32], "d": [1]}),
        (False, {"a": [32], "b": [32, 32], "c": [32], "d": [1]}),
    ],
    ids=["into blocks", "to their beginning"],
)
def test_rows_are_cut_to_the_length(blocks: bool, lengths: dict[str, list[int]], tmp_path: Path) -> None:
    """As texts are: into blocks for a model that predicts the next token, to the beginning for another."""
    rows = {"a": torch.arange(100), "b": torch.arange(80).view(2, 40), "c": torch.arange(33), "d": torch.arange(1)}
    path = written(tmp_path / "tokens.safetensors", **rows)
    read = read_sequences(path, tmp_path, samples=100, length=32, blocks=blocks)
    assert [len(sequence) for sequence in read] == [length for row in lengths.values() for length in row]
    assert read[0].tolist() == list(range(32))
    assert len(read_sequences(path, tmp_path, samples=2, length=32, blocks=blocks)) == 2


def test_calibration_reads_sequences_of_the_length_asked_for(opt: Path, tmp_path: Path) -> None:
    tokens = torch.randint(3, models.VOCABULARY, (5000,), generator=torch.Generator().manual_seed(1))
    stream = written(tmp_path / "stream.safetensors", tokens=tokens)
    rows = written(tmp_path / "rows.safetensors", tokens=tokens[: 8 * 32].view(8, 32))
    made = []
    for data in (stream, rows):
        out = tmp_path / data.stem
        quantize_checkpoint(opt, out, activations="static", calibration=data, samples=8, sequence_length=32)
        made.append(models.contents(out)["model.safetensors"])
    assert made[0] == made[1]


def test_a_sequence_longer_than_the_model_reads_is_refused(opt: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "tokens.safetensors", tokens=torch.full((5000,), 5))
    with pytest.raises(FlowError, match="a sequence of 512 tokens, but the model reads 64: pass --sequence-length 64"):
        quantize_checkpoint(opt, tmp_path / "out", activations="static", calibration=data)
    with pytest.raises(FlowError, match="evaluation: a sequence of 512 tokens, but the model reads 64"):
        quantize_checkpoint(opt, tmp_path / "out", evaluation=data)


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 40 positions, of which the first two are for padding."""
    directory = tmp_path_factory.mktemp("tokens") / "roberta"
    save("RobertaForMaskedLM", directory, **models._SIZES, max_position_embeddings=40, pad_token_id=1)
    return directory


@pytest.mark.parametrize("use", ["calibration", "evaluation"])
@pytest.mark.parametrize("length", [60, 40, 39])
def test_the_length_that_is_advised_is_one_that_the_model_reads(
    length: int, use: str, roberta: Path, tmp_path: Path
) -> None:
    options = {use: models.tokens(tmp_path / "tokens.safetensors", 2, 60)}
    options |= {"activations": "static"} if use == "calibration" else {}
    told = f"{use}: a sequence of {length} tokens, but the model reads 38: pass --sequence-length 38$"
    with pytest.raises(FlowError, match=told):
        quantize_checkpoint(roberta, tmp_path / "out", **options, sequence_length=length)
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(roberta, tmp_path / "out", **options, sequence_length=38)


def test_a_model_that_recovers_from_nothing_gets_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a bad index ends everything."""
    from baracuda.flow.hf import forward

    monkeypatch.setattr(forward, "reads", lambda *_: False)
    with pytest.raises(FlowError, match=r"of 30 tokens, but the model fails on it: pass a smaller --sequence-length$"):
        forward.require_short(nn.Linear(1, 1), torch.arange(30), "calibration")


def test_a_model_without_a_limit_is_given_none(tmp_path: Path) -> None:
    """XLNet says that it reads -1 tokens."""
    sizes = {"vocab_size": 160, "d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 96}
    model = save("XLNetLMHeadModel", tmp_path / "model", **sizes)
    assert model.config.max_position_embeddings == -1
    data = models.tokens(tmp_path / "tokens.safetensors")
    assert quantize_checkpoint(tmp_path / "model", tmp_path / "out", evaluation=data)["evaluation"]["tokens"] == 288


def test_negative_tokens_are_refused(opt: Path, tmp_path: Path) -> None:
    """Labels often hold -100 where there is nothing to predict."""
    data = written(tmp_path / "tokens.safetensors", labels=torch.tensor([[5, 6, -100], [7, -100, -100]]))
    with pytest.raises(FlowError, match="labels: expected token numbers from 0 up, got -100; leave padding"):
        quantize_checkpoint(opt, tmp_path / "out", activations="static", calibration=data)
    assert not (tmp_path / "out").exists()


def test_static_activations_name_the_layers_that_calibration_never_reached() -> None:
    """Of an expert that only the traced tokens go to, nothing is known either."""
    folds, names = Folds(), {f"{name}.weight": name for name in "abcde"}
    for number, name in enumerate("ab"):
        folds.inputs[Value(number, 0)].append(f"{name}.weight")
    maxima = {"a.weight": torch.ones(4)}
    told = r"it saw no input of b, c, d and 1 more; --ignore them, or use --activations dynamic$"
    with pytest.raises(FlowError, match=told):
        _input_scales(Changes(), folds, maxima, Smoothing(), names)


def test_static_activations_reach_the_linears_of_falcon(tmp_path: Path) -> None:
    """It computes x @ weight.T itself."""
    save("FalconForCausalLM", tmp_path / "model", **models._SIZES, **models._TOKENS)
    data = models.tokens(tmp_path / "tokens.safetensors")
    report = quantize_checkpoint(
        tmp_path / "model", tmp_path / "out", scheme="w8a8-smoothquant", activations="static", calibration=data
    )
    smoothed = {layer["name"]: layer["smoothed"] for layer in report["layers"] if ".0." in layer["name"]}
    stem = "transformer.h.0."
    assert smoothed == {
        f"{stem}self_attention.query_key_value": True,
        f"{stem}self_attention.dense": True,
        f"{stem}mlp.dense_h_to_4h": True,
        f"{stem}mlp.dense_4h_to_h": False,
    }


# -- models that want more than tokens ---------------------------------------------------------------------------


VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
SOUND = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
TEXTS = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
#: Model -> the sizes of its config, and what it says itself, in the words of old versions of transformers or of new.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "ViTForImageClassification": ({**VISION, "num_attention_heads": 4}, "(NoneType|You have to specify pixel_values)"),
    "WhisperForConditionalGeneration": (
        {**SOUND, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 160, **models._TOKENS},
        "NoneType",
    ),
    "T5ForConditionalGeneration": ({**TEXTS, "vocab_size": 160}, "You (must|have to) specify"),
}
WITHOUT = {
    "calibration": ({"activations": "static"}, "use a scheme without calibration: w8a8 or w4a16"),
    "evaluation": ({}, "evaluate it on a .safetensors file of its inputs, .*, or drop --evaluate"),
}


def save(name: str, directory: Path, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(1)
    with quiet():
        model: nn.Module = kind(kind.config_class(**sizes)).eval()
        model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("use", WITHOUT)
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_does_not_run_on_tokens_is_told_before_anything_is_done(
    name: str, use: str, tmp_path: Path
) -> None:
    (sizes, says), (options, remedy) = OTHERS[name], WITHOUT[use]
    save(name, tmp_path / "model", **sizes)
    done: list[str] = []
    message = rf"{use}: expected a model that runs on tokens alone; {name} does not \(.*{says}.*\); {remedy}$"
    with pytest.raises(FlowError, match=message):
        quantize_checkpoint(
            tmp_path / "model",
            tmp_path / "out",
            **options,
            **{use: models.tokens(tmp_path / "tokens.safetensors")},
            progress=lambda stage, *_: done.append(stage),
        )
    assert not done and not (tmp_path / "out").exists()


def test_an_evaluation_that_cannot_be_is_told_before_calibration(opt: Path, tmp_path: Path) -> None:
    unknown = written(tmp_path / "unknown.safetensors", tokens=torch.full((2, 16), 999))
    done: list[str] = []
    with pytest.raises(
        FlowError, match=r"evaluation: token 999 is not in the model's vocabulary of 160; .* another tokenizer"
    ):
        quantize_checkpoint(
            opt,
            tmp_path / "out",
            activations="static",
            calibration=models.tokens(tmp_path / "tokens.safetensors"),
            evaluation=unknown,
            progress=lambda stage, *_: done.append(stage),
        )
    assert not done and not (tmp_path / "out").exists()


def test_what_is_no_matter_of_tokens_is_not_called_one(opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    from transformers import OPTForCausalLM

    monkeypatch.setattr(OPTForCausalLM, "forward", full)
    data = models.tokens(opt.parent / "tokens.safetensors")
    with pytest.raises(torch.OutOfMemoryError):
        quantize_checkpoint(opt, opt.parent / "out", evaluation=data)


def test_a_classifier_is_evaluated_by_its_logits(tmp_path: Path) -> None:
    """It has a row of them for a sequence, and nothing to take the mean of."""
    save("BertForSequenceClassification", tmp_path / "model", **models._SIZES, num_labels=16)
    data = models.tokens(tmp_path / "tokens.safetensors")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", evaluation=data)
    assert 0.99 < report["evaluation"]["cosine"]["min"] <= report["evaluation"]["cosine"]["mean"] < 1


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.int32, torch.uint8, torch.int64], ids=str)
def test_tokens_of_any_integer_type_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "tokens.safetensors"
    write_tensors(path, {"a": torch.arange(24).view(2, 12).to(dtype), "b": torch.arange(5).to(dtype)})
    require_data(path)
    read = read_sequences(path, tmp_path, samples=9, length=8, blocks=True)
    assert [row.tolist() for row in read][1:4] == [[8, 9, 10, 11], [*range(12, 20)], [20, 21, 22, 23]]
    assert read[-1].tolist() == [0, 1, 2, 3, 4] and all(row.dtype is torch.int64 for row in read)


@pytest.mark.parametrize("dtype", [torch.uint64, torch.bool, torch.float32], ids=str)
def test_other_types_are_refused_in_words(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "tokens.safetensors"
    write_tensors(path, {"a": torch.ones(4).to(dtype)})
    with pytest.raises(FlowError, match=f"integers of up to 32 bits or int64, got {dtype}"):
        require_data(path)
