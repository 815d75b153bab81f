"""Triton's interpreter, made quicker, and with products of floats that add in one order on every machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np


def make_quick() -> None:
    """Look once a kernel for what to replace in Triton's language, not at each call.

    What a kernel has replaced stays so until it ends, and the functions that it calls see the same modules. So they
    need not look again; that was more than half of the time. For every kernel that this process interprets from now on.
    """
    from triton import language
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[str] = set()

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        """Names of the modules of the language that a function can reach, which is where Triton looks."""
        values = function.__globals__.values()
        return frozenset(module.__name__ for module in (language, language.core) if any(v is module for v in values))

    class Scope:
        """What a kernel has replaced, put back when it ends; a function that it calls has nothing to replace."""

        def __init__(self, function: Any) -> None:
            self.inner = None if seen_by(function) <= replaced else replace(function)
            replaced.update(seen_by(function))

        def restore(self) -> None:
            replaced.clear()
            if self.inner is not None:
                self.inner.restore()

    interpreter._patch_lang = Scope


def order_sums() -> None:
    """Add up a product of floats by rising k, as a GPU gives every element of a tile one order.

    NumPy leaves it to BLAS, whose kernels for some processors add the rows at the edge of a matrix in another order.
    """
    from triton import language
    from triton.runtime import interpreter

    multiply: Callable[..., Any] = interpreter.InterpreterBuilder.create_dot

    def numbers(x: Any) -> Any:
        """Of bf16 the interpreter keeps the bits."""
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar is language.bfloat16 else x.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype.kind != "f" or numbers(a).dtype.kind != "f":
            return multiply(self, a, b, d, *options)
        x, y = numbers(a).astype(d.data.dtype), numbers(b).astype(d.data.dtype)
        sums = np.zeros_like(d.data)
        for k in range(x.shape[-1]):
            sums += x[..., :, k, None] * y[..., None, k, :]
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
