"""Runs a kernel: its programs one after the other, the threads of each in step.

Threads that part at a branch run apart, those that are furthest behind first, and together again where they meet.
Those that wait for a barrier in shared memory go on when some barrier has completed a phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from . import compare, copies, groups, transfers, warps
from .alu import MAKERS
from .floats import Array
from .memory import PARAMETERS, Fault, Global, Shared
from .parse import Instruction, Kernel, Name, Number, Register, Unknown, parse
from .registers import DTYPES, UNSIGNED, Action, Mask, Reader

#: Where a tensor map has the matrix's address: as `fake_cuda.cpp` writes it, since the driver's own form is secret.
_MATRIX = slice(24, 32)
#: What registers and shared memory hold before they are written.
GARBAGE = 0xA5
assert compare and copies and groups and transfers and warps  # importing them adds to MAKERS


class Compiled:
    """A kernel with the action of each instruction; None for those that move the program counter."""

    def __init__(self, ptx: str) -> None:
        self.kernel: Kernel = parse(ptx)
        self.reader = Reader(self.kernel)
        self.actions: list[Action | None] = []
        for instruction in self.kernel.code:
            try:
                self.actions.append(None if _moves(instruction) else self._action(instruction))
            except Unknown as unknown:
                raise Unknown(f"line {instruction.line}: {instruction.text} ({unknown})") from unknown

    def _action(self, instruction: Instruction) -> Action:
        words = instruction.words
        for length in (4, 2, 1):  # the longest name that is known
            if maker := MAKERS.get(".".join(words[:length])):
                return maker(instruction, self.reader)
        raise Unknown(instruction.name)


def _moves(instruction: Instruction) -> bool:
    return instruction.words[0] in ("bra", "brx", "ret", "exit") or instruction.name in ("bar.sync", "barrier.sync")


@lru_cache(maxsize=32)
def compiled(ptx: str) -> Compiled:
    return Compiled(ptx)


class Program:
    """One program while it runs."""

    def __init__(
        self, code: Compiled, index: int, programs: int, threads: int, shared: int, memory: Global, parameters: Array
    ) -> None:
        self.code, self.index, self.programs, self.threads = code, index, programs, threads
        self.memory, self.parameters, self.shared = memory, parameters, Shared(shared)
        self.warps = np.arange(threads) // 32
        self.barriers: dict[int, copies.Barrier] = {}
        self.leaving = copies.Leaving(self.shared)
        #: Phases that barriers in shared memory had completed when those that wait for one last looked.
        self.phases = -1
        garbage = {bits: np.full(dtype.itemsize, GARBAGE, np.uint8).view(dtype) for bits, dtype in UNSIGNED.items()}
        garbage[1] = np.zeros(1, bool)
        self.registers: list[Array] = [garbage[bits] for bits in code.kernel.bits]
        self.everyone = np.arange(threads)

    # -- for instructions

    def spread(self, values: Array) -> Array:
        """One value for each thread."""
        return values if len(values) == self.threads else np.broadcast_to(values, (self.threads,))

    def active(self, mask: Mask) -> Array:
        """The numbers of the threads that take part."""
        return self.everyone if mask is None else np.flatnonzero(self.spread(mask))

    def special(self, name: str) -> Array:
        register, _, axis = name[1:].partition(".")
        if axis in ("y", "z"):
            return np.array([1 if register.startswith("n") else 0])
        values: dict[str, Callable[[], Array]] = {
            "tid": lambda: self.everyone,
            "ntid": lambda: np.array([self.threads]),
            "ctaid": lambda: np.array([self.index]),
            "nctaid": lambda: np.array([self.programs]),
            "laneid": lambda: self.everyone % 32,
            "warpid": lambda: self.warps,
        }
        if register not in values:
            raise Unknown(name)
        return values[register]()

    def check_bytes(self, addresses: Array, sizes: Array) -> None:
        for size in np.unique(sizes):
            if size % 16 or size == 0 or (addresses[sizes == size] % np.uint64(16)).any():
                raise Fault(f"{size} bytes from {int(addresses[0]):#x}: expected multiples of 16")
            self.memory.check(addresses[sizes == size], int(size))

    # -- the program counter

    def run(self) -> None:
        self.live = np.ones(self.threads, bool)
        self.groups: dict[int, Array] = {0: self.live.copy()}
        #: Of each barrier, how many threads it is for (None: all), and those that wait with the place where they go on.
        self.parked: dict[int, tuple[int | None, list[tuple[int, Array]]]] = {}
        #: Threads that wait for a phase of a barrier in shared memory, by the place where they do.
        self.blocked: dict[int, Array] = {}
        while self.groups or self.blocked:
            if not self.groups:
                self._unblock()
            at = min(self.groups)
            self._advance(at, self.groups.pop(at))
        if self.parked:
            raise Fault(f"threads wait at barrier {min(self.parked)} for others that do not come")

    def _unblock(self) -> None:
        """All look again, if anything has happened since they looked."""
        phases = sum(barrier.phase for barrier in self.barriers.values())
        if phases == self.phases:
            instruction = self.code.kernel.code[min(self.blocked)]
            raise Fault(
                f"threads wait for a phase of a barrier that nothing will complete; program {self.index}, "
                f"line {instruction.line}: {instruction.text}"
            )
        self.phases, self.groups, self.blocked = phases, self.blocked, {}

    def _join(self, at: int, mask: Array) -> None:
        self.groups[at] = self.groups[at] | mask if at in self.groups else mask

    def _advance(self, at: int, mask: Array) -> None:
        """Run these threads until they part, wait, end, or come to where others are."""
        code, actions = self.code.kernel.code, self.code.actions
        all_of_them: Mask = None if mask.all() else mask
        behind = min(self.groups, default=len(code) + 1)
        while True:
            if at >= behind:
                self._join(at, mask)
                return
            instruction, action = code[at], actions[at]
            taking = self._guarded(instruction.guard, all_of_them)
            try:
                if action is not None:
                    if taking is None or taking.any():
                        action(self, taking)
                    at += 1
                    continue
                following = self._move(at, instruction, mask, taking)
            except copies.Incomplete:
                self.blocked[at] = self.blocked[at] | mask if at in self.blocked else mask
                return
            except Fault as fault:
                raise Fault(f"{fault}; program {self.index}, line {instruction.line}: {instruction.text}") from fault
            if following is None:
                return
            at = following

    def _guarded(self, guard: Register | None, mask: Mask) -> Mask:
        if guard is None:
            return mask
        chosen = self.registers[guard.slot]
        chosen = ~chosen if guard.negated else chosen
        if chosen.all():
            return mask
        return self.spread(chosen if mask is None else chosen & mask)

    def _move(self, at: int, instruction: Instruction, mask: Array, taking: Mask) -> int | None:
        """Where all these threads go; None where they no longer go together."""
        taken = mask if taking is None else taking
        if not taken.any():
            return at + 1
        name = instruction.words[0]
        if name == "bra":
            target = instruction.operands[0]
            assert isinstance(target, Name)
            there = self.code.kernel.labels[target.text]
            rest = mask & ~taken
            if not rest.any():
                return there
            self._join(there, taken)
            self._join(at + 1, rest)
            return None
        if name == "brx":
            self._choose(at, instruction, mask, taken)
            return None
        if name in ("ret", "exit"):
            self.live &= ~taken
            if (rest := mask & ~taken).any():
                self._join(at + 1, rest)
            for barrier in list(self.parked):
                self._release(barrier)
            return None
        if (taken != mask).any():
            raise Fault("a barrier under a predicate that not all threads share")
        return self._wait(at, instruction, mask)

    def _choose(self, at: int, instruction: Instruction, mask: Array, taken: Array) -> None:
        """Each thread goes to the target of its own number."""
        number, table = instruction.operands
        assert isinstance(table, Name)
        targets = self.code.kernel.targets[table.text]
        chosen = self.spread(self.code.reader.get(number, DTYPES["u32"])(self))
        for i in np.unique(chosen[taken]):
            if i >= len(targets):
                raise Fault(f"target {int(i)} of {len(targets)}")
            self._join(self.code.kernel.labels[targets[i]], taken & (chosen == i))
        if (rest := mask & ~taken).any():
            self._join(at + 1, rest)

    def _wait(self, at: int, instruction: Instruction, mask: Array) -> int | None:
        barrier, *counts = instruction.operands
        if not isinstance(barrier, Number) or not all(isinstance(count, Number) for count in counts):
            raise Unknown(f"line {instruction.line}: {instruction.text}")
        count = counts[0].value if counts else None
        self.parked.setdefault(barrier.value, (count, []))[1].append((at + 1, mask))
        self._release(barrier.value)
        return None

    def _release(self, barrier: int) -> None:
        """Let the threads go on when as many wait as the barrier is for; those that have ended are not waited for."""
        count, waiting = self.parked[barrier]
        arrived = sum(int(mask.sum()) for _, mask in waiting)
        if arrived < (int(self.live.sum()) if count is None else count):
            return
        del self.parked[barrier]
        self.shared.barrier()
        for at, mask in waiting:
            self._join(at, mask)


def in_order(programs: int) -> Iterable[int]:
    """The order in which programs run. No kernel may depend on it, so a test may change it."""
    return range(programs)


def run(
    ptx: str,
    programs: int,
    threads: int,
    shared: int,
    parameters: Sequence[bytes],
    buffers: Mapping[int, Array],
) -> None:
    """Run a kernel on buffers of the host, which are arrays of bytes by their addresses.

    `parameters` are the bytes of each. One of eight bytes that is an address in a buffer points there.
    """
    code = compiled(ptx)
    given = [int.from_bytes(value, "little") for value in parameters]
    pointers = [value for value, raw in zip(given, parameters, strict=True) if len(raw) == 8]
    matrices = [int.from_bytes(raw[_MATRIX], "little") for raw in parameters if len(raw) == 128]
    memory = Global(buffers, [*pointers, *matrices])
    laid = np.zeros(code.reader.parameter_bytes, np.uint8)
    for (name, size), raw in zip(code.kernel.parameters, parameters, strict=True):
        at = code.reader.symbols[name] - PARAMETERS
        moved = bytearray(raw)
        pointer = slice(8) if size == 8 else _MATRIX
        if (there := memory.addresses.get(int.from_bytes(raw[pointer], "little"))) and size in (8, 128):
            moved[pointer] = there.to_bytes(8, "little")
        laid[at : at + size] = np.frombuffer(moved, np.uint8)
    with np.errstate(all="ignore"):
        for index in in_order(programs):
            Program(code, index, programs, threads, shared, memory, laid).run()
