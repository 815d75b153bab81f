"""The version ranges: one statement of them, and an error outside."""

from __future__ import annotations

import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

from baracuda.core.versions import RANGES, why_unfit

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirement(package: str) -> str:
    extras = [one for extra in PROJECT["optional-dependencies"].values() for one in extra]
    return next(one for one in [*PROJECT["dependencies"], *extras] if one.startswith(f"{package}>"))


@pytest.mark.parametrize("package", RANGES)
def test_the_ranges_are_those_of_the_package(package: str) -> None:
    oldest, beyond = RANGES[package]
    lower, _, upper = requirement(package).removeprefix(f"{package}>=").partition(",<")
    assert [int(part) for part in f"{lower}.0".split(".")[:2]] == list(oldest)
    assert (upper or None) == (None if beyond is None else str(beyond[0]))


def test_a_version_outside_says_what_to_install() -> None:
    assert why_unfit("transformers", "5.0.0") is why_unfit("transformers", "5.22.2") is None
    assert why_unfit("transformers", "4.57.6") == (
        "expected transformers>=5.0,<6, got transformers 4.57.6: pip install 'transformers>=5.0,<6'"
    )
    assert why_unfit("transformers", "6.0.0") is not None
    assert why_unfit("torch", "2.10.1") is not None and why_unfit("torch", "2.11.0+cpu") is None


def test_an_unfit_torch_is_refused_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from baracuda.core.versions import require_torch

    require_torch()
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(ImportError, match=r"expected torch>=2\.11, got torch 2\.9\.1\+cu128: pip install"):
        require_torch()


def test_an_unfit_transformers_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from baracuda.flow import FlowError
    from baracuda.flow.hf.skeleton import require_transformers

    old = types.ModuleType("transformers")
    old.__version__ = "4.57.6"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(FlowError, match=r"got transformers 4\.57\.6: pip install"):
        require_transformers("baracuda.load builds transformers models")


def test_the_documented_matrix_names_the_rows_that_are_run() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import compat

    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    for name, row in compat.ROWS.items():
        assert f"`{name}`" in page
        for package in row.packages + row.alone:
            version = re.search(r"==(.*)", package)
            assert version is None or version[1] in page, f"{name}: {package}"
