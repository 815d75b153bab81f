"""How much of the text that a result is measured on was read in calibration, by the tokens themselves.

Scales and integers are fitted to the calibration data. Figures that are measured on the same text praise the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Tokens of a window. Two texts that have one in common quote each other; common phrases are shorter.
WINDOW = 16
#: The share of tokens from which on the figures are not to be trusted.
LIMIT = 0.05
#: An odd number, so that multiplying by it loses nothing modulo 2**64.
_FACTOR = 0x5851F42D4C957F2D


def seen_share(calibration: list[Tensor], evaluation: list[Tensor]) -> float:
    """The share of the tokens of `evaluation` that lie in a window of tokens that `calibration` has, too.

    A sequence shorter than a window counts where calibration has it as a whole sequence.
    """
    known = _windows(
        torch.cat(calibration)
    )  # joined: most were cut out of one text, and a quotation can begin anywhere
    short = {tuple(sequence.tolist()) for sequence in calibration if len(sequence) < WINDOW}
    seen = total = 0
    for sequence in evaluation:
        total += len(sequence)
        if len(sequence) < WINDOW:
            seen += len(sequence) if tuple(sequence.tolist()) in short else 0
            continue
        begins = torch.isin(_windows(sequence), known).nonzero()
        covered = torch.zeros(len(sequence), dtype=torch.bool)
        covered[(begins + torch.arange(WINDOW)).flatten()] = True
        seen += int(covered.sum())
    return seen / max(1, total)


def _windows(sequence: Tensor) -> Tensor:
    """A number for each window of a sequence; 64 bits, so that two windows have one by chance next to never."""
    hashes = torch.zeros(max(0, len(sequence) - WINDOW + 1), dtype=torch.int64)
    for place in range(WINDOW):
        part = sequence[place : place + len(hashes)].to(torch.int64)
        hashes = (hashes ^ (part + 1)) * _FACTOR  # wraps around
    return hashes


def warning(evaluation: dict[str, Any] | None) -> str | None:
    """What to say about an evaluation on the calibration text, in words; None where its text is another one."""
    share = (evaluation or {}).get("seen_in_calibration") or 0.0
    if share < LIMIT:
        return None
    return (
        f"{share:.0%} of the evaluated tokens are in the calibration text: the result was fitted to them, and these "
        "figures are better than those on other text. Evaluate on text that calibration did not read."
    )
