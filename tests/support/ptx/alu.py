"""Instructions from registers to registers, each thread for itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import floats
from .floats import Array
from .parse import BITS, Instruction, Number, Operand, Several, Unknown
from .registers import DTYPES, UNSIGNED, Action, Reader, allowed, put

Maker = Callable[[Instruction, Reader], Action]
MAKERS: dict[str, Maker] = {}


def makes(*names: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(names, maker))
        return maker

    return register


def pure(instruction: Instruction, reader: Reader, operation: Callable[..., Array], *dtypes: np.dtype) -> Action:
    """The first operand from the others, which have these types."""
    write = put(instruction.operands[0])
    gets = [reader.get(operand, dtype) for operand, dtype in zip(instruction.operands[1:], dtypes, strict=True)]
    if len(gets) == 2:
        first, second = gets
        return lambda program, mask: write(program, operation(first(program), second(program)), mask)
    return lambda program, mask: write(program, operation(*(get(program) for get in gets)), mask)


def in_halves(operation: Callable[..., Array]) -> Callable[..., Array]:
    """An operation on 16 bits, of both halves of words."""

    def both(*words: Array) -> Array:
        low = operation(*((word & np.uint32(0xFFFF)).astype(np.uint16) for word in words))
        high = operation(*((word >> np.uint32(16)).astype(np.uint16) for word in words))
        return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

    return both


_PLAIN = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_ONE = {"f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80)}
_SIGN = np.uint16(0x8000)


def _arithmetic_16(operation: str, kind: str) -> Callable[..., Array]:
    """As fma: a + b is a * 1 + b, and a * b is a * b + -0."""
    if operation == "fma":
        return lambda a, b, c: floats.fma_16(a, b, c, kind)
    if operation == "mul":
        return lambda a, b: floats.fma_16(a, b, np.full_like(b, _SIGN), kind)
    flip = _SIGN if operation == "sub" else np.uint16(0)
    return lambda a, b: floats.fma_16(a, np.full_like(a, _ONE[kind]), b ^ flip, kind)


@makes("add", "sub", "mul", "mad", "fma")
def arithmetic(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, "lo", "hi", "wide", "rn")
    operation, kind = words[0], words[-1]
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        half = kind.removesuffix("x2")
        single = _arithmetic_16(operation, half)
        used = in_halves(single) if kind.endswith("x2") else single
        return pure(instruction, reader, used, *[DTYPES[kind]] * (3 if operation == "fma" else 2))
    dtype = DTYPES[kind]
    if operation == "fma":
        if kind != "f32":
            raise Unknown(instruction.name)
        return pure(instruction, reader, floats.fma_f32, dtype, dtype, dtype)
    if dtype.kind == "f":
        if operation == "mad":
            raise Unknown(instruction.name)
        plain = _PLAIN[operation]
        return pure(instruction, reader, lambda a, b: floats.one_nan(plain(a, b)), dtype, dtype)
    if operation in ("add", "sub"):
        plain, same = _PLAIN[operation], UNSIGNED[BITS[kind]]
        return pure(instruction, reader, plain, same, same)
    return _product(instruction, reader, words, dtype)


def _product(instruction: Instruction, reader: Reader, words: list[str], dtype: np.dtype) -> Action:
    bits = 8 * dtype.itemsize
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if bits < 64 else None
    if "lo" in words:
        dtype = UNSIGNED[bits]  # which wraps around
        multiply, result = np.multiply, dtype
    elif wide is None:
        raise Unknown(instruction.name)
    elif "wide" in words:
        multiply, result = (lambda a, b: a.astype(wide) * b.astype(wide)), wide
    else:
        multiply, result = (lambda a, b: (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(dtype)), dtype
    if words[0] == "mul":
        return pure(instruction, reader, multiply, dtype, dtype)
    return pure(instruction, reader, lambda a, b, c: multiply(a, b) + c, dtype, dtype, result)


@makes("div", "rem")
def division(instruction: Instruction, reader: Reader) -> Action:
    """Of integers, rounded towards zero; of floats, rounded once."""
    words = allowed(instruction, "rn")
    dtype = DTYPES[words[-1]]
    if dtype.kind == "f":
        if words[:2] != ["div", "rn"]:
            raise Unknown(instruction.name)
        return pure(instruction, reader, lambda a, b: floats.one_nan(a / b), dtype, dtype)
    # In Python's integers, since NumPy's divisions round down; 0 is what a division by zero gives here.
    quotient = np.frompyfunc(lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0, 2, 1)

    def divide(a: Array, b: Array) -> Array:
        ratio = quotient(a.astype(object), b.astype(object))
        return np.asarray(ratio if words[0] == "div" else a - ratio * b, dtype)

    return pure(instruction, reader, divide, dtype, dtype)


@makes("rcp")
def inverse(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, "approx", "ftz", "rn")
    dtype = DTYPES[words[-1]]
    if words[1:-1] == ["rn"]:
        return pure(instruction, reader, lambda x: floats.one_nan(dtype.type(1) / x), dtype)
    if instruction.name != "rcp.approx.ftz.f32":
        raise Unknown(instruction.name)
    return pure(instruction, reader, floats.reciprocal, dtype)


@makes("shl", "shr")
def shift(instruction: Instruction, reader: Reader) -> Action:
    """Shifts by the width and more leave nothing but the sign."""
    words = allowed(instruction)
    dtype = DTYPES[words[-1]]
    bits = 8 * dtype.itemsize

    def left(x: Array, by: Array) -> Array:
        return np.where(by < bits, x << (by % bits).astype(dtype), dtype.type(0))

    def right(x: Array, by: Array) -> Array:
        if dtype.kind == "i":
            return x >> np.minimum(by, bits - 1).astype(dtype)
        return np.where(by < bits, x >> (by % bits).astype(dtype), dtype.type(0))

    return pure(instruction, reader, left if words[0] == "shl" else right, dtype, DTYPES["u32"])


@makes("shf")
def funnel_shift(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, "l", "r", "wrap", "clamp")
    word = DTYPES["u32"]

    def funnel(low: Array, high: Array, by: Array) -> Array:
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        amount = (by % 32 if "wrap" in words else np.minimum(by, 32)).astype(np.uint64)
        if "l" in words:
            return ((both << amount) >> np.uint64(32)).astype(word)
        return (both >> amount).astype(word)

    return pure(instruction, reader, funnel, word, word, word)


_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@makes("and", "or", "xor", "not")
def logic(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction)
    dtype = DTYPES[words[-1]]
    if words[0] == "not":
        return pure(instruction, reader, np.invert, dtype)
    return pure(instruction, reader, _LOGIC[words[0]], dtype, dtype)


@makes("lop3")
def any_logic(instruction: Instruction, reader: Reader) -> Action:
    """Bit 4a + 2b + c of the table, for the bits of a, b and c."""
    allowed(instruction)
    table = instruction.operands[4]
    if not isinstance(table, Number):
        raise Unknown(f"{table} as a table")
    chosen, word = table.value, DTYPES["b32"]

    def combine(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros_like(a & b & c)
        for i in range(8):
            if chosen >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    short = Instruction(instruction.name, instruction.operands[:4], None, instruction.line, instruction.text)
    return pure(short, reader, combine, word, word, word)


@makes("prmt")
def permute(instruction: Instruction, reader: Reader) -> Action:
    """Byte i of the result is the one of eight that a nibble of the selector names, or its sign."""
    allowed(instruction)
    word = DTYPES["b32"]

    def pick(a: Array, b: Array, selector: Array) -> Array:
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros((), word)
        for i in range(4):
            nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
            byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64))).astype(np.uint8)
            sign = (byte.view(np.int8) >> np.int8(7)).view(np.uint8)
            byte = np.where(nibble > 7, sign, byte)
            result = result | (byte.astype(word) << np.uint32(8 * i))
        return result

    return pure(instruction, reader, pick, word, word, word)


@makes("bfe", "bfi")
def bit_field(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction)
    dtype, index = DTYPES[words[-1]], DTYPES["u32"]
    bits = 8 * dtype.itemsize

    def ones(count: Array) -> Array:
        count = np.minimum(count & np.uint32(255), bits).astype(np.uint64)
        full = np.uint64(2**64 - 1)
        return np.where(count == 0, np.uint64(0), full >> (np.uint64(64) - np.maximum(count, 1).astype(np.uint64)))

    def extract(x: Array, start: Array, count: Array) -> Array:
        start, count = start & np.uint32(255), count & np.uint32(255)
        inside = np.minimum(start, bits - 1)
        shifted = np.where(start < bits, x.astype(np.int64) >> inside.astype(np.int64), 0)
        field = shifted.view(np.uint64) & ones(count)
        if dtype.kind == "i":
            last = np.minimum(start.astype(np.int64) + count - 1, bits - 1)
            sign = (x.astype(np.int64) >> np.maximum(last, 0)) & 1
            field = np.where((sign == 1) & (count > 0), field | ~ones(count), field)
        return field.astype(UNSIGNED[bits])

    def insert(a: Array, b: Array, start: Array, count: Array) -> Array:
        start = (start & np.uint32(255)).astype(np.uint64)
        mask = np.where(start < bits, ones(count) << np.minimum(start, np.uint64(63)), np.uint64(0))
        placed = a.astype(np.uint64) << np.minimum(start, np.uint64(63))
        return ((placed & mask) | (b.astype(np.uint64) & ~mask)).astype(UNSIGNED[bits])

    if words[0] == "bfe":
        if bits == 64:
            raise Unknown(instruction.name)
        return pure(instruction, reader, extract, dtype, index, index)
    return pure(instruction, reader, insert, dtype, dtype, index, index)


@makes("min", "max")
def extreme(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, "NaN")
    dtype, kind = DTYPES[words[-1]], words[-1].removesuffix("x2")
    if kind in ("f16", "bf16"):
        widen, narrow = (floats.from_f16, floats.to_f16) if kind == "f16" else (floats.from_bf16, floats.to_bf16)
        wide = floats.least if words[0] == "min" else floats.largest
        nan = "NaN" in words

        def single(a: Array, b: Array) -> Array:
            return narrow(wide(widen(a), widen(b), nan))

        return pure(instruction, reader, in_halves(single) if words[-1].endswith("x2") else single, dtype, dtype)
    if kind in ("s16", "u16") and words[-1].endswith("x2"):
        half, pick = DTYPES[kind], np.minimum if words[0] == "min" else np.maximum
        both = in_halves(lambda a, b: pick(a.view(half), b.view(half)).view(np.uint16))
        return pure(instruction, reader, both, dtype, dtype)
    if dtype.kind == "f":
        of_floats = floats.least if words[0] == "min" else floats.largest
        nan = "NaN" in words
        return pure(instruction, reader, lambda a, b: of_floats(a, b, nan), dtype, dtype)
    return pure(instruction, reader, np.minimum if words[0] == "min" else np.maximum, dtype, dtype)


@makes("abs", "neg")
def sign(instruction: Instruction, reader: Reader) -> Action:
    """Of a float, its sign bit alone changes."""
    words = allowed(instruction)
    dtype = DTYPES[words[-1]]
    if dtype.kind == "f" or "f16" in words[-1]:
        same = UNSIGNED[8 * dtype.itemsize]
        top = same.type(0x80008000 if words[-1].endswith("x2") else 1 << 8 * dtype.itemsize - 1)
        change = (lambda x: x & ~top) if words[0] == "abs" else (lambda x: x ^ top)
        return pure(instruction, reader, change, same)
    return pure(instruction, reader, np.abs if words[0] == "abs" else np.negative, dtype)


@makes("mov")
def move(instruction: Instruction, reader: Reader) -> Action:
    """Also between a register and its parts, the lowest first."""
    dtype = DTYPES[allowed(instruction)[-1]]
    target, source = instruction.operands
    if isinstance(source, Several):
        return _joined(target, source, dtype, reader)
    get = reader.get(source, dtype if dtype.kind == "b" else UNSIGNED[8 * dtype.itemsize])
    if not isinstance(target, Several):
        write = put(target)
        return lambda program, mask: write(program, get(program), mask)
    bits = 8 * dtype.itemsize // len(target.parts)
    writes, narrow = [put(part) for part in target.parts], UNSIGNED[bits]

    def parts(program, mask) -> None:
        value = get(program)
        for i, write in enumerate(writes):
            write(program, (value >> value.dtype.type(i * bits)).astype(narrow), mask)

    return parts


def _joined(target: Operand, source: Several, dtype: np.dtype, reader: Reader) -> Action:
    bits = 8 * dtype.itemsize // len(source.parts)
    gets, write = [reader.get(part, UNSIGNED[bits]) for part in source.parts], put(target)
    whole = UNSIGNED[8 * dtype.itemsize]

    def join(program, mask) -> None:
        value = np.zeros(1, whole)
        for i, get in enumerate(gets):
            value = value | (get(program).astype(whole) << whole.type(i * bits))
        write(program, value, mask)

    return join


@makes("cvta")
def space(instruction: Instruction, reader: Reader) -> Action:
    """Addresses of all spaces are apart here, so they are the same in each."""
    allowed(instruction, "to", "global", "param")
    return pure(instruction, reader, lambda address: address, DTYPES["u64"])


@makes("selp")
def select(instruction: Instruction, reader: Reader) -> Action:
    dtype = UNSIGNED[BITS[allowed(instruction)[-1]]]
    return pure(instruction, reader, lambda a, b, chosen: np.where(chosen, a, b), dtype, dtype, DTYPES["pred"])
