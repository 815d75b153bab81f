"""Parts of K whose sums lie in the workspace: the room for them, and the kernel that adds them up."""

from __future__ import annotations

import torch

from .....core.problem import Problem
from .....core.types import QuantizeKind
from ....registry import Launch
from ...launch import Step
from ...sources import Part, WorkspaceLayout
from ...tune import blocks_of, processors_of
from .. import tune
from ..kernels import Epilogue, sum_parts
from ..launch import GemmSources
from ..tune_floats import DirectFloats


def reserve_parts(
    layout: WorkspaceLayout, p: Problem, tile: tune.Packed | tune.Few | DirectFloats, device: torch.device
) -> None:
    """Room for the sums of parts of K: all of them, or those that a program adds to."""
    m, n, _ = p.shape
    dtype = torch.float32 if p.op is QuantizeKind.WEIGHT_ONLY_LINEAR else torch.int32
    if tile.apart:
        layout.reserve("parts", dtype, tile.split, m, n)
    elif isinstance(tile, tune.Packed) and tile.split > 1:
        layout.reserve("parts", dtype, tile.grid(m, n, processors_of(device)), tile.n, tile.m)


def sum_of_parts(
    p: Problem,
    device: torch.device,
    tile: tune.Packed | tune.Few | DirectFloats,
    parts: Part | None,
    epilogue: Epilogue,
    f: GemmSources,
) -> Launch | None:
    """The kernel that adds up the parts of K that lie apart."""
    if not tile.apart or parts is None:
        return None
    m, n, _ = p.shape
    rows, columns = tune.sums(m, n, processors_of(device))
    constants = {"EPILOGUE": epilogue, "PARTS": tile.split, "BM": rows, "BN": columns}
    programs = blocks_of(m, rows) * blocks_of(n, columns)
    return Step(sum_parts, programs, {"M": m, "N": n}, constants, device).bound(parts, f.output, f.terms)
