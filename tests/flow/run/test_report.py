"""The report: numbers that add up, and a page that a real browser draws without fetching anything."""

from __future__ import annotations

import errno
import html
import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from baracuda.flow import FlowError, quantize_checkpoint, report
from baracuda.flow.hf.skeleton import quiet
from baracuda.flow.run.command import repeat_command
from baracuda.flow.run.options import Options
from baracuda.flow.run.page import page
from baracuda.flow.run.verdict import verdict
from baracuda_cli.quantize import summary

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    measured = dict.fromkeys(("calibration", "evaluation"), folder / "tokens.safetensors")
    ignored = ["*.layers.1.mlp.down_proj"]
    models.quantized(folder, "qwen2", "<b>model", scheme="w8a8-smoothquant", ignore=ignored, **measured)
    return folder / "out"


def test_the_numbers_add_up(out: Path) -> None:
    content = json.loads((out / "baracuda_report.json").read_text())
    assert len(content["layers"]) == 13
    assert all(30 < layer["sqnr_db"] < 60 for layer in content["layers"])
    assert {entry["name"]: entry["reason"] for entry in content["left"]} == {
        "lm_head": "the output head",
        "model.layers.1.mlp.down_proj": "ignored on request",
    }
    assert content["size"]["after"] == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    evaluation = content["evaluation"]
    assert 0 < evaluation["kl"] < 0.01 and evaluation["top1_agreement"] > 0.8
    assert abs(evaluation["perplexity"]["quantized"] / evaluation["perplexity"]["float"] - 1) < 0.05
    # What smoothing scaled on purpose is not compared; every other quantized layer is.
    assert set(evaluation["layers"]) == {
        layer["name"] for layer in content["layers"] if not layer["name"].endswith(("v_proj", "layers.0.mlp.up_proj"))
    }
    assert all(value > 15 for value in evaluation["layers"].values())


