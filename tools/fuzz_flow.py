"""Fuzz the model flow: hostile configs, headers, indices, reports, checksums, folds and texts, from a seed.

Every case damages a copy of a small model, its quantized checkpoint or its data, and calls what people call. An answer
is a result, a finding or a BaracudaError. Anything else (a traceback, a case that takes too long, memory without bound)
is a failure: it is printed with the seed of its case, which `--case` repeats alone.
"""

from __future__ import annotations

import argparse
import json
import os
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
from typing import Any

import models
import torch

from baracuda import BaracudaError
from baracuda.flow import evaluate_checkpoint, inspect_checkpoint, load, quantize_checkpoint, report, verify
from baracuda.flow.checkpoint.tensorfile import encode_header
from baracuda.flow.run.data import require_data

SECONDS_A_CASE = 30
#: What a case may take beyond what the process has when the cases begin.
MEMORY = 3 << 30
WORDS = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**33, 2**63, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "\ud800", "\x1b[2J", "../../etc/passwd", "a/b", "hf-hub:a/b", "<script>", "float8_e4m3fn", "load"),
    *([], {}, [1], ["x"], [[]], {"a": 1}, {"quant_method": "fp8"}, {"rope_type": "yarn", "factor": 0}),
]


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
    smooth = {"scheme": "w8a8-smoothquant", "activations": "static"}
    quantize_checkpoint(kept / "model", kept / "out", calibration=tokens, **smooth)  # type: ignore[arg-type]


def run(place: Path, seed: int, case: int, *, loud: bool = False) -> str:
    chance = random.Random(f"{seed}-{case}")
    copy = Path(shutil.copytree(place / "kept", place / "case"))
    what, call = chance.choice(CASES)
    try:
        what(copy, chance)
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS_A_CASE)
        try:
            call(copy)
            return "answered"
        except (BaracudaError, OSError) as error:
            str(error).encode()
            return "refused"
        finally:
            signal.alarm(0)
    except Exception as error:
        if loud:
            traceback.print_exc()
        return f"FAILED: {type(error).__name__}: {str(error)[:200]!r} in {call.__name__} after {what.__name__}"
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {SECONDS_A_CASE} s")


# -- damage ------------------------------------------------------------------------------------------------------


def vary(value: Any, chance: random.Random, depth: int = 0) -> Any:
    """The value with something changed somewhere in it."""
    if isinstance(value, dict) and value and depth < 6 and chance.random() < 0.9:
        key = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.12:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            return value | {str(chance.choice(WORDS)): chance.choice(WORDS)}
        return value | {key: vary(value[key], chance, depth + 1)}
    if isinstance(value, list) and value and depth < 6 and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], vary(value[at], chance, depth + 1), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return chance.choice([value + 1, value - 1, -value, value * 2, value * 10**6, value // 2])
    return chance.choice(WORDS)


def vary_json(path: Path, chance: random.Random) -> None:
    content = json.loads(path.read_text())
    for _ in range(chance.choice([1, 1, 2, 5])):
        content = vary(content, chance)
    path.write_text(json.dumps(content))


def vary_bytes(path: Path, chance: random.Random, first: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 3, 20])):
        end = min(len(data), first or len(data))
        at, kind = chance.randrange(max(1, end)), chance.random()
        if kind < 0.6 and data:
            data[at % len(data)] = chance.randrange(256)
        elif kind < 0.8:
            del data[at : at + chance.choice([1, 8, 100])]
        else:
            data[at:at] = chance.choice([b"\0", b'"', b"[" * 2000, b"{" * 30, b"\xff", b"\\ud800", b"9" * 5000, b"\n"])
    path.write_bytes(data)


def _shard(directory: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(directory.glob("*.safetensors")))


def config_of_model(place: Path, chance: random.Random) -> None:
    vary_json(place / "model" / "config.json", chance)


def config_of_checkpoint(place: Path, chance: random.Random) -> None:
    vary_json(place / "out" / "config.json", chance)


def other_model_type(place: Path, chance: random.Random) -> None:
    """The sizes of this model under the name of another kind of model."""
    import transformers

    path = place / chance.choice(["model", "out"]) / "config.json"
    content = json.loads(path.read_text()) | {"model_type": chance.choice(sorted(transformers.CONFIG_MAPPING))}
    if chance.random() < 0.5:
        content.pop("architectures", None)
    path.write_text(json.dumps(content))


