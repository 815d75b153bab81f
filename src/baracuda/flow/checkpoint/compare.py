"""A quantized checkpoint beside the one it was made from: every element of every tensor is compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.errors import InvalidProblem
from ...schemes import Recipe, get_method
from ..errors import CheckpointError
from .check import BLOCK_BYTES, Check
from .companions import companions
from .directory import REPORT, Checkpoint, read_json
from .storage import Storage

#: Files beside the weights that programs read; those that people read may be missing.
READ = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")


def compare(check: Check, directory: Path, recipe: Recipe | None) -> None:
    """Add a finding for each difference that quantization does not explain."""
    try:
        with Checkpoint.open(directory) as source:
            _Comparison(check, source, recipe, rounds_to_nearest(check.out)).run()
    except CheckpointError as error:
        check.add(error.code, str(directory), f"the original: {error}")


def smoothed(out: Path) -> frozenset[str]:
    """The tensors that smoothing has changed on purpose, by the report; they are not compared with the original's."""
    try:
        smoothing = read_json(out / REPORT).get("smoothing")
        changed = smoothing["changed"] if isinstance(smoothing, dict) else []
        return frozenset(map(str, changed))
    except (CheckpointError, KeyError, TypeError):  # a report can hold anything
        return frozenset()


def rounds_to_nearest(out: Path) -> bool:
    """Whether the method of the report rounds each weight to nearest. Without a word about it, it was rtn."""
    try:
        return get_method(str(read_json(out / REPORT).get("method", "rtn"))).nearest
    except CheckpointError:  # no report that can be read
        return True
    except InvalidProblem:  # a method of another version
        return False


@dataclass
class _Comparison:
    check: Check
    source: Checkpoint
    recipe: Recipe | None
    nearest: bool

    def run(self) -> None:
        check, source, changed = self.check, self.source, smoothed(self.check.out)
        for name in source.where:
            module = name.removesuffix(".weight")
            if module in check.modules:
                if self.recipe is not None and name not in changed and not self._flagged(module):
                    self._compare_weight(name, module, Storage(self.recipe.of(module).scheme))
            elif name not in check.entries:
                check.add("missing-tensor", name, "the original has it")
            else:
                self._compare_copy(name, changed)
        for name in check.entries:
            module = name.rpartition(".")[0]
            if name not in source.where and module not in check.modules:
                check.add("extra-tensor", name, "the original does not have it")
        for module in check.modules:
            if f"{module}.weight" not in source.where:
                check.add("extra-tensor", module, "the original has no such Linear")
        for path in companions(source.directory, check.out):
            if path.suffix in READ and not (check.out / path).is_file():
                check.add("missing-file", str(path), "the original has it beside its weights")

    def _compare_copy(self, name: str, changed: frozenset[str]) -> None:
        """A tensor that is not quantized has the original's bytes."""
        mine, original = self.check.entries[name], self.source.entry(name)
        if mine.dtype != original.dtype or mine.shape != original.shape:
            code = "wrong-dtype" if mine.shape == original.shape else "shape-mismatch"
            self.check.add(code, name, f"the original is {original.dtype} {list(original.shape)}")
        elif self._same_bytes(name):
            self._forgive("not-finite", name)
        elif name not in changed:
            self.check.add("wrong-values", name, "it differs from the original, though the scheme leaves it as it is")

    def _forgive(self, code: str, where: str) -> None:
        """Drop a finding that is true of the original too, such as a mask of infinities."""
        kept = [found for found in self.check.findings if (found.code, found.where) != (code, where[:200])]
        self.check.findings = kept

    def _flagged(self, module: str) -> bool:
        return any(finding.where.startswith(module) for finding in self.check.findings)

    def _same_bytes(self, name: str) -> bool:
        theirs, entry, step = self.source.shards[self.source.where[name]], self.check.entries[name], BLOCK_BYTES
        return all(
            torch.equal(block.view(torch.uint8), theirs.read_bytes(name, i * step, block.nbytes))
            for i, block in enumerate(self.check.blocks(name, entry))
        )

    def _compare_weight(self, name: str, module: str, storage: Storage) -> None:
        """Rows dequantized, a block at a time, are the original's quantized."""
        check, entry = self.check, self.source.entry(name)
        parts = (storage.integers, "weight_scale")
        rows = check.entries[f"{module}.{storage.integers}"].shape[0]
        if len(entry.shape) != 2 or entry.shape[0] != rows:
            return check.add("shape-mismatch", name, f"the original is {list(entry.shape)}")
        step = max(1, BLOCK_BYTES // max(1, entry.row_bytes))
        for first in range(0, rows, step):
            last = min(rows, first + step)
            stored = {part: check.file(f"{module}.{part}").read(f"{module}.{part}", first, last) for part in parts}
            original = self.source.shards[self.source.where[name]].read(name, first, last).float()
            restored = storage.dequantize(stored)
            if restored.shape != original.shape:
                return check.add("shape-mismatch", name, f"the original is {list(entry.shape)}")
            holds = storage.holds(original, restored, stored["weight_scale"]) if self.nearest else (
                storage.resembles(original, restored)
            )  # fmt: skip
            if not holds:
                return check.add("wrong-values", name, f"rows {first} to {last} are not the original's, quantized")
        return None
