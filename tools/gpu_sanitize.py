"""The GPU kernels under compute-sanitizer: a spread of the matrix, out of bounds (memcheck) and unordered (racecheck).

    python tools/gpu_sanitize.py --out logs        (make gpu-sanitize)

Every operation, scope, mode and schedule once or twice at small sizes, each result compared with the reference. The
kernels are compiled first, by many processes; then each tool watches the same work in a few. Every tensor is an
allocation of its own, with a gap behind it, so that a byte too far is in nobody's memory. Before that each tool must
notice a kernel that is wrong on purpose: a tool that sees nothing at all would look like success. Nothing is left out
by name: hardly a kernel runs that is not ours.

The tool comes with the CUDA toolkit, or with `pip install 'nvidia-cuda-sanitizer-api>=13.4'` (earlier packages lack a
part of it); COMPUTE_SANITIZER names another.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import learned
import torch
import triton
import triton.language as tl
from torch import Tensor

from baracuda import (
    Activation,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
)
from baracuda.backends.triton.linear.hopper import gemm as hopper
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem, scale_elements
from baracuda.core.types import OpCategory
from baracuda.plans.plan import SelectedPlan
from cases import CASES, LAYOUTS, LINEAR_CASES, Case, assert_same_bits, is_linear, operands, run

TOOLS = {"memcheck": ["--padding", "4096", "--report-api-errors", "no"], "racecheck": []}
#: Errors end a kernel, not the process: the work behind them is still looked at.
COMMON = ["--error-exitcode", "9", "--destroy-on-device-error", "kernel", "--show-backtrace", "no"]
FOUND = 9
DEVICE = torch.device("cuda", 0)
#: m, n, k: one for each way through the sm_90 kernels, with few tokens and in tiles, K whole and in parts.
LINEAR_SHAPES = [(2, 72, 528), (2, 64, 8192), (5, 72, 272), (16, 64, 8192), (33, 72, 528), (130, 136, 272)]
LINEAR_SHAPES += [(65, 72, 4112)]
#: m, k of packed weights whose K the warps share out: some without work, all with the same.
PACKED = [(3, 1152), (16, 4096)]
#: m, k of packed weights and float activations: all that a warp multiplies at once or in steps, K whole and in parts.
PACKED_FLOATS = [(1, 1152), (3, 4352), (16, 2048)]
LINEARS = (QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR)


# -- the work ----------------------------------------------------------------------------------------------------


def spread() -> list[Case]:
    """Of every op, layout, mode and width of the stored integers one case: any element, kind, range and data."""
    groups: dict[object, list[Case]] = defaultdict(list)
    for case in CASES:
        p = case.problem
        if not is_linear(case):
            groups[p.op, p.shape, p.scope, p.mode, p.quantized.is_packed].append(case)
    return [random.Random(i).choice(members) for i, members in enumerate(groups.values())]


def linears() -> list[Case]:
    cases = LINEAR_CASES[::13]
    for op, shape in product(LINEARS, LINEAR_SHAPES):
        for element, mode, activation in (
            (ElementKind.BF16, DynamicRangeMode.SYMMETRIC, Activation.NONE),
            (ElementKind.F16, DynamicRangeMode.SYMMETRIC, Activation.GELU),
            (ElementKind.F32, DynamicRangeMode.SYMMETRIC, Activation.SILU),
            (ElementKind.BF16, DynamicRangeMode.ASYMMETRIC, Activation.RELU),
        ):
            low, stored = -127 if mode is DynamicRangeMode.SYMMETRIC else -128, scale_elements(element)[0]
            p = Problem(
                op, shape, element, ElementKind.S8, low, 127, mode=mode, scale_element=stored, nonlinearity=activation
            )
            cases.append(Case(p, residual=activation is not Activation.NONE))
    for op, (m, k) in product(LINEARS, PACKED):
        p = Problem(op, (m, 72, k), ElementKind.BF16, ElementKind.S8, -127, 127, weight=ElementKind.S4)
        cases.append(Case(replace(p, weight_group=128)))
    for m, k in PACKED_FLOATS:
        shape, op = (m, 72, k), QuantizeKind.WEIGHT_ONLY_LINEAR
        p = Problem(op, shape, ElementKind.BF16, ElementKind.S8, -127, 127, weight=ElementKind.S4)
        cases.append(Case(replace(p, weight_group=64), scale="input_type"))
    return cases


def odd() -> list[Case]:
    """Operands of these start one element into their memory, where no access may be wide."""
    cases = []
    quantizing = [op for op, row in OPS.items() if row.category is not OpCategory.GEMM]
    for op, kind in product(quantizing, (ElementKind.S8, ElementKind.S4)):
        if op is not QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD:
            scope = PerTensor() if op in (QuantizeKind.NORM_QUANTIZE, QuantizeKind.GATED_QUANTIZE) else PerToken()
            p = Problem(op, (5, 264), ElementKind.BF16, kind, 1 - 2 ** (kind.bits - 1), kind.q_max, scope)
            cases.append(Case(p))
    p = Problem(QuantizeKind.SMOOTHQUANT_LINEAR, (33, 72, 528), ElementKind.BF16, ElementKind.S8, -127, 127)
    return [*cases, Case(p)]


def launched(case: Case, shift: int) -> dict[str, Tensor]:
    """The outputs, from operands that are copied to the device as a whole and end where their memory ends."""
    plan = SelectedPlan(case.problem, DEVICE, PlanPreference(prefer_backend=BackendKind.TRITON))

    def placed(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        flat = torch.zeros(value.numel() + shift, dtype=value.dtype)
        flat[shift:] = value.reshape(-1)
        return flat.to(DEVICE)[shift:].view(value.shape)

    values = tuple(placed(value) for value in operands(case))
    plan.launch(values, torch.full((plan.workspace_size(),), 0xA5, dtype=torch.uint8).to(DEVICE))
    rows = OPS[case.problem.op].operands
    return {o.name: v.cpu() for o, v in zip(rows, values, strict=True) if o.output and isinstance(v, Tensor)}


def check(case: Case, shift: int = 0) -> None:
    assert_same_bits(launched(case, shift), run(case, BackendKind.REFERENCE), case)


def check_learned(p: Problem) -> None:
    learned.assert_alike(p, learned.run(p, BackendKind.TRITON, DEVICE), learned.run(p, BackendKind.REFERENCE))


def work() -> Iterator[tuple[str, Callable[[], None]]]:
    for case in [*spread(), *linears()]:
        yield str(case), partial(check, case)
    for case in odd():
        yield f"{case} at odd addresses", partial(check, case, 1)
    for p in [*learned.problems(LAYOUTS)][::4] + [*learned.problems(learned.FULL_BLOCKS)][1::4]:
        yield str(p), partial(check_learned, p)


def run_share(share: int, of: int, every: int) -> int:
    """Every so-manieth piece of the work, told by name before it runs: what a tool prints next is about it."""
    wrong = ran = 0
    for name, body in list(work())[::every][share::of]:
        print(f"case {name}", flush=True)
        try:
            body()
        except Exception as error:  # whatever it is, the others are still worth running
            print(f"WRONG {type(error).__name__}: {str(error)[:500]}", flush=True)
            wrong += 1
        ran += 1
    print(f"ran {ran}", flush=True)
    return min(wrong, 1)


# -- the controls ------------------------------------------------------------------------------------------------


@triton.jit
def beyond(out_ptr, SIZE: tl.constexpr):
    """Writes one element behind the last."""
    lane = tl.arange(0, 64)
    tl.store(out_ptr + lane, lane, mask=lane <= SIZE)


#: Each thread writes a word and reads one that a thread of the other warp writes, with no barrier between.
EXCHANGE = tl.constexpr("""{
    .shared .align 4 .b32 words[64];
    .reg .b32 base, mine, other;
    mov.u32 base, words;
    shl.b32 mine, $1, 2;
    xor.b32 other, mine, 128;
    add.u32 mine, base, mine;
    add.u32 other, base, other;
    st.shared.b32 [mine], $1;
    ld.shared.b32 $0, [other];
}""")


@triton.jit
def unordered(out_ptr):
    lane = tl.arange(0, 64)
    tl.store(
        out_ptr + lane,
        tl.inline_asm_elementwise(EXCHANGE, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1),
    )


def run_control(tool: str) -> int:
    if tool == "memcheck":
        beyond[(1,)](torch.zeros(33, dtype=torch.int32).to(DEVICE), 33, num_warps=2)
    else:
        unordered[(1,)](torch.zeros(64, dtype=torch.int32).to(DEVICE), num_warps=2)
    torch.cuda.synchronize()
    return 0


# -- the tools ---------------------------------------------------------------------------------------------------


def sanitizer() -> str:
    """The path of compute-sanitizer: as named, on the path, in the toolkit, or in a Python package."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin", *packages.glob("cu*/compute-sanitizer")]
    for found in (os.environ.get("COMPUTE_SANITIZER"), shutil.which("compute-sanitizer")):
        if found:
            return found
    for folder in folders:
        if (path := folder / "compute-sanitizer").is_file():
            return str(path)
    raise SystemExit(
        "compute-sanitizer: expected it on PATH, in $CUDA_HOME/bin or from nvidia-cuda-sanitizer-api>=13.4, "
        "found none; install one of them, or name it in COMPUTE_SANITIZER"
    )


