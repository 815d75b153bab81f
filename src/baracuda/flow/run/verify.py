"""baracuda verify: what is wrong with a quantized checkpoint, by its files, its model and its original."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ..checkpoint.check import Check, Finding
from ..checkpoint.compare import compare
from ..checkpoint.inventory import check_inventory
from ..hf.compare_config import compare_configs
from ..hf.expectations import check_model
from ..hf.hub import local_directory

#: Enough to see what is wrong; a damaged file can produce one for every tensor.
MAX_FINDINGS = 200


def verify(out: str | Path, against: str | Path | None = None) -> list[Finding]:
    """What is wrong with the checkpoint in `out`; `against` also compares it with the one it was made from.

    Every byte of every file is compared with the SHA-256 that quantizing wrote down; against the original, every
    element of every tensor, every setting, and every file beside the weights. Weights that were rounded to nearest by
    this version are computed again, smoothing included, and must have the same bits.
    """
    check = Check(local_directory(out))
    _run(check, local_directory(against) if against is not None else None)
    return check.findings[:MAX_FINDINGS]


def _run(check: Check, against: Path | None) -> None:
    if not check.out.is_dir():
        return check.add("missing-file", str(check.out), "expected a directory with a quantized checkpoint")
    with ExitStack() as stack:
        config, recipe = check.read_config()
        check.open_files(stack)
        check_inventory(check)
        if recipe is not None:
            check.check_modules(recipe)
            check.check_ignored(config["quantization_config"]["ignore"])
            check_model(check, config)
            check.check_fused(recipe)
        for name in check.entries:
            check.check_values(name)
        if against is not None:
            compare(check, against, recipe)
            compare_configs(check, config, against)
    return None
