"""Fuzz the model flow: hostile configs, headers, indices, reports, checksums, folds, tokenizers and texts, from a seed.

Every case damages a copy of a small model, its quantized checkpoints or its data, and calls what people call, from
Python or by the command line. An answer is a result, a finding or a BaracudaError. Anything else (a traceback, a case
that takes too long, memory without bound) is a failure: it is printed with the seed of its case, which `--case` repeats
alone.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import fuzz_damage as damaged
import models
import torch
from typer.testing import CliRunner

from baracuda import BaracudaError
from baracuda.flow import evaluate_checkpoint, inspect_checkpoint, load, quantize_checkpoint, report, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors
from baracuda.flow.run.data import require_data
from baracuda_cli import app

#: Of the processor, and of the clock: a case may wait for a pipe, and the machine may be busy.
SECONDS_A_CASE, SECONDS_OF_WAITING = 30, 180
#: What a case may take beyond what the process has when the cases begin.
MEMORY = 3 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run this case alone, and show its traceback")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make(place / "kept")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        if options.case is not None:
            print(run(place, options.seed, options.case, loud=True))
            return 0
        return campaign(place, options)


def campaign(place: Path, options: argparse.Namespace) -> int:
    ended, outcomes, failures, slowest = time.monotonic() + options.seconds, Counter[str](), [], 0.0
    case = 0
    while time.monotonic() < ended:
        started = time.monotonic()
        outcome = run(place, options.seed, case)
        slowest = max(slowest, time.monotonic() - started)
        outcomes[outcome.split(":")[0]] += 1
        if outcome.startswith("FAILED"):
            failures.append((case, outcome))
            print(f"case {case} of seed {options.seed}: {outcome}", flush=True)
        case += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{case} cases: {dict(outcomes)}; the slowest took {slowest:.1f} s, {peak:.0f} MiB at most")
    return 1 if failures else 0


def make(kept: Path) -> None:
    """A model and a checkpoint in which every kind of file and tensor is."""
    kept.mkdir()
    models.save("llama", kept / "model", torch.bfloat16, shard="100KB")
    tokens = models.tokens(kept / "tokens.safetensors")
    (kept / "texts.jsonl").write_text('{"text": "one"}\n"two"\n')
    (kept / "texts.txt").write_text("one\ntwo\n")
    (kept / "recipe.toml").write_text('scheme = "w8a8"\n[[layers]]\nmatch = "*.up_proj"\nscheme = "w8a8"\n')
    tokenizer(kept / "model")
    smooth = {"scheme": "w8a8-smoothquant", "activations": "static"}
    quantize_checkpoint(kept / "model", kept / "out", calibration=tokens, **smooth)  # type: ignore[arg-type]
    rules = [{"match": "*.mlp.*", "scheme": "w8a8"}, {"match": "*.o_proj", "scheme": "w4a8"}]
    recipe = {"scheme": "w4a16", "group_size": 32, "layers": rules}
    quantize_checkpoint(kept / "model", kept / "mixed", recipe=recipe)
    quantize_checkpoint(kept / "model", kept / "foreign", scheme="w4a16", group_size=32)
    as_others_write_it(kept / "foreign")


def tokenizer(directory: Path) -> None:
    fast = models.word_tokenizer()
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    fast.save_pretrained(directory)


def as_others_write_it(out: Path) -> None:
    """With zero points and the group of each column."""
    for shard in out.glob("*.safetensors"):
        tensors = read_tensors(shard)
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            rows, words = tensors[name].shape
            eights = torch.full((-(-rows // 8), words * 8 // 32), -0x77777778, dtype=torch.int32)
            groups = torch.arange(words * 8, dtype=torch.int32) // 32
            stem = name.removesuffix("weight_packed")
            tensors |= {f"{stem}weight_zero_point": eights, f"{stem}weight_g_idx": groups.flip(0)}
        write_tensors(shard, tensors, {"format": "pt"})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"] = {n: f.name for f in sorted(out.glob("*.safetensors")) for n in read_tensors(f)}
    index["metadata"] = {}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((out / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["config_groups"]["group_0"]["weights"] |= {"symmetric": False, "actorder": "group"}
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantization | {"version": "0.15"}}))
    for name in ("baracuda.sha256", "baracuda_report.json", "baracuda_report.html"):
        (out / name).unlink()


def run(place: Path, seed: int, case: int, *, loud: bool = False) -> str:
    chance = random.Random(f"{seed}-{case}")
    copy = Path(shutil.copytree(place / "kept", place / "case"))
    what, call = chance.choice(CASES)
    try:
        what(copy, chance)
        for kind in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(kind, _too_long)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_A_CASE)
        signal.alarm(SECONDS_OF_WAITING)
        try:
            call(copy)
            return "answered"
        except (BaracudaError, OSError) as error:
            str(error).encode()
            return "refused"
        finally:
            signal.alarm(0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except Exception as error:
        if loud:
            traceback.print_exc()
        return f"FAILED: {type(error).__name__}: {str(error)[:200]!r} in {call.__name__} after {what.__name__}"
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {SECONDS_A_CASE} s")


# -- what people call --------------------------------------------------------------------------------------------


def verifies(place: Path) -> None:
    for name in damaged.changed(place):
        for finding in [*verify(place / name), *verify(place / name, place / "model")]:
            finding.message.encode()


def quantizes(place: Path) -> None:
    quantize_checkpoint(place / "model", place / "new")


def quantizes_with_data(place: Path) -> None:
    tokens = place / "tokens.safetensors"
    quantize_checkpoint(place / "model", place / "new", scheme="w8a8-smoothquant", calibration=tokens, samples=2)


def quantizes_by_recipe(place: Path) -> None:
    quantize_checkpoint(place / "model", place / "new", recipe=place / "recipe.toml")


def loads(place: Path) -> None:
    for name in damaged.changed(place):
        with suppress(BaracudaError, OSError):
            load(place / name)


def reports(place: Path) -> None:
    report(place / "out").read_text().encode()


def inspects(place: Path) -> None:
    json.dumps([inspect_checkpoint(place / name) for name in damaged.DIRECTORIES])


def evaluates(place: Path) -> None:
    evaluate_checkpoint(place / "out", place / "tokens.safetensors", samples=2)


def reads_data(place: Path) -> None:
    for name in ("texts.jsonl", "texts.txt", "tokens.safetensors"):
        with suppress(BaracudaError):
            require_data(place / name)


def command(*arguments: str | Path) -> None:
    """A command as people type it: it ends with 0, 1 or 2, and prints nothing that a terminal obeys."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code not in (0, 1, 2) or any(not c.isprintable() and c not in "\n\r" for c in done.output):
        raise AssertionError(f"{arguments[0]} ended with {done.exit_code}: {done.output[-100:]!a}")