def command(binary: str, tool: str, port: int, *arguments: str) -> list[str]:
    # Where the tool knows how, it looks at the copy engine's tensor copies, too.
    tensors = ["--check-tensor-ops", "yes"] if tool == "memcheck" and "--check-tensor-ops" in known(binary) else []
    under = [binary, "--tool", tool, "--port", str(port), *COMMON, *TOOLS[tool], *tensors] if binary else []
    return [*under, sys.executable, __file__, *arguments]


@cache
def known(binary: str) -> str:
    return subprocess.run([binary, "--help"], capture_output=True, text=True, check=False).stdout if binary else ""


def bounded(words: Sequence[str], log: Path, seconds: float) -> int:
    """The exit status, or -1 when the time is over; a group of processes of its own, so that none is left."""
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return -1


@cache
def hand_over() -> set[str]:
    """The places of what the compiler itself adds to a kernel of specialised warps: a byte that tells them their part.

    It is written before one barrier of all threads and read behind it, twice; racecheck 2025.3 takes that for a race.
    """
    lines, first = inspect.getsourcelines(hopper.gemm.fn)
    added = [i for i, line in enumerate(lines) if line.startswith("def ") or "gl.warp_specialize(" in line]
    return {f"{Path(hopper.__file__).name}:{first + i}" for i in added}


