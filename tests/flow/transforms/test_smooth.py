"""Smoothing: folds that the traced graph proves, reasons where it does not, and the gate in front of it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from smoothing import linears, measured
from torch import nn

from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors
from baracuda.flow.hf.forward import arguments
from baracuda.flow.run.calibrate import analyse
from baracuda.flow.run.measure import Measured
from baracuda.flow.run.scaling import choose, passes_gate
from baracuda.flow.transforms.folds import Fold, Folds, Producer, find_folds
from baracuda.flow.transforms.gate import Gate
from baracuda.flow.transforms.smooth import Smoothing
from baracuda.flow.transforms.strengths import Strength
from baracuda.flow.transforms.trace import Value, trace
from baracuda.schemes import Choice, live_scheme

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def pairs(folds: Folds) -> dict[str, list[str]]:
    """Producers of the first layer and what they are folded into, by short names."""
    found = {}
    for fold in folds.folds:
        name = fold.producer.parameter
        if ".0." in name:
            found[_short(name)] = [_short(a.parameter) for a in fold.absorbers]
    return found


def _short(name: str) -> str:
    return name.split(".0.")[1].removesuffix(".weight").removeprefix("self_attn.").removeprefix("mlp.")


LLAMA = {
    "input_layernorm": ["q_proj", "k_proj", "v_proj"],
    "post_attention_layernorm": ["gate_proj", "up_proj"],
    "v_proj": ["o_proj"],
    "up_proj": ["down_proj"],
}
EXPECTED = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "gemma2": {
        **{k: v for k, v in LLAMA.items() if k[0] != "p"},
        "pre_feedforward_layernorm": ["gate_proj", "up_proj"],
    },
    "opt": {
        "self_attn_layer_norm": ["q_proj", "k_proj", "v_proj"],
        "final_layer_norm": ["fc1"],
        "v_proj": ["out_proj"],
        "fc1": ["fc2"],
    },
    "gpt2": {"ln_1": ["attn.c_attn"], "ln_2": ["c_fc"], "attn.c_attn": ["attn.c_proj"]},
    "mixtral": {"input_layernorm": ["q_proj", "k_proj", "v_proj"], "v_proj": ["o_proj"]},
    "bert": {"attention.self.value": ["attention.output.dense"]},
}


def choices(model: nn.Module, scheme: str = "w8a8") -> dict[str, Choice]:
    return dict.fromkeys(linears(model), Choice(live_scheme(scheme)))


def smoothing_of(model: nn.Module, folds: Folds, found: Measured, alpha: float | str = 0.5) -> Smoothing:
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    chosen = choose(model, folds, found, alpha, choices(model))
    return Smoothing.of(((c.fold, c.strength, c.divisor) for c in chosen), parameters)


@pytest.mark.parametrize("name", EXPECTED)
def test_folds_are_found_and_pass_the_gate(name: str, tmp_path: Path) -> None:
    model = models.build(name)
    folds = analyse(model, linears(model), torch.device("cpu"))
    assert pairs(folds) == EXPECTED[name]
    data = list(read_tensors(models.tokens(tmp_path / "t.safetensors"))["tokens"])
    smoothing = smoothing_of(model, folds, measured(model, folds, data))
    moved = {name: p.clone() for name, p in model.named_parameters()}
    result = passes_gate(model, smoothing, folds, torch.stack(data[:2]))
    assert result["largest_difference"] < 1e-4
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, moved[n])}
    assert {f.producer.parameter for f in folds.folds} <= changed


def test_a_post_norm_model_says_that_a_residual_reads_its_norms() -> None:
    model = models.build("bert")
    folds = analyse(model, linears(model), torch.device("cpu"))
    assert "residual" in folds.reasons["encoder.layer.0.attention.self.query.weight"]
    assert "residual" in folds.reasons["encoder.layer.1.intermediate.dense.weight"]
    assert "nonlinearity" in folds.reasons["encoder.layer.0.output.dense.weight"]


class Block(nn.Module):
    """A norm whose output goes to a linear, and wherever `other` sends it."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.other = other

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(input_ids, 16).float()
        y = self.norm(x)
        if self.other == "twice":
            return self.first(y) + self.first(x)
        if self.other == "in place":
            z = self.first(y)
            y.view(-1).add_(1)
            return z + self.second(y)
        if self.other == "output":
            return self.first(y), y
        if self.other == "sorted":
            return self.first(y) + y.sort(-1).values
        if self.other == "transposed":
            return self.first(y) + self.second(y.transpose(-1, -2))
        if self.other == "columns":
            return self.first(y) + self.second(y.flip(-1))
        return self.first(y) + self.second(y * 2)


