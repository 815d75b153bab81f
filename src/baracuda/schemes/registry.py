"""The schemes with names, in one table for models in memory, checkpoints, the command line and the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.errors import InvalidProblem
from ..core.types import DynamicRangeMode, ElementKind
from .formats import ActivationFormat, LinearScheme, Scheme, WeightFormat

_S4 = ElementKind.S4

#: For type checkers: the names of the table below, for models in memory and for checkpoints. A test compares them.
LiveScheme = Literal["w8a8", "w8a8-asymmetric", "w8a8-static", "w4a8", "w4a4", "w8a8-smoothquant"]
CheckpointScheme = Literal["w8a8", "w8a8-static", "w4a8", "w4a16", "w8a8-smoothquant"]


@dataclass(frozen=True)
class Named:
    """A scheme, and where it can be asked for."""

    scheme: Scheme
    live: bool = True
    """By `quantize_model` and `prepare_qat`, which replace the linears of a model in memory."""
    checkpoint: bool = False
    """By `baracuda quantize`, which writes checkpoints, and by what reads them."""
    stored: Scheme | None = None
    """The scheme of checkpoints, where it differs from the live one."""


SCHEMES: dict[str, Named] = {
    "w8a8": Named(Scheme(), checkpoint=True),
    "w8a8-asymmetric": Named(Scheme(activation=ActivationFormat(mode=DynamicRangeMode.ASYMMETRIC))),
    "w8a8-static": Named(Scheme(activation=ActivationFormat("static")), checkpoint=True),
    "w4a8": Named(
        Scheme(WeightFormat.searched(_S4)),
        checkpoint=True,
        stored=Scheme(WeightFormat.searched(_S4, 128, factors=True)),
    ),
    "w4a4": Named(Scheme(WeightFormat.searched(_S4), ActivationFormat(q_min=-7, q_max=7))),
    "w4a16": Named(Scheme(WeightFormat.searched(_S4, 128), ActivationFormat("float")), live=False, checkpoint=True),
}


@dataclass(frozen=True)
class Alias:
    """An older name. Smoothing is a transform of its own, which precedes any scheme; this name asks for both."""

    live: str
    checkpoint: str
    smooth: bool


#: A model in memory is not smoothed: there, the name has always meant the linear with static activations.
ALIASES: dict[str, Alias] = {"w8a8-smoothquant": Alias(live="w8a8-static", checkpoint="w8a8", smooth=True)}


def live_names() -> list[str]:
    return [*(name for name, named in SCHEMES.items() if named.live), *ALIASES]


def checkpoint_names() -> list[str]:
    return [*(name for name, named in SCHEMES.items() if named.checkpoint), *ALIASES]


def live_scheme(scheme: str | LinearScheme) -> Scheme:
    """The scheme of a model in memory, named in small or capital letters."""
    if isinstance(scheme, LinearScheme):
        return scheme._scheme
    scheme = scheme.lower() if isinstance(scheme, str) else scheme
    if scheme not in live_names():
        raise InvalidProblem(
            f"scheme: expected a LinearScheme or one of {', '.join(live_names())}, got {scheme!r}; "
            "those of checkpoints, w4a16 among them, are for `baracuda quantize`"
        )
    return SCHEMES[ALIASES[scheme].live if scheme in ALIASES else scheme].scheme


def checkpoint_scheme(name: str) -> tuple[Scheme, bool]:
    """The scheme of a checkpoint, named in small or capital letters, and whether its name also asks for smoothing."""
    name = name.lower() if isinstance(name, str) else name
    if name not in checkpoint_names():
        raise InvalidProblem(f"scheme: expected one of {', '.join(checkpoint_names())}, got {name!r}")
    alias = ALIASES.get(name)
    named = SCHEMES[alias.checkpoint if alias else name]
    return named.stored or named.scheme, alias is not None and alias.smooth


def as_written(scheme: Scheme) -> Scheme | None:
    """This scheme of a checkpoint, with the rule for its scales that checkpoints are written with; None for others."""
    size = scheme.weight.group_size
    for named in SCHEMES.values():
        written = named.stored or named.scheme
        if size is not None and written.weight.group_size is not None:
            written = written.with_groups(size)
        if named.checkpoint and scheme == written:
            return written
    return None


#: 8-bit experts of a mixture. No Linear has this scheme, so it has no name.
EXPERTS = Scheme(activation=ActivationFormat("float"))


def is_checkpoint_scheme(scheme: Scheme) -> bool:
    """Whether checkpoints of this scheme are written and read, whatever the size of its groups."""
    return as_written(scheme) is not None
