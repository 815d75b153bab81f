"""Which tile and schedule a linear gets: pure functions of its shape, from measurements on an H200.

A pingpong schedule, two warpgroups that take turns, hides the epilogue of one behind the products of the other: the
fastest at all measured shapes. A larger tile for both at once reads less from L2, yet was slower, at long K as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: The most tokens the weight-streaming kernel takes.
SKINNY_TOKENS = 64
#: The most tokens every program quantizes for itself. Each repeats the work of all others: hidden, but not for more.
FUSED_TOKENS = 2
#: Bytes of shared memory a program may have on sm_90.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True, slots=True)
class Pingpong:
    """Two warpgroups that take turns: the tile of the output that each has, the ring of stages that feeds them, and the
    order of the tiles. Kernels read it as a constant."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    #: The output leaves through shared memory in this many pieces.
    pieces: int
    #: Columns of tiles, or rows where they are few, that are walked together.
    group: int
    #: The scales are read before the products, not piece by piece with the output.
    eager: bool = False
    #: Groups are of rows and walked across the columns, not of columns and down the rows.
    across: bool = False
    #: Tiles that do not fill a round of all programs are cut along K into this many parts, added up afterwards.
    tail: int = 1

    def __str__(self) -> str:
        order = f"groups of {self.group} {'rows' if self.across else 'columns'}"
        tail = f", the last tiles in {self.tail} parts" if self.tail > 1 else ""
        return f"{self.m}x{self.n}x{self.k} pingpong, {self.stages} stages, {order}{tail}"

    def tiles(self, m: int, n: int) -> int:
        return -(-m // self.m) * -(-n // self.n)

    def whole(self, m: int, n: int, processors: int) -> int:
        """The tiles that are not cut: full rounds of all programs."""
        tiles = self.tiles(m, n)
        return tiles if self.tail == 1 else tiles // processors * processors

    def programs(self, m: int, n: int, processors: int) -> int:
        whole = self.whole(m, n, processors)
        return min(processors, whole + (self.tiles(m, n) - whole) * self.tail)


#: What adding up parts of K costs the weight-streaming kernel, in steps, besides the traffic of the parts.
SUMS_STEPS = 16
#: What cutting tiles costs, in steps of a tile.
CUT_STEPS = 16
PINGPONG = Pingpong(128, 128, 128, 6, 4, 4, 8)


def pingpong(m: int, n: int, k: int, out_bytes: int, processors: int, cut: bool = False) -> Pingpong:
    """The schedule of a problem with many tokens; `cut` allows parts of tiles, which take memory in the workspace."""
    # With a tile or two for each consumer, no product hides the time to read the scales.
    tiles = PINGPONG.tiles(m, n)
    eager = tiles <= 4 * processors
    tail = _tail(tiles % processors, -(-k // PINGPONG.k), processors) if cut else 1
    # A 32-bit output needs twice the room on its way out.
    stages, across = 6 if out_bytes <= 2 else 5, eager or m <= 4 * PINGPONG.m
    return replace(PINGPONG, stages=stages, eager=eager, across=across, tail=tail)


def _tail(rest: int, steps: int, processors: int) -> int:
    """Parts for the tiles of an unfinished round, if that saves more steps than the launch that adds them up costs."""
    parts = min(processors // rest, steps // 2, 16) if rest else 1
    return parts if parts > 1 and steps - -(-steps // parts) > CUT_STEPS else 1


@dataclass(frozen=True, slots=True)
class Skinny:
    """`rows` of the weight by `tokens`, K in steps of `k` and split into `split` parts that are summed afterwards
    (split-K). Kernels read it as a constant."""

    tokens: int
    rows: int
    k: int
    stages: int
    split: int
    #: Programs that share a multiprocessor.
    programs: int = 1
    #: As many times the tokens: programs that share a part of the weight, each with other tokens.
    tiles: int = 1

    def __str__(self) -> str:
        tokens = f"{self.tiles} x {self.tokens}" if self.tiles > 1 else str(self.tokens)
        return f"{self.rows} rows x {tokens} tokens x {self.k}, {self.stages} stages, K in {self.split}"


def skinny(m: int, n: int, k: int, processors: int) -> Skinny:
    """One round of all multiprocessors, if it can be had: by fewer rows, or by tokens in two tiles."""
    tokens = 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64
    rows, step, programs, tiles = 64, 256, 1, 1
    parts = -(-n // rows)
    if tokens <= 16 and 2 * parts <= 3 * processors:
        programs = 2
    elif tokens == 64 and 2 * parts <= processors:
        tokens, tiles = 32, 2
    elif tokens <= 16 or parts > processors:
        rows, parts = 128, -(-n // 128)
    stages = min(8 if rows == 64 else 6, (SHARED_MEMORY - 4096) // programs // ((rows + tokens) * step))
    steps = -(-k // step)

    def cost(split: int) -> float:
        return _cost(parts * tiles, steps, split, programs * processors, SUMS_STEPS + split * m * n / processors / 4096)

    return Skinny(tokens, rows, step, stages, min(_splits(steps), key=cost), programs, tiles)


def fused(n: int, k: int, processors: int) -> Skinny:
    """Two programs to a multiprocessor: one reads its weights while the other quantizes. Up to 8 tokens."""
    rows, programs, tokens, step, stages = 64, 2, 8, 512, 3
    tiles, steps = -(-n // rows), -(-k // step)
    split = min(_splits(steps), key=lambda split: _cost(tiles, steps, split, programs * processors, 6))
    return Skinny(tokens, rows, step, stages, split, programs)


def _splits(steps: int) -> list[int]:
    return [split for split in (1, 2, 4, 8) if split == 1 or steps // split >= 4]


def _cost(tiles: int, steps: int, split: int, slots: int, sums: float) -> float:
    """In steps of the busiest program; adding parts up costs `sums`."""
    rounds = -(-(tiles * split) // slots)
    return rounds * -(-steps // split) + (sums if split > 1 else 0)


@dataclass(frozen=True, slots=True)
class Portable:
    """A tile of the portable kernel. Kernels read it as a constant."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}, {self.stages} stages"


def portable(m: int) -> Portable:
    if m <= 16:
        return Portable(16, 64, 128, 4, 4)
    if m <= 32:
        return Portable(32, 64, 128, 4, 4)
    if m <= 64:
        return Portable(64, 64, 128, 4, 4)
    return Portable(128, 128, 64, 8, 3)
