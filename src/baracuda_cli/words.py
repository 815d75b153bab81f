"""How commands read their words: an option whose value may be left out, and words that belong behind an option."""

from __future__ import annotations

from typing import Any, ClassVar

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command that says where a word belongs that it has no place for; `{word}` in `stray` stands for the word."""

    stray: ClassVar[str] = ""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        # Before an option that is missing: the stray word is often its value.
        if not context.resilient_parsing and (rest := self.make_parser(context).parse_args(list(arguments))[1]):
            context.fail(self.stray.format(word=rest[0]))
        return super().parse_args(context, arguments)


class QuantizeCommand(Command):
    """A command that reads `--smooth auto` as `--smooth --alpha auto`.

    Only this one value is taken: any other word behind `--smooth` may be the model's directory.
    """

    stray = "expected one directory, that of the model; the result goes behind -o: baracuda quantize MODEL -o {word}"

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        spelled: list[str] = []
        for word in arguments:
            spelled += ["--alpha", word] if word == "auto" and spelled and spelled[-1] == "--smooth" else [word]
        return super().parse_args(context, spelled)


class VerifyCommand(Command):
    stray = "expected one checkpoint; what it was made from goes behind --against: baracuda verify OUT --against {word}"


class EvalCommand(Command):
    stray = "expected one model; a text goes behind --text, its float model behind --against: {word} has no place"
