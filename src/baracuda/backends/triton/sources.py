"""Where the arguments of a kernel come from, operands or workspace: set when a plan is bound, used at every launch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, cast

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
#: Sources that travel together: a NamedTuple of them, which a kernel takes as one parameter.
Group = tuple[Source, ...]


class Sources:
    """The sources of a kernel's leading parameters, one by one and in their groups."""

    def __init__(self, sources: Sequence[Source | Group], parameters: Sequence[str]) -> None:
        self.flat: list[Source] = []
        #: The name of each: of its parameter, or of its field in a group.
        self.names: list[str] = []
        self._groups: list[Any] = []
        for source, parameter in zip(sources, parameters, strict=False):
            if isinstance(source, tuple) and not isinstance(source, Part | Either):
                group: Any = source
                self.flat += group
                self.names += group._fields
            else:
                group = None
                self.flat.append(source)
                self.names.append(parameter)
            self._groups.append(group)

    def grouped(self, values: Sequence[Any]) -> list[Any]:
        """One value for each source, in groups as the sources are."""
        left = iter(values)
        return [next(left) if group is None else type(group)(*(next(left) for _ in group)) for group in self._groups]


class WorkspaceLayout(dict[str, Part]):
    """A workspace divided into parts with names."""

    #: Every part starts at a multiple of so many bytes.
    ALIGNMENT = 256

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def reserve(self, name: str, dtype: torch.dtype, *sizes: int) -> None:
        self[name] = Part(self.nbytes, dtype, prod(sizes))
        self.nbytes += -(-prod(sizes) * dtype.itemsize // self.ALIGNMENT) * self.ALIGNMENT


def split(source: Source) -> tuple[int | None, Part | None]:
    """The operand and the part of a source."""
    if isinstance(source, Either):
        return source.operand, source.part
    return (source, None) if isinstance(source, int) else (None, source)


def pick(sources: Sequence[Source], operands: tuple[Value, ...], workspace: Tensor | None) -> list[Value]:
    """The arguments in one call. An operand behind the last of a shorter row is None."""
    arguments: list[Value] = []
    for operand, part in map(split, sources):
        value = operands[operand] if operand is not None and operand < len(operands) else None
        arguments.append(part.of(cast(Tensor, workspace)) if value is None and part is not None else value)
    return arguments
