"""Runs a transformers model on tokens alone: loads it in floating point, and checks that it can read the data."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.directory import leads_out, read_json, require_contained
from ..errors import CheckpointError, FlowError, shown
from .config import alone, model_config
from .load import load, read_model
from .skeleton import require_transformers

#: Small, and unlike any size of a model, so that no two axes are taken for one another.
TRACE_SHAPE = (2, 11)
#: Characters that a chat template may add to any conversation: instructions, tools, examples.
TEMPLATE_ROOM = 1 << 20
TOKENIZER = "tokenizer_config.json"
#: Settings of a tokenizer that name files of its vocabulary.
_FILE = re.compile(r"(file|spm|vocab|merges)$")
#: What a model of images or sounds is evaluated with.
REMEDY = "evaluate it on a .safetensors file of its inputs, such as pixel_values or input_features, or drop --evaluate"


def float_model(directory: Path, device: torch.device) -> nn.Module:
    """The checkpoint as transformers loads it."""
    require_transformers("calibration and evaluation run the model")
    return read_model(directory, model_config(directory), "auto").to(device).eval()


def any_model(directory: Path, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """A checkpoint as baracuda loads its own, or as transformers loads others."""
    try:
        model: nn.Module = load(directory, device=device, dtype=dtype)
        return model
    except FlowError as error:
        if "quantization_config" not in str(error) and "compressed-tensors" not in str(error):
            raise
        model = float_model(directory, device)
        return model if dtype is None else model.to(dtype)


def generates(model: nn.Module) -> bool:
    """Whether it predicts the next token."""
    return bool(getattr(model, "can_generate", lambda: False)())


def arguments(model: nn.Module) -> dict[str, Any]:
    """What to call it with besides tokens. A key-value cache is of no use in one forward and takes memory."""
    return {"use_cache": False} if hasattr(model, "generate") and generates(model) else {}


def without_head(model: nn.Module, layers: list[str]) -> nn.Module:
    """The model without what turns hidden states into logits, where none of the layers is in that: it saves memory."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    decoder = generates(model) and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not decoder or not all(layer.startswith(prefix) for layer in layers):
        return model
    body = getattr(model, prefix[:-1], None)
    return body if isinstance(body, nn.Module) else model


def tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory."""
    from transformers import AutoTokenizer

    require_contained(directory)
    _require_own_files(directory)
    try:
        with alone():
            found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        # Some versions of transformers make one of nothing, to which all texts are the same unknown token.
        if len(found.get_vocab()) > len(found.get_added_vocab()):
            return found
        reason = "its vocabulary has special tokens alone"
    except Exception as error:  # files can be wrong in any way; transformers and tokenizers then raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    raise FlowError(
        f"{directory}: no tokenizer that transformers can load, so texts cannot be read; give tokens.safetensors "
        f"instead ({reason})"
    )


def templated(tokenizer: Any, turns: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """A conversation as the tokenizer's template writes it.

    Raises FlowError where that is far longer than what was said: a tokenizer takes many times the memory of its text,
    and ends the process where there is none left.
    """
    made: str = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    said = len(str(turns))
    if len(made) > TEMPLATE_ROOM + 16 * said:
        raise FlowError(
            f"the chat template makes {len(made)} characters of a conversation of {said}: expected at most "
            f"{TEMPLATE_ROOM + 16 * said}; correct the template"
        )
    return made


def _require_own_files(directory: Path) -> None:
    """Raise where the settings of a tokenizer name a file elsewhere: transformers would make its vocabulary of it."""
    if not (directory / TOKENIZER).exists():
        return
    for key, value in read_json(directory / TOKENIZER).items():
        if isinstance(value, str) and _FILE.search(key) and os.path.isfile(value) and leads_out(Path(value), directory):
            place = f"{TOKENIZER}: {shown(key)[1:-1]} names {shown(value)}"
            raise CheckpointError("path-escape", f"{place}: expected no file outside {directory}; remove it")


def require_readable(model: nn.Module, sequences: list[Tensor], use: str, device: torch.device) -> None:
    """Raise unless the model runs on a few tokens of these sequences, and on the longest of them."""
    require_known(model, sequences, use)
    few = sequences[0][: TRACE_SHAPE[1]].expand(TRACE_SHAPE[0], -1).to(device)
    with on_tokens_alone(model, use), torch.no_grad():
        model(input_ids=few, **arguments(model))[0].float()
    require_short(model, max(sequences, key=len).to(device), use)


@contextmanager
def on_tokens_alone(model: nn.Module, use: str) -> Iterator[None]:
    """Explain the error of a model that needs images, sounds or a second text besides tokens."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # a lack of memory says nothing about the model's inputs
    except Exception as error:  # each model fails in its own way on what it did not get
        message = (str(error).strip().splitlines() or ["without a word"])[0][:200]
        remedy = {"calibration": "use a scheme without calibration: w8a8 or w4a16", "evaluation": REMEDY}
        raise FlowError(
            f"{use}: expected a model that runs on tokens alone; {type(model).__name__} does not "
            f"({type(error).__name__}: {message}); {remedy[use]}"
        ) from error


def require_known(model: nn.Module, sequences: list[Tensor], use: str) -> None:
    """Raise where the model has no embedding for a token of this data."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = max(int(sequence.max()) for sequence in sequences)
    if vocabulary is not None and largest >= vocabulary:
        raise FlowError(f"{use}: token {largest} is not in the model's vocabulary of {vocabulary}; "
                        "the data was made with another tokenizer: make it with this model's")  # fmt: skip


def require_short(model: nn.Module, longest: Tensor, use: str) -> None:
    """Raise where the model does not read a sequence of this length, with the length that it does read."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 0
    claimed = min(len(longest), positions) if positions > 0 else len(longest)  # XLNet writes -1: any length
    if claimed == len(longest) and reads(model, longest):
        return
    # Positions may begin at 2, as RoBERTa's do: what was claimed is tried as well.
    limit = bisect_left(range(1, claimed + 1), True, key=lambda length: not reads(model, longest[:length]))
    advice = f"the model reads {limit}: pass --sequence-length {limit}"
    failed = "the model fails on it: pass a smaller --sequence-length"  # a GPU does not recover from a bad index
    raise FlowError(f"{use}: a sequence of {len(longest)} tokens, but {advice if limit > 1 else failed}")


def reads(model: nn.Module, sequence: Tensor) -> bool:
    try:
        with torch.no_grad():
            model(input_ids=sequence[None], **arguments(model))[0].flatten()[0].item()  # a GPU fails when it is asked
    except torch.OutOfMemoryError:
        raise  # a lack of memory says nothing about the model's inputs
    except Exception:  # each model fails in its own way on what is too long
        return False
    return True
