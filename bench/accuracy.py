"""Accuracy on a real language model: every scheme and method of baracuda, beside llm-compressor's, in one run.

Each row is a process of its own, so that its time and its peak memory are its own. All results are checkpoints in
compressed-tensors' layout; one reader turns each into a float model with quantized inputs, and one loop compares it
with the original: perplexity, KL divergence, and how often both give the same most likely token.

What a peer makes of the same model and tokens is kept in the cache of the real model: a run after a change to baracuda
repeats baracuda's rows alone. `--again` measures the peers anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _gemma_type as gemma
from . import _real_model as real
from .common import Bar, arguments, show_bars, table, write_json

#: Seconds and peak memory of a row.
Cost = dict[str, Any]
#: Samples and tokens of a sample, for calibration and for evaluation.
SAMPLES, LENGTH = 16, 256
GROUP = 64


@dataclass(frozen=True)
class Row:
    """One way to quantize the model."""

    name: str
    scheme: str
    method: str = "rtn"
    smooth: bool | str = False
    peer: bool = False
    weighed: bool = False
    """Whether scales are weighed by calibration data, for a method that could do without."""
    builtin: bool = False
    """Whether calibration reads the text that comes with baracuda."""

    @property
    def calibrated(self) -> bool:
        return self.method != "rtn" or bool(self.smooth) or self.weighed


ROWS = (
    Row("w8a8", "w8a8"),
    Row("w8a8, smooth", "w8a8", smooth=True),
    Row("w8a8, smooth auto", "w8a8", smooth="auto"),
    Row("w8a8, smooth auto, builtin", "w8a8", smooth="auto", builtin=True),
    Row("w8a8, smooth auto, gptq", "w8a8", "gptq", smooth="auto"),
    Row("w4a16", "w4a16"),
    Row("w4a16, weighed scales", "w4a16", weighed=True),
    Row("w4a16, smooth auto", "w4a16", smooth="auto"),
    Row("w4a16, gptq", "w4a16", "gptq"),
    Row("w4a16, smooth auto, gptq", "w4a16", "gptq", smooth="auto"),
    Row("w4a16, smooth auto, gptq, builtin", "w4a16", "gptq", smooth="auto", builtin=True),
    Row("w4a8, smooth auto", "w4a8", smooth="auto"),
    Row("w4a8, gptq", "w4a8", "gptq"),
    Row("w4a8, smooth auto, gptq", "w4a8", "gptq", smooth="auto"),
    Row("w4a8, smooth auto, gptq, builtin", "w4a8", "gptq", smooth="auto", builtin=True),
    Row("llm-compressor w8a8", "w8a8", peer=True),
    Row("llm-compressor w4a16", "w4a16", peer=True),
    Row("llm-compressor w4a16, gptq", "w4a16", "gptq", peer=True),
)
QUICK = ("w4a16", "w4a16, gptq")
#: The models, by name, and what makes their directories.
MODELS: dict[str, Callable[[], Path]] = {"SmolLM2-135M": real.model_directory, "Gemma type": gemma.model_directory}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="SmolLM2-135M", help="the model to quantize")
    parser.add_argument("--peer", type=Path, metavar="PYTHON", help="an interpreter that has llm-compressor")
    parser.add_argument("--threads", type=int, default=0, help="threads of every contestant; all cores by default")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows to run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep checkpoints here, and use those that are there")
    parser.add_argument("--again", action="store_true", help="measure the peers anew, instead of reading the cache")
    parser.add_argument("--onto", type=Path, metavar="FILE", help="take rows that are not run from an earlier --json")
    parser.add_argument("--choose", action="store_true", help="evaluate on the chapters that variants are chosen on")


def main(argv: Sequence[str]) -> int:
    chosen = arguments("accuracy", argv, quick="two rows and few tokens", more=options)
    if (why := real.missing()) is not None:
        print(f"skipped: {why}")
        return 0
    samples = 4 if chosen.quick else SAMPLES
    rows = [r for r in ROWS if (r.name in (chosen.only or (QUICK if chosen.quick else [x.name for x in ROWS])))]
    if chosen.peer is None and any(row.peer for row in rows):
        print("llm-compressor is left out: pass --peer PYTHON, an interpreter that has it")
        rows = [row for row in rows if not row.peer]
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = measure(rows, folder, samples, chosen)
    setting = {"model": chosen.model, "group_size": GROUP}
    setting |= {"samples": samples, "length": LENGTH, "chapters": list(_chapters(chosen))}
    if chosen.onto is not None:
        results = together(results, json.loads(chosen.onto.read_text()), setting)
    show(chosen.model, results)
    bars = requirements({row["name"]: row for row in results[1:]})
    show_bars(bars)
    setting["threads"] = chosen.threads or torch.get_num_threads()
    write_json(chosen.json, {**setting, "rows": results, "bars": bars})
    return 0


def together(results: list[dict[str, Any]], earlier: dict[str, Any], setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of this run and of an earlier one on the same model and text, in their order; this run's go first."""
    if different := [f"{key}: {earlier.get(key)!r}" for key, value in setting.items() if earlier.get(key) != value]:
        raise SystemExit(f"--onto: expected a run with {setting}, got {', '.join(different)}; run all rows anew")
    rows = {row["name"]: row for row in (*earlier["rows"], *results)}
    return [rows[name] for name in ("float", *(row.name for row in ROWS)) if name in rows]


