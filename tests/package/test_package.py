"""What would be published: one version, a changelog that knows it, no stray files, workflows that name real targets."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import package
import pytest

import baracuda

ROOT = package.ROOT
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
in_a_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")


# -- the version -------------------------------------------------------------------------------------------------


def test_the_version_is_written_in_one_place() -> None:
    """In the package; the project's metadata takes it from there when it is built."""
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    source = PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert re.findall(r'^__version__ = "(.*)"$', (ROOT / source).read_text(), re.M) == [baracuda.__version__]
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", baracuda.__version__)


def test_the_changelog_keeps_its_form_and_knows_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    assert headings[1].startswith(f"{baracuda.__version__} ")
    kinds = set(re.findall(r"^### (.*)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# -- the files ---------------------------------------------------------------------------------------------------


@in_a_checkout
def test_the_sdist_holds_the_project_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    sdist = tmp_path / build.build_sdist(str(tmp_path))
    assert package.difference(package.names_in_sdist(sdist), package.sdist_files()) == []
    assert {"CMakeLists.txt", "csrc/kernels.cpp", "tests/support/cases.py", "LICENSE"} <= package.sdist_files()


@in_a_checkout
def test_the_installed_wheel_holds_the_package_and_nothing_else() -> None:
    installed = metadata.distribution("baracuda")
    if not Path(baracuda.__file__).samefile(Path(str(installed.locate_file("baracuda/__init__.py")))):
        pytest.skip("the package under test is not the installed one")
    made_by_pip = re.compile(r"\.\./|.*\.pyc$|.*\.dist-info/(INSTALLER|REQUESTED|direct_url\.json)$")
    names = {str(path) for path in installed.files or [] if not made_by_pip.match(str(path))}
    assert package.difference(names, package.wheel_files(installed.version)) == []
    assert installed.version == baracuda.__version__


def test_a_stray_or_missing_file_is_named() -> None:
    assert package.difference({"a", "b"}, {"b", "c"}) == ["stray: a", "missing: c"]


def test_building_asks_for_the_build_tools_alone() -> None:
    """Not for torch: the compiled module takes addresses, so that no build pulls gigabytes or binds to one release."""
    names = {re.split(r"[<>=!~ \[]", requirement)[0] for requirement in PROJECT["build-system"]["requires"]}
    assert names == {"scikit-build-core", "nanobind"}


# -- the workflows -----------------------------------------------------------------------------------------------


def steps(workflow: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_are_workflows() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_use_pinned_actions_and_targets_that_exist(workflow: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), step
        for called in re.findall(r"^make (.*)$", step.get("run", ""), re.M):
            assert {word for word in called.split() if "=" not in word} <= targets, step
        for script in re.findall(r"(?:tests|tools)/[\w/]+\.py", step.get("run", "")):
            assert (ROOT / script).exists()


def test_every_python_that_is_claimed_is_tested_and_built() -> None:
    yaml = pytest.importorskip("yaml")
    prefix = "Programming Language :: Python :: 3."
    claimed = [c.removeprefix(prefix) for c in PROJECT["project"]["classifiers"] if c.startswith(prefix)]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in claimed]
    assert PROJECT["tool"]["cibuildwheel"]["build"] == [f"cp3{minor}-manylinux_*" for minor in claimed]
    assert PROJECT["project"]["requires-python"] == f">=3.{claimed[0]}"
    assert f"3.{sys.version_info.minor}" in [f"3.{minor}" for minor in claimed]


def test_only_a_tag_is_published_and_without_a_stored_secret() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    publish = yaml.safe_load(text)["jobs"]["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"id-token": "write"} and set(publish["needs"]) == {"sdist", "wheels"}
    assert "secrets." not in text and "password" not in text


def test_the_smoke_test_that_wheels_are_tried_with_exists() -> None:
    command = PROJECT["tool"]["cibuildwheel"]["test-command"]
    script = command.removeprefix("python {project}/")
    assert (ROOT / script).exists() and os.access(ROOT / script, os.R_OK)
