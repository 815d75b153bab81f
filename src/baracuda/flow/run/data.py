"""The data of calibration and evaluation: files of texts or tokens, read into token sequences and batches."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.tensorfile import TensorFile
from ..errors import FlowError
from ..hf.forward import float_model, generates, require_readable, templated, tokenizer
from ..hf.generation import failures_told
from .inputs import holds_inputs, require_inputs, require_perceived
from .options import Options, Progress
from .texts import SUFFIXES as TEXTS
from .texts import Chat, Piece, read_pieces, require_texts

#: Sequences of one length that go through the model together. Fixed, so that the ranks of a team see the same batches.
BATCH = 8
#: What calibration and evaluation read.
SUFFIXES = (*TEXTS, ".safetensors")
#: Types of token numbers. Numbers of 64 bits without a sign have no use, and torch computes little with them.
TOKEN_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
#: Bytes of a file of tokens that are checked at once.
CHUNK = 1 << 22
#: A file of texts or tokens, the texts themselves, or BUILTIN.
Data = str | Path | list[str] | tuple[str, ...]
#: In place of a file: a text that comes with baracuda, one for calibration and another one for evaluation.
BUILTIN = "builtin"
_TEXTS = Path(__file__).with_name(BUILTIN)


def read_sequences(
    path: Path, model_dir: Path, *, samples: int, length: int, blocks: bool, read: Callable[[int], None] | None = None
) -> list[Tensor]:
    """Token sequences from a file of texts or tokens: no more of it is read, tokenized or kept than they need.

    Texts come from .txt (a sample a line), .jsonl or .parquet ({"text": ...} or {"messages": [...]}, a chat). With
    `blocks`, texts are joined and cut into blocks of `length`, as for models that predict the next token. Without, each
    text gives its first `length` tokens. Rows of tokens are cut in the same two ways, but never joined. `read` is
    called with the number of tokens as they are read.
    """
    if path.suffix == ".safetensors":
        return _token_sequences(path, samples, length, blocks)
    read, encode = read or (lambda count: None), Encoder(model_dir)
    if not blocks:
        texts = islice((piece for piece in read_pieces(path) if piece.begins), samples)
        return [torch.tensor(encode(piece, limit=length)) for piece in texts]
    tokens = array("q")
    for piece in read_pieces(path):
        made = encode(piece)
        tokens.extend(made)
        read(len(made))
        if len(tokens) >= samples * length:
            break
    whole = torch.frombuffer(tokens, dtype=torch.int64) if tokens else torch.empty(0, dtype=torch.int64)
    cut = [whole[i : i + length].clone() for i in range(0, min(len(whole), samples * length), length)]
    long_enough = [block for block in cut if len(block) > 1]
    if not long_enough:
        raise FlowError(f"{path}: expected texts of at least 2 tokens, got {len(tokens)}; give more text")
    return long_enough


class Encoder:
    """A model's tokenizer, for texts that come in pieces and for chats."""

    def __init__(self, model_dir: Path) -> None:
        self.directory, self.tokenizer = model_dir, tokenizer(model_dir)

    def __call__(self, piece: Piece, limit: int | None = None) -> list[int]:
        """The tokens of a piece, or the first of a text up to `limit`; a text that is joined to others ends a line."""
        options: dict[str, Any] = {} if limit is None else {"truncation": True, "max_length": limit}
        text = piece.text
        if piece.messages is not None:
            text = self._chat(piece.messages)
            options["add_special_tokens"] = False  # the template has them
        elif not piece.begins:
            options["add_special_tokens"] = False
        if limit is None and piece.ends:
            text += "\n"
        with failures_told(f"{self.directory}: the tokenizer fails"):
            found: list[int] = self.tokenizer(text, **options)["input_ids"]
        return found

    def _chat(self, messages: Chat) -> str:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise FlowError(
                f"{self.directory}: its tokenizer has no chat template, so messages cannot be read; give records with "
                "a text instead"
            )
        try:
            return templated(self.tokenizer, messages)
        except FlowError:
            raise
        except Exception as error:  # a template is a program and can fail in any way
            raise FlowError(
                f"{self.directory}: its chat template refuses {str(messages)[:80]}: {error}; correct the messages"
            ) from None


@contextmanager
def as_file(data: Data | None, use: str) -> Iterator[Path | None]:
    """The file of the data. Texts are written to one, named by their use, which is removed at the end."""
    if data is None or isinstance(data, str | Path):
        yield None if data is None else located(str(data), use)
        return
    if not isinstance(data, list | tuple) or not all(isinstance(text, str) for text in data):
        raise FlowError(f"{use}: expected the path of a file, or a list of texts, got {type(data).__name__}")
    with tempfile.TemporaryDirectory(prefix="baracuda-") as folder:
        path = Path(folder) / f"{use}-texts.jsonl"
        path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in data))
        yield path


