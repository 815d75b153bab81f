"""The data of calibration and evaluation: files of texts or tokens, read into token sequences and batches."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoint.tensorfile import TensorFile
from ..errors import FlowError, shown
from ..hf.forward import float_model, generates, require_readable, tokenizer
from .options import Options

#: Sequences of one length that go through the model together. Fixed, so that the ranks of a team see the same batches.
BATCH = 8
#: What calibration and evaluation read.
SUFFIXES = (".txt", ".jsonl", ".safetensors")
#: A file of texts or tokens, or the texts themselves.
Data = str | Path | list[str] | tuple[str, ...]


def read_sequences(path: Path, model_dir: Path, *, samples: int, length: int, blocks: bool) -> list[Tensor]:
    """Token sequences from a .txt (a sample a line), .jsonl ({"text": ...} a line) or .safetensors file of tokens.

    With `blocks`, texts are joined and cut into blocks of `length`, as for models that predict the next token. Without,
    each text gives its first `length` tokens. Rows of tokens are cut in the same two ways, but never joined.
    """
    if path.suffix == ".safetensors":
        rows = _read_tokens(path)
        return [part for row in rows for part in (_blocks(row, length) if blocks else [row[:length]])][:samples]
    texts = _read_texts(path)
    encode = tokenizer(model_dir)
    if not blocks:
        texts = texts[:samples]
        return [torch.tensor(encode(text, truncation=True, max_length=length)["input_ids"]) for text in texts]
    tokens: list[int] = []
    for text in texts:
        tokens += encode(text + "\n")["input_ids"]
        if len(tokens) >= samples * length:
            break
    cut = [torch.tensor(tokens[i : i + length]) for i in range(0, len(tokens), length)]
    long_enough = [block for block in cut if len(block) > 1][:samples]
    if not long_enough:
        raise FlowError(f"{path}: expected texts of at least 2 tokens, got {len(tokens)}; give more text")
    return long_enough


@contextmanager
def as_file(data: Data | None, use: str) -> Iterator[Path | None]:
    """The file of the data. Texts are written to one, named by their use, which is removed at the end."""
    if data is None or isinstance(data, str | Path):
        yield None if data is None else Path(data)
        return
    if not isinstance(data, list | tuple) or not all(isinstance(text, str) for text in data):
        raise FlowError(f"{use}: expected the path of a file, or a list of texts, got {type(data).__name__}")
    with tempfile.TemporaryDirectory(prefix="baracuda-") as folder:
        path = Path(folder) / f"{use}-texts.jsonl"
        path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in data))
        yield path


def require_data(path: Path) -> None:
    """Raise unless this is a file of texts or tokens. Called before a run begins, so that it does not fail later."""
    if path.suffix not in SUFFIXES or not path.is_file():
        what = "no such file" if not path.exists() else "not a file" if not path.is_file() else "another kind of file"
        raise FlowError(f"{path}: {what}; expected texts (.txt, a sample a line, or .jsonl) or tokens (.safetensors)")
    if path.suffix == ".safetensors":
        _read_tokens(path)
    else:
        _read_texts(path)


def _blocks(row: Tensor, length: int) -> list[Tensor]:
    """Leave out a last block of one token, which predicts nothing."""
    return [row[i : i + length] for i in range(0, max(1, len(row) - 1), length)]


def read_for(
    model: nn.Module, directory: Path, data: Path, options: Options, use: str, device: torch.device
) -> list[Tensor]:
    """The sequences of `data`, once the model has proved to run on them."""
    sequences = read_sequences(
        data, directory, samples=options.samples, length=options.sequence_length, blocks=generates(model)
    )
    require_readable(model, sequences, use, device)
    return sequences


def rehearse(directory: Path, data: Path, options: Options, device: torch.device) -> None:
    """Raise where the float model cannot be evaluated on this data. Called before anything is quantized."""
    read_for(float_model(directory, device), directory, data, options, "evaluation", device)


def batches(sequences: list[Tensor]) -> list[Tensor]:
    """Batches of neighbours of the same length. Nothing is padded, so padding does not enter the statistics."""
    made: list[list[Tensor]] = []
    for sequence in sequences:
        if made and len(made[-1]) < BATCH and len(made[-1][0]) == len(sequence):
            made[-1].append(sequence)
        else:
            made.append([sequence])
    return [torch.stack(batch) for batch in made]


# -- files -------------------------------------------------------------------------------------------------------


def _read_texts(path: Path) -> list[str]:
    try:
        # Not splitlines: a text may hold U+2028 and its like, which end no line of a file.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise FlowError(f"{path}: expected UTF-8 text: {error}; save it as UTF-8") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise FlowError(f"{path}: expected a text a line; it is empty")
    if path.suffix == ".jsonl":
        return [_text(line, f"{path}: line {number}") for number, line in numbered]
    return [line for _, line in numbered]


def _text(line: str, where: str) -> str:
    """The text of a line of .jsonl: a string, or the "text" of an object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    text = record.get("text") if isinstance(record, dict) else record
    if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise FlowError(f"{where}: half a character (a lone surrogate) in its text; correct the line, or remove it")
    if not isinstance(text, str):
        raise FlowError(f'{where}: expected {{"text": "..."}}, got {shown(line)[1:-1]}; correct the line, or remove it')
    return text


def _read_tokens(path: Path) -> list[Tensor]:
    """Every integer tensor of the file: one sequence, or a sequence a row."""
    sequences: list[Tensor] = []
    with TensorFile(path) as file:
        for name in sorted(file.entries):
            tokens = file.read(name)
            if tokens.is_floating_point() or tokens.ndim not in (1, 2) or not tokens.numel():
                raise FlowError(
                    f"{path}: {name}: expected token numbers, one sequence or a sequence a row, got {tokens.dtype} of "
                    f"shape {list(tokens.shape)}; convert it, or leave it out of the file"
                )
            if int(tokens.min()) < 0:
                raise FlowError(f"{path}: {name}: expected token numbers from 0 up, got {int(tokens.min())}; "
                                "leave padding and ignored positions out")  # fmt: skip
            sequences += list(tokens.long().reshape(-1, tokens.shape[-1]))
    if not sequences:
        raise FlowError(f"{path}: expected tensors of token numbers, got none; write one, a sequence a row")
    return sequences
