"""The site: what is made from the code says what the code says, and what is broken stops the build."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import baracuda
from baracuda import PerChannel, PerGroup, PerTensor, PerToken, Scope
from bench import _gpu_small as small
from bench import readme
from bench._decoder import LLAMA_8B, SMOLLM2_135M, Shapes
from bench.gpu import Line
from bench.linear import Row
from docs.site import benchmarks, figures, fill, links, tables

MODULES = {"autograd", "flow", "nn", "parallel", "__version__"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("pages")
    fill.fill(target)
    return target


def test_the_reference_has_every_public_name(pages: Path) -> None:
    text = "".join(page.read_text() for page in (pages / "reference").glob("*.md"))
    documented = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", text, re.M)}
    aliases = set(re.findall(r"`(\w+)`", tables.plan_aliases()))
    public = {
        *baracuda.__all__,
        *baracuda.nn.__all__,
        *baracuda.flow.__all__,
        "ColumnParallel",
        "RowParallel",
    } - MODULES
    assert public - documented - aliases == {"report"}  # flow.report, documented as rebuild
    assert "`baracuda.flow.report` is `rebuild`" in text


def test_nothing_is_left_to_fill_and_nothing_is_made_for_nobody(pages: Path) -> None:
    used = {mark for page in fill.sources().values() for mark in fill.MARK.findall(page.read_text())}
    assert used == {*fill.MAKERS, *figures.FIGURES}
    assert not any(fill.MARK.search(page.read_text()) for page in pages.rglob("*.md"))


def test_an_unknown_mark_stops_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- make: wonders -->")
    monkeypatch.setattr(fill, "sources", lambda: {"page.md": page})
    with pytest.raises(ValueError, match=r"wonders.*expected one of"):
        fill.fill(tmp_path / "out")


def test_every_finding_code_is_explained() -> None:
    source = "".join(path.read_text() for path in Path(baracuda.flow.__file__).parent.rglob("*.py"))
    raised = re.findall(r'(?:\.add|CheckpointError)\(\s*"([a-z-]+)"(?: if [^,]+ else "([a-z-]+)")?', source)
    codes = {code for pair in raised for code in pair if code}
    explained = set(re.findall(r"`([a-z-]+)`", (fill.ROOT / "docs/how-to/verify.md").read_text()))
    assert len(codes) > 20 and codes <= explained, codes - explained


def test_the_matrix_shows_a_kernel_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def row() -> str:
        return next(line for line in tables.op_matrix().splitlines() if line.startswith("| `quantize` "))

    everyone, without_cpu = "T\N{NO-BREAK SPACE}C\N{NO-BREAK SPACE}R", "T\N{NO-BREAK SPACE}·\N{NO-BREAK SPACE}R"
    assert everyone in row() and without_cpu not in row()
    cells = tables._both_devices()
    thinned = [(cell, [b for b in serving if b is not baracuda.BackendKind.CPU]) for cell, serving in cells]
    monkeypatch.setattr(tables, "_both_devices", lambda: thinned)
    assert without_cpu in row()


def test_every_guarantee_but_that_of_float_sums_is_the_reference_s_bits() -> None:
    lines = tables.guarantees().replace("<wbr>", "").splitlines()[2:]
    exact = [line for line in lines if "weight_only_linear" not in line]
    assert exact and len(exact) < len(lines)
    assert all(line.rstrip("| ").endswith("yes") == (line in exact) for line in lines)
    assert any("quantized_linear" in line and "| f64 | f64 | s32 |" in line for line in lines)


def test_the_command_line_page_has_every_option() -> None:
    page = tables.command_line()
    for expected in (
        "## baracuda quantize",
        "`MODEL_DIR` | required",
        "`--alpha` | `0.5`",
        "`--resume` | off",
    ):
        assert expected in page, page


def gpu_run() -> dict[str, Any]:
    lines = [
        Line("quantize", "token", element, kind, (4, 4), 10.0, 4.0, share, 0.95, peers)
        for element, kind, share, peers in (
            ("bf16", "s8", 0.99, {"torch.compile": 12.0}),
            ("bf16", "u8", 0.97, {}),
            ("f32", "s8", 0.5, {"torch.compile": 15.0, "torch": 80.0}),
        )
    ]
    head = {"device": "a GPU", "versions": {"torch": "2"}, "copy_terabytes": 4.2}
    return {**head, "lines": [asdict(line) for line in lines]}


def linear_run() -> dict[str, Any]:
    us = {"gemm": 10.0, "linear": 20.0, "bf16": 30.0, "fp8": 15.0}
    rows = [Row("bar", (16, 6144, 4096), us=us), Row("8B qkv", (1, 6144, 4096), us=us)]
    return {"device": "a GPU", "torch": "2", "host_us": 5.0, "rows": [asdict(row) for row in rows]}


def small_run() -> dict[str, Any]:
    lines = [
        small.Line("quantize", "token", "bf16", "s8", (4096, 4096), 10.0, 12.5),
        small.Line("quantize", "token", "bf16", "s8", (256, 4096), 2.0, 1.9),
        small.Line("quantize", "token", "f32", "s8", (4096, 4096), 10.0, 10.0),
    ]
    head = {"device": "a GPU", "versions": {"torch": "2"}, "date": "2026-01-01"}
    return {**head, "lines": [asdict(line) for line in lines]}


def model_run(device: str = "a GPU", shapes: Shapes = LLAMA_8B) -> dict[str, Any]:
    """As `bench model` writes it: float first, then ours, then another program, which has no ratio."""
    base, sizes = ("bf16", ("batch 1", "4 x 2048")) if device == "a GPU" else ("f32", ("batch 1", "1 x 512"))
    ms = {base: 12.0, "w8a8": 8.0, "w4a8": 6.0}
    parts = [("decode", "batch 1", 1), ("decode-compiled", sizes[0], 1), ("decode-compiled", "batch 64", 2)]
    parts += [("prefill", "1 x 16", 5), ("prefill", sizes[1], 4)]
    rows = [
        {"part": part, "size": size, "model": name, "ms": each * slower, "ratio": ms[base] / each}
        for part, size, slower in (parts if device == "a GPU" else [parts[0], parts[-1]])
        for name, each in ms.items()
    ]
    if device != "a GPU":
        rows.append({"part": "decode", "size": "batch 1", "model": "llama.cpp, q4", "ms": 5.0, "ratio": None})
    memory = dict.fromkeys(ms, 2**30)
    bars = [{"name": "w8a8 decode", "needed": 1.4, "measured": 1.5, "below": False, "holds": True}]
    described = {**asdict(shapes), "dtype": "bfloat16"}
    head = {"device": device, "torch": "2", "shapes": described, "memory": memory, "skipped": []}
    return {**head, "rows": rows, "bars": bars}


def cpu_run() -> dict[str, Any]:
    seconds = {"ours": 1.0, "torch": 5.0}
    linears = [{"m": 512, "ratio": 3.0}, {"m": 1, "ratio": 6.0}]
    return {"machine": "a CPU", "isa": "avx2", "threads": 2, "rows": [{"seconds": seconds}], "linears": linears}


def test_readme_has_five_rows_whole_models_first() -> None:
    linear = linear_run()
    linear["rows"][1]["us"] |= {"w4a8": 12.0, "w4a16": 15.0}
    small = model_run("a CPU, 2 threads", SMOLLM2_135M)
    runs = {"cpu": cpu_run(), "gpu": gpu_run(), "linear": linear, "model": model_run(), "model-cpu": small}
    assert readme.section(runs).splitlines()[2:] == [
        "| decode of a whole model, batch 1, compiled | a GPU, the shapes of Llama-3 8B | the same model in bf16 "
        "| w8a8 1.50x, w4a8 2.00x |",
        "| prefill of a whole model, 4 x 2048 tokens | a GPU, the shapes of Llama-3 8B | the same model in bf16 "
        "| w8a8 1.50x, w4a8 2.00x |",
        "| 4-bit linears, decode, 1 to 1 tokens | a GPU, Llama-3 8B and 70B | bf16 cuBLAS "
        "| w4a8 2.50 to 2.50x, w4a16 2.00 to 2.00x |",
        "| a whole model on a CPU, batch 1 | a CPU, 2 threads, the shapes of SmolLM2-135M | the same model in f32 "
        "| decode: w8a8 1.50x, w4a8 2.00x, llama.cpp, q4 2.40x; prefill: w8a8 1.50x, w4a8 2.00x |",
        "| quantize, dequantize and their like, 3 cases | a GPU | a copy | 97% of the copy rate, 50% at least; "
        "1.35x the speed of torch.compile (medians) |",
    ]


def test_linears_stand_in_for_whole_models_that_were_not_measured() -> None:
    runs = {"linear": linear_run(), "gpu": gpu_run(), "cpu": cpu_run()}
    names = [line.split(" | ")[0] for line in readme.section(runs).splitlines()[2:]]
    assert names == [
        "| int8 linears, decode, 1 to 1 tokens",
        "| int8 linears on a CPU, 1 and 512 tokens",
        "| quantize, dequantize and their like, 3 cases",
        "| the same on a CPU, 1 cases",
    ]


def test_a_run_of_a_model_directory_is_told_by_its_name() -> None:
    run = {**model_run(), "shapes": {"directory": "/somewhere/MyModel", "dtype": "bfloat16"}}
    assert readme.shapes_of(run) == "MyModel"
    assert readme.shapes_of(model_run(shapes=Shapes(2, 64, 96, 4, 2, 160))) == "2 layers of 64"


def test_a_float_model_that_does_not_wait_either_is_told_beside() -> None:
    """What quantization alone gives, and what the loop gives."""
    run = model_run()
    for part, size, ms in (("decode-compiled", "batch 1", 9.0), ("prefill", "4 x 2048", 48.0)):
        run["rows"].append({"part": part, "size": size, "model": "bf16-late", "ms": ms, "ratio": 1.33})
    gains = [row[-1] for row in readme.model_rows(run)]
    assert gains[0] == (
        "w8a8 1.50x, w4a8 2.00x; beside bf16 that does not wait for its tokens either: w8a8 1.12x, w4a8 1.50x"
    )
    assert gains[1] == "w8a8 1.50x, w4a8 2.00x"


def test_runs_of_whole_models_become_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = linear_run()
    linear["rows"][1]["us"] |= {"w4a8": 12.0, "w4a16": 15.0}
    runs = {"model": model_run(), "model-cpu": model_run("a CPU", SMOLLM2_135M), "linear": linear}
    monkeypatch.setattr(benchmarks, "read", runs.get)
    text = benchmarks.MAKERS["bench_model"]()
    assert "| decode-compiled | batch 64 | 24.00 | 16.00 (1.50x) | 12.00 (2.00x) |" in text
    assert "| memory |  | 1024 MiB | 1024 MiB | 1024 MiB |" in text and "1 of 1 bars are met" in text
    assert "| decode | batch 1 | 12.00 | 8.00 (1.50x) | 6.00 (2.00x) | 5.00 (2.40x) |" in (
        benchmarks.MAKERS["bench_model_cpu"]()
    )
    assert "| 1 x 6144 x 4096 | 30.0 | 12.0 | 2.50 | 2.4 | 15.0 | 2.00 | 2 |" in (
        benchmarks.MAKERS["bench_linear_four"]()
    )
    assert benchmarks.MAKERS["gains"]() == readme.section(runs)
    runs["linear"] = linear_run()
    assert "has no 4-bit rows yet" in benchmarks.MAKERS["bench_linear_four"]()


def test_costs_are_told_by_the_options_that_give_them() -> None:
    text = benchmarks.MAKERS["scheme_costs"]()
    assert "| `--scheme w4a16 --smooth auto --method gptq` | " in text and "llm-compressor" not in text


def test_runs_of_the_gpu_benchmarks_become_tables_and_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"gpu": gpu_run(), "gpu-small": small_run(), "linear": linear_run()}
    monkeypatch.setattr(benchmarks, "read", runs.get)
    text = benchmarks.MAKERS["bench_gpu"]()
    assert "| `quantize` | token | 98% | 50% |" in text and "2 of 3 measurements" in text
    assert "| `quantize` | token | 1.20x | 1.50x |" in text and text.endswith("| `quantize` | token | 8.00x |")
    text = benchmarks.MAKERS["bench_gpu_small"]()
    assert "| `quantize` | token | bf16 | 1.25x | 0.95x |" in text and "| `quantize` | token | f32 | 1.00x |  |" in text
    text = benchmarks.MAKERS["bench_linear"]()
    assert "| 8B qkv | 1 x 6144 x 4096 | 10.0 | 20.0 | 3.0x | 1.5x |  | 1.5x | yes |" in text
    text = benchmarks.MAKERS["one_answer_linear"]()
    assert "1 weights of" in text and "| 1 | 1.50 to 1.50x | 1.50 to 1.50x | yes |" in text
    rates, ratios = figures.gpu_rates(), figures.linear_ratios()
    assert rates and [list(line.get_xdata()) for line in rates[0].axes[0].lines[:2]] == [[0.5], [0.99]]
    assert ratios and [list(axis.lines[0].get_ydata()) for axis in ratios[0].axes] == [[3.0], [1.5]]


def test_a_run_that_is_not_committed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "read", lambda name: None)
    assert benchmarks.MAKERS["bench_gpu"]().startswith("No run is committed yet")
    assert "bench model --device cpu" in benchmarks.MAKERS["bench_model_cpu"]()
    assert figures.gpu_rates() is figures.linear_ratios() is None


def test_what_the_pictures_say_is_so() -> None:
    share, biases = figures.tie_bias()
    assert share > 0.1 and abs(biases["half to even"]) < 1e-3 and biases["half up"] > 0.05
    counts = figures.division_counts()
    for total, differing, away, _ in counts.values():
        assert 0 < differing < total / 1000 and away.abs().max() <= 1
    assert counts["bf16"][3] > 0.9
    assert counts["bf16"][1] > 100 * counts["f32"][1]
    before, after, quality = figures.smoothed()
    assert quality[1] > quality[0] + 10
    assert before[0].max() > 20 * before[0].median() and torch.allclose(*after)


@pytest.mark.parametrize("scope", [PerTensor(), PerToken(), PerChannel(1), PerGroup(4), PerGroup(3, axis=0)], ids=str)
def test_elements_drawn_in_one_colour_share_a_scale(scope: Scope) -> None:
    shape = (6, 8)
    numbers = figures.segments(scope, shape)
    scales = torch.arange(1.0, 1.0 + numbers.max() + 1).reshape(scope.scale_shape(shape))
    used = baracuda.dequantize(torch.ones(shape, dtype=torch.int8), scales, scope=scope)
    assert torch.equal(used, numbers + 1.0)


def test_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    config = fill.ROOT / "zensical.toml"
    assert links.unplaced(config, fill.sources()) == []
    forgotten, invented = links.unplaced(config, {**fill.sources(), "new.md": tmp_path}.keys() - {"index.md"})
    assert forgotten.startswith("new.md") and invented.startswith("index.md")


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="a/#here">good</a><a href="#top">good</a><a href="https://elsewhere/">good</a>'
        '<a href="b/">bad</a><a href="a/#there">bad</a><img src="missing.png"><script src="https://cdn/x.js"></script>'
    )
    (tmp_path / "a" / "index.html").write_text('<p id="here"></p><a href="..#top">good</a>')
    problems = links.broken(tmp_path)
    assert [problem.split(": ")[1] for problem in problems] == ["https://cdn/x.js", "a/#there", "b/", "missing.png"]
