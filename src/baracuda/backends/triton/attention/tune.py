"""The tiles of attention. They follow from the sizes of a head alone, so a row's bits do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..tune import power_of_two

#: Keys that one program attends to. Shorter parts would keep more of a GPU busy for one sequence, but each costs a sum
#: of the values in memory.
PART = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """`rows` queries that share a head of keys, `keys` at a time, of width `d`, with values of width `dv`; all are
    padded to powers of two. Kernels read it as a constant."""

    rows: int
    keys: int
    d: int
    dv: int
    part: int = PART
    warps: int = 4
    stages: int = 2


def heads(group: int, d: int, dv: int) -> Heads:
    # The matrix unit takes 16 rows at least.
    rows, d, dv = (max(16, power_of_two(size)) for size in (group, d, dv))
    return Heads(rows, 64 if max(d, dv) <= 128 else 32, d, dv)
