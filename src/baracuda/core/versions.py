"""The versions that baracuda works with, as pyproject.toml states them; `make compat` tests the ends of the ranges."""

from __future__ import annotations

import re

#: Package -> the first version that works, and the first that is not known to.
RANGES: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "torch": ((2, 11), None),
    "transformers": ((5, 0), (6, 0)),
}


def require_torch() -> None:
    """Raise where torch is older than what this package was tested with: it would fail later, in other words."""
    import torch

    if (unfit := why_unfit("torch", torch.__version__)) is not None:
        raise ImportError(f"baracuda: {unfit}")


def minor(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None for a build of one's own, without numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def why_unfit(package: str, version: str) -> str | None:
    """Why a version is outside of the range, and what to install; None where it is inside."""
    numbers = minor(version)
    oldest, beyond = RANGES[package]
    if numbers is None:
        return None
    if numbers >= oldest and (beyond is None or numbers < beyond):
        return None
    wanted = f"{package}>={oldest[0]}.{oldest[1]}" + (f",<{beyond[0]}" if beyond is not None else "")
    return f"expected {wanted}, got {package} {version}: pip install '{wanted}'"
