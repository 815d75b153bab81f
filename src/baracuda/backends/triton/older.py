"""What Triton 3.6 lacks of 3.7, for kernels whose constants and places travel as named tuples.

3.6 fails on a device function that is given a named tuple of constants, or that returns one with a None in it. Both
changes turn an error into what 3.7 does; code that compiles without them compiles to the same.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.compiler.code_generator import CodeGenerator
from triton.language.core import base_value, constexpr
from triton.language.semantic import TritonSemantic


def adapt() -> None:
    """Bring Triton 3.6 to what 3.7 does; 3.7 and later are left alone."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not hasattr(CodeGenerator, "adapted"):
        CodeGenerator.adapted = True
        _take_constants_as_arguments()
        _return_none_in_tuples()


def _take_constants_as_arguments() -> None:
    call = CodeGenerator.call_JitFunction

    def constant(value: Any) -> Any:
        parts = value if isinstance(value, tuple) else (value,)
        plain = isinstance(value, tuple | str) and not any(isinstance(part, base_value) for part in parts)
        return constexpr(value) if plain else value

    def call_function(self: Any, function: Any, args: Any, kwargs: Any, caller_context: Any = None) -> Any:
        named = {name: constant(value) for name, value in kwargs.items()}
        return call(self, function, [constant(value) for value in args], named, caller_context)

    CodeGenerator.call_JitFunction = call_function


def _return_none_in_tuples() -> None:
    to_tensor = TritonSemantic.to_tensor

    def convert(self: Any, value: Any, check_type: bool = True) -> Any:
        nothing = isinstance(value, constexpr) and value.value is None
        return value if nothing else to_tensor(self, value, check_type)

    TritonSemantic.to_tensor = convert