def header(place: Path, chance: random.Random) -> None:
    path = _shard(place / chance.choice(["model", "out"]), chance)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(vary(json.loads(data[8 : 8 + length]), chance)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def header_bytes(place: Path, chance: random.Random) -> None:
    vary_bytes(_shard(place / chance.choice(["model", "out"]), chance), chance, 3000)


def any_bytes(place: Path, chance: random.Random) -> None:
    vary_bytes(chance.choice([p for p in sorted(place.rglob("*")) if p.is_file()]), chance)


def index(place: Path, chance: random.Random) -> None:
    vary_json(place / chance.choice(["model", "out"]) / "model.safetensors.index.json", chance)


def written_report(place: Path, chance: random.Random) -> None:
    vary_json(place / "out" / "baracuda_report.json", chance)
    if chance.random() < 0.7:
        models.reseal(place / "out")


def folds(place: Path, chance: random.Random) -> None:
    path = place / "out" / "baracuda_folds.tensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + length])
    if chance.random() < 0.5:
        described = vary(json.loads(content["__metadata__"]["folds"]), chance)
        content["__metadata__"]["folds"] = json.dumps(described)
    else:
        content = vary(content, chance)
    text = json.dumps(content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    models.reseal(place / "out")


def checksums(place: Path, chance: random.Random) -> None:
    vary_bytes(place / "out" / "baracuda.sha256", chance)


def data_files(place: Path, chance: random.Random) -> None:
    vary_bytes(place / chance.choice(["texts.jsonl", "texts.txt", "tokens.safetensors", "recipe.toml"]), chance)


def token_types(place: Path, chance: random.Random) -> None:
    from baracuda.flow.checkpoint.tensorfile import DTYPES, Entry

    dtype, shape = chance.choice(list(DTYPES.values())), chance.choice([(), (0,), (3,), (2, 0), (2, 3), (1, 2, 3)])
    entry = Entry("tokens", dtype, shape)
    entry = Entry("tokens", dtype, shape, 0, entry.nbytes)
    (place / "tokens.safetensors").write_bytes(encode_header([entry], {}) + os.urandom(entry.nbytes))


def files(place: Path, chance: random.Random) -> None:
    """Files that are missing, links, folders, pipes, or have names that nobody gives."""
    directory = place / chance.choice(["model", "out"])
    path = chance.choice([p for p in sorted(directory.iterdir()) if p.is_file()])
    kind = chance.randrange(6)
    if kind < 4:
        path.unlink()
    if kind == 1:
        path.mkdir()
    if kind == 2:
        path.symlink_to(chance.choice(["/proc/self/environ", "/dev/zero", "nowhere", str(path), "."]))
    if kind == 3:
        os.mkfifo(path)
    if kind == 4:
        (directory / chance.choice(["a\nb", "\x1b[2J", "x.BIN", "modeling.py", "\udcff", "-rf", "a" * 200])).touch()
    if kind == 5:
        path.rename(path.with_name(path.name.upper()))


# -- what people call --------------------------------------------------------------------------------------------


def verifies(place: Path) -> None:
    for finding in [*verify(place / "out"), *verify(place / "out", place / "model")]:
        finding.message.encode()


def quantizes(place: Path) -> None:
    quantize_checkpoint(place / "model", place / "new")


def quantizes_with_data(place: Path) -> None:
    tokens = place / "tokens.safetensors"
    quantize_checkpoint(place / "model", place / "new", scheme="w8a8-smoothquant", calibration=tokens, samples=2)


def quantizes_by_recipe(place: Path) -> None:
    quantize_checkpoint(place / "model", place / "new", recipe=place / "recipe.toml")


def loads(place: Path) -> None:
    load(place / "out")


def reports(place: Path) -> None:
    report(place / "out").read_text().encode()


def inspects(place: Path) -> None:
    json.dumps([inspect_checkpoint(place / name) for name in ("model", "out")])


def evaluates(place: Path) -> None:
    evaluate_checkpoint(place / "out", place / "tokens.safetensors", samples=2)


def reads_data(place: Path) -> None:
    for name in ("texts.jsonl", "texts.txt", "tokens.safetensors"):
        with suppress(BaracudaError):
            require_data(place / name)


Damage = Callable[[Path, random.Random], None]
Call = Callable[[Path], None]
CASES: list[tuple[Damage, Call]] = [
    *[
        (damage, call)
        for damage in (config_of_model, header, header_bytes, index, files)
        for call in (quantizes, verifies)
    ],
    *[(damage, inspects) for damage in (config_of_checkpoint, config_of_model, header, index)],
    *[(damage, call) for damage in (config_of_checkpoint, other_model_type) for call in (verifies, loads, quantizes)],
    *[(damage, loads) for damage in (header, header_bytes, index, files)],
    *[(written_report, call) for call in (reports, reports, verifies)],
    *[(damage, verifies) for damage in (folds, folds, checksums, any_bytes, files)],
    *[(data_files, call) for call in (reads_data, quantizes_with_data, quantizes_by_recipe)],
    *[(token_types, call) for call in (reads_data, evaluates)],
    (config_of_model, quantizes_with_data),
    (config_of_checkpoint, evaluates),
]

if __name__ == "__main__":
    sys.exit(main())
