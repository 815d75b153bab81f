"""The text of a PTX kernel as instructions: registers numbered, blocks of inline assembly flattened."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

#: Bits of a register or value by the type's name; a predicate has one.
BITS = {"pred": 1, "bf16x2": 32, "f16x2": 32, "bf16": 16}
BITS |= {f"{letter}{size}": size for letter in "bsu" for size in (8, 16, 32, 64)}
BITS |= {f"f{size}": size for size in (16, 32, 64)}


class Unknown(Exception):
    """The text has something that the interpreter does not know."""


@dataclass(frozen=True)
class Register:
    """A register by its number among all of the kernel; `negated` only for a predicate that is read."""

    slot: int
    bits: int
    negated: bool = False


@dataclass(frozen=True)
class Number:
    """An immediate: the bits of a float (`float_bits` says how many they are), or an integer (0)."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Name:
    """A label, a special register, a parameter or a variable in shared memory."""

    text: str


@dataclass(frozen=True)
class Several:
    """Registers in braces, or predicates joined by a bar."""

    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """An address in brackets; `rest` are the coordinates and barriers that copies name beside it."""

    base: Operand
    offset: int
    rest: tuple[Operand, ...] = ()


Operand = Register | Number | Name | Several | Address


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return self.name.split(".")


@dataclass
class Kernel:
    """`parameters` are (name, bytes) in order; `bits` those of each register."""

    name: str = ""
    parameters: list[tuple[str, int]] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    #: Labels to choose from by their number, of a branch with many targets.
    targets: dict[str, list[str]] = field(default_factory=dict)


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(r"\.param(?:\s+\.align\s+\d+)?\s+\.(\w+)(?:\s+\.ptr[^,]*?)?\s+(\w+)(?:\[(\d+)\])?\s*(?:,|$)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")
_BLANK = re.compile(r"\s*")
_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
_TARGETS = re.compile(r"([$\w]+)\s*:\s*\.branchtargets\s+([^;]*);")
_INSTRUCTION = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*([^;]*);")
_SKIPPED = re.compile(r"\.(loc|file)\b[^\n]*|\.pragma[^;]*;")
_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")


def parse(ptx: str) -> Kernel:
    """The one kernel of the text."""
    text = re.sub(r"//[^\n]*", "", ptx)
    entry = _ENTRY.search(text)
    if entry is None:
        raise Unknown("expected a kernel (.entry) in the text")
    kernel = Kernel(entry.group(1))
    for kind, name, size in _PARAMETER.findall(entry.group(2).strip()):
        kernel.parameters.append((name, int(size) if size else BITS[kind] // 8))
    _Body(kernel, text, entry.end()).read()
    return kernel


class _Body:
    def __init__(self, kernel: Kernel, text: str, start: int) -> None:
        self.kernel, self.text, self.at = kernel, text, start
        #: Registers and labels by name, of the kernel and of each block that is open.
        self.scopes: list[dict[str, int]] = [{}]
        self.blocks = [0]
        self.opened = 0

    def read(self) -> None:
        while self.scopes:
            self.at = _BLANK.match(self.text, self.at).end()
            if self.text[self.at] == "{":
                self.at += 1
                self.opened += 1
                self.scopes.append({})
                self.blocks.append(self.opened)
            elif self.text[self.at] == "}":
                self.at += 1
                self.scopes.pop()
                self.blocks.pop()
            elif skipped := _SKIPPED.match(self.text, self.at):
                self.at = skipped.end()
            elif registers := _REGISTERS.match(self.text, self.at):
                self.at = registers.end()
                self._declare(registers.group(1), registers.group(2))
            elif targets := _TARGETS.match(self.text, self.at):
                self.at = targets.end()
                names = [self._label(name.strip()) for name in targets.group(2).split(",")]
                self.kernel.targets[self._label(targets.group(1))] = names
            elif label := _LABEL.match(self.text, self.at):
                self.at = label.end()
                self.kernel.labels[self._label(label.group(1))] = len(self.kernel.code)
            elif found := _INSTRUCTION.match(self.text, self.at):
                self._instruction(found)
                self.at = found.end()
            else:
                raise Unknown(f"line {self._line()}: {self.text[self.at :].splitlines()[0]}")

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _label(self, name: str) -> str:
        """Triton repeats a block of inline assembly with its labels: the block is part of the name."""
        return name if name.startswith("$") else f"{name} of block {self.blocks[-1]}"

    def _declare(self, kind: str, names: str) -> None:
        for declared in names.split(","):
            name, _, count = declared.strip().partition("<")
            numbered = [f"{name}{i}" for i in range(int(count.rstrip("> ")))] if count else [name]
            for one in numbered:
                self.scopes[-1][one] = len(self.kernel.bits)
                self.kernel.bits.append(BITS[kind])

    def _register(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return Register(scope[name], self.kernel.bits[scope[name]])
        return None

    def _instruction(self, found: re.Match[str]) -> None:
        negated, predicate, name, operands = found.groups()
        guard = None
        if predicate:
            register = self._register(predicate)
            if register is None:
                raise Unknown(f"line {self._line()}: the predicate {predicate} is not declared")
            guard = Register(register.slot, 1, negated == "!")
        text = " ".join(found.group().split())
        parts = tuple(self._operand(part) for part in _split(operands))
        self.kernel.code.append(Instruction(name, parts, guard, self._line(), text))

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Several(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            first, *rest = _split(text[1:-1])
            base, _, offset = first.partition("+")
            return Address(self._operand(base), int(offset or "0", 0), tuple(map(self._operand, rest)))
        if "|" in text:
            return Several(tuple(self._operand(part) for part in text.split("|")))
        if found := _FLOAT.match(text):
            return Number(int(found.group(2), 16), 32 if found.group(1) in "fF" else 64)
        if _INTEGER.match(text):
            return Number(int(text.rstrip("U"), 0))
        if text.startswith("!") and (register := self._register(text[1:])):
            return Register(register.slot, register.bits, True)
        return self._register(text) or Name(text if text.startswith(("%", "$")) else self._plain(text))

    def _plain(self, text: str) -> str:
        parameters = {name for name, _ in self.kernel.parameters}
        return text if text in parameters or text in ("global_smem", "_") else self._label(text)


def _split(text: str) -> list[str]:
    """At the commas outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    last = text[start:]
    return [*parts, last] if last.strip() else parts


def float_value(number: Number) -> float:
    raw = number.value.to_bytes(number.float_bits // 8, "little")
    value: float = struct.unpack("<f" if number.float_bits == 32 else "<d", raw)[0]
    return value
