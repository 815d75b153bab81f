"""A quantized checkpoint beside the one it was made from: every element of every tensor is compared."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...core.errors import InvalidProblem
from ...schemes import Recipe, get_method
from ...schemes.registry import as_written
from ..errors import CheckpointError
from .check import BLOCK_BYTES, Check
from .companions import companions
from .directory import FOLDS, JOURNAL, REPORT, Checkpoint, read_json
from .folds import Factors, read_folds
from .inventory import ours
from .manifest import files_in, for_people
from .storage import Storage

#: Files beside the weights that programs read; those that people read may be missing.
READ = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")


def compare(check: Check, directory: Path, recipe: Recipe | None, made_from: Mapping[str, str] | None = None) -> None:
    """Add a finding for each difference that quantization does not explain.

    `made_from` names the tensor of the original for each quantized module that the original stores under another name.
    """
    try:
        factors = Factors.of(read_folds(check.out / FOLDS))
    except CheckpointError as error:
        check.add(error.code, FOLDS, str(error))
        factors = Factors()
    try:
        with Checkpoint.open(directory) as source:
            _Comparison(check, source, recipe, Made.read(check.out), factors, made_from or {}).run()
    except CheckpointError as error:
        check.add(error.code, str(directory), f"the original: {error}")


@dataclass
class Made:
    """What the report says about how the weights were rounded. A report can hold anything, and so can say nothing."""

    default: str = "rtn"
    rounding: dict[str, str] = field(default_factory=dict)
    #: Whether this version made the checkpoint: its integers can then be computed again, bit for bit.
    same_version: bool = False
    #: Layers whose scales were weighed by calibration data, which is not here to choose them again.
    weighed: frozenset[str] = frozenset()

    @classmethod
    def read(cls, out: Path) -> Made:
        try:
            report = read_json(out / REPORT)
        except CheckpointError:  # no report that can be read
            return cls("another tool's" if _is_foreign(out) else "rtn")
        layers = [layer for layer in _list(report.get("layers")) if isinstance(layer, dict)]
        rounding = {str(layer.get("name")): str(layer["rounding"]) for layer in layers if "rounding" in layer}
        smoothing = report.get("smoothing")
        weighed = _list(smoothing.get("weighed")) if isinstance(smoothing, dict) else []
        same_version = report.get("baracuda") == __version__
        return cls(str(report.get("method", "rtn")), rounding, same_version, frozenset(map(str, weighed)))

    def nearest(self, module: str) -> bool:
        try:
            return get_method(self.rounding.get(module, self.default)).nearest
        except InvalidProblem:  # a method of another version
            return False

    def exact(self, module: str) -> bool:
        by_weight_alone = self.rounding.get(module, self.default) == "rtn" and module not in self.weighed
        return self.same_version and by_weight_alone


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_foreign(out: Path) -> bool:
    """Whether another tool wrote it: its config then names the version of compressed-tensors, which ours does not."""
    try:
        config = read_json(out / "config.json").get("quantization_config")
    except CheckpointError:
        return False
    return isinstance(config, dict) and "version" in config


@dataclass
class _Comparison:
    check: Check
    source: Checkpoint
    recipe: Recipe | None
    made: Made
    factors: Factors
    made_from: Mapping[str, str]

    def run(self) -> None:
        check, source = self.check, self.source
        for name in source.where:
            module = name.removesuffix(".weight")
            if module in check.modules:
                self._compare_module(name, module)
            elif name not in check.entries:
                check.add("missing-tensor", name, "the original has it")
            else:
                self._compare_copy(name)
        for name in check.entries:
            module = name.rpartition(".")[0]
            if name not in source.where and module not in check.modules:
                check.add("extra-tensor", name, "the original does not have it")
        for module in check.modules:
            if module in self.made_from:
                self._compare_module(self.made_from[module], module)
            elif f"{module}.weight" not in source.where:
                check.add("extra-tensor", module, "the original has no such Linear")
        self._compare_files()

    def _compare_module(self, name: str, module: str) -> None:
        if self.recipe is not None and module not in self.check.flagged:
            self._compare_weight(name, module, Storage(self.recipe.of(module).scheme))

    def _compare_files(self) -> None:
        """The files beside the weights are the original's."""
        check, originals = self.check, {path.as_posix() for path in companions(self.source.directory, self.check.out)}
        for name in sorted(originals):
            if not (check.out / name).is_file():
                if Path(name).suffix in READ and not for_people(name):
                    check.add("missing-file", name, "the original has it beside its weights")
            elif not for_people(name) and not _same_file(check.out / name, self.source.directory / name):
                check.add("changed-file", name, "it differs from the original's")
        flagged = {found.where for found in check.findings}
        for name in files_in(check.out):
            known = name in originals or ours(name) or for_people(name) or name.startswith(f"{JOURNAL}/")
            if not known and name not in flagged:
                check.add("unexpected-file", name, "the original does not have it beside its weights")

    def _compare_copy(self, name: str) -> None:
        """A tensor that is not quantized has the original's bytes, or what the recorded folds make of them."""
        mine, original = self.check.entries[name], self.source.entry(name)
        if mine.dtype != original.dtype or mine.shape != original.shape:
            code = "wrong-dtype" if mine.shape == original.shape else "shape-mismatch"
            self.check.add(code, name, f"the original is {original.dtype} {list(original.shape)}")
        elif self.factors.touches(name):
            if not self._is_smoothed(name):
                self.check.add("wrong-values", name, f"it is not what the folds in {FOLDS} make of the original")
        elif self._same_bytes(name):
            self._forgive("not-finite", name)
        else:
            self.check.add("wrong-values", name, "it differs from the original, though the scheme leaves it as it is")

    def _is_smoothed(self, name: str) -> bool:
        """Whether a float tensor is the original with the recorded divisors."""
        mine = self.check.file(name).read(name)
        theirs = self.source.shards[self.source.where[name]].read(name)
        eps = torch.finfo(mine.dtype).eps if mine.dtype.is_floating_point else 0.0
        if (record := self.factors.gains.get(name)) is not None:
            if mine.shape != record.strength.shape:
                return False
            # The divisors are those of the gain after rounding: what they give back is the original to f32.
            gain, found = record.offset + theirs.float(), (record.offset + mine.float()) * record.strength
            return bool(((gain - found).abs() <= 1e-5 * gain.abs() + 1e-30).all())
        if (record := self.factors.biases.get(name)) is not None:
            if mine.shape != record.strength.shape:
                return False
            expected = (theirs.float() / record.strength).to(mine.dtype).float()
            return bool(((expected - mine.float()).abs() <= eps * expected.abs()).all())
        try:
            made = self.factors.apply(name, 0, theirs)
        except RuntimeError:  # factors of another shape
            return False
        return made.shape == mine.shape and torch.equal(made.to(mine.dtype), mine)

    def _forgive(self, code: str, where: str) -> None:
        """Drop a finding that is true of the original too, such as a mask of infinities."""
        kept = [found for found in self.check.findings if (found.code, found.where) != (code, where[:200])]
        self.check.findings = kept

    def _same_bytes(self, name: str) -> bool:
        theirs, entry, step = self.source.shards[self.source.where[name]], self.check.entries[name], BLOCK_BYTES
        return all(
            torch.equal(block.view(torch.uint8), theirs.read_bytes(name, i * step, block.nbytes))
            for i, block in enumerate(self.check.blocks(name, entry))
        )

    def _compare_weight(self, name: str, module: str, storage: Storage) -> None:
        """Rows are the original's, smoothed as recorded and quantized; a block at a time."""
        check, entry = self.check, self.source.entry(name)
        format = storage.scheme.weight
        rows = check.entries[f"{module}.{storage.integers}"].shape[0]
        if len(entry.shape) != 2 or entry.shape[0] != rows:
            return check.add("shape-mismatch", name, f"the original is {list(entry.shape)}")
        step = max(8, BLOCK_BYTES // max(1, entry.row_bytes) // 8 * 8)  # eight rows share a word of zero points
        for first in range(0, rows, step):
            last = min(rows, first + step)
            ranges = {storage.integers: (first, last), "weight_scale": (first, last)}
            if format.zero_points:
                ranges["weight_zero_point"] = first // 8, -(-last // 8)
            if format.act_order:
                ranges["weight_g_idx"] = 0, entry.shape[1]
            names = {part: f"{module}.{part}" for part in ranges}
            stored = {part: check.file(names[part]).read(names[part], *where) for part, where in ranges.items()}
            original = self.source.shards[self.source.where[name]].read(name, first, last)
            try:
                smoothed = storage.as_quantized_from(self.factors.apply(name, first, original), entry.dtype)
            except RuntimeError:  # factors of another shape
                return check.add("bad-folds", name, f"the factors in {FOLDS} have another shape than this weight")
            if storage.dequantize(stored).shape != original.shape:
                return check.add("shape-mismatch", name, f"the original is {list(entry.shape)}")
            if not self._holds(module, storage, smoothed, stored):
                return check.add("wrong-values", name, f"rows {first} to {last} are not the original's, quantized")
        return None

    def _holds(self, module: str, storage: Storage, original: Tensor, stored: dict[str, Tensor]) -> bool:
        """Whether stored rows are these, quantized: bit for bit where this version can quantize them again."""
        written = as_written(storage.scheme)
        if written is not None and self.made.exact(module):
            again = storage.store(get_method("rtn").quantize(original, written.weight))
            return all(
                value.dtype == stored[part].dtype and _equal(value, stored[part]) for part, value in again.items()
            )
        restored = storage.dequantize(stored)
        if self.made.nearest(module):
            self.check.compared["rounded"].add(module)
            return storage.holds(original.float(), restored, stored["weight_scale"])
        self.check.compared["alike"].add(module)
        return storage.resembles(original.float(), restored)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _same_file(one: Path, other: Path) -> bool:
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:
        return False
