"""How `fuzz_flow` damages files: values of JSON, bytes, headers, names and kinds of files, from a chance."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import models

from baracuda.flow.checkpoint.tensorfile import encode_header

#: Directories of a case: a model, its smoothed checkpoint, one of several schemes, and one as other tools write it.
CHECKPOINTS = ("out", "mixed", "foreign")
DIRECTORIES = ("model", *CHECKPOINTS)
WORDS = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**33, 2**63, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "\ud800", "\x1b[2J", "../../etc/passwd", "a/b", "hf-hub:a/b", "<script>", "float8_e4m3fn", "load"),
    *([], {}, [1], ["x"], [[]], {"a": 1}, {"quant_method": "fp8"}, {"rope_type": "yarn", "factor": 0}),
    *("re:(.*)*(.*)*x", "re:(", "[/x]", "a.\u00b2", "9" * 400, "/etc/passwd", "{{ x.__class__ }}", [1, [2]], -8, 10**6),
]


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


def changed(place: Path) -> list[str]:
    """The checkpoints of a case that are not as they were made; all of them where none is or the model is changed."""
    names = [name for name in DIRECTORIES if _state(place / name) != _state(place.parent / "kept" / name)]
    return [name for name in names if name != "model"] if names and "model" not in names else list(CHECKPOINTS)


def _state(directory: Path) -> dict[str, tuple[int, int, int]]:
    """What a copy has in common with what it was made of."""
    states = {path.name: path.lstat() for path in directory.iterdir()}
    return {name: (state.st_mode, state.st_size, state.st_mtime_ns) for name, state in states.items()}


def config_of_model(place: Path, chance: random.Random) -> None:
    vary_json(place / "model" / "config.json", chance)


def config_of_checkpoint(place: Path, chance: random.Random) -> None:
    for name in CHECKPOINTS:
        vary_json(place / name / "config.json", chance)


def settings(place: Path, chance: random.Random) -> None:
    """What lies beside a model: how it generates, and its tokenizer."""
    name = chance.choice(["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
    change = vary_json if chance.random() < 0.7 else vary_bytes
    for directory in ("model", "out"):
        change(place / directory / name, chance)


def recipe(place: Path, chance: random.Random) -> None:
    """A recipe whose values are others, or whose text is."""
    words = [w for w in WORDS if isinstance(w, str | int | float) and w != "\ud800"]
    keys = [*("scheme", "method", "group_size", "ignore", "match", "layers"), "x"]
    lines = [f"{chance.choice(keys)} = {toml(chance.choice(words))}" for _ in range(chance.randrange(4))]
    rule = [f"{chance.choice(keys)} = {toml(chance.choice(words))}" for _ in range(chance.randrange(4))]
    (place / "recipe.toml").write_text("\n".join([*dict.fromkeys(lines), "[[layers]]", *rule]))
    if chance.random() < 0.3:
        vary_bytes(place / "recipe.toml", chance)


def toml(value: Any) -> str:
    return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")


def other_model_type(place: Path, chance: random.Random) -> None:
    """The sizes of this model under the name of another kind of model."""
    import transformers

    path = place / chance.choice(DIRECTORIES) / "config.json"
    content = json.loads(path.read_text()) | {"model_type": chance.choice(sorted(transformers.CONFIG_MAPPING))}
    if chance.random() < 0.5:
        content.pop("architectures", None)
    path.write_text(json.dumps(content))


def header(place: Path, chance: random.Random) -> None:
    path = _shard(place / chance.choice(DIRECTORIES), chance)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(vary(json.loads(data[8 : 8 + length]), chance)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def header_bytes(place: Path, chance: random.Random) -> None:
    vary_bytes(_shard(place / chance.choice(DIRECTORIES), chance), chance, 3000)


def any_bytes(place: Path, chance: random.Random) -> None:
    vary_bytes(chance.choice([p for p in sorted(place.rglob("*")) if p.is_file()]), chance)


def index(place: Path, chance: random.Random) -> None:
    vary_json(place / chance.choice(DIRECTORIES) / "model.safetensors.index.json", chance)


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
    directory = place / chance.choice(DIRECTORIES)
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
