"""The tests over the version ranges that pyproject.toml states, each row in a folder of packages of its own.

`python tools/compat.py [ROW ...]` runs the rows named, or all of them. A row puts the packages it names, with what they
depend on, into `.venv-compat/ROW`, and runs its tests with that folder first on the path: torch, pytest and the rest
come from this environment. What came of a row is kept in tools/compat.json and printed in docs/reference/versions.md.
Where PyPI cannot be reached, it prints the reason and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from vllm_env import pypi_answers

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-compat"
RECORD, PAGE = ROOT / "tools" / "compat.json", ROOT / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- from tools/compat.json by tools/compat.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Tests:
    """Arguments of pytest, and what they are in words."""

    words: str
    arguments: tuple[str, ...]


FLOW = Tests("`tests/flow`", ("tests/flow", "-m", "not slow and not gpu"))
#: What changes between two versions of transformers is how models are loaded and saved.
FILES = ("tests/flow/hf/test_load.py", "tests/flow/hf/test_transformers.py", "tests/flow/hf/test_saving.py")
LOAD = Tests("loading, saving and attention", (*FILES, "tests/flow/hf/test_attention.py"))
#: The tests of those, and of what transformers reads by itself, whose answer changed between two versions; a minute.
READ = Tests(
    "what is read and saved, by us and by transformers itself",
    (
        *FILES, "tests/flow/hf/test_surroundings.py", "-n", "0", "-k",
        "does_not_read or experts_are_read or ignored_stay or mixture or our_integers or from_pretrained_computes "
        "or while_it_is_loaded or as_it_was_read",
    ),
)  # fmt: skip
KERNELS = Tests(
    "`tests/backends/triton`, in Triton's interpreter", ("tests/backends/triton", "-m", "not slow and not gpu")
)
COMPILED = replace(KERNELS, words="`tests/backends/triton`: kernels compiled, and the PTX of some interpreted")
TORCH = Tests(
    "`tests/nn`, `tests/dispatch`, `tests/models`, loading and saving",
    ("tests/nn", "tests/dispatch", "tests/models", *FILES, "-m", "not slow and not gpu"),
)


@dataclass(frozen=True)
class Row:
    """Packages at given versions, and the tests that look at them."""

    #: Installed with what they depend on.
    packages: tuple[str, ...]
    tests: Tests
    #: Installed alone: what they depend on is torch, which this environment has.
    alone: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    #: The row whose folder it shares; one of its own unless given.
    folder: str = ""


#: The first release of each minor of transformers, with a compressed-tensors of its time.
MINORS = {
    "0.15.0": ("5.1.0", "5.2.0", "5.3.0", "5.4.0", "5.5.0", "5.6.0"),
    "0.16.0": ("5.7.0", "5.8.0", "5.9.0", "5.10.1", "5.11.0", "5.12.0"),
    "0.17.0": ("5.13.0", "5.14.0", "5.15.0", "5.16.0", "5.17.0"),
    "0.19.0": ("5.18.0", "5.19.0", "5.20.0", "5.21.0"),
    "0.20.0": ("5.22.0",),
}
INTERPRETED = {"TRITON_INTERPRET": "1"}
OLDEST = Row(("transformers==5.0.0", "safetensors==0.5.0"), READ, ("compressed-tensors==0.15.0",))
NEWEST = Row(("transformers", "safetensors"), READ, ("compressed-tensors",))
BETWEEN = {
    f"transformers-{version.rpartition('.')[0]}": Row(
        (f"transformers=={version}",), READ, (f"compressed-tensors=={compressed}",)
    )
    for compressed, versions in MINORS.items()
    for version in versions
}
#: Rows of many minutes, or of gigabytes: PyPI has torch for CUDA alone.
LONG = {
    "flow-oldest": replace(OLDEST, tests=FLOW, folder="transformers-oldest"),
    "flow-5.17": replace(BETWEEN["transformers-5.17"], tests=FLOW, folder="transformers-5.17"),
    "flow-newest": replace(NEWEST, tests=FLOW, folder="transformers-newest"),
    "torch-oldest": Row(("torch==2.11.0",), TORCH),
    "torch-newest": Row(("torch",), TORCH),
}
ROWS = {
    "transformers-oldest": OLDEST,
    **BETWEEN,
    "transformers-newest": NEWEST,
    "triton-oldest": Row((), KERNELS, ("triton==3.6.0",), INTERPRETED),
    "triton-3.8": Row((), KERNELS, ("triton==3.8.0",), INTERPRETED),
    "triton-newest": Row((), KERNELS, ("triton",), INTERPRETED),
    "compiled-oldest": Row((), COMPILED, ("triton==3.6.0",), folder="triton-oldest"),
    "compiled-3.8": Row((), COMPILED, ("triton==3.8.0",), folder="triton-3.8"),
    "compiled-newest": Row((), COMPILED, ("triton",), folder="triton-newest"),
    **LONG,
}
#: What every change is tested with (.ci/run), in two minutes; the newest versions are those of `make test`.
ENDS = {"transformers-oldest": LOAD}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--ends", action="store_true", help=f"what loads and saves with {' and '.join(ENDS)}")
    parser.add_argument("--tests", nargs="+", default=[], help="other tests than the row's; their result is not kept")
    parser.add_argument("--install-only", action="store_true", help="install the packages and run nothing")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"expected rows among {', '.join(ROWS)}, got {', '.join(unknown)}")
    found: list[tuple[str, str, str]] = []
    for name in options.rows or (ENDS if options.ends else ROWS):
        started = time.monotonic()
        if not install(name):
            if pypi_answers():
                print(f"{name}: its packages could not be installed although PyPI answers", file=sys.stderr)
                return 1
            print(f"{name}: skipped, since PyPI cannot be reached")
            continue
        if options.install_only:
            continue
        other = options.tests or (ENDS[name].arguments if options.ends else ())
        result = run(name, other or ROWS[name].tests.arguments)
        if not other:
            keep(name, result)
        found.append((str(versions(name)), verdict(result), f"{time.monotonic() - started:.0f} s"))
    for line in found:
        print(" | ".join(line))
    return int(any(result != "passed" for _, result, _ in found))


def place(name: str) -> Path:
    return FOLDER / (ROWS[name].folder or name)


def install(name: str) -> bool:
    row, folder = ROWS[name], place(name)
    stamp = folder / "installed"
    wanted = "\n".join((*row.packages, *row.alone))
    if stamp.exists() and stamp.read_text() == wanted:
        return True
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-compile", "--upgrade", "--target", str(folder)]
    for packages in (row.packages, ("--no-deps", *row.alone) if row.alone else ()):
        if packages and subprocess.run([*pip, *packages], check=False).returncode:
            return False
    stamp.write_text(wanted)
    return True


def run(name: str, tests: Sequence[str]) -> dict[str, int]:
    """How many tests passed, failed and were skipped; none, with one failure, where pytest did not come to its end."""
    path = os.pathsep.join(filter(None, (str(place(name)), os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"PYTHONPATH": path} | ROWS[name].environment
    print(f"-- {name}: {versions(name)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-n", "2", f"--junitxml={results}", *tests]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code not in (0, 1) or not results.exists():
            return {"passed": 0, "failed": 1, "skipped": 0}
        suite = next(ElementTree.parse(results).getroot().iter("testsuite"))
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = max(count["failures"] + count["errors"], code)
    return {"passed": count["tests"] - failed - count["skipped"], "failed": failed, "skipped": count["skipped"]}


def verdict(result: dict[str, Any]) -> str:
    return "FAILED" if result["failed"] or not result["passed"] else "passed"


def versions(name: str) -> dict[str, str]:
    """What the row has installed of the packages it names."""
    row = ROWS[name]
    names = [package.partition("==")[0] for package in (*row.packages, *row.alone)]
    found = [path.name for path in place(name).glob("*.dist-info")]
    stems = {item.partition("-")[0].replace("_", "-"): item.split("-")[1].removesuffix(".dist") for item in found}
    return {package: stems.get(package, "?").removesuffix("-info") for package in names}


def keep(name: str, result: dict[str, int]) -> None:
    """Put what came of a row into the record, and the record onto the page."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    day = time.strftime("%Y-%m-%d", time.gmtime())
    record[name] = {"versions": versions(name), "tests": ROWS[name].tests.words, **result, "date": day}
    kept = {row: record[row] for row in ROWS if row in record}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(rewritten(PAGE.read_text(), kept))


def rewritten(page: str, record: dict[str, Any]) -> str:
    """The page with the table of the record between its marks."""
    before, rest = page.split(BEGIN, 1)
    return before + BEGIN + "\n" + table(record) + rest[rest.index(END) :]


def table(record: dict[str, Any]) -> str:
    lines = ["| row | packages | tests | result | date |", "| --- | --- | --- | --- | --- |"]
    for name, row in ROWS.items():
        if (entry := record.get(name)) is None:
            lines.append(f"| `{name}` | {', '.join(row.packages + row.alone)} | {row.tests.words} | not run | |")
            continue
        packages = ", ".join(f"{package} {version}" for package, version in entry["versions"].items())
        counts = [f"{entry[key]} {key}" for key in ("failed", "skipped") if entry[key]]
        result = ", ".join([f"{entry['passed']} passed", *counts])
        lines.append(f"| `{name}` | {packages} | {entry['tests']} | {result} | {entry['date']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