@pytest.mark.parametrize(
    ("other", "folded"),
    [
        ("fine", True),
        ("twice", False),
        ("in place", False),
        ("output", False),
        ("sorted", False),
        ("columns", False),
        ("transposed", False),
    ],
)
def test_whatever_else_reads_the_norm_decides(other: str, folded: bool) -> None:
    torch.manual_seed(0)
    model = Block(other).eval()
    record, outputs = trace(model, {"input_ids": torch.arange(32).view(2, 16) % 16})
    folds = find_folds(record, outputs, {"first.weight"})
    assert bool(folds.folds) is folded
    assert ("first.weight" in folds.reasons) is not folded


STRONG = Strength("smoothquant", 0.5)


def test_the_gate_names_the_layer_that_a_wrong_fold_moves() -> None:
    """Gemma's gain is 1 + weight: folding it like Llama's is the public mistake this gate is for."""
    model = models.build("gemma")
    folds = analyse(model, linears(model), torch.device("cpu"))
    fold: Fold = folds.folds[0]
    fold.producer.offset = 0.0
    smoothing = Smoothing()
    smoothing.add(fold, torch.full((64,), 4.0), {n: p.detach() for n, p in model.named_parameters()}, STRONG)
    gate = Gate(model, {"input_ids": models.prompt(), **arguments(model)}, [fold])
    smoothing.apply(model, {})
    with pytest.raises(FlowError, match=r"smoothing moved model\.layers\.0\.self_attn\.q_proj by"):
        gate.check()


def test_a_gain_that_would_round_to_zero_keeps_its_channel() -> None:
    """Gemma stores gain - 1: near -1, bf16 has steps of 1 / 256."""
    model = models.build("gemma", torch.bfloat16)
    folds, parameters = analyse(model, linears(model), torch.device("cpu")), dict(model.named_parameters())
    smoothing = Smoothing.of(((f, STRONG, torch.full((f.producer.channels,), 3000.0)) for f in folds.folds), parameters)
    norms = [f.producer.parameter for f in folds.folds if f.producer.kind == "norm"]
    assert all(bool((1 + smoothing.replaced[name].float() != 0).all()) for name in norms)
    assert passes_gate(model, smoothing, folds, models.prompt())["largest_difference"] < 1e-5