def measure(rows: list[Row], folder: Path, samples: int, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    from baracuda.flow.checkpoint.tensorfile import write_tensors

    calibration = folder / f"calibration-{samples}.safetensors"
    write_tensors(calibration, {"tokens": real.tokens(real.CALIBRATION_CHAPTERS, samples, LENGTH)})
    tokens = real.tokens(_chapters(chosen), samples, LENGTH)
    made = [(row, *run(row, calibration, folder, samples, chosen)) for row in rows]
    from ._accuracy_model import Reference

    reference = Reference(MODELS[chosen.model](), tokens)
    results: list[dict[str, Any]] = [{"name": "float", "perplexity": reference.perplexity}]
    for row, checkpoint, cost in made:
        results.append({"name": row.name, **reference.compare(checkpoint), **cost})
        print(json.dumps(results[-1]), flush=True)
    return results


def _chapters(chosen: argparse.Namespace) -> tuple[int, ...]:
    return real.CHOICE_CHAPTERS if chosen.choose else real.EVALUATION_CHAPTERS


def slug(row: Row) -> str:
    return row.name.replace(", ", "-").replace(" ", "-")


def run(row: Row, calibration: Path, folder: Path, samples: int, chosen: argparse.Namespace) -> tuple[Path, Cost]:
    """Quantize in a process of its own: the checkpoint, and what it took."""
    model, here = str(MODELS[chosen.model]()), Path(__file__).parent
    if row.peer:
        script = here / "_llmcompressor.py"
        task = [row.scheme, row.method, str(GROUP)]
        folder = real.cache() / "peers" / _digest(calibration, script, chosen, task)
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(chosen.peer), str(script), model, str(calibration), str(folder / slug(row)), *task]
    else:
        options = {"model": model, "out": str(folder / slug(row)), "scheme": row.scheme, "method": row.method,
                   "samples": samples, "sequence_length": LENGTH}  # fmt: skip
        options |= {"calibration": "builtin" if row.builtin else str(calibration)} if row.calibrated else {}
        options |= {"group_size": GROUP} if row.scheme.startswith("w4") else {}
        options |= {"smooth": row.smooth} if row.smooth else {}
        command = [sys.executable, "-m", "bench._accuracy_run", json.dumps(options)]
    out, cost = folder / slug(row), folder / f"{slug(row)}.cost.json"
    if row.peer and chosen.again:
        shutil.rmtree(out, ignore_errors=True)
        cost.unlink(missing_ok=True)
    if cost.exists():
        known: Cost = json.loads(cost.read_text())
        return out, known
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if chosen.threads:
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(chosen.threads)
    done = subprocess.run(command, cwd=here.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{row.name}: {done.stderr.strip()[-2000:]}")
    found: Cost = json.loads(done.stdout.strip().splitlines()[-1])
    cost.write_text(json.dumps(found))
    return out, found


def _digest(calibration: Path, script: Path, chosen: argparse.Namespace, task: list[str]) -> str:
    """What a peer's result depends on: a run with the same inputs takes it from the cache."""
    asked = subprocess.run([str(chosen.peer), "-c", "from importlib.metadata import version as v; "
                            "print(v('llmcompressor'), v('torch'), v('transformers'))"],
                           capture_output=True, text=True, check=True)  # fmt: skip
    digest = hashlib.sha256(json.dumps([asked.stdout, chosen.threads, task]).encode())
    for file in (calibration, script, *sorted(MODELS[chosen.model]().glob("*.safetensors"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def show(model: str, results: list[dict[str, Any]]) -> None:
    header = ("", "perplexity", "KL", "top-1 %", "seconds", "of a core", "peak MB")
    cells = [
        (
            row["name"],
            row["perplexity"],
            f"{row['kl']:.4f}" if "kl" in row else None,
            100 * row["top1_agreement"] if "kl" in row else None,
            row.get("seconds"),
            row.get("cpu_seconds"),
            f"{row['peak_mb']:.0f}" if "peak_mb" in row else None,
        )
        for row in results
    ]
    table(f"{model}, groups of {GROUP}, against the float model", header, cells)


def requirements(found: dict[str, dict[str, Any]]) -> list[Bar]:
    """What must hold between the rows that were run."""
    bars = []

    def ratio(name: str, above: str, below: str, key: str, needed: float) -> None:
        if above in found and below in found:
            bars.append(Bar(name, needed, found[above][key] / found[below][key], below=True))

    peer = "llm-compressor w4a16, gptq"
    ratio("w4a16, gptq: KL / llm-compressor's", "w4a16, gptq", peer, "kl", 0.97)
    ratio("w4a16, smooth auto, gptq: KL / llm-compressor's", "w4a16, smooth auto, gptq", peer, "kl", 0.85)
    ratio("w4a8, smooth auto, gptq: KL / w4a16, gptq", "w4a8, smooth auto, gptq", "w4a16, gptq", "kl", 1.1)
    ratio("w8a8, smooth auto: KL / w8a8", "w8a8, smooth auto", "w8a8", "kl", 0.4)
    # The processors' time: rows run one after the other, and other work on the machine does not hit all of them alike.
    ratio("w4a16, gptq: seconds of a core / llm-compressor's", "w4a16, gptq", peer, "cpu_seconds", 0.5)
    ratio("w4a16, gptq: peak memory / llm-compressor's", "w4a16, gptq", peer, "peak_mb", 1.0)
    if "w4a16, gptq" in found and peer in found:
        ours, theirs = found["w4a16, gptq"]["top1_agreement"], found[peer]["top1_agreement"]
        bars.append(Bar("w4a16, gptq: top-1 agreement / llm-compressor's", 1.0, ours / theirs))
    return bars
