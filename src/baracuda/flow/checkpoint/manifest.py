"""The files of a quantized checkpoint: their SHA-256, and which others may lie beside them.

The manifest has the format of `sha256sum`, so that `sha256sum -c baracuda.sha256` checks it too.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import CheckpointError
from .directory import MANIFEST, leads_out

#: Folders that tools keep beside the files of a repository.
TOOL_FOLDERS = (".git", ".cache", ".huggingface")
#: What people read, and programs do not. Such a file may be changed, added or missing.
_FOR_PEOPLE = re.compile(
    r"(readme|license|licence|notice|copying|authors|changelog|usage|terms|use_policy|acceptable_use_policy)"
    r"(\.(md|txt|rst|pdf))?|[^/]*\.(md|rst|pdf|png|jpe?g|gif|svg|webp)|\.gitattributes|\.gitignore|\.ds_store",
    re.IGNORECASE,
)
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
#: No manifest is larger than this.
MAX_BYTES = 50_000_000


def for_people(name: str) -> bool:
    return _FOR_PEOPLE.fullmatch(name.rpartition("/")[2]) is not None


def files_in(directory: Path) -> Iterator[str]:
    """Every file and link below a directory, as a path relative to it with `/`; not those of tools."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name not in TOOL_FOLDERS)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in (*sorted(names), *links):
            yield (Path(folder) / name).relative_to(directory).as_posix()


def digests(directory: Path, names: list[str]) -> dict[str, str]:
    """The SHA-256 of each of these files, several at a time: hashing does not hold Python's lock."""

    def digest(name: str) -> str:
        with (directory / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        return dict(zip(names, workers.map(digest, names), strict=True))


def manifest(directory: Path, hidden: str) -> str:
    """The manifest of what is in a directory now, without what lies in its folder `hidden`."""
    names = [n for n in files_in(directory) if n != MANIFEST and not n.startswith(f"{hidden}/") and not for_people(n)]
    return encode(digests(directory, names))


def encode(sums: dict[str, str]) -> str:
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def read_manifest(directory: Path) -> dict[str, str] | None:
    """File -> its SHA-256, or None where there is no manifest."""
    path = directory / MANIFEST
    if not os.path.lexists(path):
        return None
    if leads_out(path, directory) or not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise CheckpointError("bad-manifest", f"{MANIFEST}: expected a file of checksums")
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        raise CheckpointError("bad-manifest", f"{MANIFEST}: cannot be read as text") from None
    sums: dict[str, str] = {}
    for line in text.removesuffix("\n").split("\n"):
        found = _LINE.fullmatch(line)
        if found is None or found[2] in sums or not text.endswith("\n"):
            raise CheckpointError("bad-manifest", f"{MANIFEST}: expected lines of a SHA-256 and a file's name")
        sums[found[2]] = found[1]
    return sums
