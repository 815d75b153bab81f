"""Instructions that the threads of a warp execute together."""

from __future__ import annotations

import numpy as np

from . import floats
from .alu import makes
from .floats import Array
from .memory import Fault
from .parse import Instruction, Register, Several, Unknown
from .registers import DTYPES, Action, Reader, allowed, put
from .transfers import address_of


def whole_warps(program, mask) -> Array:
    """The warps that take part, all of each."""
    if mask is None:
        return np.arange(program.threads // 32)
    by_warp = mask.reshape(-1, 32)
    if (by_warp.any(1) != by_warp.all(1)).any():
        raise Fault("expected all threads of a warp to take part")
    return np.flatnonzero(by_warp.all(1))


def fragments(program, gets, warps: Array, dtype: np.dtype) -> Array:
    """What the threads of these warps hold: [warp, row of threads (8), column (4), register, element of it]."""
    words = np.stack([program.spread(get(program)).reshape(-1, 32)[warps] for get in gets], axis=-1)
    return np.ascontiguousarray(words).view(dtype).reshape(len(warps), 8, 4, len(gets), -1)


def spread_result(program, values: Array, warps: Array, writes, mask) -> None:
    """[warp, thread, register] to the registers."""
    for i, write in enumerate(writes):
        result = np.zeros((program.threads // 32, 32), values.dtype)
        result[warps] = values[:, :, i]
        write(program, result.reshape(-1), mask)


@makes("mma")
def multiply(instruction: Instruction, reader: Reader) -> Action:
    """m16n8k32 of s8. Thread 4g + t has rows g and g + 8 of the left operand and column g of the right one, at
    4t .. 4t + 3 and 16 further; of the sums, columns 2t and 2t + 1 of these rows. Or m16n8k16 of 16-bit floats, at
    2t, 2t + 1 and 8 further: 16 products and a sum in f64, rounded once, as those of wgmma."""
    words = allowed(instruction, "sync", "aligned", "m16n8k32", "m16n8k16", "row", "col", "satfinite")
    if words[-3] in ("bf16", "f16"):
        return _multiply_floats(instruction, reader, words)
    if words[-4:] != ["s32", "s8", "s8", "s32"] or not all(isinstance(x, Several) for x in instruction.operands):
        raise Unknown(instruction.name)
    target, *sources = (operand.parts for operand in instruction.operands)
    writes, saturates = [put(part) for part in target], "satfinite" in words
    left, right, start = ([reader.get(part, DTYPES["b32"]) for part in parts] for parts in sources)

    def run(program, mask) -> None:
        warps = whole_warps(program, mask)
        count = len(warps)
        a = fragments(program, left, warps, np.int8).reshape(count, 8, 4, 2, 2, 4)  # k half, row half
        a = a.transpose(0, 4, 1, 3, 2, 5).reshape(count, 16, 32)
        b = fragments(program, right, warps, np.int8).transpose(0, 3, 2, 4, 1).reshape(count, 32, 8)
        c = fragments(program, start, warps, np.int32).reshape(count, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4)
        # 32 products of bytes are exact in f32.
        product = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.int64).reshape(count, 2, 8, 4, 2)
        total = product + c
        if saturates:
            total = np.clip(total, -(2**31), 2**31 - 1)
        values = total.astype(np.int32).transpose(0, 2, 3, 1, 4).reshape(count, 32, 4)
        spread_result(program, values, warps, writes, mask)

    return run


def _multiply_floats(instruction: Instruction, reader: Reader, words: list[str]) -> Action:
    kind = words[-3]
    if words[-4:] != ["f32", kind, kind, "f32"] or "m16n8k16" not in words or "satfinite" in words:
        raise Unknown(instruction.name)
    if not all(isinstance(x, Several) for x in instruction.operands):
        raise Unknown(instruction.name)
    target, *sources = (operand.parts for operand in instruction.operands)
    writes = [put(part) for part in target]
    left, right, start = ([reader.get(part, DTYPES["b32"]) for part in parts] for parts in sources)

    def run(program, mask) -> None:
        warps = whole_warps(program, mask)
        count = len(warps)
        a = fragments(program, left, warps, np.uint8).reshape(count, 8, 4, 2, 2, 4)  # k half, row half
        a = elements(a.transpose(0, 4, 1, 3, 2, 5).reshape(count, 16, 32), kind)
        b = fragments(program, right, warps, np.uint8).transpose(0, 1, 3, 2, 4).reshape(count, 8, 32)
        c = fragments(program, start, warps, np.float32).reshape(count, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4)
        product = (a @ elements(b, kind).transpose(0, 2, 1)).reshape(count, 2, 8, 4, 2)
        values = (product + c).astype(np.float32).transpose(0, 2, 3, 1, 4).reshape(count, 32, 4)
        spread_result(program, values, warps, writes, mask)

    return run


def elements(data: Array, kind: str) -> Array:
    """The values of bytes, the last axis, in f64."""
    if kind == "s8":
        return data.view(np.int8).astype(np.float64)
    held = np.ascontiguousarray(data).view(np.uint16)
    return (floats.from_f16(held) if kind == "f16" else floats.from_bf16(held)).astype(np.float64)


@makes("ldmatrix")
def load_matrices(instruction: Instruction, reader: Reader) -> Action:
    """Matrices of 8 rows of 16 bytes, a row at the address of each thread, 8 threads for a matrix; of each, thread
    4g + t gets the 4 bytes t of row g, or transposed, rows 2t and 2t + 1 of column g."""
    words = allowed(instruction, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared")
    target, address = instruction.operands
    if not isinstance(target, Several) or words[-1] != "b16":
        raise Unknown(instruction.text)
    writes = [put(part) for part in target.parts]
    count = len(writes)
    where = address_of(address, reader, _bits(address))

    def run(program, mask) -> None:
        warps = whole_warps(program, mask)
        rows = program.spread(where(program)).reshape(-1, 32)[warps, : 8 * count].reshape(-1)
        data = program.shared.read(rows, 16, np.repeat(warps, 8 * count))
        matrices = data.view(np.uint16).reshape(len(warps), count, 8, 8)
        if "trans" in words:
            matrices = matrices.transpose(0, 1, 3, 2)
        values = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(warps), count, 32)
        spread_result(program, values.transpose(0, 2, 1), warps, writes, mask)

    return run


@makes("stmatrix")
def store_matrices(instruction: Instruction, reader: Reader) -> Action:
    """The opposite of ldmatrix."""
    words = allowed(instruction, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared")
    address, source = instruction.operands
    if not isinstance(source, Several) or words[-1] != "b16":
        raise Unknown(instruction.text)
    gets = [reader.get(part, DTYPES["b32"]) for part in source.parts]
    count = len(gets)
    where = address_of(address, reader, _bits(address))

    def run(program, mask) -> None:
        warps = whole_warps(program, mask)
        rows = program.spread(where(program)).reshape(-1, 32)[warps, : 8 * count].reshape(-1)
        held = np.stack([program.spread(get(program)).reshape(-1, 32)[warps] for get in gets], axis=1)
        matrices = np.ascontiguousarray(held).view(np.uint16).reshape(len(warps), count, 8, 8)
        if "trans" in words:
            matrices = matrices.transpose(0, 1, 3, 2)
        data = np.ascontiguousarray(matrices).view(np.uint8).reshape(len(rows), 16)
        program.shared.write(rows, data, np.repeat(warps, 8 * count))

    return run


def _bits(address) -> int:
    return address.base.bits if isinstance(address.base, Register) else 64


@makes("shfl")
def shuffle(instruction: Instruction, reader: Reader) -> Action:
    """Values of other threads of the warp, or of parts of it; beyond a part's end, the thread's own."""
    words = allowed(instruction, "sync", "idx", "bfly", "up", "down")
    mode, word = words[2], DTYPES["b32"]
    target, source, other, limits, members = instruction.operands
    if isinstance(target, Several):
        raise Unknown(instruction.text)
    write, get = put(target), reader.get(source, word)
    which, limit, named = (reader.get(operand, word) for operand in (other, limits, members))

    def run(program, mask) -> None:
        lane = np.arange(program.threads, dtype=np.int64) % 32
        active = np.zeros(program.threads, bool)
        active[program.active(mask)] = True
        expected = program.spread(named(program)).astype(np.int64)
        present = np.repeat((active.reshape(-1, 32) << np.arange(32)).sum(1), 32)
        if ((expected & ~present)[active] != 0).any():
            raise Fault("a thread that shfl names does not take part")
        by, packed = (program.spread(x(program)).astype(np.int64) for x in (which, limit))
        clamp, part = packed & 31, packed >> 8 & 31
        last = (lane & part) | (clamp & ~part)
        first = lane & part
        wanted = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~part)}[mode]
        inside = wanted >= last if mode == "up" else wanted <= last
        chosen = np.where(inside, wanted, lane)
        value = program.spread(get(program)).reshape(-1, 32)
        write(program, np.take_along_axis(value, chosen.reshape(-1, 32), 1).reshape(-1), mask)

    return run


@makes("redux")
def reduce(instruction: Instruction, reader: Reader) -> Action:
    """The sum of an integer over all threads of the warp, for each of them."""
    allowed(instruction, "sync", "add")
    target, source, members = instruction.operands
    word = DTYPES["b32"]
    if isinstance(target, Several):
        raise Unknown(instruction.text)
    write, get, named = put(target), reader.get(source, word), reader.get(members, word)

    def run(program, mask) -> None:
        active = np.zeros(program.threads, bool)
        active[program.active(mask)] = True
        if (program.spread(named(program))[active] != 0xFFFFFFFF).any() or not active.reshape(-1, 32).all(1).all():
            raise Fault("expected a sum over all threads of a warp, and all of them to take part")
        sums = program.spread(get(program)).reshape(-1, 32).sum(1, dtype=word)
        write(program, np.repeat(sums, 32), mask)

    return run
