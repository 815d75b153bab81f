"""What `bench accuracy` compares with: its reader of checkpoints, its text, and the real model where there is one."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch

import baracuda
from baracuda.flow import quantize_checkpoint
from baracuda.schemes.search import Rounding, search_scales
from bench import _gemma_type as gemma
from bench import _real_model as real
from bench.accuracy import ROWS, requirements, together

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8", "w8a8"])
def test_the_reader_of_checkpoints_makes_the_model_that_baracuda_loads(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from bench._accuracy_model import Reference, fill

    models.save("llama", tmp_path / "model")
    groups = {"group_size": 32} if scheme != "w8a8" else {}
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme=scheme, **groups)
    reference = Reference(tmp_path / "model", models.prompt())
    model = reference._model()
    assert fill(model, tmp_path / "out") == 14
    with torch.no_grad():
        loaded = baracuda.load(tmp_path / "out", fuse=False)
        found, expected = model(models.prompt()).logits, loaded(models.prompt()).logits
    assert models.relative(expected, found) < 1e-3
    cost = reference.compare(tmp_path / "out")
    assert 0 < cost["kl"] < 0.1 and 0.5 < cost["top1_agreement"] <= 1


def test_requirements_are_ratios_of_the_rows_that_were_run() -> None:
    figures = {"kl": 0.2, "cpu_seconds": 10.0, "peak_mb": 500.0, "top1_agreement": 0.8}
    rows = {"w4a16, gptq": figures, "llm-compressor w4a16, gptq": {**figures, "kl": 0.4, "cpu_seconds": 15.0}}
    bars = {bar.name: bar for bar in requirements(rows)}
    assert bars["w4a16, gptq: KL / llm-compressor's"].measured == 0.5
    assert not bars["w4a16, gptq: seconds of a core / llm-compressor's"].holds
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_llama_written_as_a_gemma_has_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(gemma, "WIDTH", 80)
    llama = models.build("llama", tie_word_embeddings=True)
    made = gemma.converted(llama)
    assert made.config.hidden_size == 80 and type(made).__name__ == "GemmaForCausalLM"
    assert made.lm_head.weight is made.model.embed_tokens.weight
    with torch.no_grad():
        expected, found = llama(models.prompt()).logits, made(models.prompt()).logits
    assert models.relative(expected, found) < 1e-5


needs_real = pytest.mark.skipif(real.missing() is not None, reason=str(real.missing()))


@needs_real
def test_calibration_and_evaluation_read_different_chapters() -> None:
    uses = [real.CALIBRATION_CHAPTERS, real.CHOICE_CHAPTERS, real.EVALUATION_CHAPTERS]
    assert sorted(chapter for use in uses for chapter in use) == list(range(1, 15))
    calibration, evaluation = (real.passages(c) for c in (real.CALIBRATION_CHAPTERS, real.EVALUATION_CHAPTERS))
    assert len(calibration) > 100 and len(evaluation) > 50 and not set(calibration) & set(evaluation)
    assert all("<" not in text[:200] for text in calibration[:20])


@needs_real
def test_searched_scales_gain_more_than_a_decibel_on_real_weights() -> None:
    from baracuda.flow.checkpoint.tensorfile import TensorFile

    with TensorFile(real.model_directory() / "model.safetensors") as file:
        weight = file.read("model.layers.7.mlp.up_proj.weight").float()
    groups = weight.reshape(len(weight), -1, 64)

    def noise(scale: torch.Tensor, low: int) -> float:
        s = scale[..., None]
        return float(((groups / s).round().clamp(low, 7) * s - groups).double().square().sum())

    plain = noise((groups.abs().amax(-1) / 7).bfloat16().float(), -7)
    searched = noise(search_scales(weight, 64, Rounding(-8, 7, torch.bfloat16)), -8)
    assert searched < 10**-0.1 * plain


def test_rows_that_are_not_run_are_taken_from_an_earlier_run_of_the_same_setting() -> None:
    setting = {"model": "SmolLM2-135M", "samples": 16}
    old = [{"name": "float", "perplexity": 3}, {"name": "w8a8", "kl": 1}, {"name": "w4a16, gptq", "kl": 2}]
    new = [{"name": "float", "perplexity": 3}, {"name": "w4a16", "kl": 5}, {"name": "w4a16, gptq", "kl": 4}]
    merged = together(new, {**setting, "rows": old}, setting)
    assert [(row["name"], row.get("kl")) for row in merged] == [
        ("float", None),
        ("w8a8", 1),
        ("w4a16", 5),
        ("w4a16, gptq", 4),
    ]
    with pytest.raises(SystemExit, match="samples: 4"):
        together(new, {**setting, "samples": 4, "rows": old}, setting)
