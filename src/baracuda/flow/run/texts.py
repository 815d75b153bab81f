"""Texts from files, one record after the other: plain lines, JSON lines or Parquet, as texts or as chats.

Nothing holds a whole file. Long texts come in pieces, so that tokenizing one takes as little as tokenizing many.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FlowError, shown

SUFFIXES = (".txt", ".jsonl", ".parquet")
#: Characters that are tokenized at once. Tokenizers take memory and time beyond proportion for longer texts.
PIECE = 1 << 16
#: A piece ends before a blank, if there is one among this many of its last characters.
BLANK = 256
#: Records that are looked at before a run begins; what follows is checked when it is read.
CHECKED = 10_000

Chat = list[dict[str, Any]]


@dataclass(frozen=True)
class Piece:
    """A part of a text."""

    text: str
    #: Whether a text begins here, and whether it ends.
    begins: bool = True
    ends: bool = True
    #: The messages of a chat, in place of a text: the tokenizer's template makes one of them.
    messages: Chat | None = None


def read_pieces(path: Path) -> Iterator[Piece]:
    """The texts of a file in their order; a FlowError says which record is none."""
    if path.suffix == ".txt":
        yield from _lines(path)
    else:
        for where, record in _json_lines(path) if path.suffix == ".jsonl" else _parquet_rows(path):
            yield from _record(record, where)


def require_texts(path: Path) -> None:
    """Raise unless the file has texts: its first records are read."""
    begun = 0
    for piece in read_pieces(path):
        begun += piece.begins
        if begun == CHECKED:
            return
    if not begun:
        raise FlowError(f"{path}: expected a text a line; it is empty")


def in_pieces(text: str) -> Iterator[Piece]:
    """A text in pieces of at most PIECE characters."""
    first = 0
    while first == 0 or first < len(text):
        last = _end(text, first)
        yield Piece(text[first:last], first == 0, last >= len(text))
        first = max(last, 1)


def _end(text: str, first: int) -> int:
    last = first + PIECE
    if last >= len(text):
        return len(text)
    blank = text.rfind(" ", last - BLANK, last)
    return blank if blank > first else last


def _lines(path: Path) -> Iterator[Piece]:
    """The lines of a file. Of one that is longer than a piece, no more is in memory at a time."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            held, begins = "", True
            # Not splitlines: a text may hold U+2028 and its like, which end no line of a file.
            while part := file.readline(PIECE):
                held += part
                if held.endswith("\n"):
                    for piece in in_pieces(held.removesuffix("\n")) if begins else _rest(held.removesuffix("\n")):
                        if piece.text.strip() or not begins:
                            yield piece
                    held, begins = "", True
                elif len(held) > PIECE:
                    last = _end(held, 0)
                    if held[:last].strip() or not begins:
                        yield Piece(held[:last], begins, False)
                        begins = False
                    held = held[last:]
            if held.strip() or not begins:
                yield from in_pieces(held) if begins else _rest(held)
    except UnicodeDecodeError as error:
        raise FlowError(f"{path}: expected UTF-8 text: {error}; save it as UTF-8") from None


def _rest(text: str) -> Iterator[Piece]:
    """The pieces of a text that has begun before."""
    for piece in in_pieces(text):
        yield Piece(piece.text, False, piece.ends)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}: line {number}"
                    try:
                        record = json.loads(line)
                    except (ValueError, RecursionError):
                        record = None
                    yield where, _Shown(record, line.rstrip("\n"))
    except UnicodeDecodeError as error:
        raise FlowError(f"{path}: expected UTF-8 text: {error}; save it as UTF-8") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise FlowError(f"{path}: Parquet is read with pyarrow, which is not installed: pip install pyarrow, or "
                        "convert the file to .jsonl") from None  # fmt: skip
    try:
        with parquet.ParquetFile(path) as file:
            wanted = [name for name in ("text", "messages") if name in file.schema_arrow.names]
            if not wanted:
                got = ", ".join(file.schema_arrow.names)
                raise FlowError(f"{path}: expected a column text or messages, got {got}; rename the one with the texts")
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    record = {key: value for key, value in row.items() if value is not None}
                    yield f"{path}: row {number}", _Shown(record, str(row))
    except pyarrow.ArrowException as error:
        raise FlowError(f"{path}: cannot be read as Parquet: {error}; write the file again") from None


@dataclass(frozen=True)
class _Shown:
    """A record, and how an error shows it."""

    value: Any
    shown: str


def _record(record: _Shown, where: str) -> Iterator[Piece]:
    """The text of a record: a string, or the "text" of an object, or its "messages"."""
    value = record.value
    if isinstance(value, dict) and "text" not in value and "messages" in value:
        yield Piece("", messages=_messages(value["messages"], where))
        return
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        got = shown(record.shown)[1:-1]
        raise FlowError(f'{where}: expected {{"text": "..."}}, got {got}; correct the line, or remove it')
    _require_whole(text, where)
    yield from in_pieces(text)


def _require_whole(text: str, where: str) -> None:
    """Raise for half a character, which no tokenizer takes: JSON can escape one."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise FlowError(f"{where}: half a character (a lone surrogate) in its text; correct the line, or remove it")


def _messages(messages: Any, where: str) -> Chat:
    good = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
    )
    if not good:
        raise FlowError(
            f'{where}: expected messages such as {{"role": "user", "content": "..."}}, got {shown(messages)}; '
            "correct the record, or remove it"
        )
    made: Chat = messages
    for message in made:
        _require_whole(message["content"], where)
    return made
