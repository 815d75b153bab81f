"""What disks, permissions and other people's writing do to a run: a clear error, nothing that passes for a result,
and, once the fault is gone, --resume to the bytes of a run that met none. (Killed processes: test_flow_resume.py.)"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest

from baracuda import BaracudaError
from baracuda.flow import CheckpointError, FlowError, load, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.plain_checkpoint(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def expected(pristine: Path) -> dict[str, bytes]:
    quantize_checkpoint(pristine, pristine.parent / "whole")
    return models.contents(pristine.parent / "whole")


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def assert_resumes(source: Path, out: Path, expected: dict[str, bytes], **options: Any) -> None:
    """What a fault left is called bad by verify, and finished by --resume."""
    assert verify(out), "verify calls an unfinished result good"
    quantize_checkpoint(source, out, resume=True, **options)
    assert models.contents(out) == expected
    assert verify(out, source) == []


def failing(call: Callable[..., Any], at: int, fault: BaseException) -> Callable[..., Any]:
    """`call`, but from its `at`-th use on it raises."""
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count >= at:
            raise fault
        return call(*args, **kwargs)

    return wrapped


# -- the system says no ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at", "code", "message"),
    [
        (
            "pwrite",
            1,
            errno.ENOSPC,
            r"safetensors\.tmp: expected room for \d+ bytes, got: No space left.*free some space",
        ),
        ("pwrite", 9, errno.ENOSPC, r"No space left.*free some space"),
        ("pwrite", 30, errno.EDQUOT, r"quota exceeded.*free some of your quota"),
        ("truncate", 1, errno.EFBIG, r"File too large.*ulimit -f"),
        ("fsync", 1, errno.ENOSPC, r"No space left.*free some space"),
        ("fsync", 5, errno.EIO, r"Input/output error; solve this"),
        ("replace", 1, errno.EROFS, r"Read-only file system.*choose an output directory"),
        ("replace", 6, errno.EACCES, r"Permission denied.*give this user the permission"),
        ("mkdir", 1, errno.EROFS, r"Read-only file system.*choose an output directory"),
        ("rmdir", 1, errno.EPERM, r"not permitted.*give this user the permission"),
    ],
)
def test_a_refused_write_is_told_in_a_sentence_and_resumed(
    source: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    at: int,
    code: int,
    message: str,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr(os, name, failing(getattr(os, name), at, OSError(code, os.strerror(code))))
        with pytest.raises(
            FlowError, match=rf"(?s){message}.*then repeat the command with --resume \(in Python, resume=True\)"
        ):
            quantize_checkpoint(source, out)
    assert_resumes(source, out, expected)


@pytest.mark.parametrize("at", [1, 8, 30])
def test_an_interrupted_write_is_resumed(
    source: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(os, "pwrite", failing(os.pwrite, at, KeyboardInterrupt()))
        quantize_checkpoint(source, out)
    assert_resumes(source, out, expected)


def test_writes_and_reads_cut_short_are_continued(
    source: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[: max(1, len(data) // 2)], at))
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: read(fd, [to[0][: max(1, len(to[0]) // 3)]], at))
    quantize_checkpoint(source, tmp_path / "out")
    assert models.contents(tmp_path / "out") == expected


def test_a_disk_that_cannot_be_read_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 3, OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-00002\.safetensors: cannot be read: Input/output"):
        quantize_checkpoint(source, tmp_path / "out")


# -- the same for real, through the command ----------------------------------------------------------------------


def _as_anybody() -> None:
    """Root without the right to pass over permissions, which is what everybody else is."""
    drop_from_bounding_set, may_override, may_read = 24, 1, 2
    for right in (may_override, may_read):
        ctypes.CDLL(None).prctl(drop_from_bounding_set, right, 0, 0, 0)


def _with_small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


#: `baracuda`, without the seconds that transformers takes to be imported; this model is none it knows.
COMMAND = "import sys; sys.modules['transformers'] = None; from baracuda_cli import app; app()"


def command(*arguments: object, under: Callable[[], None] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        preexec_fn=under,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "COLUMNS": "400"},
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def test_files_that_may_not_grow_end_in_a_sentence(source: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    code, said = command("quantize", source, "-o", out, under=_with_small_files)
    assert code == 2 and "File too large" in said and "ulimit -f" in said
    assert_resumes(source, out, expected)


def test_an_output_directory_that_may_not_be_written_is_left_as_it_was(
    source: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    parent = tmp_path / "readonly"
    parent.mkdir(mode=0o555)
    out = parent / "out"
    code, said = command("quantize", source, "-o", out, under=_as_anybody)
    assert code == 2 and f"{out}" in said and "Permission denied; give this user the permission" in said
    assert not out.exists()
    parent.chmod(0o755)
    assert_resumes(source, out, expected)


@pytest.mark.parametrize(("name", "began"), [(SHARD, False), ("config.json", False), ("tokenizer.json", True)], ids=str)
def test_a_file_that_may_not_be_read_is_named(
    source: Path, tmp_path: Path, expected: dict[str, bytes], name: str, began: bool
) -> None:
    out = tmp_path / "out"
    (source / name).chmod(0)
    code, said = command("quantize", source, "-o", out, under=_as_anybody)
    assert code == 2 and name in said and "Permission denied" in said
    assert out.exists() == began
    (source / name).chmod(0o644)
    assert_resumes(source, out, expected)


# -- the input is not what it was --------------------------------------------------------------------------------


def test_a_shard_cut_short_is_refused_before_anything_is_made(
    source: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    whole = (source / SHARD).read_bytes()
    for length in (4, 200, len(whole) - 1):
        (source / SHARD).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=rf"{SHARD}: .*copy or download it again") as raised:
            quantize_checkpoint(source, tmp_path / "out")
        assert raised.value.code == "truncated" and not (tmp_path / "out").exists()
    (source / SHARD).write_bytes(whole)
    assert_resumes(source, tmp_path / "out", expected)


def at_shard_two(action: Callable[[], None]) -> Callable[[str, int, int, str], None]:
    """Progress that acts once, in the midst of the second shard."""
    pending = [action]

    def progress(stage: str, done: int, total: int, label: str) -> None:
        if label.startswith("model.layers.3.") and pending:
            pending.pop()()

    return progress


def rewritten(path: Path) -> None:
    """The same header, other values, in the same file."""
    tensors = {name: (value.float() * 1.5).to(value.dtype) for name, value in read_tensors(path).items()}
    other = path.with_suffix(".other")
    write_tensors(other, tensors, {"format": "pt"})
    path.write_bytes(other.read_bytes())
    other.unlink()


@pytest.mark.parametrize("how", ["rewritten", "cut", "replaced", "removed"])
def test_a_shard_that_changes_while_it_is_read_is_noticed(
    source: Path, tmp_path: Path, expected: dict[str, bytes], how: str
) -> None:
    out, shard, spare = tmp_path / "out", source / SHARD, tmp_path / "spare"
    shutil.copy(shard, spare)
    actions: dict[str, Callable[[], Any]] = {
        "rewritten": lambda: rewritten(shard),
        "cut": lambda: os.truncate(shard, shard.stat().st_size // 2),
        "replaced": lambda: os.replace(shutil.copy2(spare, tmp_path / "new"), shard),
        "removed": shard.unlink,
    }
    with pytest.raises(CheckpointError, match=r"changed while it was read; .*--resume|ends inside tensor .*again"):
        quantize_checkpoint(source, out, progress=at_shard_two(actions[how]))
    assert not (out / SHARD).exists()
    shutil.copy(spare, shard)
    assert_resumes(source, out, expected)


def test_a_shard_that_changed_before_the_resume_is_done_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is the same, so only the file's version tells that the finished half is of another model."""
    out = tmp_path / "out"
    with pytest.raises(BaracudaError):
        quantize_checkpoint(source, out, progress=at_shard_two(lambda: rewritten(source / SHARD)))
    finished = "model-00001-of-00002.safetensors"
    assert (out / finished).exists()
    rewritten(source / finished)
    with monkeypatch.context() as broken, pytest.raises(FlowError):
        # Its new statistics are in place, the shard of the old version would still be under its name.
        broken.setattr(os, "replace", failing(os.replace, 2, OSError(errno.EIO, os.strerror(errno.EIO))))
        quantize_checkpoint(source, out, resume=True)
    quantize_checkpoint(source, tmp_path / "fresh")
    assert_resumes(source, out, models.contents(tmp_path / "fresh"))


