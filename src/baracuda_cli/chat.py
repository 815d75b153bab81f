"""`baracuda chat`: talk to a checkpoint, quantized or not."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from .terminal import MODEL, Dtype, Json, Output, Quiet, console, dtype_named, errors_told, shown, stderr

if TYPE_CHECKING:
    from baracuda.flow.hf.chat import Conversation, Reply

HELP = "/reset starts a new conversation, /exit (or Ctrl-D) ends it; Ctrl-C stops an answer."


def chat(
    checkpoint: Annotated[str, typer.Argument(help=MODEL)],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Answer this and exit; several are one conversation.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token each time.")] = 0.0,
    device: Annotated[
        str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...; a GPU where there is one.")
    ] = None,
    dtype: Dtype = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Talk to a model; without a chat template, let it go on with your text. Reads lines from a pipe, too."""
    output = Output(json=json, quiet=quiet)
    with errors_told():
        conversation = _open(checkpoint, device, dtype)
        if prompt or not sys.stdin.isatty():
            for text in prompt or (line.rstrip("\n") for line in sys.stdin if line.strip()):
                _answer(conversation, text, max_tokens, temperature, output)
            return
        kind = "It answers." if conversation.has_template else "It has no chat template: it goes on with your text."
        output.show(f"{type(conversation.model).__name__} on {conversation.model.device}. {kind} {HELP}")
        while (text := _read()) is not None:
            if text == "/reset":
                conversation.turns.clear()
            elif text.startswith("/"):
                stderr.print(HELP, highlight=False)
            elif text:
                _answer(conversation, text, max_tokens, temperature, output)


def _open(checkpoint: str, device: str | None, dtype: str | None) -> Conversation:
    with stderr.status(f"loading {escape(checkpoint)}"):
        import torch

        from baracuda.flow.hf.chat import Conversation

        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return Conversation(checkpoint, device=where, dtype=dtype_named(dtype))


def _read() -> str | None:
    """A line of the user; None at the end of the input, or at /exit."""
    try:
        text = console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if text in ("/exit", "/quit") else text


def _answer(conversation: Conversation, text: str, max_tokens: int, temperature: float, output: Output) -> Reply | None:
    draws = not output.json
    try:
        reply = conversation.reply(
            text, max_tokens=max_tokens, temperature=temperature, on_text=_print if draws else None
        )
    except KeyboardInterrupt:
        print()
        return None
    output.data({"prompt": text, **asdict(reply)})
    if draws:
        print(flush=True)
    if not output.quiet and draws:
        rate = f"{reply.tokens} tokens in {reply.seconds:.1f} s, {reply.tokens / max(reply.seconds, 1e-9):.1f} a second"
        stderr.print(f"[dim]{rate}[/]", highlight=False)
    return reply


def _print(text: str) -> None:
    print(shown(text), end="", flush=True)  # a model may generate anything
