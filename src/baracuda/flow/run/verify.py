"""baracuda verify: what is wrong with a quantized checkpoint, by its files, its model and its original."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ..checkpoint.check import Check, Finding
from ..checkpoint.compare import compare
from ..checkpoint.directory import Checkpoint
from ..checkpoint.inventory import check_inventory
from ..errors import CheckpointError
from ..hf.compare_config import compare_configs
from ..hf.expectations import check_factors, check_model
from ..hf.head import original_head
from ..hf.hub import local_directory
from ..hf.layers import Head
from .proof import check_folds

#: Enough to see what is wrong; a damaged file can produce one for every tensor.
MAX_FINDINGS = 200


def verify(
    out: str | Path, against: str | Path | None = None, *, on_note: Callable[[str], None] | None = None
) -> list[Finding]:
    """What is wrong with the checkpoint in `out`; `against` also compares it with the one it was made from.

    Every byte of every file is compared with the SHA-256 that quantizing wrote down; against the original, every
    element of every tensor, every setting, and every file beside the weights. Weights that were rounded to nearest by
    this version are computed again, smoothing included, and must have the same bits. What smoothing folded is proved
    with the original model: every reader of what was divided absorbs it. `on_note` is called with what could only be
    compared less closely, since nothing but the run that made it could tell.
    """
    check = Check(local_directory(out))
    _run(check, local_directory(against) if against is not None else None)
    if on_note is not None and against is not None:
        for note in _notes(check):
            on_note(note)
    return check.findings[:MAX_FINDINGS]


def _run(check: Check, against: Path | None) -> None:
    if not check.out.is_dir():
        return check.add("missing-file", str(check.out), "expected a directory with a quantized checkpoint")
    with ExitStack() as stack:
        check.open_files(stack)
        config, recipe = check.read_config()
        check_inventory(check)
        if recipe is not None:
            check.check_modules(recipe)
            check.check_ignored(config["quantization_config"]["ignore"])
            check_model(check, config, recipe)
            check.check_fused(recipe)
            check_factors(check, recipe)
        for name in check.entries:
            check.check_values(name)
        if against is not None:
            head = _original_head(check, against)
            made_from = {head.module: head.tensor} if head is not None and head.is_added else {}
            compare(check, against, recipe, made_from)
            check_folds(check, against)
            compare_configs(check, config, against, head)
    return None


def _original_head(check: Check, against: Path) -> Head | None:
    """What the output head was made from in the original, where it is stored quantized."""
    try:
        with Checkpoint.open(against) as source:
            return original_head(check.modules, source)
    except CheckpointError:  # a finding of those who compare the tensors
        return None


def _notes(check: Check) -> list[str]:
    """What was compared with the original, but not bit for bit."""
    static = [name for name in check.entries if name.endswith(".input_scale")]
    said = {
        "were checked to be rounded to the nearest integers, but not computed again": check.compared["rounded"],
        "only resemble the original: the method that chose their integers is not run again": check.compared["alike"],
        "have input scales, which come from calibration data": static,
    }
    return [f"{len(names)} Linears {what}" for what, names in said.items() if names]
