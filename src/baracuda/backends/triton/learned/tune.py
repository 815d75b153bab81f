"""How the sums of a learned fake-quantization are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from ....core.scope import View
from ....core.types import SUM_LANES, SUM_STEPS
from ..tune import blocks_of, power_of_two


@dataclass(frozen=True, slots=True)
class Sums:
    """What a program sums: `steps` times `lanes` elements of each of `segments` neighbours. Kernels read it as a
    constant."""

    segments: int
    lanes: int
    steps: int
    #: The elements of a segment are not neighbours in memory.
    strided: bool
    #: A segment is one block, so that its sums are final.
    whole: bool
    #: These are all segments there are.
    alone: bool
    #: No block is cut short.
    even: bool
    #: Offsets take 64 bits.
    wide: bool
    #: The most neighbours a thread holds.
    vector: int


@dataclass(frozen=True, slots=True)
class Config:
    """The programs that sum blocks: how many groups of segments there are, and how many blocks in a segment."""

    sums: Sums
    segment_blocks: int
    units: int
    warps: int


def learned(view: View, element_bytes: int, wide: bool) -> Config:
    # Lanes beyond the run would only hold zeros.
    lanes = min(view.sum_lanes, power_of_two(max(1, view.run)))
    steps = min(SUM_STEPS, power_of_two(blocks_of(max(1, view.run), lanes)))
    strided = view.inner > 1
    across = view.inner if strided else view.rows
    segments = min(128, power_of_two(view.inner)) if strided else SUM_LANES // lanes
    segment_blocks = (view.rows if strided else 1) * blocks_of(across, segments)
    units = view.repeat * view.sum_blocks
    even = across % segments == 0 and view.run % (lanes * steps) == 0
    vector = max(1, 4 // element_bytes)
    sums = Sums(segments, lanes, steps, strided, units <= 1, segment_blocks == 1, even, wide, vector)
    # Long blocks are few, so each gets more of a processor.
    return Config(sums, segment_blocks, units, warps=8 if steps > 1 and not strided else 4)


def totals(segments: int, units: int) -> tuple[int, int]:
    """(segments, lanes) of a program that adds up the blocks of segments."""
    lanes = min(SUM_LANES, power_of_two(units))
    return min(SUM_LANES // lanes, power_of_two(segments)), lanes
