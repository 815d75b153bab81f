"""Hugging Face ids where a directory is expected: from the local cache, downloaded where that is possible."""

from __future__ import annotations

import re
from pathlib import Path

from ..checkpoint.directory import Checkpoint
from ..errors import FlowError

#: `organisation/model`; anything else is a path.
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
#: What a model directory is made of. Other formats of weights are never opened, so they are not downloaded.
FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "baracuda.sha256", "*.tensors"]


def model_directory(name: str | Path) -> Path:
    """The same, where it holds a model: raises in words where there is no folder, or no model in it."""
    directory = local_directory(name)
    with Checkpoint.open(directory):
        return directory


def local_directory(name: str | Path) -> Path:
    """The directory of that name, or of the model with that id: its snapshot in the cache of the Hugging Face Hub.

    A name that is neither a directory nor an id comes back as it is, for the error of whoever opens it.
    """
    if isinstance(name, Path) or Path(name).exists() or _ID.fullmatch(name) is None:
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return Path(name)
    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES))
    except Exception:  # not in the cache, or not whole: the kinds of errors differ by version
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise FlowError(
            f"{name}: expected a model directory or the id of a model on the Hugging Face Hub; there is no directory, "
            f"the model is not in the local cache, and it cannot be downloaded from here ({type(error).__name__}: "
            f"{reason}). Where the Hub can be reached: hf download {name}"
        ) from None