def located(name: str, use: str) -> Path:
    """The file that is meant: of BUILTIN, the text that comes with baracuda for this use."""
    return _TEXTS / f"{use}.txt" if name == BUILTIN else Path(name)


def spelled(path: Path) -> str:
    """The name by which `located` finds a file, wherever baracuda is installed."""
    return BUILTIN if path.parent == _TEXTS else str(path)


def require_data(path: Path) -> None:
    """Raise unless this is a file of texts or tokens. Called before a run begins, so that it does not fail later."""
    if path.suffix not in SUFFIXES or not path.is_file():
        what = "no such file" if not path.exists() else "not a file" if not path.is_file() else "another kind of file"
        raise FlowError(
            f"{path}: {what}; expected texts (.txt, a sample a line, .jsonl or .parquet), tokens (.safetensors), or "
            f"{BUILTIN}"
        )
    if holds_inputs(path):
        require_inputs(path)
    elif path.suffix == ".safetensors":
        _require_tokens(path)
    else:
        require_texts(path)


def _blocks(row: Tensor, length: int) -> list[Tensor]:
    """Leave out a last block of one token, which predicts nothing."""
    return [row[i : i + length] for i in range(0, max(1, len(row) - 1), length)]


def read_for(
    model: nn.Module,
    directory: Path,
    data: Path,
    options: Options,
    use: str,
    device: torch.device,
    progress: Progress | None = None,
) -> list[Tensor]:
    """The sequences of `data`, once the model has proved to run on them."""
    if holds_inputs(data):
        raise FlowError(
            f"{use}: {data} has images or sounds, with which checkpoints are evaluated, but {type(model).__name__} is "
            "calibrated on texts or tokens only; use a scheme without calibration: w8a8 or w4a16"
        )
    wanted = left = options.samples * options.sequence_length

    def read(count: int) -> None:
        nonlocal left
        left -= count
        if progress is not None:
            progress("read", count, wanted, Path(spelled(data)).name)

    sequences = read_sequences(
        data, directory, samples=options.samples, length=options.sequence_length, blocks=generates(model), read=read
    )
    if 0 < left < wanted:  # there is no more text
        read(left)
    require_readable(model, sequences, use, device)
    return sequences


def rehearse(directory: Path, data: Path, options: Options, device: torch.device) -> None:
    """Raise where the float model cannot be evaluated on this data. Called before anything is quantized."""
    model = float_model(directory, device)
    if holds_inputs(data):
        require_perceived(model, data, device)
    else:
        read_for(model, directory, data, options, "evaluation", device)


def batches(sequences: list[Tensor]) -> list[Tensor]:
    """Batches of neighbours of the same length. Nothing is padded, so padding does not enter the statistics."""
    made: list[list[Tensor]] = []
    for sequence in sequences:
        if made and len(made[-1]) < BATCH and len(made[-1][0]) == len(sequence):
            made[-1].append(sequence)
        else:
            made.append([sequence])
    return [torch.stack(batch) for batch in made]


# -- tokens ------------------------------------------------------------------------------------------------------


def _token_sequences(path: Path, samples: int, length: int, blocks: bool) -> list[Tensor]:
    sequences: list[Tensor] = []
    for row in _rows(path, samples * length if blocks else length):
        sequences += _blocks(row, length) if blocks else [row[:length]]
        if len(sequences) >= samples:
            break
    return sequences[:samples]


def _rows(path: Path, most: int) -> Iterator[Tensor]:
    """The sequences of a file of tokens, each up to `most` tokens, one at a time."""
    with TensorFile(path) as file:
        for name in sorted(file.entries):
            entry = file.entries[name]
            if len(entry.shape) == 1:
                yield file.read(name, 0, min(most, entry.shape[0])).to(torch.int64)
            else:
                for row in range(entry.shape[0]):
                    yield file.read(name, row, row + 1)[0, :most].to(torch.int64)


def _require_tokens(path: Path) -> None:
    """Raise unless every tensor of the file has token numbers: one sequence, or a sequence a row."""
    with TensorFile(path) as file:
        if not file.entries:
            raise FlowError(f"{path}: expected tensors of token numbers, got none; write one, a sequence a row")
        for name, entry in sorted(file.entries.items()):
            if entry.dtype not in TOKEN_TYPES or len(entry.shape) not in (1, 2) or 0 in entry.shape:
                raise FlowError(
                    f"{path}: {name}: expected token numbers, one sequence or a sequence a row, in integers of up to "
                    f"32 bits or int64, got {entry.dtype} of shape {list(entry.shape)}; convert it, or leave it out of "
                    "the file"
                )
            step = max(1, CHUNK // entry.row_bytes)
            for first in range(0, entry.shape[0], step):
                part = file.read(name, first, min(first + step, entry.shape[0])).to(torch.int64)
                if (least := int(part.min())) < 0:
                    raise FlowError(f"{path}: {name}: expected token numbers from 0 up, got {least}; "
                                    "leave padding and ignored positions out")  # fmt: skip
