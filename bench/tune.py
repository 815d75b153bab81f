"""Which tile is fastest: the evidence behind the `tune.py` files of `backends/triton`, to be repeated on another GPU.

    python -m bench tune [--small] [--only PARTS] [--jobs N] [--json FILE]

Every problem runs with the tile that `tune.py` chooses and with others around it; a row shows the chosen one's share of
the copy ceiling and the best, with --small their speed beside torch.compile's kernel. Results must agree to the bit,
whatever the tile. What is found is written into `tune.py` by hand, as a rule over shapes: nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch

from baracuda import BackendKind, PlanPreference
from baracuda.backends.triton import tune as common
from baracuda.backends.triton.dynamic import tune as dynamic_tune
from baracuda.backends.triton.dynamic.tune import Config, Schedule
from baracuda.backends.triton.elementwise import tune as elementwise_tune
from baracuda.backends.triton.tune import Tile, power_of_two
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.core.scope import View
from baracuda.core.types import QuantizeKind
from baracuda.plans.plan import SelectedPlan

from . import _gpu_small as small
from .common import arguments, write_json
from .gpu import _label, copy_ceiling, microseconds, moved, operands, problems

SHAPE = (16384, 8192)
TRITON = PlanPreference(prefer_backend=BackendKind.TRITON)
#: Elements a thread may hold: fewer waste what a scale costs, more spill.
PER_THREAD = range(8, 129)


@dataclass(frozen=True)
class Candidate:
    """A tile in the place of the chosen one; a dynamic range also has a schedule and chunks.

    `pdl` says whether the kernel uses programmatic dependent launch; None leaves that to `tune.pdl_pays`.
    """

    tile: Tile | None = None
    schedule: Schedule | None = None
    chunks: int = 0
    pdl: bool | None = None


@contextmanager
def using(candidate: Candidate) -> Iterator[None]:
    """Plans selected inside get what the candidate says."""
    tile, schedule, pdl = candidate.tile, candidate.schedule, candidate.pdl
    with ExitStack() as patches:

        def says(module: Any, function: str, answer: object) -> None:
            patches.enter_context(mock.patch.object(module, function, lambda *a, **k: answer))

        if tile is not None and schedule is not None:
            says(dynamic_tune, "dynamic", Config(schedule, tile, candidate.chunks))
        elif tile is not None:
            says(elementwise_tune, "dense", tile)
            says(elementwise_tune, "columns", tile)
        if pdl is not None:
            says(common, "pdl_pays", pdl)
        yield


def candidates(p: Problem, processors: int) -> Iterator[Candidate]:
    """The chosen tile, then the same with programmatic dependent launch and without, then others of its kind."""
    yield Candidate()
    yield from (Candidate(pdl=pdl) for pdl in (False, True))
    view, itemsize = p.view, p.element.dtype.itemsize
    vector = 16 // itemsize
    if not OPS[p.op].dynamic:
        light = p.op in (QuantizeKind.DEQUANTIZE, QuantizeKind.DEQUANTIZE_BACKWARD)
        yield from map(Candidate, _dense(view, vector) if view.inner == 1 else _columns(vector, light))
        return
    chosen = dynamic_tune.dynamic(view, itemsize, processors)
    for chunks in dict.fromkeys((chosen.chunks, chosen.chunks // 2, 2 * chosen.chunks)):
        for tile in _ranges(chosen, view, vector):
            if bool(chunks) == bool(chosen.chunks):
                yield Candidate(tile, chosen.schedule, chunks)


def _whole(across: int, warps: int, vector: int, parts: int, down: int = 1) -> Iterator[Tile]:
    """The tile of which each thread has a vector in every part, if it is one; `down` lines at least."""
    lines = max(32 * warps * vector // across, down)
    if across and lines * across * parts // (32 * warps) in PER_THREAD:
        yield Tile(lines, across, warps, vector=vector, parts=parts)


def _ranges(chosen: Config, view: View, vector: int) -> Iterator[Tile]:
    run = power_of_two(view.run)
    for warps, parts in product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)):
        if chosen.schedule is Schedule.ROWS:
            yield from _whole(run // parts, warps, vector, parts)
        elif chosen.schedule is Schedule.BLOCKS:
            for across, neighbours in product((32, 64, 128), (vector, vector // 2)):
                if neighbours and run // parts * across == 32 * warps * neighbours:
                    yield from _whole(across, warps, neighbours, parts, run // parts)
        elif chosen.schedule is Schedule.LONG_ROWS:
            yield from _whole(32 * warps * vector, warps, vector, parts)
        elif warps >= 4:
            yield from _whole(chosen.tile.columns, warps, vector, parts)


def _dense(view: View, vector: int) -> Iterator[Tile]:
    width = power_of_two(view.run)
    for warps, vectors, each in product((1, 2, 4, 8), (1, 2, 4, 8), (0, vector)):
        size = 32 * warps * vector * vectors
        if width >= size:
            yield Tile(1, size, warps, vector=each)
        else:
            yield Tile(size // width, width // vectors, warps, vector=each, parts=vectors)


def _columns(vector: int, light: bool) -> Iterator[Tile]:
    for size, across, warps in product((1024, 2048, 4096), (128, 256, 512), (2, 4, 8)):
        if size // (32 * warps) in PER_THREAD:
            for repeats, neighbours in product((1,) if light else (1, 2, 4, 8), (2, 4, 8)):
                if neighbours <= vector:
                    yield Tile(size // across, across, warps, repeats, neighbours)


class Trial:
    """A problem with one candidate, bound to operands."""

    def __init__(self, p: Problem, candidate: Candidate, device: torch.device) -> None:
        with using(candidate):
            self.plan = SelectedPlan(p, device, TRITON)
            self.bytes = self.plan.workspace_size()
            self.launch = self.plan._launch
        self.device = device

    def __call__(self, values: tuple[object, ...]) -> None:
        room = torch.empty(self.bytes, dtype=torch.uint8, device=self.device) if self.bytes else None
        self.launch(values, room)  # type: ignore[arg-type]


def compile_ahead(job: tuple[Problem, Candidate]) -> str | None:
    """Launch once in this process, for Triton's cache; the reason if that is not possible."""
    problem, candidate = job
    device = torch.device("cuda", 0)
    try:
        Trial(problem, candidate, device)(operands(problem, device))
        torch.cuda.synchronize(device)
    except Exception as error:  # a tile that needs too much of something
        return f"{type(error).__name__}: {error}"
    return None


