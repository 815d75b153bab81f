"""Spec: equal options are one cache key, in any process; every field is checked, encoded and decoded."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from baracuda import (
    Activation,
    Arithmetic,
    DynamicRangeMode,
    ElementKind,
    InvalidProblem,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantizeKind,
    Scope,
)
from baracuda.core.problem import FIELD_TYPES, MAKING, Problem, Spec, activation_problem, quantization_problem
from baracuda.dispatch.options import quantized_spec
from baracuda.dispatch.schema import COUNT, DECLARED, decode, encode

SPEC = Spec(
    ElementKind.BF16,
    ElementKind.U8,
    3,
    200,
    PerGroup(32, axis=1),
    DynamicRangeMode.ASYMMETRIC,
    Arithmetic.RECIPROCAL,
    ElementKind.BF16,
    True,
    ElementKind.S4,
    Activation.SILU,
)


def another(value: Any, kind: type) -> Any:
    """A value of the field's type that is not this one."""
    if kind in (int, float):
        return value + 1
    if kind is bool:
        return not value
    return PerToken() if kind is Scope else next(member for member in kind if member is not value)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FIELD_TYPES)
def test_every_field_tells_specs_apart_and_comes_back_from_an_operators_arguments(name: str) -> None:
    changed = replace(SPEC, **{name: another(getattr(SPEC, name), FIELD_TYPES[name])})
    assert changed != SPEC
    assert decode(*encode(changed)) == changed != decode(*encode(SPEC))


@pytest.mark.parametrize("scope", [PerTensor(), PerChannel(-2), PerToken(), PerGroup(8), PerGroup(4, axis=0)], ids=str)
def test_every_scope_comes_back_from_an_operators_arguments(scope: Scope) -> None:
    assert decode(*encode(replace(SPEC, scope=scope))).scope == scope


def test_the_schema_declares_as_many_arguments_as_a_spec_becomes() -> None:
    assert len(DECLARED.split(", ")) == COUNT == len(encode(SPEC))


def test_equal_specs_are_one_key_also_after_a_pickle_which_leaves_the_hash_behind() -> None:
    same = replace(SPEC)
    assert same is not SPEC and same == SPEC and hash(same) == hash(SPEC)
    loaded = pickle.loads(pickle.dumps(SPEC))
    assert "_hash" in vars(SPEC) and "_hash" not in vars(loaded)
    assert loaded == SPEC and hash(loaded) == hash(SPEC)
    problem = Problem(QuantizeKind.QUANTIZE, (4,), ElementKind.F32, ElementKind.S8, -128, 127)
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_a_problem_is_an_op_and_a_shape_before_the_fields_of_its_spec() -> None:
    assert [field.name for field in fields(Problem)] == ["op", "shape", *FIELD_TYPES]
    spec = Spec(ElementKind.F32, ElementKind.S8, -128, 127, PerToken())
    problem = Problem.of(QuantizeKind.QUANTIZE, (4, 8), spec)
    assert problem == Problem(QuantizeKind.QUANTIZE, (4, 8), ElementKind.F32, ElementKind.S8, -128, 127, PerToken())
    assert problem == Problem.unchecked(QuantizeKind.QUANTIZE, (4, 8), spec)


#: A norm and a linear with no field of a quantization at its default, but for those that these ops prescribe.
NORM = Problem(
    QuantizeKind.NORM_DYNAMIC_QUANTIZE,
    (4, 8),
    *(ElementKind.BF16, ElementKind.U8, 3, 200, PerToken()),
    mode=DynamicRangeMode.ASYMMETRIC,
    arithmetic=Arithmetic.RECIPROCAL,
    scale_element=ElementKind.BF16,
    include_zero=True,
    eps=1e-5,
    adds=True,
)
LINEAR = replace(
    NORM,
    op=QuantizeKind.QUANTIZED_LINEAR,
    shape=(4, 16, 32),
    weight=ElementKind.S4,
    nonlinearity=Activation.SILU,
    weight_group=32,
    adds=False,
)


@pytest.mark.parametrize(
    ("problem", "part"), [(NORM, quantization_problem(NORM)), (LINEAR, activation_problem(LINEAR))], ids=lambda p: p.op
)
def test_the_quantization_inside_a_problem_has_its_fields_and_none_of_what_makes_the_values(
    problem: Problem, part: Problem
) -> None:
    assert part.op is QuantizeKind.DYNAMIC_QUANTIZE
    for field in fields(Spec):
        expected = field.default if field.name in MAKING else getattr(problem, field.name)
        assert getattr(part, field.name) == expected, field.name


def test_a_quantized_norm_takes_each_field_from_the_norm_or_from_its_quantization() -> None:
    options = (NORM.mode, "u8", 3, 200, "bf16", True, NORM.arithmetic)
    made = quantized_spec(Spec(*[getattr(NORM, name) for name in FIELD_TYPES]), False, *options)
    assert made == Spec(*NORM.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_min": 1.0}, "expected integers q_min and q_max, got 1.0 and 200"),
        ({"q_max": True}, "expected integers q_min and q_max, got 3 and True"),
        ({"include_zero": 1}, "include_zero: expected True or False, got 1"),
        ({"element": "bf16"}, "element: expected one of ElementKind.F16, .*, got 'bf16'"),
        ({"mode": "symmetric"}, "mode: expected one of DynamicRangeMode.SYMMETRIC, .*, got 'symmetric'"),
        ({"scope": None}, "scope: expected PerTensor.*, got None"),
    ],
    ids=str,
)
def test_a_value_that_equals_a_lawful_one_but_has_another_type_is_refused(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidProblem, match=message):
        replace(SPEC, **changed)
