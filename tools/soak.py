"""Endurance: random plans from many threads, each result checked bit for bit, while memory must stay flat.

    python tools/soak.py --seconds 600        (make soak; SECONDS=60 make soak)

A pool of problems is drawn from the matrix every backend is tested with, their results computed once by the reference.
Then every thread picks problems at random and runs them: on a plan of its own or on one all threads share, into given
or fresh outputs, on a stream of its own where there is a GPU. Fails on any wrong bit, any exception, any byte behind a
workspace, and when memory grows: the line fitted through the samples after the warm-up may not rise by more than
16 MB and 2 % over the time watched.

    python tools/soak.py --invariance         (make soak INVARIANCE=1)

hunts for a plan that promises batch invariance and breaks it: random problems of random sizes, random rows of them,
alone and beside neighbours that are NaN, infinite, huge or tiny, each run with a number of threads of its own. No
problem comes twice, so memory is not watched.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from guards import guarded, untouched
from rows import NEIGHBOURS, random_case, require_independent_rows, some_rows
from torch import Tensor

from baracuda import BackendKind
from baracuda.backends.registry import Value
from baracuda.core.optable import OPS
from baracuda.plans.plan import SelectedPlan
from cases import CASES, Case, assert_same_bits, operands, run

WARM_UP = 0.25
ALLOWED_BYTES, ALLOWED_SHARE = 16 << 20, 0.02
MAX_FAILURES = 10

Results = dict[str, Tensor]


@dataclass
class Watched:
    """Samples of one kind of memory: (seconds, bytes)."""

    name: str
    samples: list[tuple[float, int]] = field(default_factory=list)

    def growth(self) -> float:
        """Bytes by which the line of least squares rises over the samples, in bytes."""
        times = torch.tensor([t for t, _ in self.samples], dtype=torch.float64)
        sizes = torch.tensor([b for _, b in self.samples], dtype=torch.float64)
        spread = ((times - times.mean()) ** 2).sum()
        if len(self.samples) < 3 or spread == 0:
            return 0.0
        slope = ((times - times.mean()) * (sizes - sizes.mean())).sum() / spread
        return float(slope * (times[-1] - times[0]))

    def allowed(self) -> float:
        return ALLOWED_BYTES + ALLOWED_SHARE * self.samples[0][1] if self.samples else 0.0

    def grows(self) -> bool:
        return self.growth() > self.allowed()

    def __str__(self) -> str:
        if not self.samples:
            return f"{self.name}: not sampled"
        minutes = max(self.samples[-1][0] - self.samples[0][0], 1e-9) / 60
        sizes = [b / 1e6 for _, b in self.samples]
        verdict = "GROWS" if self.grows() else "flat"
        return (
            f"{self.name}: {sizes[0]:.0f} MB after the warm-up, {max(sizes):.0f} MB at most, {sizes[-1]:.0f} MB at the "
            f"end; fitted {self.growth() / 1e6:+.1f} MB in {minutes:.1f} min "
            f"({self.growth() / 1e6 / minutes:+.2f} MB a minute), allowed {self.allowed() / 1e6:.0f} MB: {verdict}"
        )


@dataclass
class Shared:
    """What the threads have in common."""

    device: torch.device
    pool: list[Case]
    expected: dict[Case, Results]
    plans: dict[Case, SelectedPlan]
    until: float = 0.0
    runs: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def over(self) -> bool:
        return time.monotonic() > self.until or len(self.failures) >= MAX_FAILURES


def resident() -> int:
    """Bytes in memory, without what the allocator keeps for later: how that is cut up changes for minutes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def inputs_of(case: Case, plan: SelectedPlan) -> tuple[Value, ...]:
    values = operands(case, plan.device)
    if plan.kernel.strides == "contiguous":
        values = tuple(v.contiguous() if isinstance(v, Tensor) else v for v in values)
    return values


def once(case: Case, plan: SelectedPlan, fresh: bool) -> Results:
    """One run of a plan, into outputs it allocates itself or into given ones; the results by name, on the CPU."""
    rows, values = OPS[case.problem.op].operands, inputs_of(case, plan)
    if fresh:
        inputs = tuple(v for v, row in zip(values, rows, strict=True) if not row.output)
        made = iter(plan.compute(inputs))
        found = {row.name: next(made) for row in rows if row.output}
    else:
        workspace, behind = guarded(plan.workspace_size(), plan.device)
        plan.launch(values, workspace)
        if not untouched(behind):
            raise AssertionError("wrote behind its workspace")
        found = {row.name: v for row, v in zip(rows, values, strict=True) if row.output}
    return {name: value.cpu() for name, value in found.items() if isinstance(value, Tensor)}


