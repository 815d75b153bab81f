"""Tables, README sections and plots from a bench run: a small made-up one, so that every figure is known."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import linear_table, readme


def row(name: str, shape: list[int], exact: bool = True, **us: float) -> dict[str, object]:
    return {"name": name, "shape": shape, "exact": exact, "kernel": "", "us": us}


RUN = {
    "device": "A GPU",
    "torch": "9.9",
    "host_us": 5.25,
    "rows": [
        row("bar", [1, 14336, 4096], gemm=30.0, linear=27.0, bf16=60.0, fp8=31.0),
        row("8B qkv", [1, 6144, 4096], gemm=10.0, linear=16.0, bf16=20.0, fp8=15.0),
        row("8B qkv", [64, 6144, 4096], gemm=20.0, linear=30.0, bf16=30.0, int_mm=40.0, fp8=25.0),
        row("70B o", [64, 8192, 8192], exact=False, gemm=8.0, linear=9.0, bf16=8.0, fp8=8.0),
    ],
    "epilogues": [{"shape": [16, 64, 32], "us": {"plain": 10.0, "gelu": 12.5}}],
}


def test_the_table_has_rates_ratios_and_what_was_not_exact() -> None:
    lines = linear_table.table(linear_table.rows_of(RUN)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[4] == (
        "| 8B qkv | 64 x 6144 x 4096 | 20.0 | 161 | 1.26 | 30.0 | 30.0 | 40.0 | 25.0 | 1.50 | 1.25 | 1.00 | yes |"
    )
    assert " - " in lines[3]
    assert lines[5].endswith("| NO |")


def test_a_bar_fails_when_it_is_missed() -> None:
    rows = linear_table.rows_of(RUN)
    found = {(shape, what): passed for shape, what, _, _, passed in linear_table.bars(rows, 9.0)}
    assert found["1x14336x4096", "gemm/bf16"]
    assert not found["1x14336x4096", "gemm/fp8"]
    assert not found["1x14336x4096", "gemm us"]
    assert found["1x14336x4096", "linear us"]
    assert not found["every shape", "linear/bf16"]
    assert not found["1x256x256", "host us"]
    assert linear_table.bars(rows, 7.9)[-1][-1]


def test_epilogues_are_told_as_multiples_of_the_plain_one() -> None:
    assert linear_table.epilogue_table(RUN).splitlines()[-1] == "| 16 x 64 x 32 | 10.0 us | 1.25x |"


def test_the_table_of_readme_is_written_between_its_marks_and_nowhere_else() -> None:
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    written = readme.rewritten(text, {"linear": RUN})
    assert written.startswith(f"before\n{readme.BEGIN}\n| what |") and written.endswith(f"{readme.END}\nafter\n")
    assert "| bf16 cuBLAS | 0.89 to 1.25x |" in written and "old" not in written
    assert readme.rewritten(written, {"linear": RUN}) == written
    with pytest.raises(ValueError, match=r"expected the line <!-- from bench/results by"):
        readme.rewritten("no marks", {"linear": RUN})


def test_a_run_becomes_a_page_and_a_plot_that_are_the_same_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (results / "linear.json").write_text(json.dumps(RUN))
    (tmp_path / "README.md").write_text(f"{readme.BEGIN}\n{readme.END}\n")
    monkeypatch.chdir(tmp_path)
    written = []
    for _ in range(2):
        readme.main([])
        written.append(
            [path.read_bytes() for path in (tmp_path / "docs" / "reference" / "linears.md", results / "linear.svg")]
        )
    assert written[0] == written[1]
    page, drawing = (content.decode() for content in written[0])
    assert "| 70B o | 64 x 8192 x 8192 |" in page
    assert "| 1x256x256 | host us | 8 | 5.25 | pass |" in page
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    assert {"8B qkv", "70B o"} <= {line.strip(" <>!-") for line in drawing.splitlines() if "<!--" in line}
    assert "int8 linears, decode" in (tmp_path / "README.md").read_text()
