"""A Spec as plain arguments of a torch operator: schema, encoding and decoding, all derived from its fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from ..core.errors import InvalidProblem
from ..core.problem import FIELD_TYPES, Spec
from ..core.scope import SCOPES, Scope
from ..core.types import member


class _Codec(NamedTuple):
    """One field of a Spec as one or several arguments."""

    field: str
    #: The arguments as a schema declares them.
    declared: tuple[str, ...]
    encode: Callable[[Any], tuple[Any, ...]]
    decode: Callable[..., Any]


def _codec(field: str, kind: type) -> _Codec:
    if kind is Scope:
        return _Codec(field, (f"str {field}", "int axis", "int group_size"), _encode_scope, _decode_scope)
    if issubclass(kind, Enum):
        return _Codec(field, (f"str {field}",), _encode_member, lambda value: member(kind, value, field))
    return _Codec(field, (f"{kind.__name__} {field}",), _encode_plain, lambda value: value)


def _encode_plain(value: Any) -> tuple[Any, ...]:
    return (value,)


def _encode_member(value: Enum) -> tuple[Any, ...]:
    return (value.value,)


def _encode_scope(scope: Scope) -> tuple[Any, ...]:
    return scope.name, getattr(scope, "axis", 0), getattr(scope, "size", 0)


def _decode_scope(name: str, axis: int, size: int) -> Scope:
    kind = next((kind for kind in SCOPES if kind.name == name), None)
    if kind is None:
        raise InvalidProblem(f"scope: expected one of {', '.join(kind.name for kind in SCOPES)}, got {name!r}")
    given = {"axis": axis, "size": size}
    return kind(**{field.name: given[field.name] for field in fields(kind)})


_CODECS = tuple([_codec(field, kind) for field, kind in FIELD_TYPES.items()])
#: The arguments that stand for a Spec, as schemas declare them, and how many they are.
DECLARED = ", ".join(argument for codec in _CODECS for argument in codec.declared)
COUNT = sum(len(codec.declared) for codec in _CODECS)


def encode(spec: Spec) -> tuple[Any, ...]:
    """The arguments that stand for a spec."""
    arguments: list[Any] = []
    for codec in _CODECS:
        arguments += codec.encode(getattr(spec, codec.field))
    return tuple(arguments)


@lru_cache(maxsize=1024, typed=True)
def decode(*arguments: Any) -> Spec:
    """Undo `encode`."""
    values = iter(arguments)
    return Spec(*[codec.decode(*[next(values) for _ in codec.declared]) for codec in _CODECS])
