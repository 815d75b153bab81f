"""The search of strengths: one for all schemes, and the same bytes however it is run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from typer.testing import CliRunner

from baracuda.core.scope import PerToken
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.transforms.folds import Fold, Producer
from baracuda.flow.transforms.provenance import Absorber
from baracuda.flow.transforms.strengths import Channels, Linear, Strength, candidates, search, sensitivity
from baracuda.flow.transforms.trace import Value
from baracuda.functional import dequantize, dynamic_quantize
from baracuda.schemes import Choice, checkpoint_scheme, get_method
from baracuda_cli.app import app

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 24


def scheme(name: str) -> Any:
    found, _ = checkpoint_scheme(name)
    return found.with_groups(32) if found.weight.group_size is not None else found


def case(outliers: float = 20.0) -> tuple[Fold, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A norm that feeds one linear, three of whose inputs are far out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 64, generator=generator)
    x[:, :3] *= outliers
    fold = Fold(
        Producer("n.weight", None, 64, Value(0, 0), "norm"), [Absorber("w.weight", 1, tuple(range(64)), Value(1, 0))]
    )
    return fold, {"w.weight": torch.randn(48, 64, generator=generator)}, {"w.weight": x}


def quantized_output_error(x: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor, name: str) -> float:
    """What the search estimates, by really rounding weights to nearest and inputs token by token."""
    format, scaled = scheme(name).weight, weight * divisor
    w_hat = get_method("rtn").quantize(scaled, format).dequantize(format, scaled.shape[1])
    x_hat = x / divisor
    if name != "w4a16":
        made = dynamic_quantize(x_hat, scope=PerToken())
        x_hat = dequantize(made.q, made.scale, scope=PerToken())
    exact = x @ weight.T
    return float((x_hat @ w_hat.T - exact).square().sum() / exact.square().sum())


def test_each_scheme_is_offered_the_rules_it_can_gain_from() -> None:
    rules = {name: {c.rule for c in candidates([scheme(name)])} for name in ("w8a8", "w4a8", "w4a16")}
    assert rules == {
        "w8a8": {"none", "smoothquant"},
        "w4a8": {"none", "smoothquant", "awq"},
        "w4a16": {"none", "awq"},
    }


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w4a16"])
def test_the_strength_found_is_nearly_the_best_when_integers_are_really_rounded(name: str) -> None:
    fold, weights, rows = case()
    x, weight = rows["w.weight"], weights["w.weight"]
    channels = Channels.of(fold, {"w.weight": x.abs().amax(0)}, weights, rows)
    best = search(fold, channels, weights, rows, {"w.weight": Choice(scheme(name))})
    errors = {c: quantized_output_error(x, weight, channels.divisor(c), name) for c in candidates([scheme(name)])}
    assert errors[best] < 1.15 * min(errors.values())
    assert errors[best] < 0.6 * errors[Strength()]


def test_the_expected_error_is_the_error_of_rounding() -> None:
    _, weights, rows = case()
    x = rows["w.weight"].double()
    linear = Linear.of(x, weights["w.weight"], scheme("w8a8"), sensitivity(x, compensates=False))
    really = quantized_output_error(rows["w.weight"], weights["w.weight"], torch.ones(64), "w8a8")
    assert linear.error(torch.ones(64)) == pytest.approx(really, rel=0.1)


def test_a_method_that_compensates_pays_for_what_later_columns_cannot_predict() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4000, 8, generator=generator, dtype=torch.float64)
    x[:, 1] = 3 * x[:, 0] + 0.1 * torch.randn(4000, generator=generator, dtype=torch.float64)
    alone, together = sensitivity(x, compensates=False), sensitivity(x, compensates=True)
    assert together[1] < 0.2 * alone[1]  # the column that is rounded first, and that another one nearly repeats
    assert torch.allclose(together[2:], alone[2:], rtol=0.2)


def test_a_linear_without_outliers_that_only_loses_is_left_as_it_is() -> None:
    fold, weights, rows = case()
    rows["w.weight"] = torch.ones(128, 64)
    rows["w.weight"][:, ::2] = 2  # too little to gain from columns twice as large
    weights["w.weight"][:, ::2] = 7.0
    channels = Channels.of(fold, {"w.weight": rows["w.weight"][0]}, weights, rows)
    assert search(fold, channels, weights, rows, {"w.weight": Choice(scheme("w4a16"))}) == Strength()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    models.save("llama", folder / "model", torch.bfloat16)
    return folder / "model", models.tokens(folder / "tokens.safetensors")


def quantize(model: tuple[Path, Path], out: Path, scheme: str = "w4a16", **options: Any) -> dict[str, Any]:
    groups = {"group_size": 32} if scheme.startswith("w4") else {}
    chosen = {"smooth": "auto", "calibration": model[1], "sequence_length": LENGTH, **groups, **options}
    return quantize_checkpoint(model[0], out, scheme=scheme, **chosen)


@pytest.mark.parametrize(("scheme", "method"), [("w4a16", "rtn"), ("w4a8", "gptq"), ("w8a8", "rtn")])
def test_threads_do_not_change_a_byte(scheme: str, method: str, llama: tuple[Path, Path], tmp_path: Path) -> None:
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            quantize(llama, tmp_path / str(threads), scheme, method=method)
            made.append(models.contents(tmp_path / str(threads)))
    finally:
        torch.set_num_threads(before)
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8"])
def test_scaled_channels_bring_rounding_nearer_to_the_float_model(
    scheme: str, llama: tuple[Path, Path], tmp_path: Path
) -> None:
    scaled = quantize(llama, tmp_path / "scaled", scheme, evaluation=llama[1])
    plain = quantize(llama, tmp_path / "plain", scheme, evaluation=llama[1], smooth=None, calibration=None)
    decibels = [statistics.mean(report["evaluation"]["layers"].values()) for report in (scaled, plain)]
    assert decibels[0] > decibels[1] + 0.5
    assert "awq" in {layer["rule"] for layer in scaled["layers"]}
    assert verify(tmp_path / "scaled", llama[0]) == []


def test_smooth_auto_is_alpha_auto(llama: tuple[Path, Path], tmp_path: Path) -> None:
    quantize(llama, tmp_path / "one")
    quantize(llama, tmp_path / "two", smooth=True, alpha="auto")
    options = ["--scheme", "w4a16", "--group-size", "32", "--sequence-length", str(LENGTH)]
    command = ["quantize", "--smooth", "auto", str(llama[0]), "-o", str(tmp_path / "three")]
    done = CliRunner().invoke(app, [*command, *options, "--calibration", str(llama[1])])
    assert done.exit_code == 0, done.output
    assert models.contents(tmp_path / "one") == models.contents(tmp_path / "two") == models.contents(tmp_path / "three")
    with pytest.raises(FlowError, match="expected True, False or 'auto', got 'most'"):
        quantize(llama, tmp_path / "four", smooth="most")
    with pytest.raises(FlowError, match="expected no alpha beside it"):
        quantize(llama, tmp_path / "four", alpha=0.3)


def test_a_folder_behind_the_flag_is_the_model(llama: tuple[Path, Path], tmp_path: Path) -> None:
    command = ["quantize", "--smooth", str(llama[0]), "-o", str(tmp_path / "out"), "--calibration", str(llama[1])]
    done = CliRunner().invoke(app, [*command, "--sequence-length", str(LENGTH)])
    assert done.exit_code == 0, done.output