def test_a_fold_that_moves_a_layer_is_left_out_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baracuda.flow.run import calibrate

    found: list[Folds] = []

    def wrong(*arguments: Any) -> Folds:
        folds = analyse(*arguments)
        found.append(folds)
        folds.folds[1].producer.offset = 0.0  # as if Gemma's gain were its weight alone
        return folds

    monkeypatch.setattr(calibrate, "analyse", wrong)
    models.save("gemma", tmp_path / "model", torch.bfloat16)
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", smooth=True, calibration=tokens)
    told, stem = report["smoothing"]["not_folded"], "model.layers.0.mlp"
    assert set(told) == {f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight"}
    assert "post_attention_layernorm.weight, model.layers.0.mlp.gate_proj moved by" in told[f"{stem}.up_proj.weight"]
    assert len(report["smoothing"]["folded"]) == 7
    assert verify(tmp_path / "out", tmp_path / "model") == []


def test_a_norm_rounded_to_bf16_is_made_up_for_in_the_weights() -> None:
    weight = torch.rand(64).add(0.5).to(torch.bfloat16)
    producer = Producer("n", None, 64, Value(0, 0), "norm", offset=1.0)
    smoothing = Smoothing()
    exact = smoothing._fold_norm(producer, torch.rand(64) * 9 + 0.1, {"n": weight})
    new = 1 + smoothing.replaced["n"].float()
    assert smoothing.replaced["n"].dtype is torch.bfloat16
    assert torch.allclose(new * exact, 1 + weight.float(), rtol=3e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_the_rounding_of_a_norms_bias_is_not_taken_for_a_wrong_fold(name: str, dtype: torch.dtype) -> None:
    model = models.build(name, dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("norm.bias", "ln_1.bias", "ln_2.bias")):
                parameter.mul_(16)  # what the norm adds is most of what it makes
    folds, smoothing = smoothed_model(model)
    passes_gate(model, smoothing, folds, models.prompt())
    biased = {fold.producer.bias for fold in folds.folds if fold.producer.kind == "norm"}
    assert len(biased) == 4 and None not in biased


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gate_sees_a_bias_that_was_not_divided_in_any_type(dtype: torch.dtype) -> None:
    model = models.build("opt", dtype)
    folds, smoothing = smoothed_model(model)
    del smoothing.replaced[next(fold.producer.bias for fold in folds.folds if fold.producer.bias)]
    with pytest.raises(FlowError, match=r"smoothing moved model\.decoder\.layers\.0\.self_attn\.q_proj by"):
        passes_gate(model, smoothing, folds, models.prompt())


def smoothed_model(model: nn.Module) -> tuple[Folds, Smoothing]:
    folds = analyse(model, linears(model), torch.device("cpu"))
    return folds, smoothing_of(model, folds, measured(model, folds, list(models.prompt())))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_with_biased_norms_in_half_precision_is_smoothed(dtype: torch.dtype, tmp_path: Path) -> None:
    model = models.save("opt", tmp_path / "model", dtype)
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w8a8-smoothquant", calibration=tokens)
    assert verify(tmp_path / "out", tmp_path / "model") == []
    name = "model.decoder.layers.0.self_attn_layer_norm."
    norm, stored = model.get_submodule(name[:-1]), read_tensors(tmp_path / "out" / "model.safetensors")
    divisor = norm.weight.float() / stored[name + "weight"].float()
    assert divisor.max() > 2 and torch.equal(stored[name + "bias"], (norm.bias.float() / divisor).to(dtype))


def test_a_bias_that_would_overflow_keeps_its_channel() -> None:
    weight, bias = torch.ones(2, dtype=torch.float16), torch.tensor([6e4, 1.0], dtype=torch.float16)
    producer, smoothing = Producer("n", "b", 2, Value(0, 0), "norm"), Smoothing()
    assert smoothing._fold_norm(producer, torch.tensor([0.25, 0.25]), {"n": weight, "b": bias}).tolist() == [1, 0.25]
    assert smoothing.replaced["n"].tolist() == [1, 4] and smoothing.replaced["b"].half().tolist() == [6e4, 4]


class Router(nn.Linear):
    """As Llama 4 has them: a Linear that returns more than its product."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        return scores.softmax(-1), scores


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.first = nn.LayerNorm(16), Router(16, 4), nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        y = self.norm(torch.nn.functional.one_hot(input_ids, 16).float())
        return (self.first(y) * self.router(y)[0].sum(-1, keepdim=True),)


def test_a_linear_that_returns_several_tensors_is_not_watched() -> None:
    torch.manual_seed(0)
    model, batch = Routed().eval(), {"input_ids": torch.arange(32).view(2, 16) % 16}
    folds = find_folds(*trace(model, batch), {"first.weight"})
    gate = Gate(model, batch, folds.folds)
    assert [name for name, _ in gate.before] == ["first", ""]
    assert gate.check()["largest_difference"] == 0


class Turned(nn.Linear):
    """As Falcon has them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_a_product_with_a_turned_weight_is_a_linear() -> None:
    torch.manual_seed(0)
    model = Block("fine").eval()
    model.first = Turned(16, 16)
    folds = find_folds(*trace(model, {"input_ids": torch.arange(32).view(2, 16) % 16}), {"first.weight"})
    assert list(folds.inputs.values()) == [["first.weight"]] and not folds.reasons
    assert [a.parameter for a in folds.folds[0].absorbers] == ["first.weight", "second.weight"]


def test_a_fold_that_changes_what_is_not_stored_alone_is_left_out_with_the_reason() -> None:
    model = models.build("llama")
    folds, wanted = analyse(model, linears(model), torch.device("cpu")), linears(model)
    stem = "model.layers.0.self_attn"
    folds.keep_stored([name for name, _ in model.named_parameters() if name != f"{stem}.v_proj.weight"], wanted)
    assert "v_proj" not in pairs(folds) and "input_layernorm" not in pairs(folds) and len(folds.folds) == 6
    why = f"its fold changes {stem}.v_proj.weight, which the checkpoint does not store as a tensor of its own"
    assert folds.reasons == {f"{stem}.{name}.weight": why for name in ("q_proj", "k_proj", "v_proj", "o_proj")}


def test_a_checkpoint_that_stores_fused_projections_is_smoothed_where_it_can_be(tmp_path: Path) -> None:
    import transformers

    kind = getattr(transformers, "NomicBertForMaskedLM", None)
    if kind is None:
        pytest.skip("this transformers has no Nomic BERT")
    models.save_built(lambda: kind(kind.config_class(**models._SIZES)), tmp_path / "model")
    report = quantize_checkpoint(
        tmp_path / "model",
        tmp_path / "out",
        scheme="w8a8-smoothquant",
        calibration=models.tokens(tmp_path / "tokens.safetensors"),
    )
    told = report["smoothing"]["not_folded"]["nomic_bert.layers.0.self_attn.o_proj.weight"]
    assert "v_proj.weight, which the checkpoint does not store" in told
    assert verify(tmp_path / "out", tmp_path / "model") == []
