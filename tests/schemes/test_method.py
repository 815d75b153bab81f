"""The seam where a weight becomes integers: what a method gets, what it must give, and that it needs one file only."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import baracuda
from baracuda import InvalidProblem, PerChannel, PerGroup
from baracuda.core.types import ElementKind
from baracuda.schemes import CalibrationData, QuantizedWeight, WeightFormat, get_method, method_names
from baracuda.schemes import methods as folder
from baracuda.schemes.method import _METHODS, Method
from baracuda.schemes.scales import choose_scale

FORMATS = [WeightFormat(), WeightFormat(ElementKind.S4), WeightFormat(ElementKind.S4, 16), WeightFormat(group_size=16)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

FILE = '''
"""Integers that are all the floor."""
from baracuda.schemes.method import QuantizedWeight, register_method
from baracuda.schemes.scales import choose_scale


@register_method("floor", needs="moments", nearest=False)
def floor(weight, format, data):
    scale = choose_scale(weight, format, data)
    wide = scale.repeat_interleave(weight.shape[1] // scale[0].numel(), -1).view(weight.shape)
    return QuantizedWeight.pack((weight / wide).floor(), scale, format, {"largest": float(data.moments.max())})
'''


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rtn_rounds_to_nearest_with_the_scales_of_the_format(format: WeightFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 48).to(dtype)
    made, (low, high) = get_method("rtn").quantize(weight, format), format.range
    assert torch.equal(made.scale, choose_scale(weight, format))
    expected = baracuda.quantize(weight, made.scale, scope=format.scope, dtype=format.element, q_min=low, q_max=high)
    assert torch.equal(made.q, expected)
    step = made.scale.double().repeat_interleave(48 // made.scale[0].numel(), -1).view(12, 48)
    assert ((made.dequantize(format, 48).double() - weight.double()).abs() <= step * 0.51).all()


def test_formats_say_what_is_stored() -> None:
    assert [f.scope for f in FORMATS] == [PerChannel(0), PerChannel(0), PerGroup(16), PerGroup(16)]
    assert [f.range for f in FORMATS] == [(-127, 127), (-7, 7), (-7, 7), (-127, 127)]
    assert [f.bits for f in FORMATS] == [8, 4, 4, 8]
    assert [f.scale_dtype(torch.bfloat16) for f in FORMATS] == [torch.float32, torch.float32, *[torch.bfloat16] * 2]
    assert {f.scale_dtype(torch.float64) for f in FORMATS} == {torch.float32}


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rows_do_not_depend_on_each_other(format: WeightFormat) -> None:
    weight = torch.randn(12, 48)
    for name in method_names():
        method = get_method(name)
        data = CalibrationData(9, torch.ones(48), torch.eye(48)) if method.needs else None
        whole, part = method.quantize(weight, format, data), method.quantize(weight[5:9], format, data)
        assert torch.equal(whole.q[5:9], part.q) and torch.equal(whole.scale[5:9], part.scale), name


def test_group_factors_multiply_the_scale_of_a_channel() -> None:
    format, factors = WeightFormat(ElementKind.S4, 2), torch.tensor([[1, 3]])
    made = QuantizedWeight.pack(torch.tensor([[1, -7, 2, 3]]), torch.tensor([0.5]), format)
    made = QuantizedWeight(made.q, made.scale, factors=factors)
    assert made.dequantize(format, 4).tolist() == [[0.5, -3.5, 3.0, 4.5]]


def test_a_method_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in `methods/` is found by its being there: in the list, in a model, and with its data."""
    (tmp_path / "floor.py").write_text(FILE)
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    monkeypatch.setattr("baracuda.schemes.method._METHODS", dict(_METHODS))
    importlib.invalidate_caches()
    try:
        assert method_names()[0] == "rtn" and "floor" in method_names()
        model = nn.Sequential(nn.Linear(16, 4, bias=False))
        weight = model[0].weight.detach().clone()
        report = baracuda.quantize_model(model, method="floor", calibration={"0": CalibrationData(3, torch.ones(16))})
        assert report.skipped == {} and report.unmatched == []
        scale = choose_scale(weight, WeightFormat())
        assert torch.equal(model[0].weight, (weight / scale[:, None]).floor().to(torch.int8))
        report = baracuda.quantize_model(nn.Sequential(nn.Linear(16, 4)), method="floor", calibration={"1": None})
        assert "method floor: expected calibration data with its moments, got none" in report.skipped["0"]
        assert report.unmatched == ["1"]
    finally:
        sys.modules.pop("baracuda.schemes.methods.floor", None)


def test_moments_are_not_enough_for_a_method_that_needs_a_hessian() -> None:
    method = Method("new", lambda weight, format, data: QuantizedWeight(weight, weight), needs="hessian")
    with pytest.raises(InvalidProblem, match="expected calibration data with its hessian, got its moments alone"):
        method.quantize(torch.ones(2, 4), WeightFormat(), CalibrationData(1, torch.ones(4)))


def test_an_unknown_method_or_rule_is_refused() -> None:
    with pytest.raises(InvalidProblem, match="method: expected one of rtn"):
        baracuda.quantize_model(nn.Linear(2, 2), method="guess")
    with pytest.raises(InvalidProblem, match="scales: expected one of absmax"):
        get_method("rtn").quantize(torch.ones(2, 4), WeightFormat(scales="guess"))


@pytest.mark.parametrize(
    "made",
    [
        lambda w: QuantizedWeight(w.to(torch.int8)[:, :2], torch.ones(2)),
        lambda w: QuantizedWeight(w, torch.ones(2)),
        lambda w: QuantizedWeight(w.to(torch.int8), torch.ones(2, 1)),
        lambda w: QuantizedWeight(w.to(torch.int8), torch.ones(2).double()),
    ],
)
def test_a_method_that_gives_something_else_is_named(made: object) -> None:
    def wrong(weight: Tensor, format: WeightFormat, data: object) -> QuantizedWeight:
        return made(weight)  # type: ignore[operator,no-any-return]

    with pytest.raises(
        InvalidProblem, match=r"method wrong: expected (q of torch.int8 \[2, 4\]|scale of torch.float32 \[2\])"
    ):
        Method("wrong", wrong).quantize(torch.ones(2, 4), WeightFormat())


def test_calibration_data_makes_each_thing_once() -> None:
    data, made = CalibrationData(1, torch.ones(2)), []
    for key in ("a", "b", "a"):
        data.once(key, lambda key=key: made.append(key))  # type: ignore[misc]
    assert made == ["a", "b"]
