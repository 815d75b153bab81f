"""The journal: what a run has finished, kept beside its output until the end, so that a killed run can resume."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..checkpoint.directory import JOURNAL, links_out, read_json
from ..errors import FlowError

#: Held by the run that writes; it says which one that is.
LOCK = "lock"


class Journal:
    """`OUT/.baracuda`: temporary files, the fingerprint of the run, and the statistics of each finished shard.

    A shard has its final name only after its bytes and its statistics are on the disk, so a name is a promise. What was
    made from a version of the input has a digest of that version in its name, so that another version is begun anew.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / JOURNAL
        self._held: IO[str] | None = None
        self._made_out = False

    def begin(self, run: dict[str, Any], *, resume: bool) -> None:
        """Start, or resume the same run. Raise where the directory holds anything else."""
        if self.out.is_symlink() and not self.out.exists():
            raise FlowError(f"{self.out} is a link to nothing: remove it, or choose another output directory")
        if self.out.exists() and not self.out.is_dir():
            raise FlowError(f"{self.out} is a file: choose a directory that is empty or not there yet")
        self._require_no_links()
        if not self.folder.exists():
            self._require_empty()
        self._made_out = not self.out.exists()
        self._hold()
        fingerprint = digest(run)
        known = self.folder / "run.json"
        if known.exists():
            if not resume:
                raise FlowError(
                    f"{self.out} holds an unfinished run: pass --resume (in Python, resume=True) to go on, or remove it"
                )
            before = read_json(known)
            if before.get("fingerprint") != fingerprint:
                changed = differences(before.get("run"), run) or "its inputs"
                raise FlowError(
                    f"{self.out} holds an unfinished run that differs from this one in {changed}; "
                    "repeat its command, or remove the directory"
                )
        else:
            self._require_empty()
            self.write_json(known, {"fingerprint": fingerprint, "run": run})
        for stale in self.folder.glob("*.tmp"):
            stale.unlink()

    def _require_no_links(self) -> None:
        """Raise where something would be written, or removed, through a link."""
        links = [self.folder] if self.folder.is_symlink() else [p for p in self.folder.glob("*") if p.is_symlink()]
        links += links_out(self.out) if self.out.exists() else []
        if links:
            raise FlowError(f"{links[0]} is a link: remove it, or choose another output directory")

    def _require_empty(self) -> None:
        if self.out.exists() and any(path.name != JOURNAL for path in self.out.iterdir()):
            raise FlowError(f"{self.out} is not empty: choose another output directory, or remove it")

    def _hold(self) -> None:
        """Keep other runs out until `release`: a job may be started again while the first one hangs."""
        import fcntl  # not on every system

        path = self.folder / LOCK
        while True:
            self.release()
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # removed, here or below, by a run that ends at this moment
                self._held = file = path.open("a+")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.seek(0)
                    raise FlowError(
                        f"another run is writing to {self.out} ({file.read(200) or 'it has just begun'}): "
                        "wait until it ends, or end it and pass --resume, or choose another directory"
                    ) from None
                except OSError as error:
                    if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                        raise
                    warnings.warn(f"{self.out}: no locks on this file system; start one run only", stacklevel=2)
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()

    def release(self) -> None:
        """Let other runs in. Unfinished files stay."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def require_ended(self, before: dict[str, Any] | None, run: dict[str, Any]) -> None:
        """Raise unless the run that has ended here, `before`, is this one."""
        if before is None:
            raise FlowError(
                f"{self.out} holds a finished run whose report does not say what it was made from, as those of older "
                "versions: use it as it is, or choose another output directory"
            )
        if changed := differences(before, run):
            raise FlowError(
                f"{self.out} holds a finished run that differs from this one in {changed}; "
                "choose another output directory, or remove it"
            )

    def temporary(self, name: str) -> Path:
        return self.folder / f"{name}.tmp"

    def publish(self, temporary: Path, final: Path) -> None:
        """Rename a file whose bytes are on the disk, and make the rename last."""
        final.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, final)
        sync_directory(final.parent)

    def write_bytes(self, final: Path, data: bytes) -> None:
        temporary = self.temporary(final.name)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.publish(temporary, final)

    def copy(self, source: Path, final: Path) -> None:
        """Copy in blocks: a file beside a model can be as large as its weights."""
        temporary = self.temporary(final.name)
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        self.publish(temporary, final)

    def write_json(self, final: Path, content: Any) -> None:
        self.write_bytes(final, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

    def made_from(self, version: Any, name: str) -> Path:
        return self.folder / f"{digest(version)[:16]}-{name}"

    def statistics(self, shard: str, version: Any) -> Path:
        return self.made_from(version, f"{shard}.json")

    def finished(self, shard: str, version: Any) -> bool:
        return (self.out / shard).exists() and self.statistics(shard, version).exists()

    def discard(self) -> None:
        """Remove a run that has finished nothing. An error here must not hide the one that ended the run."""
        with suppress(OSError):
            if not any(path.name != JOURNAL for path in self.out.iterdir()):
                shutil.rmtree(self.folder)
                if self._made_out:
                    self.out.rmdir()

    def end(self) -> None:
        """End the run. The fingerprint is removed last: until then the run can be resumed."""
        for path in sorted(self.folder.iterdir()):
            if path.name not in ("run.json", LOCK):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.folder / "run.json").unlink()
        self.sweep()

    def sweep(self) -> None:
        """Remove the folder of a run that has ended; a run that was killed in its last step leaves it there."""
        if self.folder.exists():
            (self.folder / LOCK).unlink(missing_ok=True)
            self.folder.rmdir()
            sync_directory(self.out)


#: What the parts of a fingerprint are called in messages. Options are called by their own names.
_PARTS = {
    "baracuda": "the version of baracuda",
    "source": "the model",
    "sizes": "the model",
    "config": "the model",
    "calibration": "the calibration data",
    "evaluation": "the evaluation data",
}


def differences(before: Any, run: dict[str, Any]) -> str:
    """How `run` differs from the run before, in words; options one by one, with both values."""
    before = before if isinstance(before, dict) else {}
    changed = [key for key in run if before.get(key) != run[key]]
    named = list(dict.fromkeys(_PARTS[key] for key in changed if key in _PARTS))
    if "files" in changed and "the model" not in named:
        named.append("when the model's files were written")
    if "options" in changed:
        was = before.get("options")
        was = was if isinstance(was, dict) else {}
        here = run["options"]  # an option at its default may be in neither
        keys = [key for key in {**here, **was} if was.get(key) != here.get(key)]
        named += [f"{key} ({was.get(key)!r} there, {here.get(key)!r} here)" for key in keys]
    return ", ".join(named)


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
