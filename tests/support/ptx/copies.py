"""Barriers in shared memory (mbarrier) and the copies of TMA, which are done as soon as they are issued."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .alu import makes
from .floats import Array
from .memory import PARAMETERS, Fault, Shared
from .parse import Address, Instruction, Number, Several, Unknown
from .registers import DTYPES, Action, Reader, allowed, put
from .transfers import address_of

#: Bytes of an element by its number in a tensor map: u8, u16, u32, i32, u64, i64, f16, f32, f64, bf16.
_ELEMENTS = dict(enumerate((1, 2, 4, 4, 8, 8, 2, 4, 8, 2)))
#: The bits of a row's number that are mixed into the place of 16 bytes, by the swizzle's number in a tensor map.
SWIZZLES = {0: 0, 1: 1, 2: 3, 3: 7}


def swizzled(offsets: Array, bits: int) -> Array:
    """Addresses in shared memory, those of 16 bytes exchanged within every 8 rows of 128."""
    return offsets ^ ((offsets >> 7 & bits) << 4)


class Incomplete(Exception):
    """No thread finds its phase complete: they look again later."""


class Leaving:
    """Copies from shared memory of each thread, whose bytes may be written when it has waited for their group."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.begun: dict[int, list[Array]] = {}
        self.groups: dict[int, list[list[Array]]] = {}

    def begin(self, thread: int, index: Array) -> None:
        self.shared.leave(index)
        self.begun.setdefault(thread, []).append(index)

    def commit(self, thread: int) -> None:
        self.groups.setdefault(thread, []).append(self.begun.pop(thread, []))

    def wait(self, thread: int, pending: int) -> None:
        groups = self.groups.get(thread, [])
        while len(groups) > pending:
            for index in groups.pop(0):
                self.shared.left(index)


