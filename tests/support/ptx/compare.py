"""Comparisons and conversions."""

from __future__ import annotations

import numpy as np

from . import floats
from .alu import in_halves, makes, pure
from .floats import Array
from .parse import Instruction, Several, Unknown
from .registers import DTYPES, Action, Reader, allowed, put

_COMPARISONS = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_WIDEN = {"f16": floats.from_f16, "bf16": floats.from_bf16}
_NARROW = {"f16": floats.to_f16, "bf16": floats.to_bf16}


def compare(name: str, a: Array, b: Array) -> Array:
    """Without u, a comparison with NaN is false; with it, true."""
    name = _UNSIGNED.get(name, name)
    if a.dtype.kind != "f":
        return a != b if name == "ne" else _COMPARISONS[name](a, b)
    nan = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return nan if name == "nan" else ~nan
    base = name.removesuffix("u")
    result = a != b if base == "ne" else _COMPARISONS[base](a, b)
    return result | nan if name.endswith("u") else result & ~nan


_KNOWN = {*_COMPARISONS, *_UNSIGNED, "ne", "num", "nan", *(f"{name}u" for name in (*_COMPARISONS, "ne"))}
_COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@makes("setp")
def set_predicate(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, *_KNOWN, *_COMBINED)
    kind = words[-1]
    dtype, name = DTYPES[kind], words[1]
    target, first, second, *third = instruction.operands
    if isinstance(target, Several) or (kind in _WIDEN) or (kind == "pred"):
        raise Unknown(instruction.name)
    write, a, b = put(target), reader.get(first, dtype), reader.get(second, dtype)
    if not third:
        return lambda program, mask: write(program, compare(name, a(program), b(program)), mask)
    combine, c = _COMBINED[words[2]], reader.get(third[0], DTYPES["pred"])
    return lambda program, mask: write(program, combine(compare(name, a(program), b(program)), c(program)), mask)


@makes("set")
def set_word(instruction: Instruction, reader: Reader) -> Action:
    """All ones where it is true, of each half."""
    words = allowed(instruction, *_KNOWN)
    name, result, kind = words[1], words[2], words[-1]
    if result != "u32" or kind not in ("bf16x2", "f16x2"):
        raise Unknown(instruction.name)
    widen = _WIDEN[kind.removesuffix("x2")]
    ones = in_halves(lambda a, b: np.where(compare(name, widen(a), widen(b)), np.uint16(0xFFFF), np.uint16(0)))
    return pure(instruction, reader, ones, DTYPES["b32"], DTYPES["b32"])


_ROUNDINGS = ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")


@makes("cvt")
def convert(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, *_ROUNDINGS)
    target, source = words[-2:]
    rounding = words[1] if len(words) == 4 else ""
    if target in ("bf16x2", "f16x2"):
        if (rounding, source) != ("rn", "f32"):
            raise Unknown(instruction.name)
        narrow = _NARROW[target.removesuffix("x2")]

        def pair(high: Array, low: Array) -> Array:
            return narrow(low).astype(np.uint32) | (narrow(high).astype(np.uint32) << np.uint32(16))

        return pure(instruction, reader, pair, DTYPES["f32"], DTYPES["f32"])
    return pure(instruction, reader, _conversion(instruction, target, source, rounding), DTYPES[source])


def _conversion(instruction: Instruction, target: str, source: str, rounding: str):
    to, start = DTYPES[target], DTYPES[source]
    if source in _WIDEN:
        if target != "f32" or rounding:
            raise Unknown(instruction.name)
        return _WIDEN[source]
    if target in _NARROW:
        if source != "f32" or rounding != "rn":
            raise Unknown(instruction.name)
        return _NARROW[target]
    if start.kind != "f" and to.kind != "f":
        return lambda x: x.astype(to)
    if start.kind != "f":
        if rounding != "rn":
            raise Unknown(instruction.name)
        return lambda x: x.astype(to)
    if to.kind != "f":
        if not rounding.endswith("i"):
            raise Unknown(instruction.name)
        return lambda x: floats.to_integer(x, to, rounding)
    if to == start and rounding.endswith("i"):
        whole = floats.ROUNDINGS[rounding[:2]]
        return lambda x: floats.one_nan(whole(x))
    if rounding not in ("", "rn"):
        raise Unknown(instruction.name)
    return lambda x: floats.one_nan(x.astype(to))
