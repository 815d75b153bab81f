"""Where the arguments of a kernel come from: said once when a plan is bound, followed at every launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..registry import Value


class Part(NamedTuple):
    """`length` elements of the workspace, from byte `offset` on."""

    offset: int
    dtype: torch.dtype
    length: int

    def of(self, workspace: Tensor) -> Tensor:
        end = self.offset + self.length * self.dtype.itemsize
        return workspace.view(-1).view(torch.uint8)[self.offset : end].view(self.dtype)


class Either(NamedTuple):
    """An operand, or where it is None a part of the workspace."""

    operand: int
    part: Part


#: An operand by its place in the op's row, a part of the workspace, either, or nothing.
Source = int | Part | Either | None


def split(source: Source) -> tuple[int | None, Part | None]:
    """The operand and the part of a source."""
    if isinstance(source, Either):
        return source.operand, source.part
    return (source, None) if isinstance(source, int) else (None, source)


def pick(sources: Sequence[Source], operands: tuple[Value, ...], workspace: Tensor | None) -> list[Value]:
    """What the sources stand for in one call. An operand behind the last of a shorter row is None."""
    arguments: list[Value] = []
    for operand, part in map(split, sources):
        value = operands[operand] if operand is not None and operand < len(operands) else None
        arguments.append(part.of(cast(Tensor, workspace)) if value is None and part is not None else value)
    return arguments
