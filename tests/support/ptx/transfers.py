"""Loads and stores, each thread for itself."""

from __future__ import annotations

import numpy as np

from .alu import makes
from .floats import Array
from .memory import PARAMETERS
from .parse import BITS, Address, Instruction, Name, Operand, Several, Unknown
from .registers import DTYPES, UNSIGNED, Action, Get, Reader, allowed, put

#: They say where copies are kept, and change no value.
_CACHES = ("ca", "cg", "cs", "cv", "wb", "wt", "nc")


def address_of(operand: Operand, reader: Reader, bits: int) -> Get:
    """The address in brackets, of 64 bits whatever the space's have."""
    if not isinstance(operand, Address):
        raise Unknown(f"{operand} as an address")
    base, offset = reader.get(operand.base, UNSIGNED[bits]), np.uint64(operand.offset % 2**64)
    return lambda program: base(program).astype(np.uint64) + offset


def _parts(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Several) else (operand,)


@makes("ld")
def load(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, "global", "shared", "param", "v2", "v4", *_CACHES)
    kind, (target, address, *rest) = words[-1], instruction.operands
    dtype, writes = DTYPES[kind], [put(part) for part in _parts(target)]
    if rest or len(writes) != _count(words):
        raise Unknown(instruction.text)
    size = dtype.itemsize * len(writes)
    if words[1] == "param":
        return _parameter(instruction, reader, dtype)
    shared = words[1] == "shared"
    where = address_of(address, reader, _address_bits(address))

    def run(program, mask) -> None:
        active, places = program.active(mask), program.spread(where(program))
        if shared:
            found = program.shared.read(places[active], size, program.warps[active])
        else:
            found = program.memory.read(places[active], size)
        values = np.zeros((program.threads, len(writes)), dtype)
        values[active] = found.view(dtype)
        for i, write in enumerate(writes):
            write(program, values[:, i], mask)

    return run


def _address_bits(operand: Operand) -> int:
    base = operand.base if isinstance(operand, Address) else None
    return getattr(base, "bits", 64)


def _count(words: list[str]) -> int:
    return 4 if "v4" in words else 2 if "v2" in words else 1


def _parameter(instruction: Instruction, reader: Reader, dtype: np.dtype) -> Action:
    target, address = instruction.operands
    if not isinstance(address, Address) or not isinstance(address.base, Name):
        raise Unknown(instruction.text)
    at = reader.symbols[address.base.text] - PARAMETERS + address.offset
    write = put(target)
    return lambda program, mask: write(program, program.parameters[at : at + dtype.itemsize].view(dtype), mask)


@makes("st")
def store(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, "global", "shared", "shared::cta", "v2", "v4", *_CACHES)
    address, source = instruction.operands
    bits, shared = BITS[words[-1]], words[1].startswith("shared")
    gets = [reader.get(part, UNSIGNED[bits]) for part in _parts(source)]
    if len(gets) != _count(words):
        raise Unknown(instruction.text)
    where = address_of(address, reader, _address_bits(address))

    def run(program, mask) -> None:
        active, places = program.active(mask), program.spread(where(program))
        columns: list[Array] = [program.spread(get(program))[active] for get in gets]
        values = np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)
        if shared:
            program.shared.write(places[active], values, program.warps[active])
        else:
            program.memory.write(places[active], values)

    return run


@makes("cp.async.bulk.prefetch")
def prefetch_bytes(instruction: Instruction, reader: Reader) -> Action:
    """Changes nothing, but what is fetched must be there: aligned to 16 bytes, and a multiple of them."""
    address, count = instruction.operands
    where, size = address_of(address, reader, 64), reader.get(count, DTYPES["u32"])

    def run(program, mask) -> None:
        active = program.active(mask)
        program.check_bytes(program.spread(where(program))[active], program.spread(size(program))[active])

    return run


@makes("prefetch")
def prefetch(instruction: Instruction, reader: Reader) -> Action:
    allowed(instruction, "global", "L2")
    where = address_of(instruction.operands[0], reader, 64)

    def run(program, mask) -> None:
        program.memory.check(program.spread(where(program))[program.active(mask)], 1)

    return run


@makes("griddepcontrol", "fence", "bar.warp")
def nothing(instruction: Instruction, reader: Reader) -> Action:
    """One program runs after the other, each thread in step, so all memory is in order already."""
    if instruction.name not in (
        "griddepcontrol.wait",
        "griddepcontrol.launch_dependents",
        "fence.proxy.async.shared::cta",
        "bar.warp.sync",
    ):
        raise Unknown(instruction.name)
    return lambda program, mask: None
