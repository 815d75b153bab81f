"""Texts to calibrate with: one to a line, whatever is in it, and tokens of them by the model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest

from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.run.data import _read_texts, read_sequences, require_data

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_texts_need_a_tokenizer_and_say_so(suffix: str, tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    data = tmp_path / f"texts{suffix}"
    data.write_text("hello\n" if suffix == ".txt" else json.dumps({"text": "hello"}) + "\n")
    with pytest.raises(FlowError, match="no tokenizer"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="w8a8-smoothquant", calibration=data)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_only_newlines_end_a_line(mark: str, suffix: str, tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\x85four", "five\x0csix"]
    lines = texts if suffix == ".txt" else [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path = tmp_path / f"texts{suffix}"
    path.write_bytes((mark + "\r\n".join(lines) + "\n\n").encode())
    assert _read_texts(path) == texts


@pytest.mark.parametrize("line", ['{"text": null}', '{"text": 3}', '{"text": ["a"]}', "7", "null", '{"text": "cut'])
def test_a_line_without_a_text_is_refused_by_its_number_in_the_file(line: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'"one"\n\n{{"text": "two"}}\n{line}\n')
    with pytest.raises(FlowError) as told:
        require_data(path)
    assert str(told.value) == f'{path}: line 4: expected {{"text": "..."}}, got {line}; correct the line, or remove it'


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_texts_become_blocks_of_tokens_for_models_that_predict_the_next_one(suffix: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    import transformers

    words = {word: number for number, word in enumerate(["[UNK]", *(f"w{i}" for i in range(100))])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    models.save("llama", tmp_path / "model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "model")
    lines = [" ".join(f"w{(7 * i + j) % 100}" for j in range(12)) for i in range(10)]
    data = tmp_path / f"texts{suffix}"
    data.write_text("\n".join(lines if suffix == ".txt" else [json.dumps({"text": line}) for line in lines]))
    sequences = read_sequences(data, tmp_path / "model", samples=5, length=20, blocks=True)
    assert [len(sequence) for sequence in sequences] == [20] * 5
    assert sequences[0].tolist()[:14] == [*range(1, 13), 8, 9]
    out = tmp_path / "out"
    report = quantize_checkpoint(
        tmp_path / "model", out, scheme="w8a8-smoothquant", calibration=data, evaluation=data, sequence_length=20
    )
    assert report["evaluation"]["tokens"] == 120 and (out / "tokenizer.json").exists()


def test_texts_may_be_a_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They give the bytes and figures of the same texts in a file, and leave no file behind."""
    tokenizers = pytest.importorskip("tokenizers")
    import transformers

    words = {f"w{i}": i for i in range(64)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    models.save("llama", tmp_path / "model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "model")
    texts = [" ".join(f"w{(5 * i + j) % 64}" for j in range(24)) for i in range(6)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    options = {"scheme": "W8A8", "activations": "Static", "sequence_length": 24}
    made = {}
    with caplog.at_level("INFO", logger="baracuda"):
        for name, data in (("file", tmp_path / "texts.txt"), ("list", texts)):
            made[name] = quantize_checkpoint(
                tmp_path / "model", tmp_path / name, calibration=data, evaluation=data, **options
            )
    assert (tmp_path / "file" / "model.safetensors").read_bytes() == (
        tmp_path / "list" / "model.safetensors"
    ).read_bytes()
    assert made["list"]["evaluation"]["kl"] == made["file"]["evaluation"]["kl"]
    assert made["list"]["evaluation"]["data"] == "evaluation-texts.jsonl" and made["list"]["scheme"]["name"] == "w8a8"
    assert any("quantized" in record.getMessage() for record in caplog.records)
    with pytest.raises(FlowError, match="calibration: expected the path of a file, or a list of texts, got dict"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "no", calibration={"text": "a"}, **options)