def test_a_real_browser_draws_the_page_and_fetches_nothing(out: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here")
    page = (out / "baracuda_report.html").resolve()
    assert "http:" not in page.read_text() and "https:" not in page.read_text()
    assert page.read_text().count("<script") == 1 and "<b>model" not in page.read_text()
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    drawn = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "Activation outliers" in drawn and drawn.count("<svg") == 3 and drawn.count("<rect") > 40
    assert "&lt;b&gt;model, w8a8-smoothquant" in drawn
    assert "find in 13 rows" in drawn  # made by the page's own script, which the policy lets run
    shot = tmp_path / "page.png"
    subprocess.run(
        [*command, "--window-size=1200,4800", f"--screenshot={shot}", page.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    from PIL import Image

    colours = Image.open(shot).convert("RGB").getcolors(2**24)
    assert colours is not None and {(37, 99, 235), (245, 158, 11)} <= {colour for _, colour in colours}


def test_the_page_is_rebuilt_from_the_numbers(out: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    before = (copy / "baracuda_report.html").read_text()
    (copy / "baracuda_report.html").unlink()
    report(copy)
    assert (copy / "baracuda_report.html").read_text() == before
    (copy / "baracuda_report.json").write_text('{"model": 3}')
    with pytest.raises(FlowError, match="not a report"):
        report(copy)
    with pytest.raises(FlowError, match="writes one"):
        report(tmp_path)


def test_a_number_that_json_has_no_word_for_is_null_and_the_page_says_so(tmp_path: Path) -> None:
    model = models.save("llama", tmp_path / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(3e4)
    with quiet():
        model.save_pretrained(tmp_path / "model")
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", evaluation=tokens)
    path = tmp_path / "out" / "baracuda_report.json"
    content = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert content["evaluation"]["perplexity"] == {"float": None, "quantized": None}
    drawn = path.with_suffix(".html").read_text()
    assert "<b>not finite</b><span>perplexity, float not finite</span>" in drawn
    report(tmp_path / "out")
    assert path.with_suffix(".html").read_text() == drawn
    assert ("perplexity", "not finite before, not finite after") in summary(content)


def test_a_page_that_cannot_be_written_is_told_without_resume(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(FlowError, match=r"No space left on device; free some space, then run it again$"):
        report(out)


def test_the_page_tells_how_many_rows_of_a_weight_were_measured(out: Path) -> None:
    content = json.loads((out / "baracuda_report.json").read_text())
    content["layers"][0]["measured_rows"] = 17
    drawn = page(content)
    assert "Where a weight is large, a sample of its rows is measured." in drawn
    assert "<th>rows measured</th>" in drawn and "<td>17</td>" in drawn


def evaluated(content: dict[str, Any], **figures: Any) -> dict[str, Any]:
    return content | {"evaluation": {"data": "a.txt", "tokens": 5000, **figures}}


@pytest.mark.parametrize(
    ("kl", "agreement", "ratio", "grade"),
    [
        (0.01, 0.99, 1.01, "good"),
        (0.05, 0.95, 1.02, "good"),
        (0.051, 0.99, 1.0, "fair"),
        (0.01, 0.85, 1.0, "fair"),
        (0.01, 0.99, 1.2, "poor"),
        (0.3, 0.7, 1.5, "poor"),
    ],
)
def test_the_verdict_is_that_of_the_worst_figure(
    out: Path, kl: float, agreement: float, ratio: float, grade: str
) -> None:
    content = json.loads((out / "baracuda_report.json").read_text())
    perplexity = {"float": 10.0, "quantized": 10 * ratio}
    content = evaluated(content, kl=kl, top1_agreement=agreement, perplexity=perplexity)
    assert verdict(content).grade == grade and str(verdict(content)).startswith(f"{grade}: ")
    drawn = page(content)
    assert f'<b class="{grade}">{grade}</b>' in drawn and "good: at most 0.05, fair: at most 0.2" in drawn
    assert ("Nothing needs to be done" in drawn) == (grade == "good")


def test_a_result_that_was_not_measured_is_not_called_good(out: Path) -> None:
    content = json.loads((out / "baracuda_report.json").read_text()) | {"evaluation": None}
    assert verdict(content).grade == "not measured" and "--evaluate FILE" in page(content)
    few = evaluated(content, kl=0.0, top1_agreement=1.0, perplexity={"float": 1.0, "quantized": 1.0})
    few["evaluation"]["tokens"] = 100
    assert "Only 100 tokens were measured" in page(few)


def test_the_worst_layers_come_first_and_every_bar_has_its_name_and_value(out: Path) -> None:
    content = json.loads((out / "baracuda_report.json").read_text())
    drawn = page(content)
    ranked = sorted(content["layers"], key=lambda layer: layer["sqnr_db"])
    places = [drawn.index(f"<td>{layer['name']}</td>") for layer in ranked]
    assert places == sorted(places)
    assert drawn.count("<rect") <= drawn.count("<text") and f">{ranked[0]['sqnr_db']:.3g}</text>" in drawn


def test_the_page_has_the_command_that_makes_it_again(out: Path) -> None:
    content = json.loads((out / "baracuda_report.json").read_text())
    command = repeat_command(content)
    assert command is not None and command.startswith("baracuda quantize ") and command in html.unescape(page(content))
    options = content["run"]["made_from"]["options"]
    options |= {"scheme": "w4a16", "group_size": 32, "ignore": ["*.o_proj"], "smooth": None}
    told = repeat_command(content)
    assert told is not None and "--scheme w4a16" in told and "--group-size 32" in told and "--ignore '*.o_proj'" in told
    del content["run"]["made_from"]
    assert repeat_command(content) is None and "Make it again" not in page(content)


def test_the_command_allows_floats_where_most_of_the_model_is(out: Path) -> None:
    content = json.loads((out / "baracuda_report.json").read_text())
    assert "--allow-float" not in str(repeat_command(content))
    assert "--allow-float" in str(repeat_command(content | {"float_share": 0.75}))


@pytest.mark.parametrize("option", sorted({field.name for field in fields(Options)} - {"rules"}))
def test_the_command_names_every_option_that_was_given(option: str, out: Path) -> None:
    content = json.loads((out / "baracuda_report.json").read_text())
    kind = str(next(field.type for field in fields(Options) if field.name == option))
    values: dict[str, Any] = {"float": 0.25, "int": 24, "str": "x", "tuple": ["x"], "bool": True}
    given = next(value for name, value in values.items() if name in kind.removesuffix("[str, ...]"))
    content["run"]["made_from"]["options"] = {option: given}
    words = "" if given is True else " x" if given == ["x"] else f" {given}"
    assert f" --{option.replace('_', '-')}{words} " in f"{repeat_command(content)} "


def test_samples_and_sizes_are_side_by_side(out: Path) -> None:
    content = json.loads((out / "baracuda_report.json").read_text())
    said = {"prompt": "one <i>", "float": "two", "quantized": "three"}
    content = evaluated(content, samples=[said])
    drawn = page(content)
    assert '<td>one &lt;i&gt;</td><td class="text">two</td><td class="text">three</td>' in drawn
    assert "everything else" in drawn and "the checkpoint" in drawn