def reports(log: str) -> Iterator[str]:
    """What a tool or a comparison had to say, each as one line."""
    for text in re.split(r"\n(?![= ]*(?:and|at) |=+     )", log):
        if text.startswith("WRONG ") or re.match(
            r"=+ (?:Error|Warning|Invalid|Internal|Program hit|Potential|Barrier)", text
        ):
            yield re.sub(r"\s*\n=*\s*", " ", text).strip("= ")


def excused(report: str) -> bool:
    return "Race reported" in report and set(re.findall(r" in (\S+:\d+)", report)) <= hand_over()


def findings(log: str) -> Counter[str]:
    """The reports and how often they came: the first place of each, without its numbers."""
    found: Counter[str] = Counter()
    for report in reports(log):
        if not excused(report):
            found[re.sub(r"0x[0-9a-f]+", "..", re.match(r".*?\S+:\d+|.*", report)[0])] += 1  # type: ignore[index]
    return found


def passed(code: int, log: str) -> bool:
    """Nothing found but what is excused, all done, and the tool there to say so."""
    known_ones = sum(map(excused, reports(log)))
    status = FOUND if known_ones else 0
    return code == status and not findings(log) and "\nran " in log and f"SUMMARY: {known_ones} " in log


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The GPU kernels under compute-sanitizer.")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-sanitize"), help="a folder for the logs")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="processes that compile")
    parser.add_argument("--shares", type=int, default=4, help="processes under each tool")
    parser.add_argument("--every", type=int, default=1, help="look at every so-manieth case only")
    parser.add_argument("--seconds", type=float, default=200, help="the most that one process may take")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--control", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("gpu_sanitize: torch sees no CUDA device")
    if options.share:
        return run_share(*map(int, options.share.split("/")))
    if options.control:
        return run_control(options.control)
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    options.out.mkdir(parents=True, exist_ok=True)
    return watched(sanitizer(), options)


def watched(binary: str, options: argparse.Namespace) -> int:
    tools = options.tools.split(",")
    chores = [("", f"alone-{i}", f"{i}/{options.jobs}/{options.every}") for i in range(options.jobs)]
    alone = [name for name, code, _ in done(chores, options) if code != 0]
    if alone:  # all the more reason to look on
        print(f"FAIL without any tool: see {', '.join(f'{name}.log' for name in alone)} in {options.out}", flush=True)
    for i, tool in enumerate(tools):
        log = options.out / f"control-{tool}.log"
        code = bounded(command(binary, tool, 49152 + 16 * i, "--control", tool), log, options.seconds)
        if code != FOUND:
            print(f"FAIL {tool}: a kernel that is wrong on purpose went unnoticed (exit status {code}): see {log}")
            return 1
    parts = [f"{i}/{options.shares}/{options.every}" for i in range(options.shares)]
    chores = [(tool, f"{tool}-{i}", part) for tool in tools for i, part in enumerate(parts)]
    results = list(done(chores, options, binary))
    for tool in tools:
        mine = [(name, code, log) for name, code, log in results if name.startswith(tool)]
        found = sum((findings(log) for _, _, log in mine), Counter[str]())
        bad = [f"{name} (exit status {code})" for name, code, log in mine if not passed(code, log)]
        ran = sum(log.count("\ncase ") + log.startswith("case ") for _, _, log in mine)
        print(f"{'FAIL' if bad else 'ok'} {tool}: {ran} cases, {sum(found.values())} findings. {', '.join(bad)}")
        known_ones = sum(excused(report) for _, _, log in mine for report in reports(log))
        if known_ones:
            print(f"  besides {known_ones} x the compiler's own hand-over to specialised warps, ordered by barriers")
        for text, count in found.most_common(20):
            print(f"  {count} x {text}")
    return int(bool(alone) or any(not passed(code, log) for _, code, log in results))


def done(
    chores: list[tuple[str, str, str]], options: argparse.Namespace, binary: str = ""
) -> Iterator[tuple[str, int, str]]:
    """Name, exit status and log of each (tool, name, share), all at once."""

    def one(i: int, tool: str, name: str, share: str) -> tuple[str, int, str]:
        path = options.out / f"{name}.log"
        code = bounded(command(binary, tool, 49152 + 16 * i, "--share", share), path, options.seconds)
        return name, code, path.read_text(errors="replace")

    with ThreadPoolExecutor(len(chores)) as pool:
        yield from pool.map(lambda job: one(job[0], *job[1]), enumerate(chores))


if __name__ == "__main__":
    sys.exit(main())
