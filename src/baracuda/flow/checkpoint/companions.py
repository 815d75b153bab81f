"""The files of a model directory beside its weights: tokenizer, settings, layers of other libraries, licences."""

from __future__ import annotations

import os
from pathlib import Path

from .directory import FOLDS, INDEX, JOURNAL, MANIFEST, REPORT, REPORT_PAGE, is_foreign


def companions(directory: Path, out: Path) -> list[Path]:
    """The files to copy from `directory` to `out`, as paths relative to both.

    Safetensors of the directory itself are the model's weights. In its folders they are something else, such as the
    dense layer of a sentence-transformers model. Folders that hold a result of `baracuda quantize` are not copied, and
    neither is `out`, which may be one of them.
    """
    found = []
    for folder, folders, names in os.walk(directory):
        here = Path(folder)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not _is_result(here / f, out))
        for path in (
            here / name
            for name in sorted(names)
            if not name.startswith(".") and name not in (REPORT, REPORT_PAGE, MANIFEST, FOLDS)
        ):
            own = here == directory and (path.suffix == ".safetensors" or path.name in ("config.json", INDEX))
            if not own and not is_foreign(path.name) and path.is_file():
                found.append(path.relative_to(directory))
    return found


def _is_result(folder: Path, out: Path) -> bool:
    return folder.resolve() == out.resolve() or (folder / REPORT).exists() or (folder / JOURNAL).exists()
