"""`--smooth` alone, or `--smooth auto`: an option of `baracuda quantize` whose value may be left out."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class SmoothCommand(TyperCommand):
    """A command that reads `--smooth auto` as `--smooth --alpha auto`.

    Only this one value is taken: any other word behind `--smooth` may be the model's directory.
    """

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        spelled: list[str] = []
        for word in arguments:
            spelled += ["--alpha", word] if word == "auto" and spelled and spelled[-1] == "--smooth" else [word]
        return super().parse_args(context, spelled)
