"""A model directory: its config, its shards, and which shard holds which tensor. Paths never leave the directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.printable import printable
from ..errors import CheckpointError
from .json_text import parse_json
from .storage import FLOATS
from .tensorfile import Entry, TensorFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: What a run writes beside the weights: its journal, until it has ended, and its report.
JOURNAL = ".baracuda"
REPORT = "baracuda_report.json"
REPORT_PAGE = "baracuda_report.html"
#: The SHA-256 of every file that a run wrote, and the divisors of its smoothing.
MANIFEST = "baracuda.sha256"
FOLDS = "baracuda_folds.tensors"
#: No configuration or index is larger than this; a larger file is damaged or an attack.
MAX_JSON_BYTES = 200_000_000
#: Weights in formats other than safetensors. Some of them run code when loaded: none is ever opened.
FOREIGN_WEIGHTS = frozenset(
    (
        *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".pk", ".joblib", ".dill", ".cloudpickle", ".sav"),
        *(".h5", ".hdf5", ".keras", ".msgpack", ".pb", ".tflite", ".onnx", ".onnx_data", ".gguf", ".ggml"),
        *(".npy", ".npz", ".ot", ".nemo", ".mar", ".pte", ".engine", ".llamafile"),
    )
)


def is_foreign(name: str) -> bool:
    """Whether a file holds weights in another format than safetensors, by its name in any case."""
    return os.path.splitext(name)[1].lower() in FOREIGN_WEIGHTS


@dataclass
class Checkpoint:
    """The shards of a directory, opened; `shards` maps a file name to its file, `where` a tensor to its file name."""

    directory: Path
    config: dict[str, Any]
    shards: dict[str, TensorFile]
    where: dict[str, str]
    index: dict[str, Any] | None
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        if not directory.is_dir():
            raise CheckpointError(
                "unreadable",
                f"{directory}: expected a Hugging Face model directory; "
                f"it is {'a file' if directory.exists() else 'not there'}",
            )
        require_contained(directory)
        config = read_json(directory / "config.json")
        index = read_json(directory / INDEX) if (directory / INDEX).exists() else None
        names = [SINGLE] if index is None else shard_names(index)
        require_one_model(directory, names)
        if index is None and not (directory / SINGLE).exists():
            names = _loose_shards(directory)
        with ExitStack() as stack:
            shards = {name: stack.enter_context(TensorFile(inside(directory, name))) for name in names}
            where: dict[str, str] = {}
            for name, file in shards.items():
                for tensor in file.entries:
                    if tensor in where:
                        raise CheckpointError("duplicate-tensor", f"{tensor} is in {where[tensor]} and in {name}")
                    where[tensor] = name
            if index is not None:
                _check_index(index["weight_map"], where)
            return cls(directory, config, shards, where, index, stack.pop_all())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def entry(self, tensor: str) -> Entry:
        return self.shards[self.where[tensor]].entries[tensor]

    @property
    def dtype(self) -> str | None:
        """The type of the first float tensor: transformers takes it for the model's where the config names none."""
        entries = (entry for shard in sorted(self.shards) for _, entry in sorted(self.shards[shard].entries.items()))
        found = next((entry.dtype for entry in entries if entry.dtype in FLOATS), None)
        return None if found is None else str(found).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for shard in self.shards.values() for entry in shard.entries.values())


def leads_out(path: Path, directory: Path) -> bool:
    """Whether a path is a link, or below one, that leads out of the directory.

    The blobs of the Hugging Face cache count as inside the snapshot that they belong to.
    """
    place, target = (Path(os.path.realpath(each)) for each in (directory, path))  # Path.resolve raises on loops
    cached = place.parent.name == "snapshots" and target.parent == place.parent.parent / "blobs"
    return not (cached or target == place or place in target.parents)


