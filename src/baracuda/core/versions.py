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


def why_unfit(package: str, version: str) -> str | None:
    """Why a version is outside of the range, and what to install; None where it is inside."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:  # a build of one's own
        return None
    numbers = int(found[1]), int(found[2])
    oldest, beyond = RANGES[package]
    if numbers >= oldest and (beyond is None or numbers < beyond):
        return None
    wanted = f"{package}>={oldest[0]}.{oldest[1]}" + (f",<{beyond[0]}" if beyond is not None else "")
    return f"expected {wanted}, got {package} {version}: pip install '{wanted}'"
