"""Which tile an elementwise kernel gets, and whether its outputs bypass the cache."""

from __future__ import annotations

from ....core.scope import View
from ..tune import Tile, Work, power_of_two


def streams(read: int, written: int, cache: int, *, work: Work) -> bool:
    """Whether outputs are stored so that they leave the cache first, which keeps room there for inputs.

    Worth it for gradients and where a byte becomes four, but only if `written` bytes are more than fit: the next kernel
    finds a smaller output in the cache. A weight of 4096 x 4096, dequantized from four bits and multiplied with 16
    tokens, took 12 % longer streamed (H200).
    """
    widens = work is Work.LIGHT and written > 2 * read  # scales are read, too
    return written > cache and (widens or work is Work.GRADIENT)


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