def require_contained(directory: Path) -> None:
    """Raise where a link leads out of the directory: what it names would be read, and copied into a result.

    Names with control characters are refused too: no list of files could hold them.
    """
    for path in links_out(directory):
        raise CheckpointError(
            "path-escape",
            f"{path.relative_to(directory)}: a link that leads out of {directory}; replace it with the file itself",
        )
    for path in bad_names(directory):
        raise CheckpointError("bad-name", f"{path.name!a}: expected a name without control characters; rename it")


def bad_names(directory: Path) -> Iterator[Path]:
    """The files and folders whose names hold control characters, or bytes that are no text."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in (*folders, *sorted(names)):
            if printable(name) != name or "\n" in name or "\t" in name:
                yield Path(folder) / name


def links_out(directory: Path) -> Iterator[Path]:
    """The links below a directory that lead out of it. Hidden files and folders are neither read nor copied."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in (*folders, *sorted(name for name in names if not name.startswith("."))):
            path = Path(folder) / name
            if path.is_symlink() and leads_out(path, directory):
                yield path


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.is_symlink() and leads_out(path, path.parent):
            raise CheckpointError("path-escape", f"{path.name}: a link that leads out of the directory")
        if path.exists() and not path.is_file():
            raise CheckpointError("unreadable", f"{path.name}: not a regular file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError("bad-json", f"{path.name}: {path.stat().st_size} bytes, more than any real one")
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            "missing-file", f"{path}: expected this file of a Hugging Face model directory; it is not there"
        ) from None
    except OSError as error:
        raise CheckpointError("unreadable", f"{path.name}: cannot be read: {error.strerror}") from None
    return parse_json(data, path.name)


def shard_names(index: dict[str, Any]) -> list[str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("bad-index", f"{INDEX}: its weight_map is not a table of file names")
    return sorted(set(weight_map.values()))


def require_one_model(directory: Path, names: list[str]) -> None:
    """Raise where there is a file that transformers reads instead of the shards `names`."""
    if SINGLE not in names and (directory / SINGLE).exists():
        raise CheckpointError(
            "bad-index",
            f"{directory}: expected {SINGLE} or {INDEX}, got both: transformers reads the one, servers the files of "
            "the other; move one of them away",
        )


def inside(directory: Path, name: str) -> Path:
    """The path of a shard. Raises unless the name is that of a safetensors file directly in this directory."""
    if name != os.path.basename(name) or "\\" in name or "\0" in name or name.startswith("."):
        raise CheckpointError("path-escape", f"the index names {name[:200]!r}: expected a plain file name")
    if not name.endswith(".safetensors"):
        raise CheckpointError("not-safetensors", f"the index names {name[:200]!r}: expected a .safetensors file")
    path = directory / name
    if not path.exists():
        why = "named by the index, not there" if (directory / INDEX).exists() else "not there, and no index of others"
        raise CheckpointError("missing-file", f"{name}: {why}")
    if not path.is_file():
        raise CheckpointError("unreadable", f"{name}: not a regular file")
    if leads_out(path, directory):
        raise CheckpointError("path-escape", f"{name}: a link that leads out of the directory")
    return path


def _loose_shards(directory: Path) -> list[str]:
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        foreign = sorted(path.name for path in directory.iterdir() if is_foreign(path.name))
        found = f"found {foreign[0]}, which is never loaded" if foreign else "found none"
        how = "save the model with save_pretrained, or download it again"
        raise CheckpointError("missing-file", f"{directory}: expected files *.safetensors, {found}; {how}")
    return names


def _check_index(weight_map: dict[str, str], where: dict[str, str]) -> None:
    for tensor, shard in weight_map.items():
        if where.get(tensor) != shard:
            raise CheckpointError("missing-tensor", f"the index places {tensor[:200]} in {shard}, which lacks it")
    for tensor, shard in where.items():
        if tensor not in weight_map:
            raise CheckpointError("extra-tensor", f"{shard} holds {tensor[:200]}, which the index does not name")
