"""From the options of a call to its Spec, worked out once for the same options."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec

import torch

from ..core.problem import FIELD_TYPES, MAKING, Spec, dynamic_range, stored_scale_element
from ..core.scope import PerTensor, PerToken, Scope
from ..core.types import (
    Activation,
    ActivationName,
    Arithmetic,
    ArithmeticName,
    DynamicRangeMode,
    Element,
    ElementKind,
    ModeName,
    NormStyle,
    member,
)

P = ParamSpec("P")


def remembered(build: Callable[P, Spec]) -> Callable[P, Spec]:
    """`build` with a cache in front: most calls of a program have options that came before."""
    cached = lru_cache(maxsize=1024, typed=True)(build)  # typed: 1.0 and True are errors where 1 is not
    is_traced = torch.compiler.is_dynamo_compiling

    @wraps(build)
    def spec(*options: P.args, **named: P.kwargs) -> Spec:
        if not is_traced():  # torch.compile warns of caches
            try:
                return cached(*options, **named)  # type: ignore[arg-type]
            except TypeError:  # an option that has no hash: `build` says what is wrong with it
                pass
        return build(*options, **named)

    return spec


@remembered
def static_spec(
    x: Element,
    scope: Scope,
    dtype: Element,
    q_min: int | None = None,
    q_max: int | None = None,
    arithmetic: Arithmetic | ArithmeticName = Arithmetic.DIVIDE,
) -> Spec:
    """The spec of an op whose scale is given; the range is that of the integer type unless told otherwise."""
    element, kind = ElementKind.of_tensor(x, "x"), ElementKind.of(dtype, "dtype")
    low, high = kind.q_min if q_min is None else q_min, kind.q_max if q_max is None else q_max
    return Spec(element, kind, low, high, scope, arithmetic=member(Arithmetic, arithmetic, "arithmetic"))


@remembered
def dynamic_spec(
    x: Element,
    scope: Scope,
    mode: DynamicRangeMode | ModeName,
    dtype: Element,
    q_min: int | None,
    q_max: int | None,
    scale_dtype: Element | None,
    include_zero: bool,
    arithmetic: Arithmetic | ArithmeticName,
    weight: Element = ElementKind.S8,
    activation: Activation | ActivationName = Activation.NONE,
    weight_group: int = 0,
) -> Spec:
    """The spec of an op that finds its scales."""
    element, kind = ElementKind.of_tensor(x, "x"), ElementKind.of(dtype, "dtype")
    mode = member(DynamicRangeMode, mode, "mode")
    low, high = dynamic_range(kind, mode, q_min, q_max)
    return Spec(
        element,
        kind,
        low,
        high,
        scope,
        mode=mode,
        arithmetic=member(Arithmetic, arithmetic, "arithmetic"),
        scale_element=stored_scale_element(scale_dtype, element, "scale_dtype"),
        include_zero=include_zero,
        weight=ElementKind.of(weight, "weight_element"),
        nonlinearity=member(Activation, activation, "activation"),
        weight_group=weight_group,
    )


@remembered
def weight_only_spec(x: Element, weight: Element, activation: Activation | ActivationName, weight_group: int) -> Spec:
    """The spec of a linear whose activations stay floats."""
    return Spec(
        ElementKind.of_tensor(x, "x"),
        ElementKind.S8,
        ElementKind.S8.q_min,
        ElementKind.S8.q_max,
        PerTensor(),
        weight=ElementKind.of(weight, "weight_element"),
        nonlinearity=member(Activation, activation, "activation"),
        weight_group=weight_group,
    )


@remembered
def static_linear_spec(
    x_q: torch.dtype,
    dtype: Element,
    symmetric: bool,
    weight: Element,
    activation: Activation | ActivationName,
    weight_group: int = 0,
    per_token: bool = False,
) -> Spec:
    """The spec of a linear whose activations are quantized already."""
    kind = ElementKind.of_tensor(x_q, "x_q")
    weight = ElementKind.of(weight, "weight_element")
    return Spec(
        ElementKind.of(dtype, "dtype"),
        kind,
        kind.q_min,
        kind.q_max,
        PerToken() if per_token else PerTensor(),  # torch.compile cannot trace an object that is a default
        mode=DynamicRangeMode.SYMMETRIC if symmetric else DynamicRangeMode.ASYMMETRIC,
        weight=weight,
        nonlinearity=member(Activation, activation, "activation"),
        weight_group=weight_group,
    )


@remembered
def norm_spec(x: Element, style: NormStyle | str, eps: float, adds: bool) -> Spec:
    """The spec of a norm."""
    kind = ElementKind.S8  # of nothing
    return Spec(
        ElementKind.of_tensor(x, "x"),
        kind,
        kind.q_min,
        kind.q_max,
        PerToken(),
        norm=member(NormStyle, style, "style"),
        eps=eps,
        adds=adds,
    )


@remembered
def gated_spec(x: Element, activation: Activation | ActivationName, halves: bool) -> Spec:
    """The spec of the product of two tensors, one of them, the gate, after a nonlinearity."""
    kind, nonlinearity = ElementKind.S8, member(Activation, activation, "activation")
    return Spec(
        ElementKind.of_tensor(x, "gate"),
        kind,
        kind.q_min,
        kind.q_max,
        PerToken(),
        nonlinearity=nonlinearity,
        halves=halves,
    )


@remembered
def quantized_spec(
    floats: Spec,
    static: bool,
    mode: DynamicRangeMode | ModeName,
    dtype: Element,
    q_min: int | None,
    q_max: int | None,
    scale_dtype: Element | None,
    include_zero: bool,
    arithmetic: Arithmetic | ArithmeticName,
) -> Spec:
    """The spec of a norm or a gated product whose result is quantized, by a given scale or by each row's own."""
    scope: Scope = PerTensor() if static else PerToken()
    if static:
        by = static_spec(floats.element, scope, dtype, q_min, q_max, arithmetic)
    else:
        by = dynamic_spec(floats.element, scope, mode, dtype, q_min, q_max, scale_dtype, include_zero, arithmetic)
    return Spec(*[getattr(floats if name in MAKING else by, name) for name in FIELD_TYPES])
