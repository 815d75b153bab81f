"""The texts that come with baracuda: `--calibration builtin`, `--evaluate builtin`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch

from baracuda.flow import FlowError, evaluate_checkpoint, quantize_checkpoint
from baracuda.flow.run.command import repeat_command
from baracuda.flow.run.data import BUILTIN, located
from baracuda.flow.run.overlap import LIMIT, seen_share
from baracuda.flow.run.page import page
from baracuda.flow.run.verdict import verdict

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer reads any text, by bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("builtin") / "model"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    models.save("llama", folder, vocab_size=len(alphabet))
    letters = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(source: Path) -> tuple[Path, dict[str, Any]]:
    given: dict[str, Any] = {"calibration": BUILTIN, "evaluation": Path(BUILTIN)}
    out = source.parent / "out"
    return out, quantize_checkpoint(source, out, smooth="auto", samples=4, sequence_length=64, **given)


def test_the_bar_of_a_short_text_gets_to_its_end(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []

    def progress(stage: str, done: int, total: int, label: str) -> None:
        if stage == "read":
            steps.append((done, total, label))

    quantize_checkpoint(source, tmp_path / "out", smooth=True, calibration=BUILTIN, samples=400, progress=progress)
    assert sum(done for done, _, _ in steps) == 400 * 512
    assert {(total, label) for _, total, label in steps} == {(400 * 512, BUILTIN)}


def test_a_run_needs_no_file_and_its_report_names_the_texts_as_one_types_them(
    made: tuple[Path, dict[str, Any]],
) -> None:
    _, report = made
    assert len(report["smoothing"]["folded"]) > 0 and report["evaluation"]["kl"] < 0.1
    inputs = report["run"]["inputs"]
    assert (inputs["calibration"], inputs["evaluation"], report["evaluation"]["data"]) == (BUILTIN,) * 3
    assert str(repeat_command(report)).endswith(" --calibration builtin --evaluate builtin")
    assert "tokens of the text that comes with baracuda." in page(report)


def test_a_result_may_be_measured_on_the_other_text(made: tuple[Path, dict[str, Any]], source: Path) -> None:
    out, report = made
    sizes = {"samples": 4, "sequence_length": 64}
    found = evaluate_checkpoint(out, BUILTIN, against=source, **sizes)
    assert found["data"] == BUILTIN and found["kl"] == pytest.approx(report["evaluation"]["kl"], rel=0.01)
    assert report["evaluation"]["seen_in_calibration"] < LIMIT and found["seen_in_calibration"] < LIMIT
    fitted = evaluate_checkpoint(out, located(BUILTIN, "calibration"), against=source, **sizes)
    assert fitted["seen_in_calibration"] == 1


def test_what_smoothing_scaled_is_not_taken_for_noise(made: tuple[Path, dict[str, Any]], source: Path) -> None:
    out, report = made
    found = evaluate_checkpoint(out, BUILTIN, against=source, samples=4, sequence_length=64)
    assert set(found["layers"]) == set(report["evaluation"]["layers"])
    assert not any(name.endswith(("v_proj", "up_proj")) for name in found["layers"])
    assert min(found["layers"].values()) > 15


def test_the_two_texts_have_nothing_in_common_and_are_long_enough_for_a_verdict() -> None:
    words = {use: located(BUILTIN, use).read_text().split() for use in ("calibration", "evaluation")}
    numbers = {word: i for i, word in enumerate(sorted({*words["calibration"], *words["evaluation"]}))}
    calibration, evaluation = (torch.tensor([numbers[w] for w in words[use]]) for use in words)
    assert seen_share([calibration], [evaluation]) == 0
    assert len(calibration) > 2000 and len(evaluation) > 1200


def test_errors_and_verdicts_say_that_there_are_such_texts(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="--calibration builtin"):
        quantize_checkpoint(source, tmp_path / "out", smooth=True)
    with pytest.raises(FlowError, match=r"Builtin: no such file; expected .* or builtin"):
        quantize_checkpoint(source, tmp_path / "out", evaluation="Builtin")
    report = quantize_checkpoint(source, tmp_path / "out")
    told = str(verdict(report))
    assert "--evaluate builtin" in told and "loses less with --smooth auto --calibration builtin" in told


@pytest.mark.parametrize(
    ("scheme", "given", "tried", "advice"),
    [
        ("w8a8", None, {}, "Try --smooth auto --calibration builtin (or FILE); the"),
        ("w8a8", "texts.txt", {"alpha": 0.5}, "Try --smooth auto; the"),
        ("w8a8", BUILTIN, {"alpha": "auto"}, "Try --calibration FILE with texts like those the model is for; the"),
        ("w8a8", "texts.txt", {"alpha": "auto"}, "The noisiest layers below can be left out"),
        ("w4a8", None, {}, "Try --smooth auto --method gptq --calibration builtin (or FILE) or a smaller"),
        ("w4a8", "texts.txt", {"alpha": "auto", "method": "gptq"}, "Try a smaller --group-size or w8a8; the"),
    ],
)
def test_a_verdict_advises_what_was_not_tried_yet(
    scheme: str, given: str | None, tried: dict[str, Any], advice: str
) -> None:
    content: dict[str, Any] = {"scheme": {"name": scheme}, "run": {"inputs": {}}, "smoothing": None}
    content["evaluation"] = {"tokens": 9999, "kl": 1.0}
    if given is not None:
        content["run"]["inputs"]["calibration"], content["smoothing"] = given, {"alpha": tried.get("alpha")}
    content |= {"method": tried["method"]} if "method" in tried else {}
    assert advice in str(verdict(content))
