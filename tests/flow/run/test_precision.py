"""--budget and --max-kl: which layers get more bits, and that the result keeps what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from typer.testing import CliRunner

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.run.allocate import Unit, ranked, within_budget, within_divergence
from baracuda_cli import app

pytestmark = pytest.mark.filterwarnings("ignore")

UNITS = [Unit((name,), 50, 100, small, large) for name, small, large in
         [("a", 0.1, 0.0), ("b", 0.5, 0.1), ("c", 0.2, 0.0), ("d", 0.1, 0.2)]]  # fmt: skip


def names(units: list[Unit]) -> str:
    return "".join(unit.modules[0] for unit in units)


def test_layers_that_gain_most_for_each_byte_come_first_and_those_that_lose_never() -> None:
    assert names(ranked(UNITS)) == "bca"
    assert names(ranked([Unit(("big",), 0, 1000, 0.5, 0), Unit(("small",), 0, 10, 0.1, 0)])) == "smallbig"


@pytest.mark.parametrize(("bits", "chosen"), [(4, ""), (4.99, ""), (5, "b"), (6, "bc"), (7, "bca"), (16, "bca")])
def test_a_budget_buys_8_bits_until_it_is_spent(bits: float, chosen: str) -> None:
    assert names(within_budget(UNITS, 0, 400, bits)) == chosen


def test_a_budget_below_4_bits_and_scales_is_refused_with_the_least_there_is() -> None:
    with pytest.raises(FlowError, match=r"expected at least 4.200 bits a weight"):
        within_budget(UNITS, 10, 400, 4.1)


def divergence(large: list[Unit], floats: list[Unit]) -> float:
    known = {unit.modules: unit.kl_large for unit in large} | {unit.modules: 0.0 for unit in floats}
    return sum(known.get(unit.modules, unit.kl_small) for unit in UNITS)


@pytest.mark.parametrize(
    ("bound", "large", "floats"), [(1, "", ""), (0.6, "b", ""), (0.31, "bc", ""), (0.21, "bca", ""), (0.15, "ca", "b")]
)
def test_the_fewest_layers_that_keep_the_bound_get_more_bits(bound: float, large: str, floats: str) -> None:
    """Floats are the last resort: d is harmed by 8 bits, so it stays at 4 until then."""
    found = within_divergence(UNITS, bound, divergence)
    assert (names(found[0]), names(found[1])) == (large, floats) and found[2] <= bound


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one layer matters more than all others: its outputs are large."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("precision") / "model"
    model = models.build("llama", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(10)
    model.save_pretrained(directory)
    models.tokens(directory.parent / "tokens.safetensors")
    return directory


def quantize(source: Path, out: Path | None, **options: Any) -> dict[str, Any]:
    data = source.parent / "tokens.safetensors"
    return quantize_checkpoint(source, out, calibration=data, sequence_length=24, **{"scheme": "w4a8", **options})


def test_a_budget_is_kept_by_the_files_and_spent_on_the_layer_that_matters(source: Path, tmp_path: Path) -> None:
    plan = quantize(source, None, budget=5.2, dry_run=True)
    report = quantize(source, tmp_path / "out", budget=5.2)
    assert report["precision"] == plan["precision"], "measured twice, the same figures"
    bits = {layer["name"]: layer["bits"] for layer in report["layers"]}
    assert bits["model.layers.1.self_attn.o_proj"] == 8 and 4 in bits.values()
    stored = sum(layer["bytes_after"] for layer in report["layers"])
    average = 8 * stored / sum(layer["shape"][0] * layer["shape"][1] for layer in report["layers"])
    assert average == plan["average_bits"] <= 5.2
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) > 1 and verify(tmp_path / "out", source) == []
    layer = baracuda.load(tmp_path / "out", merge=False).model.layers[1]
    assert layer.self_attn.o_proj.weight_element.value == "s8" != layer.mlp.down_proj.weight_element.value


def test_a_bound_on_the_divergence_is_kept_by_the_model_that_is_loaded(source: Path, tmp_path: Path) -> None:
    data = source.parent / "tokens.safetensors"
    loose = quantize(source, None, max_kl=100.0, dry_run=True)["precision"]
    assert {unit["bits"] for unit in loose["units"]} == {4}
    bound = loose["kl"] / 3
    report = quantize(source, tmp_path / "out", max_kl=bound, evaluation=data)
    assert report["precision"]["kl"] <= bound and report["evaluation"]["kl"] <= 1.1 * bound
    assert {unit["bits"] for unit in report["precision"]["units"]} >= {4, 8}


def test_a_bound_that_8_bits_do_not_keep_leaves_layers_float_but_most_of_them_only_when_allowed(source: Path) -> None:
    with pytest.raises(FlowError, match="stay in floating point"):
        quantize(source, None, max_kl=1e-6, dry_run=True)
    units = quantize(source, None, budget=16.0, dry_run=True)["precision"]["units"]
    bound = sum(unit["kl_8_bits"] for unit in units) / 2
    plan = quantize(source, None, max_kl=bound, dry_run=True, allow_float=True)
    reasons = {entry["name"]: entry["reason"] for entry in plan["left"]}
    assert "is not kept with 8 bits there" in reasons["model.layers.1.self_attn.o_proj"]


def test_the_plan_is_shown_before_the_run(source: Path, tmp_path: Path) -> None:
    data, out = source.parent / "tokens.safetensors", tmp_path / "out"
    command = [
        "quantize",
        str(source),
        "-o",
        str(out),
        "--scheme",
        "w4a16",
        "--calibration",
        str(data),
        "--budget",
        "6",
    ]
    done = CliRunner().invoke(app, [*command, "--sequence-length", "24"])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert said.index("for --budget 6: of 8 sets of layers") < said.index("baracuda_report.html")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w8a8", "budget": 5.0}, "use --scheme w4a16 or w4a8"),
        ({"budget": 5.0, "max_kl": 0.1}, "expected --budget or --max-kl, got both"),
        ({"budget": 3.0}, "expected average bits from 4 to 16, got 3"),
        ({"max_kl": 0.0}, "expected a positive number, got 0"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], message: str, source: Path) -> None:
    with pytest.raises(FlowError, match=message):
        quantize(source, None, dry_run=True, **options)
