"""The tiles of norms and gated products."""

from __future__ import annotations

from ....core.scope import View
from ....core.types import SUM_LANES, SUM_STEPS
from ..dynamic import tune as dynamic
from ..tune import Tile, blocks_of, power_of_two


def norm(width: int, element_bytes: int) -> Tile | None:
    """A row in registers, a step of its sum in each part and a vector of that for each thread; None where it is too
    long for that."""
    parts, math_bytes = power_of_two(blocks_of(width, SUM_LANES)), max(element_bytes, 4)
    columns = SUM_LANES if parts > 1 else max(power_of_two(width), 32)
    if parts * columns * math_bytes > dynamic.IN_REGISTERS:
        return None
    vector = 16 // element_bytes
    return Tile(1, columns, max(columns // (32 * vector), 1), vector=vector, parts=parts)


def long_norm(element_bytes: int) -> Tile:
    """A block of the sum at a time."""
    return Tile(1, SUM_LANES, SUM_LANES * element_bytes // 512, vector=16 // element_bytes, parts=SUM_STEPS)


def gated(view: View, element_bytes: int, processors: int) -> Tile | None:
    """Rows in registers, as where their ranges are found; None where they are too long for that."""
    width, math_bytes = power_of_two(view.run), max(element_bytes, 4)
    if 2 * width * math_bytes > dynamic.IN_REGISTERS:
        return None
    return dynamic.dynamic(View(1, max(view.rows, 2), view.run, 1), element_bytes, processors).tile


def pieces(element_bytes: int) -> Tile:
    """Pieces of long rows, which stay floats."""
    vector = 16 // element_bytes
    return Tile(1, 128 * vector, 4, vector=vector, parts=2)
