"""Quantized: integers with their scales, and what they stand for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core import scope as scopes
from ..core.errors import InvalidProblem
from ..core.notebook import html_table
from ..core.scope import Scope
from ..core.types import Element, ElementKind

__all__ = ["Quantized"]


class Quantized(tuple[Tensor, Tensor, Tensor | None]):
    """What `dynamic_quantize` returns: the tuple `(q, scale, zero_point)`, which knows how to become floats again.

    `zero_point` is None when symmetric. `scope` says which elements share a scale, `element` what `q` holds, `dtype`
    the type that was quantized and `size` the length of its last axis, which packed integers do not tell.
    """

    scope: Scope | None = None
    element: ElementKind
    dtype: torch.dtype = torch.float32
    size: int | None = None

    def __new__(
        cls,
        q: Tensor,
        scale: Tensor,
        zero_point: Tensor | None = None,
        *,
        scope: Scope | None = None,
        element: ElementKind | None = None,
        dtype: torch.dtype = torch.float32,
        size: int | None = None,
    ) -> Quantized:
        self = super().__new__(cls, (q, scale, zero_point))
        self.scope, self.dtype, self.size = scope, dtype, size
        self.element = ElementKind.of(q.dtype) if element is None else element
        return self

    @property
    def q(self) -> Tensor:
        """The integers; 4-bit ones in pairs, a byte each."""
        return self[0]

    @property
    def scale(self) -> Tensor:
        """One for each segment of the scope."""
        return self[1]

    @property
    def zero_point(self) -> Tensor | None:
        """The integer that stands for 0, for each segment; None when symmetric."""
        return self[2]

    def __repr__(self) -> str:
        parts = f"q={self.q}, scale={self.scale}, zero_point={self.zero_point}"
        return f"Quantized({parts}, scope={self.scope}, element={self.element.value})"

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def dequantize(self, *, dtype: Element | None = None, out: Tensor | None = None) -> Tensor:
        """(q - zero_point) * scale, in the type that was quantized unless another is asked for."""
        from .elementwise import dequantize

        if self.scope is None:
            raise InvalidProblem(
                "dequantize: this Quantized was made without a scope; make it with scope=PerToken(), or call "
                "baracuda.dequantize(q, scale, zero_point, scope=...)"
            )
        return dequantize(
            self.q,
            self.scale,
            self.zero_point,
            scope=self.scope,
            element=self.element,
            dtype=self.dtype if dtype is None else dtype,
            size=self.size if self.element.is_packed else None,
            out=out,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the integers, the scales and the zero points."""
        return sum(part.nbytes for part in self if part is not None)

    def _repr_html_(self) -> str:
        shape = [*self.q.shape[:-1], self.size] if self.element.is_packed and self.size else list(self.q.shape)
        floats = torch.Size(shape).numel() * self.dtype.itemsize
        rows = [
            ("elements", f"{self.element.value} {shape} on {self.q.device}"),
            ("scope", repr(self.scope)),
            ("scale", f"{_kind(self.scale)}, from {_least(self.scale):.3g} to {_most(self.scale):.3g}"),
            ("zero point", "none: symmetric" if self.zero_point is None else _kind(self.zero_point)),
            ("made from", str(self.dtype).removeprefix("torch.")),
            ("bytes", f"{self.nbytes:,}, {self.nbytes / max(1, floats):.0%} of the {floats:,} before"),
        ]
        return html_table("Quantized", rows)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _least(tensor: Tensor) -> float:
    return float(tensor.min()) if tensor.numel() else float("nan")


def _most(tensor: Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else float("nan")


# -- torch's trees: vmap, torch.export and checkpoints take it apart and put it together again --------------------

_NAMES = ("q", "scale", "zero_point")
_Context = tuple[Scope | None, ElementKind, torch.dtype, int | None]


def _flatten(value: Quantized) -> tuple[list[Any], _Context]:
    return list(value), (value.scope, value.element, value.dtype, value.size)


def _unflatten(parts: Any, context: _Context) -> Quantized:
    scope, element, dtype, size = context
    made: Quantized = tuple.__new__(Quantized, parts)  # the parts may be anything: torch puts markers into trees
    made.scope, made.element, made.dtype, made.size = scope, element, dtype, size
    return made


def _flatten_with_keys(value: Quantized) -> tuple[list[tuple[Any, Any]], _Context]:
    parts, context = _flatten(value)
    return [(pytree.GetAttrKey(name), part) for name, part in zip(_NAMES, parts, strict=True)], context


def _to_json(context: _Context) -> Any:
    scope, element, dtype, size = context
    options: Any = scope
    named = None if scope is None else [type(scope).__name__, asdict(options)]
    return [named, element.value, ElementKind.of(dtype).value, size]


def _from_json(written: Any) -> _Context:
    named, element, dtype, size = written
    scope = None if named is None else getattr(scopes, named[0])(**named[1])
    return scope, ElementKind.of(element), ElementKind.of(dtype).dtype, size


pytree.register_pytree_node(
    Quantized,
    _flatten,
    _unflatten,
    serialized_type_name="baracuda.Quantized",
    to_dumpable_context=_to_json,
    from_dumpable_context=_from_json,
    flatten_with_keys_fn=_flatten_with_keys,
)