def types_commands(place: Path) -> None:
    """Those that only read files, with every option that changes what is drawn."""
    for name in damaged.DIRECTORIES:
        command("inspect", place / name, "--layers")
    command("verify", place / "out", "--against", place / "model")
    command("report", place / "out")
    command("compare", place / "out", place / "mixed", "-o", place / "page.html")


def chats(place: Path) -> None:
    command("chat", place / "out", "-p", "w5 w6", "--max-tokens", "2")


def benches(place: Path) -> None:
    command("bench", place / "model", place / "out", "--length", "4", "--tokens", "8")


def types_evaluation(place: Path) -> None:
    for data in ("texts.jsonl", "texts.txt", "tokens.safetensors"):
        command("eval", place / "out", "--text", place / data, "--samples", "2", "--sequence-length", "8")


Damage = Callable[[Path, random.Random], None]
Call = Callable[[Path], None]
CASES: list[tuple[Damage, Call]] = [
    *[
        (damage, call)
        for damage in (damaged.config_of_model, damaged.header, damaged.header_bytes, damaged.index, damaged.files)
        for call in (quantizes, verifies)
    ],
    *[
        (damage, inspects)
        for damage in (damaged.config_of_checkpoint, damaged.config_of_model, damaged.header, damaged.index)
    ],
    *[
        (damage, call)
        for damage in (damaged.config_of_checkpoint, damaged.other_model_type)
        for call in (verifies, loads, quantizes)
    ],
    *[(damage, loads) for damage in (damaged.header, damaged.header_bytes, damaged.index, damaged.files)],
    *[(damaged.written_report, call) for call in (reports, reports, verifies)],
    *[
        (damage, verifies)
        for damage in (damaged.folds, damaged.folds, damaged.checksums, damaged.any_bytes, damaged.files)
    ],
    *[(damaged.data_files, call) for call in (reads_data, quantizes_with_data, quantizes_by_recipe)],
    *[(damaged.token_types, call) for call in (reads_data, evaluates)],
    *[(damaged.settings, call) for call in (chats, chats, types_evaluation, benches)],
    *[
        (damage, types_commands)
        for damage in (
            damaged.config_of_checkpoint,
            damaged.written_report,
            damaged.index,
            damaged.header,
            damaged.any_bytes,
            damaged.files,
        )
    ],
    *[(damaged.recipe, quantizes_by_recipe)] * 2,
    (damaged.config_of_checkpoint, chats),
    (damaged.config_of_model, benches),
    (damaged.data_files, types_evaluation),
    (damaged.config_of_model, quantizes_with_data),
    (damaged.config_of_checkpoint, evaluates),
]

if __name__ == "__main__":
    sys.exit(main())
