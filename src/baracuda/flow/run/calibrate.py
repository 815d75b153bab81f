"""Calibration: what texts become, and the running per-channel maxima that hooks collect while the model reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.tensorfile import TensorFile
from ..errors import FlowError
from .distributed import Team

#: Sequences of one length that go through the model together. Fixed, so that the ranks of a team see the same batches.
BATCH = 8
#: What calibration and evaluation read.
SUFFIXES = (".txt", ".jsonl", ".safetensors")
#: Rows of each layer's input kept for alpha="auto": this many of each of the first batches.
KEPT_ROWS, KEPT_BATCHES = 32, 8


def read_sequences(path: Path, model_dir: Path, *, samples: int, length: int, blocks: bool) -> list[Tensor]:
    """Token sequences from a .txt (a sample a line), .jsonl ({"text": ...} a line) or .safetensors file of tokens.

    `blocks` joins texts and cuts them into equal blocks, as for models that predict the next token; of other texts the
    beginning is read. Rows of tokens are cut alike, but never joined.
    """
    if path.suffix == ".safetensors":
        rows = _read_tokens(path)
        return [part for row in rows for part in (_blocks(row, length) if blocks else [row[:length]])][:samples]
    texts = _read_texts(path)
    tokenizer = _tokenizer(model_dir)
    if not blocks:
        texts = texts[:samples]
        return [torch.tensor(tokenizer(text, truncation=True, max_length=length)["input_ids"]) for text in texts]
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer(text + "\n")["input_ids"]
        if len(tokens) >= samples * length:
            break
    cut = [torch.tensor(tokens[i : i + length]) for i in range(0, len(tokens), length)]
    long_enough = [block for block in cut if len(block) > 1][:samples]
    if not long_enough:
        raise FlowError(f"{path}: expected texts of at least 2 tokens, got {len(tokens)}; give more text")
    return long_enough


def require_data(path: Path) -> None:
    """Raise unless this can be a file of texts or tokens: before a run begins, not when it gets there."""
    if path.suffix not in SUFFIXES or not path.is_file():
        what = "no such file" if not path.exists() else "not a file" if not path.is_file() else "another kind of file"
        raise FlowError(f"{path}: {what}; expected texts (.txt, a sample a line, or .jsonl) or tokens (.safetensors)")
    if path.suffix == ".safetensors":
        _read_tokens(path)
    else:
        _read_texts(path)


def _blocks(row: Tensor, length: int) -> list[Tensor]:
    """A last block of a single token, which predicts nothing, is left out."""
    return [row[i : i + length] for i in range(0, max(1, len(row) - 1), length)]


def batches(sequences: list[Tensor]) -> list[Tensor]:
    """Neighbours of the same length share a batch; nothing is padded, so no padding is measured."""
    made: list[list[Tensor]] = []
    for sequence in sequences:
        if made and len(made[-1]) < BATCH and len(made[-1][0]) == len(sequence):
            made[-1].append(sequence)
        else:
            made.append([sequence])
    return [torch.stack(batch) for batch in made]


def channel_maximum(x: Tensor) -> Tensor:
    """max |x| of each column, NaN where there is one, in the type of x: every maximum is one of its values."""
    if x.device.type == "cuda":
        largest: Tensor = torch.linalg.vector_norm(x, math.inf, 0)  # one kernel, where launches are what costs
        return largest
    return torch.maximum(x.amax(0), x.amin(0).neg_())  # many times faster than the norm on a CPU


class Observer:
    """Hooks on linears, one for each distinct input. Holds a maximum per channel, and a few rows when asked to."""

    def __init__(self, model: nn.Module, groups: list[list[str]], *, keep_rows: bool) -> None:
        """`groups`: names of linear weights that read the same value; the first of each is watched."""
        self.groups, self.keep_rows = groups, keep_rows
        self.maxima: dict[str, Tensor] = {}
        self.rows: dict[str, dict[int, Tensor]] = {group[0]: {} for group in groups}
        self.batch = 0
        self._handles = [self._watch(model, group[0]) for group in groups]

    def _watch(self, model: nn.Module, weight: str) -> Any:
        module = model.get_submodule(weight.removesuffix(".weight"))

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            largest = channel_maximum(x)
            known = self.maxima.get(weight)
            self.maxima[weight] = largest if known is None else torch.maximum(known, largest, out=known)
            if self.keep_rows and self.batch < KEPT_BATCHES:
                step = max(1, x.shape[0] // KEPT_ROWS)
                self.rows[weight][self.batch] = x[::step][:KEPT_ROWS].float().cpu()

        return module.register_forward_pre_hook(hook)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def reduce(self, team: Team) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Maxima and rows over all ranks, for every linear of every group."""
        maxima: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        for group in self.groups:
            mine = self.maxima.get(group[0])
            everyone = [part for part in team.gather(None if mine is None else mine.cpu()) if part is not None]
            if not everyone:
                continue
            largest = torch.stack(everyone).amax(0).float()
            if not bool(torch.isfinite(largest).all()):
                raise FlowError(
                    f"calibration: expected finite inputs, {group[0]} got NaN or infinite ones; give other data, or "
                    "use a scheme without calibration: w8a8 or w4a16"
                )
            kept: dict[int, Tensor] = {}
            for part in team.gather(self.rows[group[0]]):
                kept |= part
            for weight in group:
                maxima[weight] = largest
                if kept:
                    rows[weight] = torch.cat([kept[i] for i in sorted(kept)])
        return maxima, rows


def run_batches(
    model: nn.Module,
    data: list[Tensor],
    team: Team,
    device: torch.device,
    step: Callable[[int], None],
    arguments: dict[str, Any],
) -> None:
    """This rank's batches through the model."""
    for index, tokens in enumerate(data):
        if index % team.size != team.rank:
            continue
        step(index)
        with torch.no_grad():
            model(input_ids=tokens.to(device), **arguments)


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
    except ValueError:
        record = None
    text = record.get("text") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise FlowError(f'{where}: expected {{"text": "..."}}, got {line[:60]}; correct the line, or remove it')
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


def _tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise FlowError(
            f"{model_dir}: no tokenizer that transformers can load, so texts cannot be read; give tokens.safetensors "
            f"instead ({str(error).strip().splitlines()[0][:200]})"
        ) from None
