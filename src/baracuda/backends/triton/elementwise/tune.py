"""Configurations as pure functions of the view, the element sizes and the device: no measuring at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from ....core.scope import View

#: Segments up to this many bytes, in the math type, are held in registers.
IN_REGISTERS = 2**17


@dataclass(frozen=True, slots=True)
class Tile:
    """[parts, lines, columns] elements a program handles at a time, `repeats` times down the run, with `warps` warps.

    A thread has the same place in all parts: they split a segment, which it then looks at more often than at others.
    `vector` limits the neighbouring columns a thread holds, `registers` its registers (0: no limit). Told a limit, the
    compiler uses all of it and orders instructions better than in the fewest registers it can do with.
    """

    lines: int
    columns: int
    warps: int
    repeats: int = 1
    vector: int = 0
    parts: int = 1
    registers: int = 0


class Work(Enum):
    """What an elementwise op does: a multiplication; a quantization; and back; a gradient, passed on or divided."""

    LIGHT = "light"
    QUANTIZE = "quantize"
    FAKE_QUANTIZE = "fake_quantize"
    GRADIENT = "gradient"
    DIVIDED_GRADIENT = "divided_gradient"


class Out(Enum):
    """What leaves a dynamic range: the scales alone, or with them the integers or the floats they stand for."""

    SCALES = "scales"
    INTEGERS = "integers"
    FLOATS = "floats"


class Schedule(Enum):
    """How a dynamic range is found."""

    ROWS = "rows"
    LONG_ROWS = "long_rows"
    BLOCKS = "blocks"
    PARTIAL = "partial"
    PARTIAL_COLUMNS = "partial_columns"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Range:
    """A schedule, its tile and, for the two-stage ones, into how many chunks a segment is cut."""

    schedule: Schedule
    tile: Tile
    chunks: int = 0


def processors_of(device: torch.device) -> int:
    """Multiprocessors; a few for the interpreter, so that it meets loops that are long on a device only."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def cache_of(device: torch.device) -> int:
    """Bytes of the cache in front of memory; a few for the interpreter."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 2**12


def streams(read: int, written: int, cache: int, *, work: Work) -> bool:
    """Whether outputs are stored so that they leave the cache first, which keeps room there for inputs.

    Worth it for gradients and where a byte becomes four, but only if `written` bytes are more than fit: the next kernel
    finds a smaller output in the cache. A weight of 4096 x 4096, dequantized from four bits and multiplied with 16
    tokens, took 12 % longer streamed (H200).
    """
    widens = work is Work.LIGHT and written > 2 * read  # scales are read, too
    return written > cache and (widens or work is Work.GRADIENT)


def early(programs: int, processors: int, nbytes: int, *, work: Work = Work.QUANTIZE, again: bool = False) -> bool:
    """Whether a kernel that moves `nbytes` comes while the one before it still runs.

    That saves most of a microsecond between the two. But programs of a kernel that comes early start at no more than
    820 in a microsecond (H200): many that take little time each are faster without. They do where they move or compute
    little, and where they read `again` what is in the cache.
    """
    if again:
        return programs <= 16 * processors
    most = 128 * processors if work is Work.LIGHT else programs
    return programs <= 64 * processors or (programs <= most and nbytes >= 5120 * programs)


def dense(width: int, element_bytes: int, *, work: Work, packed: bool) -> Tile:
    """The tile of an elementwise kernel over lines of `width` elements.

    Two vectors a thread. What takes many instructions, f64 or packed, has four, which share what a scale costs, in
    small programs that overlap: one computes while another waits. A gradient has as many inputs with one.
    """
    size, warps, vector = 4096 // element_bytes, 4, 16 // element_bytes
    if work is Work.LIGHT:
        vector *= 2  # what a thread writes fills a sector
        size = 4096 // (element_bytes if packed else min(element_bytes, 4))
    elif packed or element_bytes == 8:
        warps = 2
    elif work is Work.GRADIENT and element_bytes == 2:
        warps = 8
    elif work is Work.QUANTIZE and element_bytes == 4:
        size, warps = 2 * size, 8  # half as many programs to start, for what writes little
    columns = min(power_of_two(width), size)
    # Packed, a byte moved is more to compute: it takes as many threads as can be had.
    registers = 48 if packed and element_bytes == 2 and work is Work.QUANTIZE else 0
    if columns == size:
        return Tile(1, columns, warps, vector=vector if packed else 0, registers=registers)
    # A thread works out a short line's scale once for all its parts.
    parts = min(size // (32 * warps * vector), max(columns // vector, 1))
    return Tile(size // columns, columns // parts, warps, vector=vector, parts=parts, registers=registers)


def columns(view: View, element_bytes: int, processors: int, *, work: Work, packed: bool) -> Tile:
    """The tile of an elementwise kernel over columns of their own scale: a thread keeps few columns and walks far, if
    that leaves each multiprocessor a number of programs that hide each other's start."""
    run, inner = view.run, view.inner
    if run == 1:
        return Tile(1, min(power_of_two(inner), 2048), 4, vector=16 // element_bytes if packed else 0)
    if work is Work.LIGHT:
        if packed or element_bytes == 8:
            across = min(power_of_two(inner), 128 if element_bytes == 8 else 256)
            lines = min(power_of_two(run), max(4096 // across, 1))
            return Tile(lines, across, 4, vector=16 // element_bytes if element_bytes < 8 else 0)
        # A thread keeps its columns to itself.
        return Tile(min(power_of_two(run), 4), min(power_of_two(inner), 512), 4, vector=4)
    # A thread has many elements, or many neighbours, if every multiprocessor gets a few tiles.
    many = view.numel > 2**13 * processors
    size, across, warps, repeats, vector = 2048, 256, 4, 4, 4 if element_bytes == 4 and many else 2
    if element_bytes == 2:
        size, across, warps, repeats, vector = {
            Work.GRADIENT: (2048, 128, 4, 4, 4),
            Work.DIVIDED_GRADIENT: (2048, 256, 4, 8, 2),
        }.get(work, (2048, 128, 2, 8, 4) if packed else (4096, 128, 4, 8, 4) if many else (2048, 256, 4, 8, 2))
    across = min(power_of_two(inner), across)
    lines = min(power_of_two(run), max(size // across, 1))
    tiles = view.rows * -(-run // lines) * -(-inner // across)
    far = min(repeats, max(run // lines, 1), max(tiles // (32 * processors), 1))
    return Tile(lines, across, warps, repeats=1 << (far.bit_length() - 1), vector=vector)


def dynamic(view: View, element_bytes: int, processors: int, *, out: Out = Out.INTEGERS) -> Range:
    """The schedule of a dynamic range.

    Every thread that shares a segment works out its scale, so a thread looks at 16 elements of it, or more.
    """
    vector, math_bytes = 16 // element_bytes, max(element_bytes, 4)
    if view.segment_length == 0:
        return Range(Schedule.EMPTY, Tile(1, 128, 4))
    if view.inner > 1:
        return _strided(view, element_bytes, processors)
    width = power_of_two(view.run)
    if view.repeat == 1 and width * math_bytes <= IN_REGISTERS and (view.rows > 1 or view.run <= 4096):
        if out is Out.SCALES and width * element_bytes < 8192:
            # Programs that only read: larger, so that they may come early.
            parts = min(max(8 // vector, 2), max(width // vector, 1))
            return Range(Schedule.ROWS, _tile(width // parts, 8, vector, parts))
        warps = min(max(width // (2048 if element_bytes == 2 else 1024), 2), 32)
        parts = min(max(width // (32 * warps * vector), 4, 16 // vector), 8, max(width // vector, 1))
        tile = _tile(width // parts, warps, vector, parts)
        few = element_bytes == 2 and parts * vector <= 32 and out is not Out.FLOATS  # which take more
        return Range(Schedule.ROWS, replace(tile, registers=40) if few else tile)
    if view.repeat == 1 and view.rows >= processors:
        return Range(Schedule.LONG_ROWS, _tile(512 * vector, 16, vector, 4))
    tile = _tile(min(width, 256 * vector), 8, vector, max(min(4, width // (256 * vector)), 1))
    tile = replace(tile, lines=min(tile.lines, power_of_two(view.repeat)))
    items = -(-view.repeat // tile.lines) * -(-view.run // (tile.parts * tile.columns))
    chunks = min(items, max(-(-8 * processors // view.rows), 1))
    return Range(Schedule.PARTIAL, tile, chunks)


def _strided(view: View, element_bytes: int, processors: int) -> Range:
    """A thread has few columns and, of elements that take little room, many lines: scales are worked out less often."""
    lines, vector, math_bytes = power_of_two(view.run), 16 // element_bytes, max(element_bytes, 4)
    across = min(power_of_two(view.inner), 256 // math_bytes)
    if lines * across * math_bytes <= 2**15:
        across = min(power_of_two(view.inner), max(2**15 // math_bytes // lines, across))
    if lines * across * math_bytes <= IN_REGISTERS // 2:
        each, neighbours = 256 // element_bytes, min(vector, 4)
        parts = min(each // neighbours, lines)
        return Range(
            Schedule.BLOCKS,
            Tile(lines // parts, across, _warps(lines * across, each), vector=neighbours, parts=parts),
        )
    across, parts, each = (8, 16, 4) if element_bytes == 2 else (16, 8, 6)
    tile = _tile(min(power_of_two(view.inner), across * vector), 4, vector, parts)
    programs = view.rows * -(-view.inner // tile.columns)
    # All programs at once: a few that are left for a second round would cost as much as the first.
    chunks = min(-(-view.run // (tile.parts * tile.lines)), max(each * processors // programs, 1))
    return Range(Schedule.PARTIAL_COLUMNS, tile, chunks)


def _tile(columns: int, warps: int, vector: int, parts: int) -> Tile:
    """A tile of which every thread has one vector in each part."""
    return Tile(max(32 * warps * vector // columns, 1), columns, warps, vector=vector, parts=parts)


def _warps(elements: int, each: int) -> int:
    """As many warps as give a thread `each` elements."""
    return min(max(elements // (32 * each), 1), 32)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
