"""The schedule of a weight-only linear of the fewest tokens: a pure function of its shape.

How K is cut is part of the result, so it comes from `tune.weight_only_split`. The rest is free.
"""

# Triton finds compiled kernels by the text of their constants: str() of a tile must name every field.
from __future__ import annotations

from dataclasses import dataclass

from ..tune import power_of_two
from .tune import PART_OF_K, weight_only_split

#: Weights of a row that a warp multiplies at a time.
CHUNK = 128
#: Bytes of shared memory that a program may have.
SHARED = 227 * 1024


@dataclass(frozen=True, slots=True)
class DirectFloats:
    """Warps of 16 rows of a packed weight, `groups` of them for each of `split` parts of K, by `tokens`. A part is
    `part` chunks, read `depth` chunks ahead in `steps`. Kernels read it as a constant."""

    tokens: int
    groups: int
    split: int
    part: int
    depth: int
    steps: int
    #: Every warp has all its chunks.
    whole: bool
    #: A program has no more than one tile for each warp, and holds all of it at once.
    once: bool
    #: Chunks whose scales are read together.
    together: int
    #: Chunks of activations that the threads of a program bring to shared memory together, and how often before they
    #: wait for them.
    fill: int
    fills: int

    #: No second kernel adds up the parts of K.
    apart = False

    @property
    def warps(self) -> int:
        return self.groups * self.split

    @property
    def schedule(self) -> str:
        parts = f", K in {self.split}" if self.split > 1 else ""
        return f"16 rows x {self.tokens} tokens for each of {self.warps} warps, {self.depth} chunks ahead{parts}"

    @property
    def thread_registers(self) -> int:
        return min(65536 // (32 * self.warps) // 8 * 8, 248)

    def grid(self, n: int, processors: int) -> int:
        return min(processors, -(-n // 16))


def direct_floats(
    m: int, n: int, k: int, group: int, processors: int, depth: int = 0, groups: int = 0
) -> DirectFloats | None:
    """None where the activations do not fit into shared memory, or the groups not the chunks. `depth` and `groups` are
    chosen unless they are given."""
    if m > 16 or k % 32 or not (group in (32, 64) or group % CHUNK == 0):
        return None
    split = weight_only_split(n, k, processors)
    part = -(-k // CHUNK) if split == 1 else -(-k // (split * PART_OF_K)) * (PART_OF_K // CHUNK)
    tiles = -(-(-(-n // 16)) // min(processors, -(-n // 16)))
    groups = groups or min(power_of_two(tiles), 16 // split)
    warps = groups * split
    depth = depth or _depth(part, 8 if warps > 8 else 14)
    steps = -(-part // depth)
    whole = part * CHUNK * split == k and part == steps * depth
    once = steps == 1 and tiles <= groups
    together = 1
    if whole and 0 < group <= CHUNK:
        each = CHUNK // group
        while 2 * together * each <= 8 and depth % (2 * together) == 0 and part % (2 * together) == 0:
            together *= 2
    tokens = power_of_two(m)
    chunks = steps * depth
    sums = 4 * 16 * warps * max(8, tokens) if split > 1 else 0
    if chunks * CHUNK * split * tokens * 2 + sums > SHARED:
        return None
    # A thread holds no more than 16 units of four activations before it stores them.
    fill = 1
    while chunks % (2 * fill) == 0 and fill * split * tokens < 16 * warps:
        fill *= 2
    each = -(-fill * split * tokens // warps)
    return DirectFloats(
        tokens, groups, split, part, depth, steps, whole, once, together, fill, max(1, 16 // each)
    )


def _depth(part: int, most: int) -> int:
    """Chunks ahead, so that the last step lacks few."""
    return min(range(most, most // 2, -1), key=lambda depth: (-(-part // depth) * depth, -depth)) if part > most else part
