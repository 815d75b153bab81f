"""The folds of smoothing with their factors: smoothed tensors can be computed again from what a run records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .directory import FOLDS, leads_out
from .json_text import parse_json
from .tensorfile import TensorFile, write_tensors


@dataclass(frozen=True)
class FoldRecord:
    """One fold under the checkpoint's names: `divided` is a norm's gain `offset + weight`, or the rows of a linear."""

    divided: str
    bias: str | None
    norm: bool
    offset: float
    #: The divisor of each channel, f32.
    strength: Tensor
    #: Weight -> the channel that each of its columns reads.
    into: dict[str, Tensor]


@dataclass
class Factors:
    """What all folds together do to each tensor."""

    #: Weight -> factor of each column.
    columns: dict[str, Tensor] = field(default_factory=dict)
    #: Weight or bias -> divisor of each row.
    rows: dict[str, Tensor] = field(default_factory=dict)
    #: Gain of a norm -> its fold.
    gains: dict[str, FoldRecord] = field(default_factory=dict)
    #: Bias of a norm -> its fold.
    biases: dict[str, FoldRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[FoldRecord]) -> Factors:
        made = cls()
        for record in records:
            if record.norm:
                made.gains[record.divided] = record
                if record.bias is not None:
                    made.biases[record.bias] = record
            else:
                for name in filter(None, (record.divided, record.bias)):
                    made.rows[name] = made.rows[name] * record.strength if name in made.rows else record.strength
            for weight, channels in record.into.items():
                if weight in made.columns:
                    raise CheckpointError("bad-folds", f"{FOLDS}: two folds change the columns of {weight}")
                made.columns[weight] = record.strength[channels.long()]
        return made

    def touches(self, tensor: str) -> bool:
        return any(tensor in table for table in (self.columns, self.rows, self.gains, self.biases))

    def apply(self, tensor: str, first: int, block: Tensor) -> Tensor:
        return scaled(block, first, self.columns.get(tensor), self.rows.get(tensor))


def scaled(block: Tensor, first: int, columns: Tensor | None, rows: Tensor | None) -> Tensor:
    """Rows of a tensor from `first` on, smoothed in f32; as they are where there are no factors."""
    if columns is not None:
        block = block.float() * columns.to(block.device)
    if rows is not None:
        divisor = rows[first : first + block.shape[0]].to(block.device)
        block = block.float() / divisor.view(-1, *[1] * (block.ndim - 1))
    return block


def write_folds(path: Path, records: list[FoldRecord]) -> None:
    tensors, described = {}, []
    for i, record in enumerate(records):
        tensors[f"{i}.strength"] = record.strength.detach().cpu().contiguous()
        tensors |= {f"{i}.into.{j}": channels.to(torch.int32) for j, channels in enumerate(record.into.values())}
        described.append(
            {
                "divided": record.divided,
                "bias": record.bias,
                "norm": record.norm,
                "offset": record.offset,
                "into": list(record.into),
            }
        )
    write_tensors(path, tensors, {"folds": json.dumps({"folds": described})})


def read_folds(path: Path) -> list[FoldRecord]:
    """The folds in a file; none where there is no file. Raises for whatever is wrong with it."""
    if not path.exists():
        return []
    if path.is_symlink() and leads_out(path, path.parent):
        raise CheckpointError("path-escape", f"{path.name}: a link that leads out of the directory")
    with TensorFile(path) as file:
        described = parse_json(file.metadata.get("folds", "").encode(), path.name).get("folds")
        if not isinstance(described, list):
            raise CheckpointError("bad-folds", f"{path.name}: expected a list of folds")
        used = {name for i, fold in enumerate(described) for name in _names(i, fold)}
        if used != set(file.entries):
            raise CheckpointError("bad-folds", f"{path.name}: its tensors are not those of its folds")
        return [_read(file, i, fold) for i, fold in enumerate(described)]


def _names(index: int, fold: Any) -> list[str]:
    kinds: dict[str, Any] = {"divided": str, "bias": (str, type(None)), "norm": bool, "offset": float, "into": list}
    if not isinstance(fold, dict) or set(fold) != set(kinds):
        raise CheckpointError("bad-folds", f"{FOLDS}: fold {index}: expected the keys {', '.join(kinds)}")
    if not all(isinstance(fold[key], kind) for key, kind in kinds.items()):
        raise CheckpointError("bad-folds", f"{FOLDS}: fold {index}: a value is of another type")
    if not all(isinstance(name, str) for name in fold["into"]) or len(set(fold["into"])) != len(fold["into"]):
        raise CheckpointError("bad-folds", f"{FOLDS}: fold {index}: expected the names of different weights")
    return [f"{index}.strength", *(f"{index}.into.{j}" for j in range(len(fold["into"])))]


def _read(file: TensorFile, index: int, fold: dict[str, Any]) -> FoldRecord:
    strength = file.read(f"{index}.strength")
    into = {name: file.read(f"{index}.into.{j}") for j, name in enumerate(fold["into"])}
    if strength.dtype != torch.float32 or strength.ndim != 1 or not _positive(strength):
        raise CheckpointError("bad-folds", f"{FOLDS}: fold {index}: expected positive divisors in float32")
    for name, channels in into.items():
        inside = channels.dtype == torch.int32 and channels.ndim == 1 and channels.numel() > 0
        if not inside or int(channels.min()) < 0 or int(channels.max()) >= len(strength):
            raise CheckpointError("bad-folds", f"{FOLDS}: fold {index}: the channels of {name} are not the divisors'")
    return FoldRecord(fold["divided"], fold["bias"], fold["norm"], fold["offset"], strength, into)


def _positive(strength: Tensor) -> bool:
    return bool((torch.isfinite(strength) & (strength > 0)).all())
