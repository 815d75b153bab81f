"""The commands in a pseudo-terminal, on files of strangers: nothing in them reaches the terminal as a command to it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

#: A title, a cleared screen, the same with one character for ESC [, text that runs backwards, a step back, a line of
#: its own, the line's beginning, and DEL.
BAD = "a\x1b]0;title\x07\x1b[2J\x9b3J\u202eb\x08\nFORGED\r\x7f"
OBEYED = ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e", "\x08", "\nFORGED", "FORGED\r", "\x7f")
#: The commands of a list, one after the other in one process, each after a line with its number.
CHILD = """
import json, sys
from baracuda_cli import app
for number, arguments in enumerate(json.load(open(sys.argv[1]))):
    print(f"<{number}>", flush=True)
    try:
        app(arguments)
    except SystemExit as ended:
        print(f"<ended {ended.code}>", flush=True)
"""


def in_terminal(code: str, *arguments: str) -> str:
    """What a terminal of 200 columns gets from a Python that runs this code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **streams)
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 1 << 16):
            parts.append(part)
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(ours)
        process.wait(60)
    return b"".join(parts).decode(errors="replace").replace("\r\n", "\n")


def rename_tensor(directory: Path) -> None:
    """The second tensor of each file has a hostile name, the third a hostile type."""
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = list(json.loads(data[8 : 8 + length]).items())
        header[2] = (BAD + header[2][0], header[2][1])
        header[3] = (header[3][0], header[3][1] | {"dtype": BAD})
        text = json.dumps(dict(header)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def add_files(directory: Path) -> None:
    (directory / BAD).touch()
    (directory / f"{BAD}.safetensors").touch()


def forge_report(directory: Path) -> None:
    if (path := directory / "baracuda_report.json").exists():
        content = json.loads(path.read_text())
        layers = [layer | {"name": BAD + layer["name"]} for layer in content["layers"]]
        left = [entry | {"name": BAD, "reason": BAD} for entry in content["left"]]
        models.change_json(path, model=BAD, scheme=BAD, layers=layers, left=left)


def forge_checksums(directory: Path) -> None:
    with (directory / "baracuda.sha256").open("a", newline="") as file:
        print(f"{'0' * 64}  {BAD.replace(chr(10), '')}", file=file)


def forge_words(directory: Path) -> None:
    """Every token but those of the prompt is hostile: the model says nothing else."""
    path = directory / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    vocabulary = {k if k in ("w0", "w5") else f"\x1b]0;{k}\x07": v for k, v in model["vocab"].items()}
    models.change_json(path, model=model | {"vocab": vocabulary})


def forge_quantization(directory: Path) -> None:
    path = directory / "config.json"
    weights = {"num_bits": BAD, "type": BAD, "strategy": BAD}
    groups = {BAD: {"targets": [BAD], "weights": weights}}
    forged = {"quant_method": "compressed-tensors", "format": BAD, "ignore": [BAD], "config_groups": groups}
    models.change_json(path, quantization_config=forged)


def settings(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda directory: models.change_json(directory / name, **values)


def forge_notices(directory: Path) -> None:
    """Of a model that can be built: transformers logs what it cannot set, with the values."""
    models.change_json(directory / "config.json", __weakref__=BAD)
    models.change_json(directory / "generation_config.json", eos_token_id=BAD, **{BAD: BAD})


def forge_notes(directory: Path) -> None:
    forge_report(directory)
    forge_checksums(directory)


#: Kind -> how it spoils a directory, and whether some command must have shown the text, spelled out.
KINDS: dict[str, tuple[Callable[[Path], None], bool]] = {
    "names of tensors": (rename_tensor, True),
    "names of files": (add_files, True),
    "a link": (lambda directory: (directory / "x.json").symlink_to(f"/nowhere/{BAD}"), False),
    "its kind": (settings("config.json", model_type=BAD, architectures=[BAD]), True),
    "its settings": (settings("config.json", hidden_act=BAD, dtype=BAD, **{BAD: BAD}), True),
    "its quantization": (forge_quantization, True),
    "its template": (settings("tokenizer_config.json", chat_template="{{ raise_exception('\\x1b]0;x') }}"), True),
    "what transformers logs": (forge_notices, False),
    "its words": (forge_words, True),
    "the report and the checksums": (forge_notes, True),
}


def commands(place: Path) -> list[list[str]]:
    model, out, texts = str(place / "model"), str(place / "out"), str(place / "texts.txt")
    few = ["--samples", "2", "--sequence-length", "8"]
    measured = ["--scheme", "w8a8-smoothquant", "--calibration", texts, "--evaluate", texts, *few]
    return [
        ["quantize", model, "-o", str(place / "new"), *measured],
        ["verify", out, "--against", model],
        ["verify", out, "--json"],
        ["inspect", out, "--layers"],
        ["report", out],
        ["compare", out, out],
        ["eval", out, "--text", texts, *few],
        ["bench", model, out, "--length", "4", "--tokens", "8"],
        ["chat", out, "-p", "w5", "--max-tokens", "2"],
    ]


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[list[str], str]]]:
    """Kind -> the commands on a directory that it has spoilt, and what each of them wrote to the terminal."""
    folder = tmp_path_factory.mktemp("terminal")
    kept = models.quantized(folder / "kept", words=True)
    (kept / "texts.txt").write_text("w5 w6 w7\nw8 w9 w5 w6 w7 w8 w9 w5 w6\n" * 4)
    asked: list[tuple[str, list[str]]] = []
    for number, (kind, (spoil, _)) in enumerate(KINDS.items()):
        place = Path(shutil.copytree(kept, folder / str(number)))
        for directory in ("model", "out"):
            spoil(place / directory)
        asked += [(kind, command) for command in commands(place)]
    (folder / "commands.json").write_text(json.dumps([command for _, command in asked]))
    shown = re.split(r"(?m)^<\d+>\n", in_terminal(CHILD, str(folder / "commands.json")))[1:]
    assert len(shown) == len(asked), shown[-1]
    found: dict[str, list[tuple[list[str], str]]] = {kind: [] for kind in KINDS}
    for (kind, command), text in zip(asked, shown, strict=True):
        found[kind].append((command, text))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_writes_what_a_terminal_obeys(kind: str, screens: dict[str, list[tuple[list[str], str]]]) -> None:
    for command, text in screens[kind]:
        assert not [character for character in OBEYED if character in text], (command, ascii(text))
        assert re.search(r"<ended [012]>\n\Z", text) and "Traceback" not in text, (command, ascii(text))
    if KINDS[kind][1]:
        assert any(r"\x1b]" in text or r"\u001b]" in text for _, text in screens[kind]), "nothing hostile was shown"


def test_what_libraries_log_warn_of_and_raise_is_shown() -> None:
    code = """
import logging, sys, warnings
from baracuda_cli.terminal import App
app, bad = App(), sys.argv[1]
@app.command()
def quote():
    logging.getLogger("library").error("logged %s", bad)
    warnings.warn("warned " + bad)
    raise RuntimeError("raised " + bad)
app([])
"""
    text = in_terminal(code, BAD)
    assert not [character for character in OBEYED if character in text.replace("\nFORGED", "")], ascii(text)
    for word in ("logged", "warned", "raised"):
        assert rf"{word} a\x1b]0;title" in text, ascii(text)
    assert "in quote" in text  # a bug keeps its trace
