"""Wrong input to the plans: the documented error, what was expected and what came, and nothing written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from plan_table import BY_NAME, POISON, ROWS, Row
from torch import Tensor

from baracuda import Arithmetic, DynamicRangeMode, InvalidProblem, PerToken, Unsupported

NAN, INF = math.nan, math.inf

# -- descriptors: refused by select ------------------------------------------------------------------------------

SIZES = {
    "PerTensor": ["numel"],
    "PerToken": ["n", "d"],
    "PerGroup": ["outer_size", "axis_size"],
    "Fake": ["numel"],
    "Dynamic": ["n", "d"],
    "QuantizedLinear": ["m", "c_out", "k"],
    "SmoothQuant": ["m", "n", "k"],
}
#: plan, what is changed in its good descriptor, the error, the message.
DESCRIPTORS: list[tuple[str, dict[str, Any], type[Exception], str]] = []
for _row in ROWS:
    _sizes = next((fields for part, fields in SIZES.items() if part in _row.name), [])
    for _field in _sizes:
        DESCRIPTORS += [(_row.name, {_field: bad}, InvalidProblem, "expected") for bad in (-6, 6.0, "6", True)]
    if "PerChannel" in _row.name:
        DESCRIPTORS += [
            (_row.name, {"shape": (2, -3, 4)}, InvalidProblem, r"non-negative integer sizes, got shape \[2, -3, 4\]"),
            (_row.name, {"axis": 3}, InvalidProblem, r"an axis in \[-3, 2\] for shape \[2, 3, 4\], got axis 3"),
            (_row.name, {"axis": -4}, InvalidProblem, r"an axis in \[-3, 2\].*got axis -4"),
            (_row.name, {"axis": 1.0}, InvalidProblem, r"axis.*got .*1\.0"),
            (_row.name, {"shape": ()}, InvalidProblem, "a tensor with at least one axis"),
        ]
    if "PerGroup" in _row.name:
        DESCRIPTORS += [
            (_row.name, {"group_size": 4}, InvalidProblem, r"axis 1 has 6 elements, not a multiple of 4"),
            (_row.name, {"group_size": 0}, InvalidProblem, "size of at least 1, got 0"),
            (_row.name, {"group_size": -3}, InvalidProblem, "size of at least 1, got -3"),
            (_row.name, {"group_size": 3.0}, InvalidProblem, r"got 3\.0"),
        ]
    if not _row.name.startswith("SmoothQuant"):
        DESCRIPTORS += [
            (_row.name, {"q_min": 5, "q_max": 4}, InvalidProblem, "q_min=5, q_max=4|divides by q_max"),
            (_row.name, {"q_min": -129}, InvalidProblem, r"\[-129, 127\]"),
            (_row.name, {"q_max": 128}, InvalidProblem, r", 128\]"),
            (_row.name, {"q_min": -1.0}, InvalidProblem, r"integers q_min and q_max.*-1\.0"),
            (_row.name, {"q_max": True}, InvalidProblem, "integers q_min and q_max.*True"),
            (_row.name, {"arithmetic": "sideways"}, InvalidProblem, "sideways"),
        ]
    for _field in ("input_element", "output_element", "activation_element", "weight_element"):
        if _field in _row.describe().__dataclass_fields__:
            DESCRIPTORS += [
                (_row.name, {_field: "s16"}, InvalidProblem, "expected an element kind .*'s16'"),
                (_row.name, {_field: torch.complex64}, InvalidProblem, r"expected an element kind .*torch\.complex64"),
                (_row.name, {_field: None}, InvalidProblem, "expected an element kind .*None"),
                (_row.name, {_field: [1]}, InvalidProblem, r"expected an element kind .*\[1\]"),
                (_row.name, {_field: "s32"}, Unsupported, "expected one of .*got s32"),
            ]
DESCRIPTORS += [
    (
        "QuantizePerTensor",
        {"input_element": "s8"},
        Unsupported,
        "the float tensor: expected one of f16, bf16, f32, f64, got s8",
    ),
    (
        "QuantizePerToken",
        {"output_element": "f32"},
        Unsupported,
        "the quantized tensor: expected one of s8, u8, s4, u4, got f32; choose one of these",
    ),
    ("DequantizePerGroup", {"input_element": "f16"}, Unsupported, "the quantized tensor: expected one of s8.*got f16"),
    ("DequantizePerGroup", {"output_element": "u8"}, Unsupported, "the float tensor: expected one of f16.*got u8"),
    (
        "QuantizePerTensor",
        {"output_element": "u8", "q_min": -1},
        InvalidProblem,
        r"u8's range \[0, 255\], got \[-1, 127\]",
    ),
    ("QuantizePerTensor", {"output_element": "s4"}, InvalidProblem, r"s4's range \[-8, 7\], got \[-128, 127\]"),
    ("FakeQuantize", {"shape": (5, 5)}, InvalidProblem, r"a shape of numel=24 elements, got \[5, 5\]: 25"),
    ("FakeQuantize", {"scope": "token"}, InvalidProblem, "scope.*'token'"),
    ("FakeQuantize", {"scope": PerToken, "shape": (4, 6)}, InvalidProblem, "scope.*PerToken"),
    ("DynamicRangeQuantize", {"scope": None}, InvalidProblem, "scope.*None"),
    ("DynamicRangeQuantize", {"shape": (4, 6)}, InvalidProblem, "either n and d or shape"),
    ("DynamicRangeQuantize", {"n": None}, InvalidProblem, "either n and d or shape, got n=None"),
    ("DynamicRangeQuantize", {"mode": "sideways"}, InvalidProblem, "sideways"),
    ("DynamicRangeQuantize", {"q_min": 3, "q_max": 3}, InvalidProblem, "expected q_min < q_max, got both 3"),
    ("DynamicRangeQuantize", {"scale_element": "f16"}, Unsupported, "the stored scale: .*f32, got f16; leave it out"),
    ("DynamicRangeQuantize", {"scale_element": "s8"}, Unsupported, "the stored scale: expected one of f32, got s8"),
    ("QuantizedLinear", {"mode": "sideways"}, InvalidProblem, "sideways"),
    ("QuantizedLinear", {"weight_element": "u8"}, Unsupported, "the weight: .*s8, s4, got u8; quantize it"),
    (
        "QuantizedLinear",
        {"quantized_element": "s4", "q_min": -7, "q_max": 7},
        Unsupported,
        "quantized activations: .*got s4",
    ),
    ("SmoothQuantLinear", {"activation_element": "s4"}, Unsupported, "quantized activations: .*got s4"),
    ("SmoothQuantLinear", {"weight_element": "u4"}, Unsupported, "the weight: expected one of s8, s4, got u4"),
    (
        "SmoothQuantLinear",
        {"act_zero_point": 128},
        InvalidProblem,
        r"act_zero_point: expected an integer in \[-128, 127\].*128",
    ),
    ("SmoothQuantLinear", {"act_zero_point": 0.5}, InvalidProblem, r"act_zero_point: expected an integer.*0\.5"),
]
for _high in (0, -1, -128):
    _symmetric = {"mode": DynamicRangeMode.SYMMETRIC, "q_min": -128, "q_max": _high}
    for _name in ("DynamicRangeQuantize", "QuantizedLinear"):
        DESCRIPTORS.append(
            (_name, _symmetric, InvalidProblem, f"expected q_max > 0, got {_high}; use mode='asymmetric'")
        )
for _scale in (NAN, INF, -INF, 0.0, -0.5, 1e-60, 1e60, True, "0.5", None, 1j):
    _message = "scale: expected a number that is finite and > 0"
    DESCRIPTORS.append(("SmoothQuantLinear", {"act_scale": _scale}, InvalidProblem, _message))


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"), DESCRIPTORS, ids=lambda v: None if isinstance(v, type) else str(v)
)
def test_select_refuses_a_wrong_description(
    name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    row = BY_NAME[name]
    row.plan.select(row.describe())  # a cache of lawful problems must not let 1.0 or True pass for 1
    with pytest.raises(error, match=message):
        row.plan.select(row.describe(**changes))


@pytest.mark.parametrize("name", ["QuantizePerToken", "FakeQuantize", "DynamicRangeQuantize", "QuantizedLinear"])
def test_a_choice_by_name_means_the_same_as_the_member(name: str) -> None:
    row = BY_NAME[name]
    assert row.plan.select(row.describe(arithmetic="reciprocal")).problem.arithmetic is Arithmetic.RECIPROCAL
    if name in ("DynamicRangeQuantize", "QuantizedLinear"):
        plan = row.plan.select(row.describe(mode="asymmetric"))
        assert plan.problem.mode is DynamicRangeMode.ASYMMETRIC


def test_select_refuses_a_descriptor_or_a_preference_of_another_kind() -> None:
    row = BY_NAME["QuantizePerToken"]
    with pytest.raises(InvalidProblem, match="expected QuantizePerTokenDescriptor, got QuantizePerTensorDescriptor"):
        row.plan.select(BY_NAME["QuantizePerTensor"].describe())
    with pytest.raises(InvalidProblem, match="expected PlanPreference, got str; a device is a keyword"):
        row.plan.select(row.describe(), "cpu")


@pytest.mark.parametrize("name", ["QuantizePerToken", "SmoothQuantLinear"])
def test_arguments_of_another_kind_are_told_apart(name: str) -> None:
    row = BY_NAME[name]
    plan = row.plan.select(row.describe())
    expected = f"{row.plan.__name__}: expected {type(row.args()).__name__}, got dict"
    assert plan.can_implement({}).reason == expected
    with pytest.raises(InvalidProblem, match=expected):
        plan.run({})


# -- arguments: refused by can_implement and run alike -----------------------------------------------------------


def _spoil(value: Tensor) -> list[tuple[str, Any, str]]:
    """Every way a tensor can be wrong: what to call it, the wrong value, what the message says of it."""
    other = torch.int64 if value.dtype is not torch.int64 else torch.int32
    float_or_not = torch.complex64 if value.dtype.is_floating_point else torch.float32
    shape, longer = list(value.shape), (*value.shape, 2)
    return [
        ("dtype", value.to(other), f"{value.dtype}.*got {other}"),
        ("kind", value.to(float_or_not), f"{value.dtype}.*got {float_or_not}"),
        ("bool", value.bool(), f"{value.dtype}.*got torch.bool"),
        ("rank", value.new_full(longer, POISON), rf"expected shape {_literal(shape)}, got {_literal(list(longer))}"),
        ("size", value.new_full((99,), POISON), rf"expected shape {_literal(shape)}, got \[99\]"),
        ("device", value.to("meta"), "expected a tensor on cpu, got one on meta"),
        ("list", [1.0, 2.0], r"got \[1\.0, 2\.0\]|a number|an integer"),
        ("numpy", np.ones(3), r"expected .* got |a number|an integer"),
        ("string", "tensor", "got 'tensor'"),
    ]


def _literal(value: object) -> str:
    return str(value).replace("[", r"\[").replace("]", r"\]")


OPTIONAL = {"zero_point", "bias"}
ARGUMENTS: list[tuple[str, str, str, Any, str]] = []
for _row in ROWS:
    for _field, _value in _row.arguments().items():
        ARGUMENTS += [(_row.name, _field, what, wrong, message) for what, wrong, message in _spoil(_value)]
        if _field not in OPTIONAL and not ("Dequantize" in _row.name and "Backward" in _row.name and _field == "input"):
            ARGUMENTS.append((_row.name, _field, "none", None, f"{_field}: expected .*got None"))
        if _field in _row.outputs and _value.numel() > 1:
            _expanded = _value.new_full((1,), POISON).expand(_value.shape)
            ARGUMENTS.append((_row.name, _field, "expanded", _expanded, f"{_field}: expected an element per address"))
            _sliding = _value.new_full((99,), POISON).as_strided(_value.shape, (1,) * _value.ndim)
            if _value.ndim > 1:
                ARGUMENTS.append((_row.name, _field, "sliding", _sliding, f"{_field}: expected an element per address"))
        if _field in ("scale", "weight_scale"):
            for _wrong in (0.0, -1.0, NAN, INF, 1e-60, 1e60, True, 1j):
                ARGUMENTS.append(
                    (_row.name, _field, repr(_wrong), _wrong, "scale: expected a number that is finite and > 0")
                )
        if _field == "zero_point":
            for _wrong in (2**24, -(2**24), 2**24 - 255, 0.0, 1.5, True, 2**40):
                ARGUMENTS.append(
                    (
                        _row.name,
                        _field,
                        repr(_wrong),
                        _wrong,
                        r"zero_point: expected an integer in \[-16776960, 16776960\]",
                    )
                )


@pytest.mark.parametrize(
    ("name", "field", "what", "wrong", "message"), ARGUMENTS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_can_implement_and_run_refuse_a_wrong_argument_alike(
    name: str, field: str, what: str, wrong: Any, message: str
) -> None:
    row = BY_NAME[name]
    plan = row.plan.select(row.describe())
    args = row.args(**{field: wrong})
    support = plan.can_implement(args)
    assert not support
    with pytest.raises(InvalidProblem, match=message) as raised:
        plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
    assert str(raised.value) == support.reason
    assert_untouched(row, args)


def assert_untouched(row: Row, args: Any) -> None:
    for name in row.outputs:
        output = getattr(args, name)
        if (
            isinstance(output, Tensor)
            and output.device.type == "cpu"
            and output.dtype.is_floating_point | (output.dtype == torch.int8)
        ):
            assert (output == POISON).all()


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.endswith("Backward")], ids=str)
def test_an_output_that_overlaps_an_input_by_a_part_is_refused(row: Row) -> None:
    plan = row.plan.select(row.describe())
    good = row.args()
    n = good.grad_output.numel()
    memory = torch.full((n + 1,), float(POISON))
    args = row.args(grad_output=memory[1:].view_as(good.grad_output), grad_input=memory[:n].view_as(good.grad_output))
    assert "overlaps grad_output in memory" in plan.can_implement(args).reason
    with pytest.raises(InvalidProblem, match="grad_input overlaps grad_output in memory; give it memory of its own"):
        plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
    assert (memory == POISON).all()


def test_an_output_that_overlaps_another_output_is_refused() -> None:
    row = BY_NAME["DynamicRangeQuantize"]
    plan = row.plan.select(row.describe())
    memory = torch.full((4,), POISON, dtype=torch.int32)
    args = row.args(scale_out=memory.view(torch.float32), zero_point_out=memory)
    with pytest.raises(InvalidProblem, match=r"overlaps .* in memory"):
        plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
    assert (memory == POISON).all()


@pytest.mark.parametrize("name", ["QuantizedLinear", "SmoothQuantLinear"])
def test_a_residual_must_not_be_the_output_and_an_activation_must_be_one(name: str) -> None:
    row = BY_NAME[name]
    plan = row.plan.select(row.describe())
    args = row.args()
    args.residual = args.output
    with pytest.raises(InvalidProblem, match="output overlaps residual in memory"):
        plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
    assert_untouched(row, args)
    with pytest.raises(InvalidProblem, match=r"activation: expected one of 'none', .* got 'tanh'"):
        row.plan.select(row.describe(activation="tanh"))


@pytest.mark.parametrize("name", ["QuantizedLinear", "SmoothQuantLinear"])
def test_a_linear_refuses_scratch_and_sums_that_do_not_fit(name: str) -> None:
    row = BY_NAME[name]
    plan = row.plan.select(row.describe())
    wrong: dict[str, Any] = {
        "weight_sum": torch.zeros(4, dtype=torch.int32),
        "bias": torch.zeros(3, dtype=torch.float64),
        "residual": torch.zeros(4, 3, dtype=torch.bfloat16),
    }
    if name == "QuantizedLinear":
        wrong |= {"act_q_scratch": torch.zeros(4, 6), "act_scale_scratch": torch.zeros(3)}
    for field, value in wrong.items():
        args = row.args(**{field: value})
        with pytest.raises(InvalidProblem, match=f"{field}: expected"):
            plan.run(args, torch.empty(plan.workspace_size(), dtype=torch.uint8))
        assert_untouched(row, args)
