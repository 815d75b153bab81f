"""What the tuners of several families share: the device's sizes, tiles, and where dependent launches pay.

Configurations are pure functions of the view, the element sizes and the device: nothing is measured at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """[parts, lines, columns] elements a program handles at a time, `repeats` times down the run, with `warps` warps.

    A thread has the same place in all parts; the parts split a segment, so a thread meets the same few segments again.
    `vector` limits the neighbouring columns a thread holds, `registers` its registers (0: no limit). Given a limit, the
    compiler uses all of it and orders instructions better than in the fewest registers it can do with. Kernels read it
    as a constant.
    """

    lines: int
    columns: int
    warps: int
    repeats: int = 1
    vector: int = 0
    parts: int = 1
    registers: int = 0


class Work(Enum):
    """What a kernel does with an element: a multiplication; a quantization, perhaps and back; a gradient, perhaps
    divided."""

    LIGHT = "light"
    QUANTIZE = "quantize"
    FAKE_QUANTIZE = "fake_quantize"
    GRADIENT = "gradient"
    DIVIDED_GRADIENT = "divided_gradient"


def processors_of(device: torch.device) -> int:
    """Multiprocessors; a few for the interpreter, so that it meets loops that are long on a device only."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def cache_of(device: torch.device) -> int:
    """Bytes of the cache in front of memory; a few for the interpreter."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 2**12


def pdl_pays(programs: int, processors: int, nbytes: int, *, work: Work = Work.QUANTIZE, again: bool = False) -> bool:
    """Whether a kernel that moves `nbytes` is faster with programmatic dependent launch (PDL).

    PDL saves most of a microsecond between two kernels. But the programs of such a kernel start at no more than 820 in
    a microsecond (H200): many that take little time each are faster without. They do where they move or compute little,
    and where they read `again` what is in the cache.
    """
    if again:
        return programs <= 16 * processors
    most = 128 * processors if work is Work.LIGHT else programs
    return programs <= 64 * processors or (programs <= most and nbytes >= 5120 * programs)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def blocks_of(size: int, by: int) -> int:
    """How many blocks of `by` cover `size`."""
    return -(-size // by)
