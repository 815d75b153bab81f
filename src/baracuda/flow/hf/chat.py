"""A conversation with a model directory, quantized or not: what `baracuda chat` holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...plans.plan import resolve_device
from ..errors import FlowError
from .forward import any_model, generates, templated, tokenizer
from .generation import failures_told, plain_generation
from .hub import model_directory
from .skeleton import quiet, require_transformers


@dataclass(frozen=True)
class Reply:
    """What the model answered."""

    text: str
    tokens: int
    seconds: float


class Conversation:
    """A model that remembers what was said.

    With a chat template, each text is a turn of the user. Without one the model goes on with the text as it stands,
    and nothing is remembered.
    """

    def __init__(
        self, checkpoint: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        require_transformers("a conversation needs transformers")
        directory, where = model_directory(checkpoint), resolve_device(device)
        self.tokenizer = tokenizer(directory)
        self.model: Any = any_model(directory, where, dtype)
        if not generates(self.model):
            raise FlowError(
                f"{directory}: expected a model that generates text, got a {type(self.model).__name__}; "
                "`baracuda eval` measures models of other kinds"
            )
        self.turns: list[dict[str, str]] = []

    @property
    def has_template(self) -> bool:
        """Whether the model was trained for turns of a conversation."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    def reply(
        self,
        text: str,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """The answer to a text, of at most `max_tokens`; `on_text` is called with each piece as it is generated.

        A temperature of 0 takes the most likely token each time, so that the same text has the same answer.
        """
        with failures_told("the tokenizer fails"):
            ids = self._encoded(text)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and ids.shape[1] + max_tokens > limit > 0:
            max_tokens = limit - ids.shape[1]
            if max_tokens < 1:
                raise FlowError(f"the conversation has {ids.shape[1]} tokens and the model reads {limit}; use /reset")
        sampled = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        start = perf_counter()
        with plain_generation(self.model), quiet(), torch.no_grad():
            made = self.model.generate(
                ids.to(self.model.device),
                attention_mask=torch.ones_like(ids).to(self.model.device),
                max_new_tokens=max_tokens,
                streamer=None if on_text is None else _streamer(self.tokenizer, on_text),
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0,
                **sampled,
            )[0, ids.shape[1] :]
        seconds = perf_counter() - start
        with failures_told("the tokenizer fails"):
            answer: str = self.tokenizer.decode(made, skip_special_tokens=True)
        if self.has_template:
            self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return Reply(answer, len(made), seconds)

    def _encoded(self, text: str) -> torch.Tensor:
        if not self.has_template:
            ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        else:
            turns = [*self.turns, {"role": "user", "content": text}]
            rendered = templated(self.tokenizer, turns, add_generation_prompt=True)
            ids = self.tokenizer(rendered, add_special_tokens=False, return_tensors="pt")["input_ids"]
        if not ids.shape[1]:
            raise FlowError("expected a text of at least one token, got none; type something")
        found: torch.Tensor = ids
        return found


def _streamer(tokenizer: Any, on_text: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