@dataclass
class Barrier:
    """Completes a phase when `pending` arrivals have come and no more `bytes` are expected."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending < 0:
            raise Fault("more threads arrive at a barrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


def _barriers(program, addresses: Array) -> list[Barrier]:
    missing = [int(at) for at in addresses if int(at) not in program.barriers]
    if missing:
        raise Fault(f"there is no barrier at {missing[0]:#x} in shared memory")
    return [program.barriers[int(at)] for at in addresses]


@makes("mbarrier.init")
def init(instruction: Instruction, reader: Reader) -> Action:
    address, count = instruction.operands
    where, get = address_of(address, reader, 32), reader.get(count, DTYPES["u32"])

    def run(program, mask) -> None:
        active = program.active(mask)
        counts = program.spread(get(program))[active]
        for at, number in zip(program.spread(where(program))[active], counts, strict=True):
            program.barriers[int(at)] = Barrier(int(number), int(number))

    return run


@makes("mbarrier.inval")
def invalidate(instruction: Instruction, reader: Reader) -> Action:
    where = address_of(instruction.operands[0], reader, 32)

    def run(program, mask) -> None:
        for at in program.spread(where(program))[program.active(mask)]:
            program.barriers.pop(int(at), None)

    return run


@makes("mbarrier.arrive")
def arrive(instruction: Instruction, reader: Reader) -> Action:
    words = allowed(instruction, "arrive", "expect_tx", "shared::cta", "shared")
    _, address, *rest = instruction.operands
    expects = "expect_tx" in words
    where, get = address_of(address, reader, 32), reader.get(rest[0], DTYPES["u32"]) if rest else None

    def run(program, mask) -> None:
        active = program.active(mask)
        values = program.spread(get(program))[active] if get else np.ones(len(active), int)
        for barrier, value in zip(_barriers(program, program.spread(where(program))[active]), values, strict=True):
            barrier.bytes += int(value) if expects else 0
            barrier.pending -= 1 if expects else int(value)
            barrier.settle()

    return run


@makes("mbarrier.try_wait")
def try_wait(instruction: Instruction, reader: Reader) -> Action:
    """True where the phase of this parity is complete: all that was copied for it may be read."""
    allowed(instruction, "try_wait", "parity", "shared::cta", "shared")
    target, address, parity = instruction.operands
    write, where, get = put(target), address_of(address, reader, 32), reader.get(parity, DTYPES["u32"])

    def run(program, mask) -> None:
        active = program.active(mask)
        places, wanted = (program.spread(x)[active] for x in (where(program), get(program)))
        done = np.zeros(program.threads, bool)
        done[active] = [b.phase & 1 != p & 1 for b, p in zip(_barriers(program, places), wanted.tolist(), strict=True)]
        for at in set(places[done[active]].tolist()):
            program.shared.arrived(at)
        if not done[active].any():
            raise Incomplete
        write(program, done, mask)

    return run


@makes("elect")
def elect(instruction: Instruction, reader: Reader) -> Action:
    """One thread of each warp: the first that takes part."""
    allowed(instruction, "sync")
    target = instruction.operands[0]
    if not isinstance(target, Several):
        raise Unknown(instruction.text)
    number, chosen = map(put, target.parts)

    def run(program, mask) -> None:
        active = np.zeros(program.threads, bool)
        active[program.active(mask)] = True
        leader = np.repeat(active.reshape(-1, 32).argmax(1), 32)
        number(program, leader.astype(np.uint32), mask)
        chosen(program, np.arange(program.threads) % 32 == leader, mask)

    return run


@makes("cp.async.bulk.tensor")
def copy_box(instruction: Instruction, reader: Reader) -> Action:
    """A box of a matrix to shared memory; what lies outside of the matrix is 0."""
    words = instruction.words
    if words[4:7] == ["2d", "global", "shared::cta"]:
        return _copy_back(instruction, reader)
    if words[4:7] not in (["2d", "shared::cta", "global"], ["2d", "shared::cluster", "global"]):
        raise Unknown(instruction.name)
    target, source, barrier = instruction.operands
    if not isinstance(source, Address) or len(source.rest) != 1 or not isinstance(source.rest[0], Several):
        raise Unknown(instruction.text)
    to, signal = address_of(target, reader, 32), address_of(barrier, reader, 32)
    described = reader.get(source.base, DTYPES["u64"])
    coordinates = [reader.get(part, DTYPES["s32"]) for part in source.rest[0].parts]

    def run(program, mask) -> None:
        active = program.active(mask)
        each = (to, signal, described, *coordinates)
        for place, at, tensor, column, row in zip(
            *(program.spread(x(program))[active].tolist() for x in each), strict=True
        ):
            size = _copy(program, place, at, tensor - PARAMETERS, column, row)
            (waiting,) = _barriers(program, np.array([at]))
            waiting.bytes -= size
            waiting.settle()

    return run


def _copy_back(instruction: Instruction, reader: Reader) -> Action:
    """A box of shared memory to a matrix; what lies outside of the matrix is left out."""
    target, source = instruction.operands
    if not isinstance(target, Address) or len(target.rest) != 1 or not isinstance(target.rest[0], Several):
        raise Unknown(instruction.text)
    where, described = address_of(source, reader, 32), reader.get(target.base, DTYPES["u64"])
    coordinates = [reader.get(part, DTYPES["s32"]) for part in target.rest[0].parts]

    def run(program, mask) -> None:
        active = program.active(mask)
        each = (where, described, *coordinates)
        for thread, place, tensor, column, row in zip(
            active.tolist(), *(program.spread(x(program))[active].tolist() for x in each), strict=True
        ):
            map_ = _Map(program, place, tensor - PARAMETERS)
            index = map_.places(program)
            program.leaving.begin(thread, index)
            box = program.shared.read_together(index).reshape(map_.height, map_.row_bytes)
            rows, columns = map_.inside(column, row)
            if rows.any() and columns.any():
                starts = map_.starts(column, row, rows, columns)
                program.memory.write_bytes(starts, box[rows][:, np.repeat(columns, map_.size)])

    return run


@makes("cp.async.bulk.commit_group")
def commit_group(instruction: Instruction, reader: Reader) -> Action:
    def run(program, mask) -> None:
        for thread in program.active(mask).tolist():
            program.leaving.commit(thread)

    return run


@makes("cp.async.bulk.wait_group")
def wait_group(instruction: Instruction, reader: Reader) -> Action:
    allowed(instruction, "async", "bulk", "wait_group", "read")
    (pending,) = instruction.operands
    if not isinstance(pending, Number):
        raise Unknown(instruction.text)
    most = pending.value
    return lambda program, mask: (
        [program.leaving.wait(thread, most) for thread in program.active(mask).tolist()] and None
    )


class _Map:
    """A tensor map, and the box of it that lies at a place in shared memory."""

    def __init__(self, program, place: int, parameter: int) -> None:
        fields = program.parameters[parameter : parameter + 128].view(np.uint64)[1:10].tolist()
        kind, rank, self.address, self.columns, self.rows, self.pitch, width, self.height, swizzle = fields
        if rank != 2 or place % 128:
            raise Fault(
                f"expected a matrix and a place in shared memory that is a multiple of 128, got {rank=} {place=}"
            )
        self.size, self.place, self.width, self.bits = _ELEMENTS[kind], place, width, SWIZZLES[swizzle]
        self.row_bytes = width * self.size

    def inside(self, column: int, row: int) -> tuple[Array, Array]:
        """Which rows and which columns of the box are in the matrix."""
        there = (row + np.arange(self.height), self.rows), (column + np.arange(self.width), self.columns)
        first, second = ((index >= 0) & (index < most) for index, most in there)
        return first, second

    def starts(self, column: int, row: int, rows: Array, columns: Array) -> Array:
        """Where those rows begin in memory."""
        first = (column + int(np.flatnonzero(columns)[0])) * self.size
        return (self.address + (row + np.flatnonzero(rows)) * self.pitch + first).astype(np.uint64)

    def places(self, program) -> Array:
        """Where its bytes lie in shared memory: [byte, 1]."""
        offsets = swizzled(self.place + np.arange(self.height * self.row_bytes), self.bits).astype(np.uint64)
        return program.shared.places(offsets, 1)


def _copy(program, place: int, barrier: int, parameter: int, column: int, row: int) -> int:
    """The bytes that were copied."""
    map_ = _Map(program, place, parameter)
    box = np.zeros((map_.height, map_.row_bytes), np.uint8)
    rows, columns = map_.inside(column, row)
    if rows.any() and columns.any():
        starts = map_.starts(column, row, rows, columns)
        data = program.memory.read_bytes(starts, int(columns.sum()) * map_.size)
        at = int(np.flatnonzero(columns)[0]) * map_.size
        box[rows, at : at + data.shape[1]] = data
    index = map_.places(program)
    program.shared.write_at(index, box.reshape(-1, 1), np.full(box.size, Shared.COPY))
    program.shared.expect(barrier, index)
    return box.size
