"""What a run of `bench linear` says: its table, bars, plot and README section, from the rows alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Shape = tuple[int, int, int]
#: The shapes with a bar: least ratios of the GEMM or the whole linear to a peer, and most microseconds.
BARS: dict[Shape, dict[str, float]] = {
    (8192, 8192, 8192): {"gemm/bf16": 2.1, "gemm/fp8": 1.05},
    (4096, 14336, 4096): {"gemm/bf16": 1.95, "gemm/fp8": 1.05},
    (4096, 4096, 14336): {"gemm/bf16": 1.95, "gemm/fp8": 1.05},
    (2048, 6144, 4096): {"gemm/bf16": 2.0, "gemm/fp8": 1.05},
    (256, 14336, 4096): {"gemm/bf16": 1.45, "gemm/fp8": 1.05},
    (64, 14336, 4096): {"gemm/bf16": 1.6, "gemm/fp8": 1.05, "gemm us": 26.0},
    (16, 14336, 4096): {"gemm/bf16": 1.6, "gemm/fp8": 1.05, "gemm us": 26.0, "linear us": 28.0},
    (1, 14336, 4096): {"gemm/bf16": 1.6, "gemm/fp8": 1.05, "gemm us": 26.0, "linear us": 28.0},
    (2048, 14336, 4096): {"linear/bf16": 1.6},
    (8192, 14336, 4096): {"linear/bf16": 1.85},
}
HOST_BAR = 8.0
COLUMNS = ("gemm us", "TOPS", "weight TB/s", "linear us", "bf16 us", "int_mm us", "fp8 us")
RATIOS = ("gemm/bf16", "gemm/fp8", "linear/bf16")


@dataclass
class Row:
    """One shape: microseconds by contestant, and whether ours had the bits of the formula."""

    name: str
    shape: Shape
    exact: bool = True
    kernel: str = ""
    us: dict[str, float] = field(default_factory=dict)

    def ratio(self, ours: str, peer: str) -> float:
        return self.us[peer] / self.us[ours] if ours in self.us and peer in self.us else float("nan")

    @property
    def tops(self) -> float:
        m, n, k = self.shape
        return 2 * m * n * k / self.us["gemm"] / 1e6

    @property
    def weight_tb(self) -> float:
        return self.shape[1] * self.shape[2] / self.us["gemm"] / 1e6


def rows_of(run: dict[str, Any]) -> list[Row]:
    return [Row(**{**row, "shape": tuple(row["shape"])}) for row in run["rows"]]


def markdown(lines: list[list[str]]) -> str:
    head, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *body])


def table(rows: list[Row]) -> str:
    lines = [["weight", "M x N x K", *COLUMNS, *RATIOS, "exact"]]
    for row in rows:
        cells = [row.name, " x ".join(map(str, row.shape))]
        for column in COLUMNS:
            if column == "TOPS":
                cells.append(f"{row.tops:.0f}")
            elif column == "weight TB/s":
                cells.append(f"{row.weight_tb:.2f}")
            else:
                us = row.us.get(column.removesuffix(" us"))
                cells.append("-" if us is None else f"{us:.1f}")
        cells += [f"{row.ratio(*ratio.split('/')):.2f}" for ratio in RATIOS]
        lines.append([*cells, "yes" if row.exact else "NO"])
    return markdown(lines)


def four_bit_bar(what: str, shape: Shape) -> float:
    """The least ratio to bf16 of a four-bit linear in groups of 128."""
    m, n, k = shape
    if what == "w4a16":
        return 2.0 if m <= 16 else 1.5 if m <= 64 else 1.0 if m <= 256 else 0.9
    if m <= 16:
        return 2.2 if n < k else 2.4
    return 1.8 if m <= 64 else 1.55 if m <= 256 else 1.85


def four_bit_table(rows: list[Row]) -> str:
    """Times as fast as bf16, with the bars."""
    lines = [
        [
            "M x N x K",
            "bf16 us",
            "w4a8 us",
            "w4a8/bf16",
            "bar",
            "w4a16 us",
            "w4a16/bf16",
            "bar",
            "int4/bf16",
            "fp8/bf16",
        ]
    ]
    for row in (row for row in rows if "w4a8" in row.us):
        cells = [" x ".join(map(str, row.shape)), f"{row.us['bf16']:.1f}"]
        for what in ("w4a8", "w4a16"):
            cells += [f"{row.us[what]:.1f}", f"{row.ratio(what, 'bf16'):.2f}", f"{four_bit_bar(what, row.shape):g}"]
        lines.append([*cells, *(f"{row.ratio(peer, 'bf16'):.2f}" for peer in ("int4", "fp8"))])
    return markdown(lines)


def bars(rows: list[Row], host: float) -> list[tuple[str, str, float, float, bool]]:
    """Shape, measure, bar, measured, passed."""
    found = {row.shape: row for row in rows}
    lines = []
    for shape, wanted in BARS.items():
        row = found.get(shape)
        for what, bar in wanted.items() if row is not None else ():
            if what.endswith(" us"):
                value = row.us[what.removesuffix(" us")]
                passed = value <= bar
            else:
                value = row.ratio(*what.split("/"))
                passed = value >= bar
            lines.append(("x".join(map(str, shape)), what, bar, value, passed))
    least = min(row.ratio("linear", "bf16") for row in rows)
    lines.append(("every shape", "linear/bf16", 1.0, least, least >= 1))
    lines.append(("1x256x256", "host us", HOST_BAR, host, host <= HOST_BAR))
    return lines


def bar_table(rows: list[Row], host: float) -> str:
    lines = [["shape", "measure", "bar", "measured", ""]]
    for shape, what, bar, value, passed in bars(rows, host):
        lines.append([shape, what, f"{bar:g}", f"{value:.2f}", "pass" if passed else "FAIL"])
    return markdown(lines)


def epilogue_table(run: dict[str, Any]) -> str:
    """How much longer a GEMM takes with each epilogue than without."""
    measured = run.get("epilogues", [])
    names = list(measured[0]["us"]) if measured else []
    lines = [["M x N x K", *names]]
    for row in measured:
        plain = row["us"][names[0]]
        cells = [f"{us:.1f} us" if name == names[0] else f"{us / plain:.2f}x" for name, us in row["us"].items()]
        lines.append([" x ".join(map(str, row["shape"])), *cells])
    return markdown(lines)


# -- from a committed run ----------------------------------------------------------------------------------------


def page(run: dict[str, Any]) -> str:
    """docs/reference/linears.md."""
    rows = rows_of(run)
    parts = [
        "# The int8 linears beside their peers",
        f"{run['device']}, torch {run['torch']}, medians of one interleaved run with cold caches, written by "
        "`python -m bench readme` from `bench/results/linear.json`. `gemm` starts from quantized activations, `linear` "
        "from bf16; every output of ours is compared with the formula before it is timed.",
        "![Times as fast as bf16 cuBLAS, by tokens](../../bench/results/linear.svg)",
        table(rows),
        *(("## Four bits", four_bit_table(rows)) if any("w4a8" in row.us for row in rows) else ()),
        "## Epilogues",
        "Times as long as the GEMM that only scales.",
        epilogue_table(run),
        "## Bars",
        bar_table(rows, run["host_us"]),
    ]
    return "\n\n".join(parts) + "\n"


def plot(rows: list[Row], path: Path | str) -> None:
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("bench: plots are drawn with matplotlib, which is missing: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    names = [name for name in dict.fromkeys(row.name for row in rows) if name != "bar"]
    with mpl.rc_context({"svg.hashsalt": "baracuda", "font.size": 9}):
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
        for axis, what in zip(axes, ("gemm", "linear"), strict=True):
            for name in names:
                mine = sorted((row for row in rows if row.name == name), key=lambda row: row.shape[0])
                tokens = [str(row.shape[0]) for row in mine]
                axis.plot(tokens, [row.ratio(what, "bf16") for row in mine], marker="o", label=name)
            axis.axhline(1.0, color="grey", linewidth=0.8)
            axis.set_title({"gemm": "GEMM with epilogue", "linear": "whole linear, bf16 to bf16"}[what])
            axis.set_xlabel("tokens")
        axes[0].set_ylabel("times as fast as bf16 cuBLAS")
        axes[1].legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None, dpi=120)
        pyplot.close(figure)


def write(run: dict[str, Any], root: Path) -> None:
    """The page and the plot, in the repository `root`."""
    (root / "docs" / "reference" / "linears.md").write_text(page(run))
    plot(rows_of(run), root / "bench" / "results" / "linear.svg")
