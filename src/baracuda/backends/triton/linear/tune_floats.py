"""The schedule of a weight-only linear of the fewest tokens: a pure function of its shape.

How K is cut is part of the result, so it comes from `tune.weight_only_split`. The rest is free.
"""

# Triton finds compiled kernels by the text of their constants: str() of a tile must name every field.
from __future__ import annotations

from dataclasses import dataclass

from ..tune import blocks_of, power_of_two
from .tune import PART_OF_K, weight_only_split

#: Weights of a row that a warp multiplies at a time.
CHUNK = 128
#: Bytes of shared memory that a program may have.
SHARED = 227 * 1024


@dataclass(frozen=True, slots=True)
class DirectFloats:
    """Warps of 16 rows of a packed weight by `tokens`: `groups` of them, for each of `split` parts of K. A part is
    `part` chunks, read in `steps` of `depth` chunks, a step ahead; `programs` share a multiprocessor. Kernels read it
    as a constant."""

    tokens: int
    groups: int
    split: int
    part: int
    depth: int
    steps: int
    programs: int
    #: The parts of K lie in programs of their own, whose sums a second kernel adds: all activations at once do not fit
    #: into shared memory.
    apart: bool
    #: Every warp has all its chunks.
    whole: bool
    #: A program has no more tiles than `groups`.
    one_turn: bool
    #: Chunks whose scales are read together.
    together: int
    #: Chunks of activations that the threads of a program bring to shared memory together, and how often before they
    #: wait for them.
    fill: int
    fills: int

    @property
    def parts(self) -> int:
        """Of a program."""
        return 1 if self.apart else self.split

    @property
    def warps(self) -> int:
        return self.groups * self.parts

    @property
    def once(self) -> bool:
        """A program holds all that it multiplies at once."""
        return self.one_turn and self.steps == 1

    @property
    def schedule(self) -> str:
        cut = f", K in {self.split}" if self.split > 1 else ""
        return f"16 rows x {self.tokens} tokens for each of {self.warps} warps, {self.depth} chunks ahead{cut}"

    @property
    def thread_registers(self) -> int:
        return min(65536 // self.programs // (32 * self.warps) // 8 * 8, 248)

    @property
    def shared(self) -> int:
        """Bytes of a program: activations and, beside them or behind, the sums of parts."""
        tokens = self.steps * self.depth * CHUNK * self.parts * self.tokens * 2
        sums = 4 * 16 * self.warps * max(8, self.tokens) if self.parts > 1 else 0
        return max(tokens, sums) if self.one_turn else tokens + sums

    def grid(self, n: int, processors: int) -> int:
        return _shares(n, processors, self.programs, self.split if self.apart else 1) * (self.split // self.parts)


def direct_floats(
    m: int, n: int, k: int, group: int, processors: int, depth: int = 0, groups: int = 0, programs: int = 1
) -> DirectFloats | None:
    """The schedule of a packed weight-only linear and the fewest tokens; None where it does not fit or the kernel
    with a ring of copies is faster. `depth` and `groups` are chosen unless they are given."""
    if m > (16 if n * k <= 2**25 else 1) or k % 32 or not (group in (32, 64) or group % CHUNK == 0):
        return None
    split = weight_only_split(n, k, processors)
    if m > 8 and split > 2:  # its parts would lie apart, where the ring is faster
        return None
    for apart in (False, True) if split > 1 else (False,):
        tile = _tile(m, n, k, group, processors, split, apart, depth, groups, programs)
        if tile.shared <= (SHARED + 1024) // programs - 1024:
            return tile
    return None


def _tile(
    m: int, n: int, k: int, group: int, processors: int, split: int, apart: bool, depth: int, groups: int, programs: int
) -> DirectFloats:
    part = blocks_of(k, CHUNK) if split == 1 else blocks_of(k, split * PART_OF_K) * (PART_OF_K // CHUNK)
    parts = 1 if apart else split
    tiles = blocks_of(blocks_of(n, 16), _shares(n, processors, programs, split // parts))
    groups = groups or min(power_of_two(tiles), 16 // parts)
    warps, tokens = groups * parts, power_of_two(m)
    depth = depth or _depth(part)
    steps = blocks_of(part, depth)
    whole, one_turn = part * CHUNK * split == k and part == steps * depth, tiles <= groups
    together = 1
    if whole and 0 < group <= CHUNK:
        while 2 * together * (CHUNK // group) <= 8 and depth % (2 * together) == 0:
            together *= 2
    # Units of four activations that a thread holds before it stores them, beside the weights.
    units = 32 if warps * programs <= 8 else 16
    fill = 1
    while steps * depth % (2 * fill) == 0 and fill * parts * tokens < units * warps:
        fill *= 2
    fills = max(1, units // blocks_of(fill * parts * tokens, warps))
    return DirectFloats(
        tokens, groups, split, part, depth, steps, programs, apart, whole, one_turn, together, fill, fills
    )


def _shares(n: int, processors: int, programs: int, apart: int) -> int:
    """Programs that share out the rows, for each of the parts that lie apart."""
    return min(max(1, processors * programs // apart), blocks_of(n, 16))


def _depth(part: int) -> int:
    """Chunks ahead: all of a short part, else a few; twice as many on their way were slower."""
    return part if part <= 8 else 7 if part % 7 == 0 else 4
