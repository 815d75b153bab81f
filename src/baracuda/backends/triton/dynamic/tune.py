"""How a dynamic range is found: the schedule, its tile, and into how many chunks a segment is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ....core.scope import View
from ..tune import Tile, power_of_two

#: Segments up to this many bytes, in the math type, are held in registers.
IN_REGISTERS = 2**17
#: The longest segment that one program reads alone: a longer one is faster in parts, by three kernels.
LONE_ROW = 2**14


class Out(Enum):
    """What leaves a dynamic range: the scales alone, or with them the integers or the floats they stand for."""

    SCALES = "scales"
    INTEGERS = "integers"
    FLOATS = "floats"


class Schedule(Enum):
    """How a dynamic range is found: the kernel of that name, or nothing to read."""

    ROWS = "rows"
    LONG_ROWS = "long_rows"
    BLOCKS = "blocks"
    PARTIAL = "partial"
    PARTIAL_COLUMNS = "partial_columns"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Config:
    """A schedule, its tile and, for the two-stage ones, into how many chunks a segment is cut."""

    schedule: Schedule
    tile: Tile
    chunks: int = 0


def dynamic(view: View, element_bytes: int, processors: int, *, out: Out = Out.INTEGERS) -> Config:
    """The schedule of a dynamic range.

    Every thread that shares a segment works out its scale, so a thread looks at 16 elements of it, or more.
    """
    vector, math_bytes = 16 // element_bytes, max(element_bytes, 4)
    if view.segment_length == 0:
        return Config(Schedule.EMPTY, Tile(1, 128, 4))
    if view.inner > 1:
        return _strided(view, element_bytes, processors)
    width = power_of_two(view.run)
    if view.repeat == 1 and width * math_bytes <= IN_REGISTERS and (view.rows > 1 or view.run <= LONE_ROW):
        if out is Out.SCALES and width * element_bytes < 8192:
            # Programs that only read: larger, so that programmatic dependent launch pays.
            parts = min(max(8 // vector, 2), max(width // vector, 1))
            return Config(Schedule.ROWS, _tile(width // parts, 8, vector, parts))
        warps = min(max(width // (2048 if element_bytes == 2 and view.rows > 1 else 1024), 2), 32)
        parts = min(max(width // (32 * warps * vector), 4, 16 // vector), 8, max(width // vector, 1))
        tile = _tile(width // parts, warps, vector, parts)
        few = element_bytes == 2 and parts * vector <= 32 and out is not Out.FLOATS  # which take more
        return Config(Schedule.ROWS, replace(tile, registers=40) if few else tile)
    if view.repeat == 1 and view.rows >= processors:
        return Config(Schedule.LONG_ROWS, _tile(512 * vector, 16, vector, 4))
    tile = _tile(min(width, 256 * vector), 8, vector, max(min(4, width // (256 * vector)), 1))
    tile = replace(tile, lines=min(tile.lines, power_of_two(view.repeat)))
    items = -(-view.repeat // tile.lines) * -(-view.run // (tile.parts * tile.columns))
    chunks = min(items, max(-(-8 * processors // view.rows), 1))
    return Config(Schedule.PARTIAL, tile, chunks)


def _strided(view: View, element_bytes: int, processors: int) -> Config:
    """A thread has few columns and, of elements that take little room, many lines: scales are worked out less often."""
    lines, vector, math_bytes = power_of_two(view.run), 16 // element_bytes, max(element_bytes, 4)
    across = min(power_of_two(view.inner), 256 // math_bytes)
    if lines * across * math_bytes <= 2**15:
        across = min(power_of_two(view.inner), max(2**15 // math_bytes // lines, across))
    if lines * across * math_bytes <= IN_REGISTERS // 2:
        each, neighbours = 256 // element_bytes, min(vector, 4)
        parts = min(each // neighbours, lines)
        return Config(
            Schedule.BLOCKS,
            Tile(lines // parts, across, _warps(lines * across, each), vector=neighbours, parts=parts),
        )
    across, parts, each = (8, 16, 4) if element_bytes == 2 else (16, 8, 6)
    tile = _tile(min(power_of_two(view.inner), across * vector), 4, vector, parts)
    programs = view.rows * -(-view.inner // tile.columns)
    # All programs at once: a few that are left for a second round would cost as much as the first.
    chunks = min(-(-view.run // (tile.parts * tile.lines)), max(each * processors // programs, 1))
    return Config(Schedule.PARTIAL_COLUMNS, tile, chunks)


def _tile(columns: int, warps: int, vector: int, parts: int) -> Tile:
    """A tile of which every thread has one vector in each part."""
    return Tile(max(32 * warps * vector // columns, 1), columns, warps, vector=vector, parts=parts)


def _warps(elements: int, each: int) -> int:
    """As many warps as give a thread `each` elements."""
    return min(max(elements // (32 * each), 1), 32)
