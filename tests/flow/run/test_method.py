"""Smoothing before any scheme, and methods that quantize by data: what flow measures for them and hands over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from baracuda.core.errors import InvalidProblem
from baracuda.flow import FlowError, quantize_checkpoint, verify
from baracuda.flow.checkpoint.config import parse_config, quantization_config
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors
from baracuda.flow.hf.forward import arguments
from baracuda.schemes import CalibrationData, Choice, QuantizedWeight, Recipe, WeightFormat, checkpoint_scheme
from baracuda.schemes.method import _METHODS, Method, get_method
from baracuda.schemes.scales import choose_scale

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    models.save("llama", tmp_path / "model", shard="100KB")
    return tmp_path / "model"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return models.tokens(tmp_path / "tokens.safetensors")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two methods that keep the data they are given: it is found by the sum of the weight's rows."""
    seen: dict[str, Any] = {}

    def keep(weight: Tensor, format: WeightFormat, data: CalibrationData | None) -> QuantizedWeight:
        assert data is not None
        seen[f"{float(weight.double().sum()):.9f}"] = data
        scale, (low, high) = choose_scale(weight, format), format.range
        wide = scale.float().repeat_interleave(weight.shape[1] // scale[0].numel(), -1).view(weight.shape)
        q = (weight / wide).floor().clamp(low, high)
        return QuantizedWeight.pack(q, scale, format, {"rows": weight.shape[0]})

    for needs in ("moments", "hessian"):
        monkeypatch.setitem(_METHODS, needs, Method(needs, keep, needs, nearest=False))  # type: ignore[arg-type]
    return seen


def inputs(tokens: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Each Linear's weight and input, by name."""
    model, found = models.build("llama"), {}

    def keep(name: str) -> Any:
        return lambda module, args: found.__setitem__(name, (module.weight.detach(), args[0].flatten(0, 1)))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(keep(name))
    with torch.no_grad():
        model(input_ids=read_tensors(tokens)["tokens"], **arguments(model))
    return found


@pytest.mark.parametrize("needs", ["moments", "hessian"])
@pytest.mark.parametrize("options", [{}, {"scheme": "w4a16", "group_size": 32}], ids=str)
def test_a_method_gets_the_second_moments_of_its_layer_s_input(
    needs: str, options: dict[str, Any], llama: Path, tokens: Path, seen: dict[str, Any], tmp_path: Path
) -> None:
    report = quantize_checkpoint(llama, tmp_path / "out", method=needs, calibration=tokens, one_shot=True, **options)
    assert report["method"] == needs and report["run"]["made_from"]["options"]["method"] == needs
    found = inputs(tokens)
    assert len(found) == len(report["layers"]) == 14
    for weight, x in found.values():
        data = seen[f"{float(weight.double().sum()):.9f}"]
        assert data.count == len(x)
        assert torch.allclose(data.moments, x.square().mean(0), rtol=1e-4)
        assert (data.hessian is None) == (needs == "moments")
        if data.hessian is not None:
            assert torch.allclose(data.hessian, x.T @ x / len(x), rtol=1e-3, atol=1e-5)
    shared = [seen[f"{float(found[f'model.layers.0.self_attn.{n}_proj'][0].double().sum()):.9f}"] for n in "qkv"]
    assert shared[0] is shared[1] is shared[2]
    assert all(layer["method"] == {"rows": layer["shape"][0]} for layer in report["layers"])


def test_a_checkpoint_of_a_method_that_does_not_round_to_nearest_verifies_unless_it_is_another_model_s(
    llama: Path, tokens: Path, seen: dict[str, Any], tmp_path: Path
) -> None:
    quantize_checkpoint(llama, tmp_path / "out", method="hessian", calibration=tokens)
    assert verify(tmp_path / "out", llama) == []
    for shard in llama.glob("*.safetensors"):
        write_tensors(shard, {n: -v if "mlp" in n else v for n, v in read_tensors(shard).items()}, {"format": "pt"})
    wrong = verify(tmp_path / "out", llama)
    assert {finding.code for finding in wrong} == {"wrong-values"} and len(wrong) == 6


def test_moments_are_those_of_the_smoothed_input(
    llama: Path, tokens: Path, seen: dict[str, Any], tmp_path: Path
) -> None:
    options = {"method": "hessian", "calibration": tokens}
    quantize_checkpoint(llama, tmp_path / "plain", **options)
    before = {round(float(data.moments.max()), 4) for data in seen.values()}
    seen.clear()
    quantize_checkpoint(llama, tmp_path / "smooth", smooth=True, **options)
    for data in seen.values():
        assert torch.allclose(data.hessian.diagonal(), data.moments, rtol=1e-4)
    assert not before & {round(float(data.moments.max()), 4) for data in seen.values()}


def test_what_was_measured_survives_an_interruption(
    llama: Path, tokens: Path, seen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"method": "hessian", "calibration": tokens}
    quantize_checkpoint(llama, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr("baracuda.flow.run.stream.ShardJob.run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quantize_checkpoint(llama, tmp_path / "out", **options)
    monkeypatch.setattr("baracuda.flow.run.calibrate.calibrate", None)
    quantize_checkpoint(llama, tmp_path / "out", resume=True, **options)
    assert models.contents(tmp_path / "out") == models.contents(tmp_path / "whole")


def test_a_method_that_needs_data_is_refused_without(llama: Path, seen: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"needs calibration data.*--calibration FILE"):
        quantize_checkpoint(llama, tmp_path / "out", method="hessian")
    with pytest.raises(FlowError, match="method: expected one of rtn, gptq, hessian, moments, got 'guess'"):
        quantize_checkpoint(llama, tmp_path / "out", method="guess")


def test_smooth_is_what_the_older_name_does(llama: Path, tokens: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama, tmp_path / "old", scheme="w8a8-smoothquant", calibration=tokens)
    quantize_checkpoint(llama, tmp_path / "new", scheme="w8a8", smooth=True, calibration=tokens)
    quantize_checkpoint(llama, tmp_path / "old-static", scheme="w8a8", activations="static", calibration=tokens)
    quantize_checkpoint(llama, tmp_path / "new-static", scheme="w8a8-static", calibration=tokens)
    for suffix in ("", "-static"):
        old, new = (models.contents(tmp_path / f"{age}{suffix}") for age in ("old", "new"))
        reports = [json.loads(files.pop("baracuda_report.json")) for files in (old, new)]
        assert old == new
        names = [report["scheme"].pop("name") for report in reports]
        assert reports[0] == reports[1] and names[0] != names[1]
    with pytest.raises(FlowError, match="w8a8-smoothquant smooths: drop smooth=False, or use --scheme w8a8"):
        quantize_checkpoint(llama, tmp_path / "x", scheme="w8a8-smoothquant", smooth=False, calibration=tokens)


@pytest.mark.parametrize("alpha", ["auto", 0.3])
def test_smoothing_may_precede_four_bit_weights(alpha: float | str, llama: Path, tokens: Path, tmp_path: Path) -> None:
    options = {"scheme": "w4a16", "group_size": 32, "calibration": tokens}
    report = quantize_checkpoint(llama, tmp_path / "out", smooth=True, alpha=alpha, **options)
    assert len(report["smoothing"]["folded"]) == 8 and all(layer["smoothed"] for layer in report["layers"])
    assert verify(tmp_path / "out", llama) == []


def test_a_recipe_is_written_as_groups_and_read_back() -> None:
    eight, four = (Choice(checkpoint_scheme(name)[0]) for name in ("w8a8", "w4a16"))
    recipe = Recipe(eight, (("re:.*mlp.*", four), ("re:.*o_proj$", Choice(eight.scheme.with_activations("static")))))
    written = quantization_config(recipe, ["lm_head"])
    assert written["format"] == "mixed-precision"
    groups = written["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear"], ["re:.*mlp.*"], ["re:.*o_proj$"]]
    assert [group["format"] for group in groups.values()] == ["int-quantized", "pack-quantized", "int-quantized"]
    assert parse_config(json.loads(json.dumps(written))) == recipe
    groups["group_1"]["targets"] = ["re:("]
    with pytest.raises(FlowError, match=r"quantization_config: targets re:\(: not a regular expression"):
        parse_config(written)


def test_a_scheme_that_no_checkpoint_has_is_not_read() -> None:
    written = quantization_config(Recipe(Choice(checkpoint_scheme("w4a16")[0].with_activations("static"))), [])
    with pytest.raises(FlowError, match="groups of 128 with static activations are not read here"):
        parse_config(written)


def test_the_method_of_a_report_from_another_version_is_not_taken_for_rtn(tmp_path: Path) -> None:
    from baracuda.flow.checkpoint.compare import Made

    assert Made.read(tmp_path).nearest("any") and get_method("rtn").nearest
    (tmp_path / "baracuda_report.json").write_text('{"method": "of tomorrow"}')
    assert not Made.read(tmp_path).nearest("any")
    with pytest.raises(InvalidProblem):
        get_method("of tomorrow")


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8"])
def test_searched_scales_are_weighed_by_the_inputs_where_there_is_data(
    scheme: str, llama: Path, tokens: Path, tmp_path: Path
) -> None:
    """The weight's error counts by what it does to the outputs: less of it where the inputs are small."""
    options = {"scheme": scheme, "group_size": 32}
    report = quantize_checkpoint(llama, tmp_path / "weighed", calibration=tokens, **options)
    assert len(report["smoothing"]["weighed"]) == 14
    quantize_checkpoint(llama, tmp_path / "plain", **options)
    weighed, plain = (read_all(tmp_path / name) for name in ("weighed", "plain"))
    errors = []
    for name, (weight, x) in inputs(tokens).items():
        for stored in (weighed, plain):
            scale = stored[f"{name}.weight_scale"].float().repeat_interleave(32, 1)
            packed = stored[f"{name}.weight_packed"]
            integers = torch.stack([(packed >> (4 * i)) & 15 for i in range(8)], -1).reshape(len(packed), -1) - 8
            errors.append(
                float(((integers[:, : weight.shape[1]] * scale - weight).square() * x.square().mean(0)).sum())
            )
    assert all(ours <= other * 1.001 for ours, other in zip(errors[::2], errors[1::2], strict=True))
    assert sum(errors[::2]) < 0.95 * sum(errors[1::2])
    assert verify(tmp_path / "weighed", llama) == []


def read_all(directory: Path) -> dict[str, Tensor]:
    return {k: v for shard in sorted(directory.glob("*.safetensors")) for k, v in read_tensors(shard).items()}
