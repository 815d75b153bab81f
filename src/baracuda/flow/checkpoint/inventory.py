"""Every file of a quantized checkpoint is expected, harmless or a finding."""

from __future__ import annotations

import pickletools
import re

from ..errors import CheckpointError
from .check import Check
from .directory import FOLDS, INDEX, JOURNAL, MANIFEST, REPORT, REPORT_PAGE, bad_names, is_foreign, links_out
from .manifest import digests, files_in, for_people, read_manifest
from .tensorfile import TensorFile

#: Files that run when somebody opens, imports or loads them.
_CODE = re.compile(r"\.(py|pyc|pyd|pyi|so|dll|dylib|exe|sh|bat|ps1|js|jar|ipynb|wasm)$", re.IGNORECASE)
#: How pickles and the archives that torch.save makes begin, whatever their name is.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
_LOOK = 1 << 16
_DOTTED = re.compile(r"[A-Za-z_][\w.]* [A-Za-z_][\w.]*")
#: Shards that `baracuda quantize` has written say so: their report and their checksums are then missed.
MADE_BY = {"made_by": "baracuda quantize"}


def check_inventory(check: Check) -> None:
    """Add a finding for each file that is changed, missing, or neither expected nor harmless."""
    if (check.out / JOURNAL).exists():
        check.add("unfinished", JOURNAL, "a run into this directory has not ended; --resume it")
    try:
        sums = read_manifest(check.out)
    except CheckpointError as error:
        check.add(error.code, MANIFEST, str(error))
        sums = None
    here = [name for name in files_in(check.out) if not name.startswith(f"{JOURNAL}/") and name != MANIFEST]
    escaping = {path.relative_to(check.out).as_posix() for path in links_out(check.out)}
    flagged = {found.where for found in check.findings if found.code == "path-escape"}
    for name in sorted(escaping - flagged):
        check.add("path-escape", name, "a link that leads out of the directory")
    for path in bad_names(check.out):
        check.add("bad-name", ascii(path.name), "a name with control characters")
    regular = [name for name in here if name not in escaping and (check.out / name).is_file()]
    for name in sorted(set(here) - set(regular) - escaping):
        check.add("unexpected-file", name, "it is neither a file nor a folder, or a link to nothing")
    for name in regular:
        _look_at(check, name, sums)
    if sums is not None:
        _compare(check, regular, sums)
    elif is_made_by_quantize(check):
        for name in (MANIFEST, REPORT):
            if not (check.out / name).exists():
                check.add("missing-file", name, "baracuda quantize wrote it beside these shards; it was removed")


def is_made_by_quantize(check: Check) -> bool:
    return any(file.metadata.items() >= MADE_BY.items() for file in check.files.values())


def _look_at(check: Check, name: str, sums: dict[str, str] | None) -> None:
    """What a file is by its name and its first bytes."""
    listed = sums is not None and name in sums
    if is_foreign(name) or _is_pickle(check, name):
        check.add("foreign-weights", name, "weights that are not safetensors, and may run code when loaded")
    elif "/" not in name and name.endswith(".safetensors") and name not in check.shards:
        check.add("unexpected-file", name, "a file of weights that no index names: some servers load it too")
    elif listed or for_people(name):
        return
    elif _CODE.search(name) and (sums is not None or not check.own_code):
        check.add("unexpected-file", name, "code, which was not there when the checkpoint was written")
    elif sums is not None and name not in check.shards:
        check.add("unexpected-file", name, "it was not there when the checkpoint was written")


def _is_pickle(check: Check, name: str) -> bool:
    """Whether a file begins as a pickle. Files of tensors begin with a length, which may look like that."""
    try:
        if name.endswith(".safetensors") or (name == FOLDS and _has_tensors(check, name)):
            return False
        with (check.out / name).open("rb") as file:
            start = file.read(_LOOK)
            return start.startswith(_PICKLES) or _calls(start)
    except OSError as error:
        check.add("unreadable", name, f"it cannot be read: {error.strerror}")
        return False


def _has_tensors(check: Check, name: str) -> bool:
    try:
        with TensorFile(check.out / name):
            return True
    except CheckpointError:
        return False


def _calls(start: bytes) -> bool:
    """Whether these bytes begin a pickle of protocol 0 or 1, which have no mark of their own, that calls something."""
    named = False
    try:
        for code, argument, _ in pickletools.genops(start):
            named |= code.name in ("GLOBAL", "INST") and bool(_DOTTED.fullmatch(str(argument)))
            if named and code.name in ("INST", "REDUCE", "BUILD", "OBJ", "STOP"):
                return True
    except Exception:  # most files are no pickles; pickletools raises many kinds of errors then
        return False
    return False


def _compare(check: Check, regular: list[str], sums: dict[str, str]) -> None:
    present = sorted(sums.keys() & set(regular))
    try:
        found = digests(check.out, present)
    except OSError as error:
        return check.add("unreadable", str(error.filename), f"it cannot be read: {error.strerror}")
    for name, digest in sums.items():
        if name not in found:
            check.add("missing-file", name, "it was there when the checkpoint was written")
        elif found[name] != digest:
            check.add("changed-file", name, f"its SHA-256 is not the one in {MANIFEST}: its bytes were changed")
    index = [INDEX] if (check.out / INDEX).exists() else []
    for name in ("config.json", *index, *check.shards):
        if name not in sums and (check.out / name).exists():
            check.add("bad-manifest", name, f"{MANIFEST} has no SHA-256 of it")
    return None


def ours(name: str) -> bool:
    """Whether this is a file that quantizing makes, rather than one that comes from the original."""
    return name in ("config.json", INDEX, REPORT, REPORT_PAGE, MANIFEST, FOLDS) or (
        "/" not in name and name.endswith(".safetensors")
    )
