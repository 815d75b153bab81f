"""What calibration decided: how each tensor is changed before it is quantized, and what is known of each input."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemes import CalibrationData
from ..checkpoint.folds import FoldRecord, read_folds, scaled, write_folds
from ..checkpoint.tensorfile import TensorFile, write_tensors


@dataclass
class Changes:
    """The result of calibration. Tensors are named as the checkpoint names them."""

    #: Weight tensor -> factor of each column: the smoothing it absorbs.
    columns: dict[str, Tensor] = field(default_factory=dict)
    #: Weight or bias tensor -> divisor of each row: the smoothing it takes away.
    rows: dict[str, Tensor] = field(default_factory=dict)
    #: Norm tensors, small enough to be replaced whole.
    replaced: dict[str, Tensor] = field(default_factory=dict)
    #: Module -> the static scale of its input.
    input_scales: dict[str, Tensor] = field(default_factory=dict)
    #: The folds that these factors come from, for whoever checks the result.
    folds: list[FoldRecord] = field(default_factory=list)
    #: What the report tells: folds, layers left alone and why, outliers before and after.
    notes: dict[str, Any] = field(default_factory=dict)
    #: Module -> the input it reads. Modules that read the same tensor have the same input.
    inputs: dict[str, str] = field(default_factory=dict)
    #: Input -> the tokens that were measured, the mean square of each channel, the mean product of each two.
    counts: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    hessians: dict[str, Tensor] = field(default_factory=dict)
    #: Module -> the file that has it, where it is quantized already.
    quantized: dict[str, Path] = field(default_factory=dict)
    _data: dict[str, CalibrationData] = field(default_factory=dict, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def apply(self, tensor: str, first: int, block: Tensor) -> Tensor:
        """Smooth rows of a tensor from `first` on, in f32; return those of other tensors as they are."""
        return scaled(block, first, self.columns.get(tensor), self.rows.get(tensor))

    def touches(self, tensor: str) -> bool:
        return tensor in self.columns or tensor in self.rows

    def data(self, module: str) -> CalibrationData | None:
        """What was measured of a module's input, for its method; None where nothing was."""
        key = self.inputs.get(module)
        if key is None:
            return None
        with self._lock:
            if key not in self._data:
                count = int(self.counts[key])
                self._data[key] = CalibrationData(count, self.moments[key], self.hessians.get(key))
            return self._data[key]

    def save(self, tensors: Path, notes: Path, folds: Path) -> None:
        named = {f"{kind}:{name}": value for kind in _KINDS for name, value in getattr(self, kind).items()}
        metadata = {"inputs": json.dumps(self.inputs)} if self.inputs else None
        write_tensors(tensors, {name: value.detach().cpu() for name, value in named.items()}, metadata)
        notes.write_text(json.dumps(self.notes))
        write_folds(folds, self.folds)

    @classmethod
    def load(cls, tensors: Path, notes: Path, folds: Path) -> Changes:
        loaded = cls(notes=json.loads(notes.read_text()), folds=read_folds(folds))
        with TensorFile(tensors) as file:
            loaded.inputs = json.loads(file.metadata.get("inputs", "{}"))
            for key in file.entries:
                kind, name = key.split(":", 1)
                getattr(loaded, kind)[name] = file.read(key)
        return loaded


_KINDS = ("columns", "rows", "replaced", "input_scales", "counts", "moments", "hessians")


def input_scale(maximum: float) -> Tensor:
    """The static scale of activations whose absolute maximum this is; 1 where nothing was ever seen."""
    return torch.tensor([maximum / 127 if maximum > 0 else 1.0], dtype=torch.float32)


def scaled_outputs(notes: dict[str, Any]) -> frozenset[str]:
    """The modules whose outputs smoothing scaled on purpose, by what the report tells of it."""
    return frozenset(fold["from"].removesuffix(".weight") for fold in notes.get("folded", []))
