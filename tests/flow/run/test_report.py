"""The report: numbers that add up, and a page that a real browser draws without fetching anything."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from pathlib import Path

import models
import pytest
import torch

from baracuda.flow import FlowError, quantize_checkpoint, report
from baracuda.flow.hf.skeleton import quiet
from baracuda.flow.run.page import _ticks, page
from baracuda_cli.quantize import summary

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    models.save("qwen2", folder / "<b>model")
    tokens = models.tokens(folder / "tokens.safetensors")
    quantize_checkpoint(
        folder / "<b>model",
        folder / "out",
        scheme="w8a8-smoothquant",
        calibration=tokens,
        evaluation=tokens,
        ignore=["*.layers.1.mlp.down_proj"],
    )
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
    assert "<script" not in page.read_text() and "<b>model" not in page.read_text()
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    drawn = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "Activation outliers" in drawn and drawn.count("<svg") == 3 and drawn.count("<rect") > 40
    assert "&lt;b&gt;model, w8a8-smoothquant" in drawn
    shot = tmp_path / "page.png"
    subprocess.run(
        [*command, "--window-size=1200,1800", f"--screenshot={shot}", page.as_uri()],
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


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 45.1, [0, 10, 20, 30, 40]),
        (0.0, 0.9, [0, 0.2, 0.4, 0.6, 0.8]),
        (0.865, 11.7, [1, 2, 5, 10]),
        (0.4, 3e4, [1, 10, 100, 1000, 10000]),
        (3.0, 4.0, []),
    ],
)
def test_axes_have_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert _ticks(low, high) == pytest.approx(ticks)
