"""What the benchmarks share: arguments, timing with the peers interleaved, tables, and a file for machines."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

Body = Callable[[], object]


def arguments(
    area: str,
    argv: Sequence[str] | None,
    quick: str = "small sizes and few repeats: does it run at all",
    more: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """What every area takes; `quick` says what it leaves out then, `more` adds options of its own."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {area}")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    if more is not None:
        more(parser)
    return parser.parse_args(argv)


def interleaved(bodies: dict[str, Body], repeats: int, seconds: float = 0.4) -> dict[str, float]:
    """The best time of each body in seconds; they take turns, so that a noisy moment hits all of them.

    A body that has used up its share of `seconds` sits out, but every one runs at least twice.
    """
    best = dict.fromkeys(bodies, float("inf"))
    spent = dict.fromkeys(bodies, 0.0)
    for body in bodies.values():
        body()
    for turn in range(repeats):
        for name, body in bodies.items():
            if turn >= 2 and spent[name] > seconds:
                continue
            start = time.perf_counter()
            body()
            taken = time.perf_counter() - start
            best[name] = min(best[name], taken)
            spent[name] += taken
    return best


def per_call(body: Body, calls: int = 2000, repeats: int = 7, wait: Body | None = None) -> float:
    """The best mean time of a short call, in seconds; `wait` comes before each repeat and does not count."""
    best = float("inf")
    for _ in range(repeats):
        if wait is not None:
            wait()
        start = time.perf_counter()
        for _ in range(calls):
            body()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same work as a CUDA graph, so that a slow host does not show in the device's time."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain table: the first column to the left, figures to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [list(header), *cells]:
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


@dataclass
class Bar:
    """A requirement, what was measured, and whether it holds."""

    name: str
    needed: float
    measured: float
    #: Whether the figure must stay below (a time) instead of above (a ratio).
    below: bool = False
    holds: bool = field(init=False)

    def __post_init__(self) -> None:
        self.holds = self.measured <= self.needed if self.below else self.measured >= self.needed


def show_bars(bars: Sequence[Bar]) -> None:
    rows = [
        (b.name, f"{'<=' if b.below else '>='} {b.needed:g}", b.measured, "pass" if b.holds else "FAIL") for b in bars
    ]
    table("bars", ("requirement", "needed", "measured", ""), rows)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        content = {key: [asdict(v) if is_dataclass(v) else v for v in value] if isinstance(value, list) else value
                   for key, value in content.items()}  # fmt: skip
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nwrote {path}")


def machine() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    return platform.processor() or platform.machine()
