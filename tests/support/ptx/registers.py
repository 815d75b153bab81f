"""How instructions read and write registers: arrays over the threads of a program, or of one element where a value is
the same for all of them. An array is never changed, so that registers may share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .floats import Array
from .memory import PARAMETERS, SHARED
from .parse import Instruction, Kernel, Name, Number, Operand, Register, Unknown, float_value

if TYPE_CHECKING:
    from .machine import Program

Get = Callable[["Program"], Array]
Mask = Array | None
#: What an instruction does to a program, for the threads of a mask; None: for all of them.
Action = Callable[["Program", Mask], None]

UNSIGNED = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
DTYPES = {f"{letter}{8 * size}": np.dtype(f"{kind}{size}") for letter, kind in zip("bus", "uui", strict=True)
          for size in (1, 2, 4, 8)}  # fmt: skip
DTYPES |= {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)}
#: 16-bit floats are kept as bits.
DTYPES |= {"f16": np.dtype("u2"), "bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")}
DTYPES |= {"s16x2": np.dtype("u4"), "u16x2": np.dtype("u4")}


class Reader:
    """Finds the operands of one kernel's instructions."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.symbols = {"global_smem": SHARED}
        at = 0
        for name, size in kernel.parameters:
            at = -(-at // size) * size if size <= 8 else -(-at // 64) * 64
            self.symbols[name] = PARAMETERS + at
            at += size
        self.parameter_bytes = at

    def get(self, operand: Operand, dtype: np.dtype) -> Get:
        """The operand's values, as bits of this type."""
        if isinstance(operand, Register):
            return _register(operand, dtype)
        if isinstance(operand, Number):
            constant = _constant(operand, dtype)
            return lambda program: constant
        if isinstance(operand, Name) and operand.text.startswith("%"):
            name = operand.text
            return lambda program: program.special(name).astype(dtype)
        if isinstance(operand, Name) and operand.text in self.symbols:
            address = np.array([self.symbols[operand.text]], np.uint64).astype(dtype)
            return lambda program: address
        raise Unknown(f"the operand {operand}")


def _register(operand: Register, dtype: np.dtype) -> Get:
    slot, bits = operand.slot, 8 * dtype.itemsize
    if dtype.kind == "b":
        if operand.negated:
            return lambda program: ~program.registers[slot]
        return lambda program: program.registers[slot]
    if operand.bits == bits:
        return lambda program: program.registers[slot].view(dtype)
    if operand.bits > bits:
        narrow = UNSIGNED[bits]
        return lambda program: program.registers[slot].astype(narrow).view(dtype)
    raise Unknown(f"a register of {operand.bits} bits is read as {bits}")


def _constant(number: Number, dtype: np.dtype) -> Array:
    if dtype.kind == "b":
        return np.array([bool(number.value)])
    if dtype.kind == "f" and number.float_bits:
        return np.array([float_value(number)], dtype)
    bits = 8 * dtype.itemsize
    return np.array([number.value & (1 << bits) - 1], UNSIGNED[bits]).view(dtype)


def put(operand: Operand) -> Callable[[Program, Array, Mask], None]:
    """Writes values to a register; integers that are narrower are extended by their sign, if they have one."""
    if isinstance(operand, Name) and operand.text == "_":
        return lambda program, value, mask: None
    if not isinstance(operand, Register):
        raise Unknown(f"{operand} is written to")
    slot, unsigned = operand.slot, UNSIGNED[operand.bits]
    wide = np.dtype(f"i{unsigned.itemsize}") if operand.bits > 1 else unsigned

    def write(program: Program, value: Array, mask: Mask) -> None:
        if value.dtype != unsigned:
            if value.dtype.itemsize > unsigned.itemsize:
                raise Unknown(f"{8 * value.dtype.itemsize} bits are written to a register of {8 * unsigned.itemsize}")
            if value.dtype.kind == "i" and value.dtype.itemsize < unsigned.itemsize:
                value = value.astype(wide)
            value = value.view(unsigned) if value.dtype.itemsize == unsigned.itemsize else value.astype(unsigned)
        old = program.registers[slot]
        program.registers[slot] = value if mask is None else np.where(mask, value, old)

    return write


def allowed(instruction: Instruction, *known: str) -> list[str]:
    """The words of the instruction's name, all of them known: what is not would be ignored in silence."""
    words = instruction.words
    if missing := [word for word in words[1:] if word not in known and word not in DTYPES]:
        raise Unknown(f".{missing[0]} of {instruction.name}")
    return words
