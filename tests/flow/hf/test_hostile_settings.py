"""Settings beside a model: how it generates, and where its tokenizer reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
from typer.testing import CliRunner

from baracuda.flow import CheckpointError, FlowError, evaluate_checkpoint, quantize_checkpoint
from baracuda.flow.hf.chat import Conversation
from baracuda.flow.hf.forward import tokenizer
from baracuda.flow.run.speed import compare_speed
from baracuda_cli import app

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.quantized(tmp_path_factory.mktemp("settings"), words=True)


@pytest.fixture
def place(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "place"))


GENERATION: list[dict[str, Any]] = [
    {"num_beams": 10**6},
    {"num_beams": 4, "num_return_sequences": 4},
    {"cache_implementation": "offloaded"},
    {"eos_token_id": "x"},
    {"eos_token_id": [[]]},
    {"bad_words_ids": 3},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"force_words_ids": [[1]]},
    {"dola_layers": "low"},
    {"stop_strings": ["x"]},
    {"sequence_bias": [1]},
    {"custom_generate": "someone/else"},
    {"max_time": -1.0},
    {"temperature": "hot", "top_p": [1]},
]


@pytest.mark.parametrize("settings", GENERATION, ids=lambda settings: next(iter(settings)))
def test_how_a_model_generates_is_not_for_its_files_to_say(settings: dict[str, Any], kept: Path, place: Path) -> None:
    plain = Conversation(kept / "out").reply("w5 w6", max_tokens=3).text
    models.change_json(place / "out" / "generation_config.json", **settings)
    conversation = Conversation(place / "out")
    before = conversation.model.generation_config
    assert conversation.reply("w5 w6", max_tokens=3).text == plain
    assert conversation.model.generation_config is before
    assert compare_speed(place / "out", length=4, tokens=8)[0].decode > 0


def test_an_evaluation_samples_with_plain_settings(place: Path) -> None:
    models.change_json(place / "model" / "generation_config.json", num_beams=10**6)
    data = place / "tokens.safetensors"
    content = quantize_checkpoint(place / "model", place / "new", evaluation=data, samples=2)
    assert content["evaluation"]["samples"][0]["float"]


def test_tokens_and_numbers_of_a_model_are_kept(place: Path) -> None:
    from baracuda.flow.hf.generation import plain_generation

    models.change_json(
        place / "out" / "generation_config.json", eos_token_id=[7, 8], repetition_penalty=1.3, num_beams=3
    )
    model = Conversation(place / "out").model
    with plain_generation(model):
        kept = model.generation_config
        assert (kept.eos_token_id, kept.repetition_penalty) == ([7, 8], 1.3) and kept.num_beams != 3


@pytest.mark.parametrize(
    "template",
    [3, "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{{ raise_exception('\x1b[2J') }}", "{%"],
)
def test_a_chat_template_that_fails_is_told_in_a_sentence(template: Any, place: Path) -> None:
    models.change_json(place / "out" / "tokenizer_config.json", chat_template=template)
    done = CliRunner().invoke(app, ["chat", str(place / "out"), "-p", "w5", "--max-tokens", "2"])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert "\x1b" not in done.output and "the tokenizer fails" in " ".join(done.output.split())


def test_a_chat_template_that_makes_a_long_text_of_a_short_one_is_refused(place: Path) -> None:
    """A tokenizer takes far more memory than its text, and ends the process where there is none."""
    models.change_json(place / "out" / "tokenizer_config.json", chat_template="{{ 'w5 ' * 1000000 }}")
    with pytest.raises(FlowError, match="makes 3000000 characters of a conversation of 35: expected at most"):
        Conversation(place / "out").reply("w5", max_tokens=2)
    (place / "texts.jsonl").write_text('{"messages": [{"role": "user", "content": "w5"}]}\n')
    with pytest.raises(FlowError, match="makes 3000000 characters"):
        evaluate_checkpoint(place / "out", place / "texts.jsonl")


def test_a_tokenizer_larger_than_the_model_is_told_in_a_sentence(place: Path) -> None:
    path = place / "out" / "tokenizer.json"
    words = json.loads(path.read_text())
    words["model"]["vocab"]["far"] = 2 * models.VOCABULARY
    path.write_text(json.dumps(words))
    with pytest.raises(FlowError, match="cannot generate text: IndexError"):
        Conversation(place / "out").reply("far", max_tokens=2)


@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "merges_file", "source_spm", "vocab"])
def test_a_tokenizer_reads_no_file_elsewhere(key: str, place: Path, tmp_path: Path) -> None:
    """Its words would come back in the samples of a report."""
    (tmp_path / "secret").write_text("topsecret\n[UNK]\n[PAD]\n")
    (place / "out" / "tokenizer.json").unlink()
    models.change_json(
        place / "out" / "tokenizer_config.json", tokenizer_class="BertTokenizer", **{key: str(tmp_path / "secret")}
    )
    with pytest.raises(CheckpointError, match=rf"{key} names .*: expected no file outside"):
        tokenizer(place / "out")
    models.change_json(place / "out" / "tokenizer_config.json", **{key: "/root/of/another/machine/vocab.txt"})
    try:
        assert "topsecret" not in tokenizer(place / "out").get_vocab()
    except FlowError as error:
        assert "no tokenizer" in str(error)