@pytest.mark.filterwarnings("ignore")
def test_what_was_measured_on_another_version_of_the_model_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    models.save("llama", tmp_path / "model", shard="100KB")
    options = {"scheme": "w8a8-smoothquant", "calibration": models.tokens(tmp_path / "tokens.safetensors")}
    with monkeypatch.context() as broken, pytest.raises(FlowError, match="No space left"):
        broken.setattr(os, "pwrite", failing(os.pwrite, 60, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", **options)
    assert list((tmp_path / "out").glob("*.safetensors")), "the fault should come after the first shard"
    rewritten(max((tmp_path / "model").glob("*.safetensors")))
    quantize_checkpoint(tmp_path / "model", tmp_path / "fresh", **options)
    assert_resumes(tmp_path / "model", tmp_path / "out", models.contents(tmp_path / "fresh"), **options)


@pytest.mark.filterwarnings("ignore")
def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    ran = tmp_path / "ran"
    (source / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\n")
    auto = {"AutoConfig": "evil.Config", "AutoModel": "evil.Config", "AutoTokenizer": ["evil.Config", None]}
    (source / "config.json").write_text(json.dumps({"model_type": "nobody-knows", "auto_map": auto}))
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto}))
    (tmp_path / "texts.txt").write_text("some words\n")
    options = {"activations": "static", "calibration": tmp_path / "texts.txt"}
    with pytest.raises(FlowError, match="code of its own, which baracuda never runs"):
        quantize_checkpoint(source, tmp_path / "out", **options)
    quantize_checkpoint(source, tmp_path / "dynamic")
    with pytest.raises(FlowError, match="code of its own, which baracuda never runs"):
        load(tmp_path / "dynamic")
    assert not ran.exists()
