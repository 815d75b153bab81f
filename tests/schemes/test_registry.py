"""The table of schemes: one name means one thing wherever it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from torch import nn
from typer.testing import CliRunner

import baracuda
from baracuda import InvalidProblem, LinearScheme
from baracuda.core.types import ElementKind
from baracuda.schemes import (
    ActivationFormat,
    CheckpointScheme,
    Choice,
    LiveScheme,
    Recipe,
    Scheme,
    WeightFormat,
    checkpoint_names,
    checkpoint_scheme,
    get_method,
    live_names,
    live_scheme,
    method_names,
)
from baracuda.schemes.registry import is_checkpoint_scheme
from baracuda_cli import app

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", sorted({*live_names()} & {*checkpoint_names()} - {"w8a8-smoothquant", "w4a8"}))
def test_a_name_means_one_scheme_in_models_and_in_checkpoints(name: str) -> None:
    assert checkpoint_scheme(name) == (live_scheme(name), False)


def test_checkpoints_of_w4a8_have_groups_whose_scales_are_integer_multiples() -> None:
    stored, live = checkpoint_scheme("w4a8")[0], live_scheme("w4a8")
    assert stored.weight == WeightFormat(ElementKind.S4, 128) and stored.weight.factors
    assert live.weight == WeightFormat(ElementKind.S4) and live.activation == stored.activation


def test_four_bit_scales_are_searched_and_all_sixteen_integers_used() -> None:
    for scheme in (live_scheme("w4a8"), LinearScheme(weight="s4")._scheme, checkpoint_scheme("w4a16")[0]):
        assert scheme.weight.scales == "search" and scheme.weight.range == (-8, 7)
    assert live_scheme("w8a8").weight.range == (-127, 127)


def test_the_older_name_is_static_in_a_model_and_smoothed_in_a_checkpoint() -> None:
    assert live_scheme("w8a8-smoothquant") == live_scheme("w8a8-static") == LinearScheme(static=True)._scheme
    assert checkpoint_scheme("w8a8-smoothquant") == (live_scheme("w8a8"), True)


def test_how_weights_are_stored_says_nothing_about_activations() -> None:
    packed = Scheme(WeightFormat(ElementKind.S4, 64))
    assert packed.activation.kind == "dynamic" and packed.with_activations("float").weight == packed.weight
    assert is_checkpoint_scheme(packed) and is_checkpoint_scheme(packed.with_activations("float"))
    assert not is_checkpoint_scheme(packed.with_activations("static"))
    assert not is_checkpoint_scheme(Scheme(WeightFormat(), ActivationFormat("float")))


@pytest.mark.parametrize("name", live_names())
def test_every_live_scheme_has_an_integer_linear(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    scales = {"0": 0.1} if live_scheme(name).activation.kind == "static" else None
    assert baracuda.quantize_model(model, name, input_scales=scales).skipped == {}


def test_a_scheme_without_an_integer_linear_is_refused() -> None:
    with pytest.raises(InvalidProblem, match=r"expected integer activations .* got float .* groups of 128"):
        _ = checkpoint_scheme("w4a16")[0].linear_options
    with pytest.raises(InvalidProblem, match=r"w4a16 among them, are for `baracuda quantize`"):
        baracuda.quantize_model(nn.Linear(2, 2), "w4a16")


def test_the_command_line_names_every_scheme_and_method() -> None:
    text = CliRunner().invoke(app, ["quantize", "--help"], env={"COLUMNS": "300"}).output
    for name in (*checkpoint_names(), *method_names()):
        assert name in text


def test_type_checkers_know_the_names() -> None:
    assert list(get_args(LiveScheme)) == live_names() and list(get_args(CheckpointScheme)) == checkpoint_names()


def test_names_may_be_in_capitals() -> None:
    assert live_scheme("W4A8") == live_scheme("w4a8") and checkpoint_scheme("W4A16") == checkpoint_scheme("w4a16")
    assert get_method("RTN") is get_method("rtn")


def test_the_documentation_names_every_scheme() -> None:
    checkpoints, models = ((DOCS / "how-to" / f"{page}.md").read_text() for page in ("checkpoints", "training"))
    assert [name for name in checkpoint_names() if f"`{name}`" not in checkpoints] == []
    assert [name for name in live_names() if f"`{name}`" not in models] == []


def test_a_layer_gets_the_choice_of_the_first_pattern_that_matches_one_of_its_names() -> None:
    eight, four = Choice(live_scheme("w8a8")), Choice(live_scheme("w4a8"), get_method("rtn"))
    recipe = Recipe(eight, (("*.mlp.*", four), ("re:model", eight)))
    assert recipe.of("layers.0.mlp.up") == recipe.of("model.x", "model.mlp.y") == four
    assert recipe.of("model.attn") == recipe.of("other") == eight
    assert recipe.choices == [eight, four, eight] and not recipe.static and recipe.needs is None
