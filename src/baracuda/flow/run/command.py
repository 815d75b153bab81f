"""The command that makes a checkpoint again, from what its report recorded."""

from __future__ import annotations

import shlex
from typing import Any

from ..hf.coverage import MOST
from .options import Options

_FLAGS = ("smooth", "one_shot", "quantize_head")
_WRITTEN = ("scheme", "activations", "alpha", "group_size", "samples", "sequence_length", "method", "budget", "max_kl")


def repeat_command(content: dict[str, Any]) -> str | None:
    """As one would type it; None for a report that did not record the options.

    A report may come from a stranger: values of other types than options have are left out.
    """
    run = content["run"]
    made, inputs = run.get("made_from") or {}, run.get("inputs") or {}
    options = made.get("options")
    if not isinstance(options, dict):
        return None
    words = ["baracuda", "quantize", str(inputs.get("model", "MODEL_DIR")), "-o", "OUT"]
    default = Options()
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name in _FLAGS:
            words += [option] if value else []
        elif name == "ignore" and isinstance(value, list):
            words += [word for pattern in value for word in ("--ignore", str(pattern))]
        elif name in _WRITTEN and isinstance(value, str | int | float) and value != getattr(default, name):
            words += [option, str(value)]
    for name, option in (("calibration", "--calibration"), ("evaluation", "--evaluate")):
        if inputs.get(name) is not None:
            words += [option, str(inputs[name])]
    if options.get("rules"):
        words += ["--recipe", "RECIPE.toml"]
    if content.get("float_share", 0) > MOST:
        words.append("--allow-float")
    if run["device"] != "cpu":
        words += ["--device", str(run["device"])]
    return shlex.join(words)
