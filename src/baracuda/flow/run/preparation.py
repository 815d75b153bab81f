"""What calibration decided, in the terms streaming works in: a vector per tensor, a scale per module."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tensorfile import read_tensors, write_tensors


@dataclass
class Preparation:
    """Tensors are named as the checkpoint names them."""

    #: Weight tensor -> factor of each column: the smoothing it absorbs.
    columns: dict[str, Tensor] = field(default_factory=dict)
    #: Weight or bias tensor -> divisor of each row: the smoothing it takes away.
    rows: dict[str, Tensor] = field(default_factory=dict)
    #: Norm tensors, small enough to be replaced whole.
    replaced: dict[str, Tensor] = field(default_factory=dict)
    #: Module -> the static scale of its input.
    input_scales: dict[str, Tensor] = field(default_factory=dict)
    #: What the report tells: folds, layers left alone and why, outliers before and after.
    notes: dict[str, Any] = field(default_factory=dict)

    def apply(self, tensor: str, first: int, block: Tensor) -> Tensor:
        """Rows of a tensor from `first` on, smoothed in f32; untouched tensors pass through as they are."""
        columns, rows = self.columns.get(tensor), self.rows.get(tensor)
        if columns is not None:
            block = block.float() * columns.to(block.device)
        if rows is not None:
            divisor = rows[first : first + block.shape[0]].to(block.device)
            block = block.float() / divisor.view(-1, *[1] * (block.ndim - 1))
        return block

    def touches(self, tensor: str) -> bool:
        return tensor in self.columns or tensor in self.rows

    def save(self, tensors: Path, notes: Path) -> None:
        named = {f"{kind}:{name}": value for kind in _KINDS for name, value in getattr(self, kind).items()}
        write_tensors(tensors, {name: value.detach().cpu() for name, value in named.items()})
        notes.write_text(json.dumps(self.notes))

    @classmethod
    def load(cls, tensors: Path, notes: Path) -> Preparation:
        loaded = cls(notes=json.loads(notes.read_text()))
        for key, value in read_tensors(tensors).items():
            kind, name = key.split(":", 1)
            getattr(loaded, kind)[name] = value
        return loaded


_KINDS = ("columns", "rows", "replaced", "input_scales")


def input_scale(maximum: float) -> Tensor:
    """The static scale of activations whose absolute maximum this is; 1 where nothing was ever seen."""
    return torch.tensor([maximum / 127 if maximum > 0 else 1.0], dtype=torch.float32)
