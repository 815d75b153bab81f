"""The version ranges: one statement of them, and an error outside."""

from __future__ import annotations

import json
import sys
import tomllib
import types
from pathlib import Path

import compat
import pytest

from baracuda.core.versions import RANGES, minor, why_unfit

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads(compat.RECORD.read_text())
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


def test_the_page_prints_what_the_rows_gave() -> None:
    page = compat.PAGE.read_text()
    assert page == compat.rewritten(page, RECORD), "run the rows of tools/compat.py: they write the page"


@pytest.mark.parametrize("name", compat.ROWS)
def test_every_row_was_run_with_its_packages_and_its_tests_and_passed(name: str) -> None:
    row, entry = compat.ROWS[name], RECORD.get(name)
    if entry is None and name not in ("transformers-oldest", "transformers-newest"):
        pytest.skip(f"the page says that it was not run; make compat ROWS={name}")
    assert entry is not None, f"make compat ROWS={name}"
    for package in row.packages + row.alone:
        found, _, version = package.partition("==")
        assert version in ("", entry["versions"][found]), f"{package}: make compat ROWS={name}"
    assert entry["tests"] == row.tests.words and compat.verdict(entry) == "passed", f"make compat ROWS={name}"


def test_the_record_has_no_rows_that_are_gone() -> None:
    assert list(RECORD) == [name for name in compat.ROWS if name in RECORD]


@pytest.mark.parametrize("package", ["torch", "triton", "transformers", "safetensors", "compressed-tensors"])
def test_the_first_version_of_each_range_has_a_row(package: str) -> None:
    lower = requirement(package).removeprefix(f"{package}>=").partition(",")[0].split(".")
    pinned = [one.partition("==")[2] for row in compat.ROWS.values() for one in row.packages + row.alone
              if one.startswith(f"{package}==")]  # fmt: skip
    oldest = min(pinned, key=lambda version: [int(part) for part in version.split(".")])
    assert oldest.split(".")[: len(lower)] == lower and set(oldest.split(".")[len(lower) :]) <= {"0"}


def test_every_minor_of_transformers_up_to_the_newest_has_a_row() -> None:
    pinned = [row.packages[0].partition("==")[2] for row in (compat.OLDEST, *compat.BETWEEN.values())]
    (oldest, beyond), newest = RANGES["transformers"], minor(RECORD["transformers-newest"]["versions"]["transformers"])
    assert beyond is not None and newest is not None and oldest <= newest < beyond
    assert [minor(one) for one in pinned] == [(oldest[0], number) for number in range(oldest[1], newest[1])]


def test_a_failure_is_printed_and_is_no_pass() -> None:
    entry = {"versions": {"torch": "1.0"}, "tests": "all", "passed": 3, "failed": 1, "skipped": 2, "date": "2026-01-01"}
    printed = compat.table({"torch-oldest": entry})
    assert "| `torch-oldest` | torch 1.0 | all | 3 passed, 1 failed, 2 skipped | 2026-01-01 |" in printed
    assert f"| `triton-oldest` | triton==3.6.0 | {compat.KERNELS.words} | not run | |" in printed
    assert compat.verdict(entry) == "FAILED" and compat.verdict(entry | {"failed": 0}) == "passed"
    assert compat.verdict(entry | {"failed": 0, "passed": 0}) == "FAILED", "nothing was run"
