"""Texts to calibrate with: one to a line, whatever is in it, and tokens of them by the model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest

from baracuda.flow import FlowError, quantize_checkpoint
from baracuda.flow.run import texts
from baracuda.flow.run.data import read_sequences, require_data
from baracuda.flow.run.texts import Piece, in_pieces, read_pieces

pytestmark = pytest.mark.filterwarnings("ignore")


def give_tokenizer(directory: Path, template: str | None = None) -> None:
    """Words w0 to w99 are the tokens 1 to 100."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {word: number for number, word in enumerate(["[UNK]", *(f"w{i}" for i in range(100))])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain)
    made.chat_template = template
    made.save_pretrained(directory)


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
    written = ["one\u2028two", "three\x85four", "five\x0csix"]
    lines = written if suffix == ".txt" else [json.dumps({"text": text}, ensure_ascii=False) for text in written]
    path = tmp_path / f"texts{suffix}"
    path.write_bytes((mark + "\r\n".join(lines) + "\n\n").encode())
    assert [piece.text for piece in read_pieces(path)] == written


@pytest.mark.parametrize("line", ['{"text": null}', '{"text": 3}', '{"text": ["a"]}', "7", "null", '{"text": "cut'])
def test_a_line_without_a_text_is_refused_by_its_number_in_the_file(line: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'"one"\n\n{{"text": "two"}}\n{line}\n')
    with pytest.raises(FlowError) as told:
        require_data(path)
    assert str(told.value) == f'{path}: line 4: expected {{"text": "..."}}, got {line}; correct the line, or remove it'


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_texts_become_blocks_of_tokens_for_models_that_predict_the_next_one(suffix: str, tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    give_tokenizer(tmp_path / "model")
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
    models.save("llama", tmp_path / "model")
    give_tokenizer(tmp_path / "model")
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


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_long_line_comes_in_pieces_that_end_before_a_blank(suffix: str, tmp_path: Path) -> None:
    line = " ".join(f"word{i}" for i in range(30_000))
    path = tmp_path / f"texts{suffix}"
    path.write_text(f"{line}\nshort\n" if suffix == ".txt" else f'{json.dumps({"text": line})}\n"short"\n')
    *pieces, last = list(read_pieces(path))
    assert last == Piece("short") and len(pieces) > 3 and "".join(piece.text for piece in pieces) == line
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.text) <= texts.PIECE and piece.text.startswith(" ") for piece in pieces[1:])


@pytest.mark.parametrize("length", [0, 1, texts.PIECE - 1, texts.PIECE, texts.PIECE + 1, 3 * texts.PIECE])
def test_a_text_without_blanks_is_cut_anywhere_and_nothing_is_lost(length: int) -> None:
    pieces = list(in_pieces("x" * length))
    assert "".join(piece.text for piece in pieces) == "x" * length and pieces[-1].ends and pieces[0].begins


def test_no_more_of_a_file_is_tokenized_than_is_asked_for(tmp_path: Path) -> None:
    """A line of 18 MB: tokenized at once it would take gigabytes."""
    give_tokenizer(tmp_path / "model")
    path = tmp_path / "texts.txt"
    path.write_text("w1 w2 w3 " * 2_000_000)
    seen: list[int] = []
    made = read_sequences(path, tmp_path / "model", samples=8, length=512, blocks=True, read=seen.append)
    assert [len(row) for row in made] == [512] * 8 and sum(seen) < 30_000
    assert made[0][:4].tolist() == [2, 3, 4, 2]
    short = read_sequences(path, tmp_path / "model", samples=8, length=512, blocks=False)
    assert [len(row) for row in short] == [512]


TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} w99 {% endfor %}"


def test_messages_go_through_the_chat_template_of_the_tokenizer(tmp_path: Path) -> None:
    give_tokenizer(tmp_path / "model", TEMPLATE)
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "w5", "content": "w6 w7"}, {"role": "w8", "content": "w9"}]
    path.write_text(f"{json.dumps({'messages': messages})}\n")
    require_data(path)
    (row,) = read_sequences(path, tmp_path / "model", samples=1, length=64, blocks=True)
    assert row.tolist() == [6, 7, 8, 100, 9, 10, 100]
    give_tokenizer(tmp_path / "plain")
    with pytest.raises(FlowError, match="no chat template, so messages cannot be read"):
        read_sequences(path, tmp_path / "plain", samples=1, length=64, blocks=True)


@pytest.mark.parametrize("messages", ["[]", "3", '[{"role": "user"}]', '[{"content": "a"}]', '["a"]'])
def test_messages_of_another_form_are_refused_by_their_line(messages: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f'{{"messages": {messages}}}\n')
    with pytest.raises(FlowError, match=r"line 1: expected messages such as"):
        require_data(path)


def test_parquet_is_read_like_json_lines_or_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(FlowError, match="pip install pyarrow"):
            require_data(path)
        return
    parquet.write_table(pyarrow.table({"text": ["w1 w2", "w3"], "other": [1, 2]}), path)
    require_data(path)
    assert [piece.text for piece in read_pieces(path)] == ["w1 w2", "w3"]
    parquet.write_table(pyarrow.table({"other": [1, 2]}), path)
    with pytest.raises(FlowError, match="expected a column text or messages, got other; rename"):
        require_data(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(FlowError, match="cannot be read as Parquet"):
        require_data(path)