def work(shared: Shared, seed: int) -> None:
    pick, runs = random.Random(seed), collections.Counter[str]()
    stream = torch.cuda.Stream(shared.device) if shared.device.type == "cuda" else None
    while not shared.over():
        case, own, fresh = pick.choice(shared.pool), pick.random() < 0.3, pick.random() < 0.5
        how = f"{'own' if own else 'shared'} plan, {'fresh' if fresh else 'given'} outputs"
        try:
            plan = SelectedPlan(case.problem, shared.device) if own else shared.plans[case]
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                got = once(case, plan, fresh)
            assert_same_bits(got, shared.expected[case], case)
        except Exception as error:
            with shared.lock:
                shared.failures.append(f"{case} ({how}): {type(error).__name__}: {error}")
        runs[how] += 1
    with shared.lock:
        shared.runs += runs


def hunt(shared: Shared, seed: int) -> None:
    """Look for rows whose bits depend on the batch around them, among plans that promise that they do not."""
    draw, runs = random.Random(seed), collections.Counter[str]()
    stream = torch.cuda.Stream(shared.device) if shared.device.type == "cuda" else None
    while not shared.over():
        case = random_case(draw)
        rows, number = some_rows(case.problem, draw), draw.choice([None, *NEIGHBOURS])
        if not SelectedPlan(case.problem, shared.device).precision_guarantee().batch_invariant:
            continue
        try:
            torch.set_num_threads(draw.randint(1, 4))
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                require_independent_rows(case, rows, number, shared.device)
        except Exception as error:
            with shared.lock:
                shared.failures.append(f"{case}: {type(error).__name__}: {error}")
        runs[case.problem.op.value] += 1
    with shared.lock:
        shared.runs += runs


Worker = Callable[[Shared, int], None]


def prepared(device: torch.device, size: int, seed: int) -> Shared:
    """A pool in which every operation has its share; each problem is run once, so that what is cached is cached."""
    by_op: dict[object, list[Case]] = collections.defaultdict(list)
    for case in CASES:
        by_op[case.problem.op].append(case)
    draw = random.Random(seed)
    for cases in by_op.values():
        draw.shuffle(cases)
    in_turn = (case for group in itertools.zip_longest(*by_op.values()) for case in group if case is not None)
    pool = list(itertools.islice(in_turn, size))
    plans = {case: SelectedPlan(case.problem, device) for case in pool}
    return Shared(device, pool, {case: run(case, BackendKind.REFERENCE) for case in pool}, plans)


def soak(shared: Shared, seconds: float, threads: int, seed: int, body: Worker = work) -> list[Watched]:
    """Run for a while; returns what was seen of the memory after the warm-up."""
    started = time.monotonic()
    shared.until = started + seconds
    workers = [threading.Thread(target=body, args=(shared, seed * 1000 + i)) for i in range(threads)]
    for worker in workers:
        worker.start()
    watched = [Watched("resident memory")]
    if shared.device.type == "cuda":
        watched.append(Watched("device memory"))
    while not shared.over():
        time.sleep(min(1.0, seconds / 50))
        now = time.monotonic() - started
        if now > WARM_UP * seconds:
            watched[0].samples.append((now, resident()))
            if len(watched) > 1:
                free, total = torch.cuda.mem_get_info(shared.device)
                watched[1].samples.append((now, total - free))
    for worker in workers:
        worker.join()
    return watched


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--pool", type=int, default=300, help="how many problems to choose from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--invariance", action="store_true", help="hunt for rows that depend on the batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    shared = Shared(device, [], {}, {}) if options.invariance else prepared(device, options.pool, options.seed)
    watched = soak(shared, options.seconds, options.threads, options.seed, hunt if options.invariance else work)
    watched = [] if options.invariance else watched

    total = sum(shared.runs.values())
    problems = "random" if options.invariance else len(shared.pool)
    print(f"{total} runs of {problems} problems on {device} from {options.threads} threads in "
          f"{options.seconds:.0f} s ({total / options.seconds:.0f} a second), seed {options.seed}")  # fmt: skip
    for how, count in sorted(shared.runs.items()):
        print(f"  {count:>9} {how}")
    for memory in watched:
        print(memory)
    print(f"{len(shared.failures)} failures")
    for failure in shared.failures:
        print(f"  {failure}")
    return 1 if shared.failures or total == 0 or any(memory.grows() for memory in watched) else 0


if __name__ == "__main__":
    sys.exit(main())
