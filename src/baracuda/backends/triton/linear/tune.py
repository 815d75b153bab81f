"""Which tile and schedule a linear gets: pure functions of its shape, from measurements on an H200.

A pingpong schedule, two warpgroups that take turns, hides the epilogue of one behind the products of the other: the
fastest at all measured shapes. A larger tile for both at once reads less from L2, yet was slower, at long K as well.
"""

# Triton finds compiled kernels by the text of their constants: str() of a tile must name every field.
from __future__ import annotations

from dataclasses import dataclass, replace

from ..tune import power_of_two

#: The most tokens the kernel for few takes.
FEW_TOKENS = 64


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

    @property
    def schedule(self) -> str:
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
class Few:
    """`rows` of the folded weight by `tokens` of the folded activations, rows in steps of `k` bytes, in a ring of
    `stages` copies; `programs` share a multiprocessor. Kernels read it as a constant."""

    tokens: int
    rows: int
    k: int
    stages: int
    programs: int
    #: A row of the weight, and of the activations, is read as so many rows.
    fold: int
    #: Multiplies from shared memory, by a warpgroup; else from registers.
    wgmma: bool = False
    #: Steps that are fetched into L2 while the previous kernel still runs.
    ahead: int = 8
    #: K is cut into this many parts, whose sums a second kernel adds in their order.
    split: int = 1
    #: Warps of a program: a warpgroup for 64 rows, where it multiplies by warpgroups.
    warps: int = 4

    @property
    def schedule(self) -> str:
        folds = f", K in {self.fold * self.split}" if self.fold * self.split > 1 else ""
        return f"{self.rows} rows x {self.tokens} tokens x {self.k} bytes, {self.stages} stages{folds}"

    @property
    def apart(self) -> bool:
        """Whether parts of K lie in programs of their own."""
        return self.split > 1

    @property
    def thread_registers(self) -> int:
        return 65536 // self.programs // (32 * self.warps) // 8 * 8

    def span(self, packed: bool) -> int:
        """The weights along K of a step."""
        return 2 * self.k if packed else self.k

    def grid(self, n: int, processors: int) -> int:
        """Programs that all have the same number of units, but for the last."""
        units = -(-n * self.fold // self.rows) * self.split
        rounds = -(-units // (self.programs * processors))
        return -(-units // rounds)


def few(m: int, n: int, k: int, packed: bool, group: int, processors: int) -> Few | None:
    """A tile of tokens that is not full costs what a full one does: rows of the weight are folded until it is.

    None where the kernels for many tokens are faster.
    """
    tile = None if m > FEW_TOKENS else _few_packed(m, n, k, processors) if packed else _few(m, n, k, processors)
    if tile is None:
        return None
    fold, alignment = tile.fold, 32 if packed else 16
    while fold > 1 and (k % (fold * alignment) or (group and k // fold % group)):
        fold //= 2
    return replace(tile, fold=fold)


def _few(m: int, n: int, k: int, processors: int) -> Few:
    if m <= 4:
        fold = (8 if n * k > 2**25 else 4) if m == 1 else 8 // power_of_two(m)
        return Few(8, 64, 256, 3, 4, fold)
    if m <= 16:
        return Few(32, 64, 256, 4, 2, 4 if m <= 8 else 2, wgmma=True)
    if m <= 32:
        return Few(64, 64, 256, 3, 2, 2, wgmma=True)
    if 2 * n <= 64 * processors:
        return Few(128, 64, 256, 4, 1, 2, wgmma=True)
    return Few(64, 64, 256, 6, 1, 1, wgmma=True) if n <= 64 * processors else Few(64, 64, 128, 6, 2, 1, wgmma=True)


def _few_packed(m: int, n: int, k: int, processors: int) -> Few | None:
    many_rows = n > 64 * processors
    if m == 1:
        return Few(8, 128, 128, 3, 4, 8)
    if m <= 4:
        return Few(8, 128, 256, 3, 2, 8 // power_of_two(m))
    if m <= 8:
        return Few(8, 64, 128, 4, 4, 1, wgmma=True) if many_rows else Few(16, 64, 128, 4, 4, 2, wgmma=True)
    if m <= 16:
        if n > 128 * processors:
            return Few(16, 128, 128, 4, 2, 1)
        # Two parts of a long K where the rows alone leave half of the programs idle.
        if processors <= 3 * -(-n // 64) <= 3 * processors and k >= 8192:
            return Few(16, 64, 256, 3, 2, 1, split=2)
        return Few(32, 64, 256, 3, 2, 2) if 3 * n <= 128 * processors else Few(16, 64, 256, 3, 2, 1)
    if many_rows:
        return Few(32 if m <= 32 else 64, 128, 128, 3, 2, 1, wgmma=True, warps=8)
    return Few(64, 64, 128, 3, 3, 2 if m <= 32 else 1, wgmma=True) if n * k <= 2**25 else None


@dataclass(frozen=True, slots=True)
class Direct:
    """16 rows of a packed weight by `tokens`; each of the warps reads `chunks` times `k` bytes of a row, and `programs`
    share a multiprocessor. Kernels read it as a constant."""

    tokens: int
    k: int
    chunks: int
    warps: int
    programs: int
    #: All warps have all their chunks.
    whole: bool

    @property
    def schedule(self) -> str:
        return f"16 rows x {self.tokens} tokens, {self.warps} warps share out K"

    @property
    def thread_registers(self) -> int:
        return min(65536 // self.programs // (32 * self.warps) // 8 * 8, 248)

    def grid(self, n: int, processors: int) -> int:
        """Programs that all have the same number of tiles, but for the last."""
        tiles = -(-n // 16)
        return -(-tiles // -(-tiles // (self.programs * processors)))


#: Each program of `Direct` reads and keeps all activations: for longer K, `Few` is faster.
DIRECT_K = 4096


def direct(m: int, n: int, k: int, group: int) -> Direct | None:
    """The schedule of a packed weight and the fewest tokens; None where it does not fit or `few` is faster."""
    span = group or 128
    if k > DIRECT_K or span not in (64, 128) or k % span or m > (16 if n * k <= 2**25 else 8):
        return None
    # Twice the activations are kept for more than 8 tokens.
    tokens, warps, programs = (8, 8, 2) if m <= 8 else (16, 16, 1)
    chunks = -(-k // (span * warps))
    return Direct(tokens, span // 2, chunks, warps, programs, chunks * span * warps == k)


#: The most tokens that a program of `Direct` quantizes itself, and the most bytes of them that a thread holds between
#: its look for the largest and the division.
QUANTIZED_TOKENS, QUANTIZED_BYTES = 4, 128


def direct_quantizes(tile: Direct, m: int, k: int, element_bytes: int) -> bool:
    """Whether every program quantizes all activations, while its first weights are on their way, and no kernel before
    does. `Few` was slower that way with packed weights and for long K, and as fast with weights of s8."""
    held = power_of_two(m) * k * element_bytes
    return m <= QUANTIZED_TOKENS and held <= QUANTIZED_BYTES * 32 * tile.warps


def few_takes_groups(tile: Few, group: int) -> bool:
    """Whether a step of the kernel has whole groups, as many as a power of two, or is part of one."""
    span = 2 * tile.k
    return not group or group % span == 0 or (span % group == 0 and power_of_two(span // group) == span // group)


@dataclass(frozen=True, slots=True)
class Packed:
    """A tile of `m` tokens by `n` rows of a stored weight, rows in steps of `k` bytes; the ring of what is multiplied
    and the ring of stored bytes. Kernels read it as a constant."""

    m: int
    n: int
    k: int
    stages: int
    packed_stages: int
    #: Tokens that leave through shared memory at a time.
    piece: int
    #: Warps of a team that decodes.
    decoders: int = 4
    #: Warpgroups that multiply.
    consumers: int = 2
    #: Programs that share a multiprocessor.
    programs: int = 1
    #: Teams that decode, step by step in turn.
    teams: int = 1
    #: Stages of activations; 0: as many as of weights.
    tokens: int = 0
    #: K is cut into this many parts, whose sums are added in their order: by a second kernel, if the parts lie `apart`
    #: in programs of their own, else by the program that has them all.
    split: int = 1
    apart: bool = False
    #: Columns of tiles, or rows where they are few, that are walked together.
    group: int = 8
    across: bool = False

    def __post_init__(self) -> None:
        # A stored stage always meets the same team. Another one could not tell its first phase from its second.
        assert self.packed_stages % self.teams == 0, self

    @property
    def x_stages(self) -> int:
        return self.tokens or self.stages

    @property
    def schedule(self) -> str:
        steps = f"rows in steps of {self.k} bytes"
        return f"{self.m}x{self.n}, {steps}, behind {self.decoders} decoding warps, {self.stages} stages"

    def tiles(self, m: int, n: int) -> int:
        return -(-m // self.m) * -(-n // self.n)

    def grid(self, m: int, n: int, processors: int) -> int:
        return min(processors * self.programs, self.tiles(m, n) * (self.split if self.apart else 1))

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1) + 32 * self.decoders * self.teams

    @property
    def thread_registers(self) -> int:
        """Of a thread when the program starts."""
        return 65536 // self.programs // self.threads // 8 * 8

    @property
    def registers(self) -> list[int]:
        """Of a thread that multiplies (in the second warpgroup), that decodes, and that feeds: the first has the rest.

        A thread that multiplies holds 64 * m / 128 sums.
        """
        consumer = max(72, self.m // 2 + (64 if self.decoders * self.teams == 4 else 40))
        rest = self.thread_registers * self.threads - 128 * (24 + self.consumers * consumer)
        decoder = min(rest // (32 * self.decoders * self.teams) // 8 * 8, 152)
        return [*[consumer] * (self.consumers - 1), *[decoder] * self.teams, 24, 24]


#: Parts of K are multiples of this many elements, the longest step of all tiles.
PART_OF_K = 256


def parts(tiles: int, k: int, shortest: int, programs: int) -> int:
    """Parts of K, up to 4 and none shorter than so many elements, as long as so many programs can have one each."""
    split = 1
    while split < 4 and 2 * split * tiles <= programs and k >= 2 * split * shortest:
        split *= 2
    return split


def sums(m: int, n: int, processors: int) -> tuple[int, int]:
    """Rows and columns of the output that a program gets which adds up the parts."""
    rows, elements = min(16, power_of_two(m)), 2048
    while elements > 512 and m * n < elements * processors:
        elements //= 2
    return rows, elements // rows


def packed(m: int, n: int, k: int, out_bytes: int, processors: int) -> Packed:
    """The schedule of a packed weight and many tokens."""
    if m <= 64:
        tile = Packed(64, 128, 128, 2, 4, 32, teams=2, tokens=3)
    elif m <= 128:
        tile = Packed(128, 128, 64, 4, 4, 32 if out_bytes <= 2 else 16, teams=2, tokens=5)
    elif 2 * (-(-m // 256) * -(-n // 128)) <= processors:
        tile = Packed(256, 64, 64, 4, 4, 32 if out_bytes <= 2 else 16, consumers=1, teams=2)
    else:
        # Of an output of 32 bits, half as many tokens fit into the memory on its way out.
        tile = Packed(256, 128, 64, 3, 4, 32 if out_bytes <= 2 else 16, teams=2, tokens=4)
    split = parts(tile.tiles(m, n), k, 2048, processors)
    return replace(tile, split=split, apart=split > 1)


def weight_only_split(n: int, k: int, processors: int) -> int:
    """The parts of K of a weight-only linear. They depend on the weight alone: they are part of the result."""
    return parts(-(-n // 64), k, 1024, 2 * processors)


def few_floats(m: int, n: int, k: int, processors: int) -> Few | None:
    """The schedule of a packed weight-only linear and few tokens; None where decoding warps are faster."""
    split, tokens = weight_only_split(n, k, processors), max(8, power_of_two(m))
    if m <= 16:
        return Few(tokens, 64, 128, 4 if m <= 8 else 3, 4, 1, wgmma=True, split=split)
    if m <= 32:
        return Few(tokens, 128, 128, 3, 2, 1, wgmma=True, split=split, warps=8)
    return Few(64, 128, 64, 3, 2, 1, wgmma=True, split=split, warps=8) if m <= 64 and n * k <= 2**25 else None


def weight_only(m: int, n: int, k: int, packed: bool, processors: int) -> Packed:
    """The schedule of a weight-only linear behind decoding warps."""
    split = weight_only_split(n, k, processors)
    if m <= 16:
        tokens = max(8, power_of_two(m))
        tile = Packed(tokens, 64, 128, 2 if packed else 3, 3, tokens, 8, 1, 2)
    elif m <= 64:
        tile = Packed(32 if m <= 32 else 64, 128, 64, 3, 4, 32, teams=2, tokens=4)
    elif m <= 128:
        tile = Packed(128, 128, 64, 3, 2, 16, teams=2)
    elif 2 * (-(-m // 256) * -(-n // 128)) <= processors:
        tile = Packed(256, 64, 32, 4, 6, 32, consumers=1, teams=2)
    else:
        tile = Packed(256, 128, 32, 3, 4, 32, teams=2, tokens=4)
    # Many tiles fill the device without being cut: each program then adds up the parts of its tiles.
    return replace(tile, split=split, apart=split > 1 and (m <= 64 or 4 * tile.tiles(m, n) <= 3 * processors))


@dataclass(frozen=True, slots=True)
class Portable:
    """A tile of the portable kernel. Kernels read it as a constant."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    @property
    def schedule(self) -> str:
        return f"{self.m}x{self.n}x{self.k}, {self.stages} stages"


def portable(m: int) -> Portable:
    if m <= 16:
        return Portable(16, 64, 128, 4, 4)
    if m <= 32:
        return Portable(32, 64, 128, 4, 4)
    if m <= 64:
        return Portable(64, 64, 128, 4, 4)
    return Portable(128, 128, 64, 8, 3)


#: The tile of the portable weight-only linear: one for every number of tokens, which keeps the order of its sums.
WEIGHT_ONLY = Portable(64, 64, 64, 4, 3)
