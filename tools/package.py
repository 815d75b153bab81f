"""make package: build the sdist, the wheel from it, look for stray files, and use the wheel where nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTENSIONS = {f"baracuda/{name}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in ("_cpu", "_host")}
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")


def tracked() -> set[str]:
    """The files of the project, as git knows them."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\n")) - {""}


def wheel_files(version: str) -> set[str]:
    """The package, its compiled module and the metadata."""
    package = {
        name.removeprefix("src/") for name in tracked() if name.startswith(("src/baracuda/", "src/baracuda_cli/"))
    }
    return package | EXTENSIONS | {f"baracuda-{version}.dist-info/{name}" for name in METADATA}


def sdist_files() -> set[str]:
    """Everything of the project but the settings of the tools around it: it builds, and its tests run."""
    return {name for name in tracked() if not name.startswith(".")} | {"PKG-INFO"}


def names_in_sdist(path: Path) -> set[str]:
    with tarfile.open(path) as file:
        return {member.name.partition("/")[2] for member in file if member.isfile()}


def difference(found: Iterable[str], expected: Iterable[str]) -> list[str]:
    found, expected = set(found), set(expected)
    stray = [f"stray: {name}" for name in sorted(found - expected)]
    return stray + [f"missing: {name}" for name in sorted(expected - found)]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        built, bare = Path(folder) / "dist", Path(folder) / "bare"
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(built), str(ROOT)], check=True)
        (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        version = wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as file:
            problems = difference(file.namelist(), wheel_files(version))
        problems += difference(names_in_sdist(sdist), sdist_files())
        print("\n".join(problems) or f"{sdist.name}, {wheel.name}: the files they should hold and no others")
        if problems:
            return 1
        venv.create(bare, with_pip=True)
        python = str(bare / "bin" / "python")
        constraints = str(ROOT / "constraints.txt")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", constraints, str(wheel)], check=True)
        subprocess.run([python, "-m", "pip", "check"], check=True)
        alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        subprocess.run([python, str(Path(__file__).parent / "smoke.py")], cwd=folder, env=alone, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
