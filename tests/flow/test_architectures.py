"""tools/architectures.py: a few architectures again, and that it notices what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import architectures
import pytest
import torch

import baracuda

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

RECORD = json.loads(architectures.RECORD.read_text())
#: One of each family, and one that is refused.
AGAIN = {
    "llama": "text",
    "qwen2_5_vl": "images",
    "t5": "translation",
    "bert": "encoders",
    "vit": "vision",
    "gpt2": "text",
}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", AGAIN)
def test_the_record_is_what_comes_out(kind: str) -> None:
    found = architectures.outcome(AGAIN[kind], kind)
    if transformers.__version__ != RECORD["transformers"]:
        assert found["outcome"] != "failed"
    else:
        recorded = (row for row in RECORD["rows"] if (row["family"], row["architecture"]) == (AGAIN[kind], kind))
        assert found == next(recorded)


def test_nothing_failed_when_the_record_was_made() -> None:
    assert {row["outcome"] for row in RECORD["rows"]} == {"works", "refused"}
    assert RECORD["families"] == {name: family.title for name, family in architectures.FAMILIES.items()}


def test_a_checkpoint_that_is_wrong_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    load = baracuda.load

    def wrong(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        return model

    monkeypatch.setattr(baracuda, "load", wrong)
    row = architectures.outcome("text", "llama")
    assert row["outcome"] == "failed" and "cosine" in row["reason"]