def sweep(name: str, p: Problem, tried: list[Candidate], ceiling: float, device: torch.device) -> dict[str, object]:
    """The share of the ceiling that each candidate reaches; without a ceiling, of torch.compile's speed."""
    trials = [Trial(p, candidate, device) for candidate in tried]
    values = operands(p, device)
    agree(p, trials, values)
    if ceiling:
        rates = [moved(p) / microseconds(lambda trial=trial: trial(values), 6, 5) for trial in trials]  # type: ignore[misc]
        shares = [rate / ceiling for rate in rates]
    else:
        _, compiled, count = small.ready(p, device)
        sets = small.operand_sets(p, values, device)
        calls = [lambda values: compiled(*values[:count]), *trials]
        graphs = [small.captured(call, sets) for call in calls]
        theirs, *ours = small.in_turns([graph for graph, _ in graphs], len(sets))
        shares = [theirs / each for each in ours]
    best, by = max(zip(shares, tried, strict=True), key=lambda found: found[0])
    size = "" if ceiling else "x".join(map(str, p.shape))
    print(f"{_label(name, p):60s}{size:11s} chosen {shares[0]:6.1%}  best {best:6.1%}  {_named(by)}", flush=True)
    rows = [
        {"share": share, "pdl": c.pdl, **asdict(c.tile or Tile(0, 0, 0))}
        for share, c in zip(shares, tried, strict=True)
    ]
    return {"problem": _label(name, p), "shape": p.shape, "chosen": shares[0], "best": best, "tiles": rows}


def _named(c: Candidate) -> str:
    when = {None: "", True: ", PDL", False: ", no PDL"}[c.pdl]
    return f"{c.tile or 'as chosen'}{when}"


def agree(p: Problem, trials: Sequence[Trial], values: tuple[object, ...]) -> None:
    """Stops where a candidate gives other bits than the first."""
    outputs = [v for v, operand in zip(values, OPS[p.op].operands, strict=True) if operand.output and v is not None]
    expected: list[torch.Tensor] = []
    for trial in trials:
        for output in outputs:
            output.fill_(77)  # type: ignore[attr-defined]
        trial(values)
        got = [output.view(-1).view(torch.uint8).clone() for output in outputs]  # type: ignore[attr-defined]
        expected = expected or got
        if not all(map(torch.equal, got, expected)):
            raise SystemExit(f"{p}: {trial.plan} gives other bits than {trials[0].plan}")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="substrings of 'op|scope|element|quantized' to keep, by commas")
    parser.add_argument("--small", action="store_true", help="4096 x 4096 and below, beside torch.compile")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile the kernels before the timing")


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments("tune", argv, "leave out f16, u8 and u4", _options)
    if not torch.cuda.is_available():
        raise SystemExit("bench tune: torch sees no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = options.only.split(",")
    all_problems = small.problems() if options.small else problems(SHAPE, options.quick)
    chosen = [(n, p) for n, p in all_problems if all(part in small.label(n, p) for part in wanted)]
    jobs = [(p, candidate) for _, p in chosen for candidate in candidates(p, processors)]
    with ProcessPoolExecutor(options.jobs, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        refused = dict(zip(jobs, pool.map(compile_ahead, jobs, chunksize=8), strict=True))
    ceiling = 0.0 if options.small else copy_ceiling(device)
    print(f"{torch.cuda.get_device_name(device)}, copy {ceiling / 1e6:.2f} TB/s, {len(jobs)} kernels")
    rows = []
    for name, p in chosen:
        tried = [candidate for candidate in candidates(p, processors) if refused[p, candidate] is None]
        rows.append(sweep(name, p, tried, ceiling, device))
    write_json(options.json, {"device": torch.cuda.get_device_name(device), "rows": rows})
